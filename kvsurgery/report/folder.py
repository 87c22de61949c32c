"""The folders that `kvsurgery eval` and `kvsurgery bench` write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsurgery.bench import results as benchmark
from kvsurgery.bench.results import Bench
from kvsurgery.checkpoint.source import CONFIG
from kvsurgery.errors import KVSurgeryError, OutputError
from kvsurgery.evaluate import results as evaluation
from kvsurgery.evaluate.results import Results
from kvsurgery.system.files import check_folder


def has_page(folder: Path) -> bool:
    """Whether a folder holds results whose page belongs there."""
    return any((folder / name).exists() for name in (evaluation.FILE, benchmark.FILE))


def read(folder: Path) -> tuple[Results | None, Bench | None]:
    """What an evaluation and a benchmark left in a folder.

    Raises:
        KVSurgeryError: nothing, or something else.
    """
    results = Results.load(folder) if (folder / evaluation.FILE).exists() else None
    bench = Bench.load(folder) if (folder / benchmark.FILE).exists() else None
    if results is None and bench is None and (folder / CONFIG).exists():
        raise KVSurgeryError(
            f"{folder} is a checkpoint; run `kvsurgery eval {folder} --out report` or `kvsurgery bench {folder} --out "
            "report`, and give the folder report"
        )
    if results is None and bench is None:
        raise KVSurgeryError(
            f"{folder} has neither {evaluation.FILE} nor {benchmark.FILE}: run `kvsurgery eval DIR --out {folder}` or "
            f"`kvsurgery bench DIR --out {folder}` first"
        )
    if results and bench and not is_same_checkpoint(results.checkpoint, bench.checkpoint):
        raise KVSurgeryError(
            f"{evaluation.FILE} and {benchmark.FILE} in {folder} are of two checkpoints; give each its own folder"
        )
    return results, bench


def check_output(folder: Path) -> None:
    """Check that results can be written to a folder, and that it is no checkpoint, of which they would become a part.

    Raises:
        OutputError: they cannot, or it is.
    """
    check_folder(folder)
    if (folder / CONFIG).exists():
        raise OutputError(f"{folder} is a checkpoint; give results a folder of their own with --out")


def checkpoint_of(results: Results | None, bench: Bench | None) -> Mapping[str, Any]:
    """The facts of the checkpoint that was evaluated, measured, or both."""
    return next(run.checkpoint for run in (results, bench) if run is not None)


def is_same_checkpoint(first_facts: Mapping[str, Any], second_facts: Mapping[str, Any]) -> bool:
    """Whether two facts of a checkpoint tell of the same surgery."""
    surgeries = [facts["surgery"] or {} for facts in (first_facts, second_facts)]
    return all(
        surgeries[0].get(fact) == surgeries[1].get(fact) for fact in ("base_model", "base_revision", "options", "heads")
    )
