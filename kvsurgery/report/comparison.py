"""`Comparison`: the evaluations, benchmarks and sweeps of several folders, checked to be of one original and one set of
samples."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvsurgery.bench.results import Bench
from kvsurgery.errors import KVSurgeryError
from kvsurgery.evaluate import sweep_results
from kvsurgery.evaluate.results import ORIGINAL, Results, TaskResult
from kvsurgery.evaluate.sweep_results import Sweep
from kvsurgery.report.folder import checkpoint_of, read
from kvsurgery.report.rendering import flat

SETTINGS = "settings.json"  # of an evaluation or a sweep: its samples, and the models that answered
SWEEP_SETTINGS = ("profile", "conversion")  # which evaluations do not have


@dataclass(frozen=True)
class Entry:
    """One converted checkpoint.

    Attributes:
        name: unique within a comparison.
        folder: of its results.
        checkpoint: its facts, as `inspection.Facts.to_json()` has them.
    """

    name: str
    folder: Path
    checkpoint: Mapping[str, Any]
    results: Results | None
    bench: Bench | None

    def result(self, task: str, metric: str) -> TaskResult | None:
        """The scores of one task by one metric, if it was evaluated and answered."""
        found = self.results.tasks if self.results else ()
        return next((one for one in found if (one.task, one.metric) == (task, metric) and one.scores), None)


@dataclass(frozen=True)
class SweepEntry:
    """One sweep. Attributes are those of `Entry`."""

    name: str
    folder: Path
    sweep: Sweep


@dataclass(frozen=True)
class Comparison:
    """What is compared, in the order given.

    Attributes:
        entries: converted checkpoints.
        sweeps: sweeps over the same original.
        notices: what differs between them, a line each.
    """

    entries: tuple[Entry, ...]
    sweeps: tuple[SweepEntry, ...]
    notices: tuple[str, ...]

    @property
    def evaluated(self) -> list[Results | Sweep]:
        """The results that have scores."""
        return [entry.results for entry in self.entries if entry.results] + [entry.sweep for entry in self.sweeps]

    @property
    def tasks(self) -> list[TaskResult]:
        """The tasks of all results, each as the results with the most samples have it."""
        tasks: dict[tuple[str, str], TaskResult] = {}
        for results in self.evaluated:
            for task in results.original if isinstance(results, Sweep) else results.tasks:
                key = task.task, task.metric
                if key not in tasks or task.count > tasks[key].count:
                    tasks[key] = task
        return [*tasks.values()]


def is_sweep(folder: Path) -> bool:
    """Whether a folder holds the results of a sweep."""
    return (folder / sweep_results.FILE).exists()


def compare(folders: Sequence[Path]) -> Comparison:
    """Read the folders that `eval`, `bench` and `sweep` wrote.

    Raises:
        KVSurgeryError: a folder has no results, or they are of another original, of other samples, or of no converted
            checkpoint.
    """
    entries, sweeps = [], []
    for folder in folders:
        if is_sweep(folder):
            sweeps.append(SweepEntry(folder.resolve().name, folder, Sweep.load(folder)))
            continue
        results, bench = read(folder)
        checkpoint = checkpoint_of(results, bench)
        if not checkpoint["surgery"]:
            raise KVSurgeryError(f"{folder} has results of an original alone; give folders of converted checkpoints")
        entries.append(Entry(Path(checkpoint["name"]).name, folder, checkpoint, results, bench))
    names = Counter(entry.name for entry in (*entries, *sweeps))
    named = [
        replace(entry, name=f"{entry.name} ({entry.folder})") if names[entry.name] > 1 else entry
        for entry in (*entries, *sweeps)
    ]
    _check_originals(named)
    _check_samples(named)
    return Comparison(
        tuple(entry for entry in named if isinstance(entry, Entry)),
        tuple(entry for entry in named if isinstance(entry, SweepEntry)),
        tuple(_notices(named)),
    )


def _evaluated(entries: Sequence[Entry | SweepEntry]) -> list[tuple[Entry | SweepEntry, Results | Sweep]]:
    pairs = [(entry, entry.sweep if isinstance(entry, SweepEntry) else entry.results) for entry in entries]
    return [(entry, results) for entry, results in pairs if results is not None]


def _settings(folder: Path) -> Mapping[str, Any]:
    try:
        return json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KVSurgeryError(
            f"{folder / SETTINGS} cannot be read, so that nobody can tell which samples were evaluated: {error}; give "
            "the whole folder"
        ) from error


def _check_originals(entries: Sequence[Entry | SweepEntry]) -> None:
    """Refuse results of two originals: other weights where both answered, other names or shapes otherwise."""
    known: list[tuple[Entry | SweepEntry, Mapping[str, Any]]] = []
    for entry in entries:
        if isinstance(entry, SweepEntry):
            facts = {"name": entry.sweep.source}
        else:
            surgery = entry.checkpoint["surgery"]
            facts = {"name": surgery["base_model"], "commit": surgery["base_revision"]}
            facts["shape"] = entry.checkpoint["dimensions"]
        if _evaluated([entry]):
            original = _settings(entry.folder)["models"].get(ORIGINAL)
            facts |= {"weights": original["fingerprint"]} if original else {}
        known.append((entry, facts))
    for place, (entry, facts) in enumerate(known):
        for other, others in known[:place]:
            shared = ["weights"] if {"weights"} <= facts.keys() & others.keys() else ["name", "commit", "shape"]
            if any(facts[fact] != others[fact] for fact in shared if fact in facts and fact in others):
                raise KVSurgeryError(
                    f"{entry.folder} and {other.folder} are of different originals ({facts['name']} and "
                    f"{others['name']}); compare conversions of one original"
                )


def _check_samples(entries: Sequence[Entry | SweepEntry]) -> None:
    """Refuse scores on other samples, and KV bytes in other dtypes."""
    evaluated = _evaluated(entries)
    for entry, results in evaluated[1:]:
        first, one = evaluated[0]
        where = f"{entry.folder} and {first.folder}"
        if _settings(entry.folder)["samples"] != _settings(first.folder)["samples"]:
            apart = _apart(one.settings, results.settings)
            why = next((f": {name} is {value} and {reference}" for name, reference, value in apart), "")
            raise KVSurgeryError(
                f"{where} were evaluated on different samples{why}; evaluate both with the same tasks, "
                "settings and files"
            )
        if None not in (sizes := (one.dense_bytes, results.dense_bytes)) and len({*sizes}) > 1:
            raise KVSurgeryError(
                f"{where} were evaluated in different dtypes, so that their KV bytes cannot be compared; evaluate both "
                "with the same `dtype`"
            )


def _apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The names and values of settings that differ."""
    first, second = (
        dict(flat({name: value for name, value in settings.items() if name not in SWEEP_SETTINGS}))
        for settings in (one, other)
    )
    for name in dict.fromkeys([*first, *second]):
        if first.get(name) != second.get(name):
            yield name, first.get(name, "not set"), second.get(name, "not set")


