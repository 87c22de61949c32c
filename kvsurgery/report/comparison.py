"""`Comparison`: comparable evaluations, benchmarks and sweeps, read from several folders.

They belong to the same original and the same set of samples.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from kvsurgery.bench.results import Bench
from kvsurgery.errors import KVSurgeryError
from kvsurgery.evaluate.results import ORIGINAL, SETTINGS, Results, TaskResult
from kvsurgery.evaluate.sweep_results import Sweep
from kvsurgery.report.folder import checkpoint_of, is_same_checkpoint, is_sweep, read
from kvsurgery.report.rendering import flat_settings

SWEEP_SETTINGS = ("profile", "conversion")  # which evaluations do not have


@dataclass(frozen=True)
class Entry:
    """One converted checkpoint.

    Attributes:
        name: unique within a comparison.
        folder: of its results, or of its benchmark if it was not evaluated.
        checkpoint: its facts, as `inspection.Facts.to_json()` has them.
    """

    name: str
    folder: Path
    checkpoint: Mapping[str, Any]
    results: Results | None
    bench: Bench | None

    def result(self, task: str, metric: str) -> TaskResult | None:
        """The scores of a task by a metric; None if it was not evaluated, or not answered."""
        task_results = self.results.tasks if self.results else ()
        for result in task_results:
            if (result.task, result.metric) == (task, metric) and result.scores:
                return result
        return None

    def joined(self, other: Entry) -> Entry | None:
        """Join two entries of one checkpoint, one with its evaluation and one with its benchmark."""
        evaluated, measured = (self, other) if self.results else (other, self)
        has_both = evaluated.results and measured.bench and not evaluated.bench and not measured.results
        if not has_both or self.name != other.name or not is_same_checkpoint(self.checkpoint, other.checkpoint):
            return None
        return replace(evaluated, bench=measured.bench)


@dataclass(frozen=True)
class SweepEntry:
    """One sweep. Attributes are those of `Entry`."""

    name: str
    folder: Path
    sweep: Sweep


@dataclass(frozen=True)
class Comparison:
    """Checkpoints and sweeps that are compared, in the given order.

    Attributes:
        entries: converted checkpoints.
        sweeps: sweeps over the same original.
        notices: differences between them, one line each.
    """

    entries: tuple[Entry, ...]
    sweeps: tuple[SweepEntry, ...]
    notices: tuple[str, ...]

    @property
    def evaluations(self) -> list[Results | Sweep]:
        """The results that have scores."""
        return [entry.results for entry in self.entries if entry.results] + [entry.sweep for entry in self.sweeps]

    @property
    def tasks(self) -> list[TaskResult]:
        """The tasks of all results; of each, the result with the most samples."""
        tasks: dict[tuple[str, str], TaskResult] = {}
        for results in self.evaluations:
            for task in results.original if isinstance(results, Sweep) else results.tasks:
                key = task.task, task.metric
                if key not in tasks or task.count > tasks[key].count:
                    tasks[key] = task
        return [*tasks.values()]


def compare(folders: Sequence[Path]) -> Comparison:
    """Read the folders that `eval`, `bench` and `sweep` wrote.

    An evaluation and a benchmark of one checkpoint are one entry, at the place of the first.

    Raises:
        KVSurgeryError: a folder has no results, or they belong to another original, to other samples, or to no
            converted checkpoint.
    """
    entries: list[Entry] = []
    sweeps: list[SweepEntry] = []
    for folder in folders:
        if is_sweep(folder):
            sweeps.append(SweepEntry(folder.resolve().name, folder, Sweep.load(folder)))
            continue
        results, bench = read(folder)
        checkpoint = checkpoint_of(results, bench)
        if not checkpoint["surgery"]:
            raise KVSurgeryError(f"{folder} has results of an original alone; give folders of converted checkpoints")
        new = Entry(Path(checkpoint["name"]).name, folder, checkpoint, results, bench)
        for place, entry in enumerate(entries):
            if joined := entry.joined(new):
                entries[place] = joined
                break
        else:
            entries.append(new)
    names = Counter(entry.name for entry in (*entries, *sweeps))
    named_entries = [
        replace(entry, name=f"{entry.name} ({entry.folder})") if names[entry.name] > 1 else entry
        for entry in (*entries, *sweeps)
    ]
    _check_originals(named_entries)
    _check_samples(named_entries)
    return Comparison(
        tuple(entry for entry in named_entries if isinstance(entry, Entry)),
        tuple(entry for entry in named_entries if isinstance(entry, SweepEntry)),
        tuple(_notices(named_entries)),
    )


def _evaluations(entries: Sequence[Entry | SweepEntry]) -> list[tuple[Entry | SweepEntry, Results | Sweep]]:
    pairs = [(entry, entry.sweep if isinstance(entry, SweepEntry) else entry.results) for entry in entries]
    return [(entry, results) for entry, results in pairs if results is not None]


def _settings(folder: Path) -> Mapping[str, Any]:
    try:
        return json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KVSurgeryError(
            f"{folder / SETTINGS} cannot be read, so the evaluated samples are unknown: {error}; give the whole folder"
        ) from error


def _check_originals(entries: Sequence[Entry | SweepEntry]) -> None:
    """Refuse results that belong to different originals."""
    facts = [_original_facts(entry) for entry in entries]
    for place, other_place in combinations(range(len(entries)), 2):
        if not _is_same_original(facts[place], facts[other_place]):
            raise KVSurgeryError(
                f"{entries[other_place].folder} and {entries[place].folder} are of different originals "
                f"({facts[other_place]['name']} and {facts[place]['name']}); compare conversions of one original"
            )


def _original_facts(entry: Entry | SweepEntry) -> dict[str, Any]:
    """The facts about the original that results record; older results have no fingerprint of its weights."""
    if isinstance(entry, SweepEntry):
        facts: dict[str, Any] = {"name": entry.sweep.source}
    else:
        surgery = entry.checkpoint["surgery"]
        facts = {"name": surgery["base_model"], "commit": surgery["base_revision"]}
        facts["shape"] = entry.checkpoint["dimensions"]
        if entry.bench:
            facts["weights"] = entry.bench.original
    if _evaluations([entry]):
        models = _settings(entry.folder)["models"]
        facts["files"] = models.get(ORIGINAL, {}).get("fingerprint")
        for model in models.values():
            facts["weights"] = facts.get("weights") or model.get("original")
    return {name: value for name, value in facts.items() if value is not None or name == "name"}


def _is_same_original(facts: Mapping[str, Any], other_facts: Mapping[str, Any]) -> bool:
    """Whether two originals are the same: by weights, else by file fingerprints, else by names and shapes."""
    common_names = facts.keys() & other_facts.keys()
    for name in ("weights", "files"):
        if name in common_names:
            return facts[name] == other_facts[name]
    names = str(facts["name"]), str(other_facts["name"])
    # a sweep has the folder's path, and a converted checkpoint the folder's name
    has_same_name = names[0] == names[1] or names[0] == Path(names[1]).name or names[1] == Path(names[0]).name
    return has_same_name and all(facts[name] == other_facts[name] for name in common_names - {"name"})


def _check_samples(entries: Sequence[Entry | SweepEntry]) -> None:
    """Refuse scores on other samples, and KV bytes in other dtypes."""
    evaluations = _evaluations(entries)
    for entry, results in evaluations[1:]:
        first_entry, first_results = evaluations[0]
        both_folders = f"{entry.folder} and {first_entry.folder}"
        if _settings(entry.folder)["samples"] != _settings(first_entry.folder)["samples"]:
            differences = _differences(first_results.settings, results.settings)
            reason = next((f": {name} is {value} and {reference}" for name, reference, value in differences), "")
            raise KVSurgeryError(
                f"{both_folders} were evaluated on different samples{reason}; evaluate both with the same tasks, "
                "settings and files"
            )
        if None not in (sizes := (first_results.dense_bytes, results.dense_bytes)) and len({*sizes}) > 1:
            raise KVSurgeryError(
                f"{both_folders} were evaluated in different dtypes, so that their KV bytes cannot be compared; "
                "evaluate both with the same `dtype`"
            )


def _differences(
    first_settings: Mapping[str, Any], second_settings: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """The names and values of settings that differ."""
    first_values = _values(first_settings)
    second_values = _values(second_settings)
    for name in dict.fromkeys([*first_values, *second_values]):
        if first_values.get(name) != second_values.get(name):
            yield name, first_values.get(name, "not set"), second_values.get(name, "not set")


def _values(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings by their dotted names, as text, without those that only a sweep has."""
    return dict(flat_settings({name: value for name, value in settings.items() if name not in SWEEP_SETTINGS}))


