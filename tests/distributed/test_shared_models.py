"""A benchmark and an evaluation over several processes that share the models."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from kvsurgery.bench.benchmark import benchmark
from kvsurgery.bench.results import Bench
from kvsurgery.bench.workload import Workload
from kvsurgery.errors import CheckpointError, KVSurgeryError
from kvsurgery.evaluate.results import CONVERTED, ORIGINAL
from kvsurgery.evaluate.runner import Options, evaluate
from kvsurgery.system.json_lines import read_lines
from kvsurgery.system.processes import Processes, tensor_parallel
from kvsurgery.templates.kv_layout import KVLayout
from tests.distributed import process
from tests.distributed.process import WIDE
from tests.distributed.start import start
from tests.evaluate.recall import MODEL, convert, tasks, write_language
from tests.helpers.cases import some
from tests.helpers.families import make
from tests.helpers.surgery import convert_folder

pytestmark = pytest.mark.slow
WORK = Workload((24,), batches=(2,), new=6, chunk=16, rounds=1)


def run(processes: Processes, folder: Path, source: Path | None, wrong: Path) -> tuple[Bench, str]:
    """A benchmark, and what is said of a checkpoint for another number of processes."""
    with pytest.raises(CheckpointError) as refusal:
        benchmark(wrong, workload=WORK, device="cpu")
    return benchmark(folder, source, WORK, device="cpu"), str(refusal.value)


@pytest.mark.parametrize("family", some(["llama", "phi3"]))
def test_two_processes_share_both_models(family, tmp_path):
    """Bytes are of one process: half of them, or as many where attention is replicated."""
    source = make(family, tmp_path / "source", **WIDE)
    shared, alone = (
        convert_folder(source, tmp_path / name, full_heads=5, tp=tp, tp_uneven=tp > 1).folder
        for name, tp in (("shared", 2), ("alone", 1))
    )
    found, other = start(2, run, tmp_path, shared, source if family == "llama" else None, alone)
    assert found[0].rows[0].kv_bytes == other[0].rows[0].kv_bytes
    bench, refusal = found
    assert refusal.startswith(f"2 processes are to share {alone}, which was converted for 1;")
    rows = {row.contender: row for row in bench.rows}
    layout = KVLayout.from_config(AutoConfig.from_pretrained(shared))
    held = [part.kv_bytes(2, 24, 6, itemsize=4) for part in layout.parts(2)]
    assert held[0] != held[1]
    replicated = family == "phi3"
    assert rows[CONVERTED].kv_bytes == rows[CONVERTED].predicted == (sum(held) if replicated else max(held))
    dense = layout.dense_bytes(2, 24, 6, itemsize=4)
    assert rows[ORIGINAL].kv_bytes == (dense if replicated else dense // 2)
    assert all(row.decode.count == 2 and row.prefill.peak_bytes and row.first_token.seconds for row in rows.values())
    assert bench.settings["processes"] == 2
    whole = benchmark(shared, workload=WORK, device="cpu")
    assert whole.weights / 2 < bench.weights < (0.9 if replicated else 0.7) * whole.weights


def test_processors_where_there_are_gpus(monkeypatch):
    """transformers takes these, whatever a command says."""
    assert tensor_parallel("cpu", 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(KVSurgeryError, match="hide them: CUDA_VISIBLE_DEVICES="):
        tensor_parallel("cpu", 2)
    assert tensor_parallel("cuda:1", 2)


def answer(processes: Processes, folder: Path, language: Path, out: Path) -> None:
    """An evaluation in a folder of its own, and one of as many models as processes is refused."""
    models = {"original": MODEL, "converted": folder}
    with pytest.raises(KVSurgeryError, match="the models need 3 processes, but 2 were started; start 3"):
        evaluate(models, tasks(language), out, Options(batch=4, tp=3))
    evaluate(models, tasks(language), out, Options(batch=4, tp=2), device="cpu")


@pytest.mark.skipif(not process.ODD, reason="this version of transformers wants a vocabulary that divides")
def test_two_processes_that_share_the_models_answer_as_one(tmp_path):
    write_language(tmp_path)
    folder = convert(tmp_path / "recall-tp2", sparsity=0.5, tp=2)
    start(2, answer, tmp_path, folder, tmp_path, tmp_path / "shared")
    evaluate({"original": MODEL, "converted": folder}, tasks(tmp_path), tmp_path / "alone", Options(batch=4))
    for name in ("original", "converted"):
        shared, alone = (read_lines(tmp_path / place / f"answers-{name}.jsonl") for place in ("shared", "alone"))
        assert len(shared) == 24
        for one, other in zip(shared, alone, strict=True):
            assert one.pop("nll", 0) == pytest.approx(other.pop("nll", 0), rel=1e-5)
            assert one == other