def _notices(entries: Sequence[Entry | SweepEntry]) -> Iterator[str]:
    """What differs between results that can be compared: settings, versions and devices, numbers of samples, bytes."""
    evaluated = _evaluated(entries)
    benched = [(entry, entry.bench) for entry in entries if isinstance(entry, Entry) and entry.bench]
    for what, runs in (("evaluations", evaluated), ("benchmarks", benched)):
        if not runs:
            continue
        (first, one), *others = runs
        for entry, run in others:
            differ = [*_apart(one.versions, run.versions)]
            if what == "evaluations":
                differ += _apart(one.settings, run.settings)
            for name, mine, yours in differ:
                yield f"The {what} differ in {name}: {first.name} has {mine}, {entry.name} has {yours}."
    yield from _sample_counts(evaluated)
    for entry, results in evaluated:
        if not isinstance(results, Results):
            continue
        if ORIGINAL not in results.models:
            yield (
                f"{entry.name} was evaluated without the original. It therefore has no differences to it, and is "
                "missing in the chart."
            )
        elif results.kv_bytes is None:
            yield (
                f"{entry.name} is missing in the chart, because its results.json does not contain KV bytes. Run the "
                "same kvsurgery eval command again; the answers are kept."
            )


def _sample_counts(evaluated: Sequence[tuple[Entry | SweepEntry, Results | Sweep]]) -> Iterator[str]:
    counts: dict[str, dict[int, list[str]]] = {}
    for entry, results in evaluated:
        runs = results.points if isinstance(results, Sweep) else [results]
        for task in (task for run in runs for task in run.tasks):
            names = counts.setdefault(task.task, {}).setdefault(task.count, [])
            if entry.name not in names:
                names.append(entry.name)
    for task, by_count in counts.items():
        if len(by_count) > 1:
            said = "; ".join(f"{count:,} samples: {', '.join(names)}" for count, names in by_count.items())
            yield (
                f"The scores of {task} are means over different samples, because a model skipped some ({said}). Each "
                "difference is paired over its own samples."
            )
