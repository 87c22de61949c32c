"""The folders that `kvsurgery eval` and `kvsurgery bench` write."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsurgery.bench import results as benchmark
from kvsurgery.bench.results import Bench
from kvsurgery.checkpoint.source import CONFIG
from kvsurgery.conversion.inspection import inspect_checkpoint
from kvsurgery.errors import KVSurgeryError, OutputError
from kvsurgery.evaluate import results as evaluation
from kvsurgery.evaluate import sweep_results
from kvsurgery.evaluate.results import Results, read_settings
from kvsurgery.system.files import check_folder

LOADERS = {evaluation.FILE: Results.load, benchmark.FILE: Bench.load}
PAGE = "index.html"


def has_page(folder: Path) -> bool:
    """Whether a folder holds results with a page of their own, or an unfinished evaluation."""
    return any((folder / name).exists() for name in LOADERS) or _unfinished(folder) == evaluation.FILE


def is_sweep(folder: Path) -> bool:
    """Whether a folder holds a sweep, finished or not."""
    return (folder / sweep_results.FILE).exists() or _unfinished(folder) == sweep_results.FILE


def _unfinished(folder: Path) -> str | None:
    """The file of results that the unfinished run in a folder will write; None without such a run."""
    return read_settings(folder).get("file") if (folder / evaluation.SETTINGS).exists() else None


def read(folder: Path) -> tuple[Results | None, Bench | None]:
    """Read the results of an evaluation and a benchmark in a folder.

    Raises:
        KVSurgeryError: the folder has no results, or results of two checkpoints.
    """
    quoted = shlex.quote(str(folder))
    results = Results.load(folder) if (folder / evaluation.FILE).exists() else None
    bench = Bench.load(folder) if (folder / benchmark.FILE).exists() else None
    if results is None and bench is None and (folder / CONFIG).exists():
        raise KVSurgeryError(
            f"{folder} is a checkpoint; run `kvsurgery eval {quoted} --out report` or `kvsurgery bench {quoted} --out "
            "report`, and give the folder report"
        )
    if results is None and bench is None:
        raise KVSurgeryError(
            f"{folder} has neither {evaluation.FILE} nor {benchmark.FILE}: run `kvsurgery eval DIR --out {quoted}` or "
            f"`kvsurgery bench DIR --out {quoted}` first"
        )
    if results and bench and not is_same_checkpoint(results.checkpoint, bench.checkpoint):
        raise KVSurgeryError(
            f"{evaluation.FILE} and {benchmark.FILE} in {folder} are of two checkpoints; give each its own folder"
        )
    return results, bench


def check_output(folder: Path) -> None:
    """Check that results can be written to a folder, and that the folder is not a checkpoint.

    Raises:
        OutputError: they cannot be written, or it is a checkpoint.
    """
    check_folder(folder)
    if (folder / CONFIG).exists():
        raise OutputError(f"{folder} is a checkpoint; give results a folder of their own")


def check_new(folder: Path) -> None:
    """Check that the page and pictures of results would not replace unrelated files.

    Raises:
        OutputError: there are such files, but neither results nor the settings of an interrupted run.
    """
    if any((folder / name).exists() for name in (*LOADERS, sweep_results.FILE, evaluation.SETTINGS)):
        return
    for name in (PAGE, evaluation.SAMPLES):
        if (folder / name).exists():
            raise OutputError(f"{folder} holds {name} but no results; give results a folder of their own")


def check_neighbor(folder: Path, checkpoint: Path, name: str) -> None:
    """Check that the results of a checkpoint can join those in a folder, whose page will show both.

    Args:
        name: the result file of the other command, such as "bench.json" for an evaluation.

    Raises:
        KVSurgeryError: the folder has a sweep, or the file is from another checkpoint or another version.
    """
    if is_sweep(folder):
        raise OutputError(f"{folder} holds a sweep; give other results a folder of their own")
    if (folder / name).exists() and not is_same_checkpoint(LOADERS[name](folder).checkpoint, facts_of(checkpoint)):
        raise OutputError(f"{name} in {folder} is of another checkpoint than {checkpoint}; give another folder")


def facts_of(checkpoint: Path) -> Mapping[str, Any]:
    """The facts of a checkpoint in the form that results have after JSON."""
    return json.loads(json.dumps(inspect_checkpoint(checkpoint, str(checkpoint)).to_json()))


def checkpoint_of(results: Results | None, bench: Bench | None) -> Mapping[str, Any]:
    """The facts of the checkpoint that the results belong to."""
    return next(run.checkpoint for run in (results, bench) if run is not None)


def is_same_checkpoint(first_facts: Mapping[str, Any], second_facts: Mapping[str, Any]) -> bool:
    """Whether the facts of two checkpoints describe the same surgery."""
    surgeries = [facts["surgery"] or {} for facts in (first_facts, second_facts)]
    return all(
        surgeries[0].get(fact) == surgeries[1].get(fact) for fact in ("base_model", "base_revision", "options", "heads")
    )
