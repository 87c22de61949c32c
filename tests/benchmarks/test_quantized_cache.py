"""The comparison of quantized caches on a language model: what is read, compared and counted."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks import caches, figures, quantized_cache, quantized_report
from kvsurgery.report.colors import LIGHT
from kvsurgery.text.haystack import Haystack
from tests.helpers.families import stock
from tests.helpers.vocabularies import tokenizer

ROOT = Path(__file__).resolve().parents[2]
PROMPT, NEW = 280, 6


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return stock("llama", vocab_size=400, head_dim=16)


def test_each_cache_is_read_beside_the_original(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = tokenizer("bytes", ["the baker carried a basket"], size=400)
    model.save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(words.decode(Haystack.read(None, words, 900).tokens))
    names = ["kvsurgery, unquantized", "kvsurgery, scheme of version 0.1.0, 2 bits"]
    settings = {name: how for name, how in caches.settings().items() if name in names}
    monkeypatch.setattr(caches, "settings", lambda: settings)
    monkeypatch.setattr(caches, "BACKENDS", {})
    command = ["quantized_cache.py", tmp_path / "model", text, "--prompt", PROMPT, "--new", NEW, "--pieces", 2]
    monkeypatch.setattr(sys, "argv", [str(word) for word in [*command, "--json", tmp_path / "found.json"]])
    threads = torch.get_num_threads()
    quantized_cache.main()
    torch.set_num_threads(threads)
    found = json.loads((tmp_path / "found.json").read_text())
    results = found["results"]
    assert [*results] == ["original", *settings, "fp8, as vLLM has it"]
    exact = torch.tensor([part["kl"] for name in ("original", names[0]) for part in results[name]])
    assert exact.abs().max() < 1e-6
    assert min(part["kl"] for name in (names[1], "fp8, as vLLM has it") for part in results[name]) > 1e-6
    tokens = quantized_cache.pieces(tmp_path / "model", [text], PROMPT + NEW + 1, 2)
    with torch.no_grad():
        logs = model(tokens).logits.log_softmax(-1)[:, PROMPT:-1]
    nats = -logs.gather(2, tokens[:, PROMPT + 1 :, None]).mean((1, 2))
    torch.testing.assert_close(torch.tensor([part["nats"] for part in results["original"]]), nats)
    held = results["original"][0]["kv_bytes"]
    config = model.config
    assert held == (PROMPT + NEW) * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    assert results["fp8, as vLLM has it"][0]["kv_bytes"] == held // 2


def test_floats_of_eight_bits_are_the_nearest() -> None:
    cache = caches.Cache(layer_class_to_replicate=caches.Fp8Layer)
    states = torch.randn(2, 2, 1, 3, 64, generator=torch.Generator().manual_seed(0)) * 30
    states[0, 0, 0, 0, :2] = torch.tensor([1000.0, -1000.0])
    cache.update(*states[:, :, :, :2], 0)
    keys, values = cache.update(*states[:, :, :, 2:], 0)
    assert keys[0, 0, 0, :2].tolist() == [448, -448]
    found, exact = torch.stack([keys, values]), states.clamp(-448, 448)
    large = exact.abs() >= 2**-6  # smaller ones are subnormal
    assert ((found - exact).abs() <= exact.abs() / 16)[large].all()
    assert not torch.equal(found, exact)


def test_widths_of_a_cache_are_a_line(tmp_path: Path) -> None:
    """Over the share of bytes, the smallest first; what is exact has no place on an axis of logarithms."""
    sizes = {
        "original": (100, 0.0),
        "ours, 4 bits": (40, 0.25),
        "ours, 2 bits, rotated": (30, 0.5),
        "ours, 2 bits": (20, 1),
    }
    found = {"results": {name: [{"kv_bytes": size, "kl": loss}] for name, (size, loss) in sizes.items()}}
    assert quantized_report.points(found) == {"ours": [(0.2, 1), (0.4, 0.25)], "ours, rotated": [(0.3, 0.5)]}
    figures.save(partial(quantized_report.draw, {"one": found, "two": found}), str(tmp_path / "figure"))
    assert all(LIGHT[ink] in (tmp_path / "figure-light.svg").read_text() for ink in ("paper", "series-1", "series-4"))


def test_intervals_are_paired_by_piece() -> None:
    def parts(*pieces: tuple[float, float]) -> list[dict]:
        return [{"kl": kl, "nats": nats, "kv_bytes": 50, "seconds": 3, "stock_seconds": 2} for kl, nats in pieces]

    results = {"original": parts((0, 2), (0, 4)), "ours, 4 bits": parts((0.25, 2.1), (0.75, 4.1))}
    results["original"][0]["kv_bytes"] = 100
    assert quantized_cache.table({"results": results})[2:] == [
        "| original | 100% | 0 | 20.09 | × 1.50 |",
        "| ours, 4 bits | 50% | 0.5000 [0.2500, 0.7500] | × 1.105 [1.105, 1.105] | × 1.50 |",
    ]


def test_the_docs_say_in_how_many_pieces_a_cache_diverges_less() -> None:
    def pieces(name: str) -> dict[str, list[float]]:
        found = json.loads((ROOT / "benchmarks" / "results" / f"quantized-cache-{name}.json").read_text())["results"]
        return {cache: [part["kl"] for part in parts] for cache, parts in found.items()}

    def less(own: dict[str, list[float]], cache: str, other: str) -> int:
        return sum(ours < theirs for ours, theirs in zip(own[cache], own[other], strict=True))

    others = ("QuantizedCache, quanto, 4 bits", "QuantizedCache, hqq, 4 bits", "fp8, as vLLM has it")
    kivi = [f"KIVI in groups of 32, {bits} bits" for bits in (4, 2)]
    for name, count, rotated in (("1024", 4, 2), ("4096", 2, 2)):
        own = pieces(name)
        assert {less(own, "kvsurgery, 4 bits", other) for other in others} == {count}
        assert less(own, "kvsurgery, 2 bits", kivi[1]) == count
        assert less(own, "kvsurgery, 3 bits, keys rotated", others[0]) == rotated
    own = pieces("bundled")
    assert [less(own, other, "kvsurgery, 4 bits") for other in (kivi[0], others[2])] == [8, 8]
    assert less(own, "kvsurgery, 2 bits", kivi[1]) == 5
    assert less(own, "kvsurgery, 2 bits per token", "kvsurgery, 2 bits") == 7
