"""Several processes choose the needles that one process chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvsurgery.evaluate.options import Options
from kvsurgery.evaluate.runner import Evaluation
from kvsurgery.measure.mesh import Mesh
from kvsurgery.measure.needle_trial import choose_needles
from kvsurgery.measure.retrieval import Trials
from kvsurgery.system.processes import Processes
from kvsurgery.text import needle_sets
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.needle_sets import AUTO
from tests.distributed import process
from tests.distributed.start import start
from tests.evaluate.recall import MODEL, tasks, write_language
from tests.helpers.cases import ONLY_IN_ALL
from tests.helpers.needle_sets import write_sets


def choose(processes: Processes, folder: Path, sizes: list[int]) -> list[Any]:
    """What is chosen for scores and for an evaluation, by the processes that share a model, and notes on the latter."""
    needle_sets.FOLDER = folder / "sets"
    found: list[Any] = []
    for tp in sizes:
        mesh = Mesh(processes, tp)
        measured = mesh.load(str(MODEL), sharded=False)
        haystack = Haystack.read(str(folder / "text.txt"), measured.text, 1000)
        found.append(choose_needles(measured, haystack, "headkv-er", Trials((120,)), mesh=mesh))
        needle = replace(tasks(folder, (96,))["needle"], needles=AUTO, count=None)
        out, notes = folder / f"report-{processes.world}-{tp}", []
        for _ in range(2):
            options = Options(limit=1, tp=tp)
            asked = Evaluation.open(out, MODEL, {"needle": needle}, options, processes, note=notes.append)
        found += [asked.tasks["needle"]["choice"], len(notes)]
    return found


@ONLY_IN_ALL
def test_two_processes_choose_what_one_chooses(tmp_path, monkeypatch):
    """Those that share the trials, and those that share the model; the first one says what."""
    write_language(tmp_path)
    write_sets(tmp_path / "sets", ("fact", "word"))
    sizes = [1, 2] if process.ODD else [1]
    first, second = start(2, choose, tmp_path, tmp_path, sizes)
    monkeypatch.setattr(needle_sets, "FOLDER", None)  # `choose` sets it
    scores, evaluation, notes = choose(Processes(), tmp_path, [1])
    assert scores.right == {"phrase": 0, "fact": 8} == evaluation["right"]
    assert first == [scores, evaluation, notes] * len(sizes)
    assert second == [scores, evaluation, 0] * len(sizes)
