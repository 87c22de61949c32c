"""The GPU benchmark's logic on a CPU, with tiny models: what is built, filled, skipped and written."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu, gpu_capacity, gpu_kernels, gpu_models, gpu_report, synthetic
from benchmarks.gpu_report import Report
from kvsurgery.bench.caches import cache_bytes
from kvsurgery.templates.kv_layout import KVLayout

TOKENS = 700
SPARE = 3


@pytest.fixture(scope="module")
def parts() -> list[gpu_models.Variant]:
    torch.manual_seed(0)
    return gpu_models.variants("tiny", 0.5, "cpu", torch.float32)


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """A report at second 0, where time stands still."""
    monkeypatch.setattr(gpu_report, "time", SimpleNamespace(monotonic=lambda: 0.0))
    report = Report(tmp_path / "gpu-test", {"device": "test"})
    report.table("part", {"what": "<6", "ms": "8.2f"})
    return report


def written(report: Report) -> dict:
    return json.loads(report.path.with_name("gpu-test.json").read_text())


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    return int(end.value.code)


def test_without_a_cuda_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch) == 2
    assert capsys.readouterr().err == "no CUDA device: nothing to measure\n"


def test_a_run_with_tiny_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    writes, write = [], Report.write

    def note(report: Report) -> None:
        write(report)
        writes.append(len(report.rows))

    monkeypatch.setattr(Report, "write", note)
    assert run(monkeypatch, "--device", "cpu", "--out", tmp_path) == 0
    [path] = tmp_path.glob("*.json")
    results = json.loads(path.read_text())
    assert [skip["what"] for skip in results["skipped"]] == [
        "correctness",
        "kernels",
        "graphs",
        "capacity",
        "prefill",
        "lengths",
    ]
    assert len(writes) == 9 + 2  # after every section, and after a model
    assert writes[:2] == [0, 0]
    rows = [row for row in results["rows"] if row["section"] == "generate"]
    assert [(row["variant"], row["graph"]) for row in rows] == [
        ("stock, SDPA", "no"),
        ("50% full", "no"),
        ("50% full", "no"),
    ]
    assert rows[2]["as eager"] == rows[2]["new"] == 64
    rows = [row for row in results["rows"] if row["section"] == "decode"]
    assert [row["variant"] for row in rows] == ["stock, SDPA", "all full", "50% full", "50% full, int4"]
    for row in rows[1:]:
        assert row["cache"] == row["kv_bytes"]
    assert rows[1]["error"] < 1e-5  # of the stock model's logits
    sums = [row for row in results["rows"] if row["section"] == "prefill in chunks"]
    assert [row["measured"] for row in sums] == [4, 4, 4]
    with open(path.with_suffix(".csv"), newline="") as file:
        assert len([*csv.DictReader(file)]) == len(results["rows"]) == 3 + 4 + 12 + 3


def test_comparisons_fit_the_card() -> None:
    """Stock's cache and weights beside each other; a target of more tokens says of how many."""
    for case in gpu_models.CASES:
        shape = synthetic.SHAPES[case.shape]
        token = 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
        assert 17e9 + token * max(case.decode) < 72e9
    assert gpu_models.CASES[-1].decode[400_000] == gpu_models.Target(1.5, 500_000)


def test_generate_without_time(report: Report) -> None:
    report.deadline = 0
    gpu_models.generate_section(report, "cpu")
    assert report.rows == []
    assert [skip["what"] for skip in report.skipped] == [
        "generate of stock, SDPA, eager",
        "generate of 50% full, eager",
        "generate of 50% full, CUDA graph",
    ]