def _notices(entries: Sequence[Entry | SweepEntry]) -> Iterator[str]:
    """Differences between comparable results: settings, versions, devices, numbers of samples, and bytes."""
    evaluations = _evaluations(entries)
    benchmarks = [(entry, entry.bench) for entry in entries if isinstance(entry, Entry) and entry.bench]
    for kind, runs in (("evaluations", evaluations), ("benchmarks", benchmarks)):
        if not runs:
            continue
        (first_entry, first_run), *other_runs = runs
        for entry, run in other_runs:
            differences = [*_differences(first_run.versions, run.versions)]
            if kind == "evaluations":
                differences += _differences(first_run.settings, run.settings)
            for name, first_value, value in differences:
                yield f"The {kind} differ in {name}: {first_entry.name} has {first_value}, {entry.name} has {value}."
    yield from _sample_counts(evaluations)
    for entry, results in evaluations:
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


def _sample_counts(evaluations: Sequence[tuple[Entry | SweepEntry, Results | Sweep]]) -> Iterator[str]:
    counts: dict[str, dict[int, list[str]]] = {}
    for entry, results in evaluations:
        runs = results.points if isinstance(results, Sweep) else [results]
        for task in (task for run in runs for task in run.tasks):
            names = counts.setdefault(task.task, {}).setdefault(task.count, [])
            if entry.name not in names:
                names.append(entry.name)
    for task, by_count in counts.items():
        if len(by_count) > 1:
            counts_text = "; ".join(f"{count:,} samples: {', '.join(names)}" for count, names in by_count.items())
            yield (
                f"The scores of {task} are means over different samples, because a model skipped some ({counts_text}). "
                "Each difference is paired over its own samples."
            )