def test_wrong_kernels_are_noted(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    def error(batch: int, full: int, bits: int, device: str) -> float:
        return float("nan") if (batch, bits) == (32, 4) else 1e-3

    monkeypatch.setattr(gpu_kernels, "check_quantized", error)
    monkeypatch.setattr(gpu_kernels, "check_streaming", lambda past, device: 1e-3)
    gpu_kernels.correctness_section(report)
    assert len(report.rows) == 4 * 3 + 2
    assert [skip["what"] for skip in report.skipped] == ["decode, 4 bits, batch 32"]
    assert report.failed


def test_caches_hold_what_they_say(parts: list[gpu_models.Variant]) -> None:
    sizes = {}
    for variant in parts:
        cache = gpu_models.filled(variant, TOKENS, SPARE)
        assert cache.get_seq_length() == TOKENS
        sizes[variant.name] = cache_bytes(cache)
        expected = gpu_models.predicted_bytes(variant, cache, TOKENS, SPARE)
        assert expected in (None, sizes[variant.name])
    token = sizes["stock, SDPA"] // TOKENS
    assert sizes["all full"] == token * (TOKENS + SPARE)
    assert sizes["50% full, int4"] < sizes["50% full"] < sizes["all full"]


@pytest.mark.parametrize("bits", gpu_kernels.BITS)
@torch.inference_mode()
def test_occupied_is_like_filled(parts: list[gpu_models.Variant], bits: int) -> None:
    model = parts[2].model
    config, caches = model.config, [synthetic.empty_cache(parts[2].model, TOKENS + SPARE, bits) for _ in range(2)]
    synthetic.fill(caches[0], config, 2, TOKENS, model.dtype, "cpu")
    synthetic.occupy(caches[1], torch.empty(2, config.num_key_value_heads, 0, config.head_dim), TOKENS)
    for cache in caches:
        assert cache.allocated_bytes() == caches[0].allocated_bytes()
        assert [group.packed for group in cache.layers[1].storage.tiled] == [[512] * 2] * (bits < 16)
        assert model(torch.ones(2, 1, dtype=torch.long), past_key_values=cache).logits.isfinite().all()
        assert cache.get_seq_length() == TOKENS + 1


def test_what_does_not_work_is_noted_and_the_rest_goes_on(report: Report) -> None:
    with report.attempt("too large"):
        raise torch.OutOfMemoryError
    assert not report.failed
    with report.attempt("wrong"):
        raise AssertionError("wrong by 1")
    report.add(what="right", ms=1.0)
    assert report.failed
    report.deadline = 5
    assert report.allows("short", 4)
    assert not report.allows("long", 60)
    report.write()
    assert [skip["why"].split(",")[0] for skip in written(report)["skipped"]] == [
        "out of memory",
        "failed: AssertionError: wrong by 1",
        "takes about 60 s",
    ]
    assert written(report)["rows"] == [{"section": "part", "what": "right", "ms": 1.0}]


def test_no_time_for_any_model(parts: list[gpu_models.Variant], report: Report) -> None:
    report.deadline = 0
    gpu_models.decode_section(report, gpu_models.TINY[0], parts)
    gpu_models.prefill_section(report, gpu_models.TINY[0], parts)
    report.write()
    assert written(report)["rows"] == []
    assert len(written(report)["skipped"]) == 4 + 3


def test_chunks_between_measured_ones(
    monkeypatch: pytest.MonkeyPatch, parts: list[gpu_models.Variant], report: Report
) -> None:
    """Time over after the first and the last chunk: the others are on the line between them."""

    def chunk(variant: gpu_models.Variant, past: int, tokens: int) -> tuple[float, int]:
        if past == 900:
            report.deadline = 4.5 if variant is parts[2] else report.deadline
        return 1 + past / tokens, 10**9

    report.deadline = 1000
    monkeypatch.setattr(gpu_models, "prefill_chunk", chunk)
    gpu_models.prefill_section(report, gpu_models.TINY[0], parts)
    sums = [row for row in report.rows if row["section"] == "prefill in chunks"]
    assert [(row["seconds"], row["measured"]) for row in sums] == [(1 + 2 + 3 + 4, 2)] * 3
    assert sums[2]["x stock"] == sums[2]["x all full"] == 1


@pytest.mark.parametrize("chunks", [1, 2, 3, 10])
def test_order_of_chunks(chunks: int) -> None:
    order = gpu_models.order(chunks)
    assert sorted(order) == [*range(chunks)]
    assert order[:2] == [0, chunks - 1][:chunks]


@pytest.mark.parametrize("full", [2, 8])
@pytest.mark.parametrize("bits", gpu_kernels.BITS)
def test_bytes_that_decode_reads(bits: int, full: int) -> None:
    """What is allocated, but for the slots of tokens that are in tiles already."""
    tokens, unread = 2 * 128 + 300, 0
    cache, config = gpu_kernels.empty_layers(1, full, bits, tokens)
    synthetic.occupy(cache, torch.empty(1, gpu_kernels.HEADS, 0, gpu_kernels.HEAD_DIM, dtype=torch.bfloat16), tokens)
    for group in cache.layers[0].storage.tiled:
        slots = group.sink + 256  # residual and a tile
        unread = group.heads * (slots - (tokens - group.packed[0])) * 2 * gpu_kernels.HEAD_DIM * 2
    assert gpu_kernels.bytes_to_read(1, tokens, full, bits) == cache.allocated_bytes() - unread
    assert cache.allocated_bytes() == KVLayout.from_config(config).kv_bytes(1, tokens) or bits < 16
    table, columns, _ = gpu_kernels.arguments(cache.layers[0])
    assert (columns - table.skipped).tolist() == [[tokens] * gpu_kernels.HEADS]
    assert table.keys.ndim == 3
    assert (table.tiles is not None) == (bits < 16)


def test_visible_pairs() -> None:
    for past, tokens in ((0, 400), (300, 50)):
        at = torch.arange(past, past + tokens)[:, None]
        seen = torch.arange(past + tokens)
        causal = seen <= at
        window = causal & ((seen < gpu_kernels.SINK) | (at - seen < gpu_kernels.RECENT))
        assert gpu_kernels.visible_pairs(past, tokens, False) == causal.sum()
        assert gpu_kernels.visible_pairs(past, tokens, True) == window.sum()


def test_int8_weights(parts: list[gpu_models.Variant], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_capacity, "ROWS", 5)
    ids = torch.arange(20)[None]
    exact = parts[0].model(ids).logits
    model = gpu_capacity.with_int8_weights(synthetic.emitted(parts[0].model, 4))
    assert not any(isinstance(module, torch.nn.Linear) for module in model.modules())
    assert {name.rsplit(".")[-1] for name, part in model.named_buffers() if part.dtype == torch.int8} == {"weight"}
    assert (model(ids).logits - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("room", [3_950_000, 3_650_000, 4_450_000])
def test_capacity_search(report: Report, room: int) -> None:
    report.table("capacity", {"tokens": "10,", "fits": "<5"})
    found = gpu_capacity.search(
        report, 4_000_000, lambda tokens: {"cache": tokens} if tokens <= room else None, dense=1
    )
    assert found == (room // 100_000 * 100_000, True)
    report.deadline = 0
    assert gpu_capacity.search(report, 4_000_000, lambda tokens: None) == (0, False)
