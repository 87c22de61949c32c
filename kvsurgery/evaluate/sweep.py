"""Many conversions of one checkpoint, one after the other: each is written, asked, and thrown away."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from kvsurgery.conversion.convert import convert
from kvsurgery.conversion.output import check_space
from kvsurgery.conversion.prepared import PreparedConversion
from kvsurgery.display.progress import Progress, silent
from kvsurgery.errors import OutputError, PolicyError
from kvsurgery.evaluate.held import LongestSample
from kvsurgery.evaluate.options import Options
from kvsurgery.evaluate.results import CONVERTED, ORIGINAL
from kvsurgery.evaluate.runner import Evaluation, started_evaluation
from kvsurgery.evaluate.sample import Task
from kvsurgery.evaluate.standing import Steps
from kvsurgery.evaluate.sweep_results import FILE, Point, Sweep, named, varied
from kvsurgery.policy.evidence import Evidence
from kvsurgery.policy.layer_bits import UNQUANTIZED
from kvsurgery.recipe import Recipe

SCRATCH = "sweep-checkpoint"  # one name for all, since transformers keeps emitted code by the folder's


@dataclass(frozen=True)
class SweptSetting:
    """One combination of the axes' values, and the conversion that it decides."""

    options: Mapping[str, Any]
    prepared: PreparedConversion

    @property
    def answers(self) -> str:
        """The name of its answers, which is that of its policy."""
        return f"policy-{self.prepared.policy.hash[:16]}"


@dataclass(frozen=True)
class Refused:
    """One combination of the axes' values that decides no conversion, and why."""

    options: Mapping[str, Any]
    reason: str


@dataclass(frozen=True)
class Grid:
    """The settings of a sweep: one recipe, with every combination of values of some of its fields.

    Attributes:
        source: the original's folder.
        recipe, evidence: what all settings share.
        axes: values by field of the recipe; of `kv_bits`, 16 is a cache in the model's dtype.
        name, revision: the original's Hub id and commit, if it comes from the Hub.
    """

    source: Path
    recipe: Recipe
    evidence: Evidence
    axes: Mapping[str, Sequence[Any]]
    name: str | None = None
    revision: str | None = None

    @property
    def distinct_axes(self) -> dict[str, tuple[Any, ...]]:
        """The axes with each value once."""
        return {name: tuple(dict.fromkeys(values)) for name, values in self.axes.items()}

    def settings(self) -> list[SweptSetting | Refused]:
        """Every combination, the first axis outermost. Only headers are read.

        Raises:
            PolicyError: not one gives a policy.
            KVSurgeryError: no conversion can be done, whatever the policy.
        """
        combinations = product(*self.distinct_axes.values())
        settings = [self._setting(dict(zip(self.axes, values, strict=True))) for values in combinations]
        refusals = [setting for setting in settings if isinstance(setting, Refused)]
        if len(refusals) == len(settings):
            raise PolicyError(f"no setting gives a policy: {refusals[0].reason}")
        return settings

    def to_json(self) -> dict[str, Any]:
        """What all settings share, in plain JSON values."""
        shared_fields = {**asdict(self.recipe), "name": self.name, "revision": self.revision}
        return {name: value for name, value in shared_fields.items() if value not in (None, ())}

    def _setting(self, options: Mapping[str, Any]) -> SweptSetting | Refused:
        """Plan one; what the policy refuses is kept as the reason."""
        values = {name: None if (name, value) == ("kv_bits", UNQUANTIZED) else value for name, value in options.items()}
        try:
            recipe = self.recipe.changed(**values)
            prepared = PreparedConversion.prepare(
                self.source, recipe, self.evidence, name=self.name, revision=self.revision
            )
        except PolicyError as error:
            return Refused(options, str(error))
        return SweptSetting(options, prepared)


def sweep(
    grid: Grid,
    tasks: Mapping[str, Task],
    folder: str | Path,
    options: Options = Options(),
    *,
    device: str | None = None,
    command: str = "",
    progress: Progress = silent,
    note: Callable[[str], None] = lambda line: None,
) -> Sweep:
    """Evaluate the original, and a conversion for every combination of values; write `sweep.json` and `sweep.csv`.

    A conversion lies in the folder while it answers, and is removed then. What has been answered is not computed again,
    also where axes have other values than before. Settings that decide the same policy are evaluated once.

    Args:
        grid: what is converted, in which ways.
        tasks: by name.
        folder: where everything is written.
        device: default is CUDA where there is one.
        command: what was typed, for the results.
        note: as `Evaluation.open` takes it.

    Raises:
        PolicyError: not one setting gives a policy.
        OutputError: the folder lies in the original's, or has no room for a conversion.
        KVSurgeryError: as `PreparedConversion.prepare`, `convert`, `Evaluation.open` and `Evaluation.answer`.
        Interrupted: Ctrl-C.
    """
    settings = grid.settings()
    resolved_folder = Path(folder).resolve()
    if grid.source.resolve() in (resolved_folder, *resolved_folder.parents):
        raise OutputError(f"{folder} is the original's folder or inside it; choose another folder")
    distinct_settings: dict[str, SweptSetting] = {}
    for setting in settings:
        if isinstance(setting, SweptSetting):
            distinct_settings.setdefault(setting.answers, setting)
    with started_evaluation(folder, grid.source, tasks, options, device, progress, note, FILE) as evaluation:
        processes, [first_setting, *_] = evaluation.processes, distinct_settings.values()
        with processes.first():
            if any(map(evaluation.missing, distinct_settings)):
                check_space(evaluation.folder, first_setting.prepared.checkpoint.size)
            if processes.rank == 0:
                note(f"{evaluation.plan}; {1 + len(distinct_settings)} models")
        steps = Steps(progress if processes.rank == 0 else silent, len(evaluation.samples), 1 + len(distinct_settings))
        evaluation.answer(ORIGINAL, grid.source, steps.of(0, ORIGINAL))
        for number, setting in enumerate(distinct_settings.values(), 1):
            varied_options = {axis: setting.options[axis] for axis in varied(grid.distinct_axes)}
            _answer(evaluation, setting, steps.of(number, named(varied_options)))
        with processes.first():
            finished_sweep = _results(grid, settings, evaluation, command)
            if processes.rank == 0:
                finished_sweep.save(evaluation.folder)
        return finished_sweep


def _answer(evaluation: Evaluation, setting: SweptSetting, progress: Progress) -> None:
    """Convert and ask, unless all is answered. A conversion that was killed goes on."""
    is_first, prepared, name = evaluation.processes.rank == 0, setting.prepared, setting.answers
    out = evaluation.folder / name / SCRATCH
    moved = 0

    def moving(count: int) -> None:
        nonlocal moved
        moved += count
        progress(0, None, f"{name}: converting, {moved / prepared.checkpoint.size:.0%}")

    with evaluation.processes.first():
        missing_count = evaluation.missing(name)
    if missing_count:
        with evaluation.processes.first():
            if is_first:
                convert(prepared.checkpoint, prepared.plan, out, prepared.emitted.files, progress=moving)
        evaluation.answer(name, out, progress)
    # models that still answer have it in memory
    if is_first:
        shutil.rmtree(out.parent, ignore_errors=True)


def _results(grid: Grid, settings: Sequence[SweptSetting | Refused], evaluation: Evaluation, command: str) -> Sweep:
    """What the sweep found, once all is answered."""
    original_results = evaluation.results({ORIGINAL: ORIGINAL}, command)
    longest_sample = LongestSample.of(
        grid.source, evaluation.samples, evaluation.reader.max_context, evaluation.options.dtype
    )
    first_setting = next(setting for setting in settings if isinstance(setting, SweptSetting))
    return Sweep(
        source=grid.name or str(grid.source),
        command=command,
        settings={
            **original_results.settings,
            **({"profile": grid.evidence.scores.hash} if grid.evidence.scores else {}),
            "conversion": grid.to_json(),
        },
        versions=original_results.versions,
        axes=grid.distinct_axes,
        tokens=longest_sample.tokens,
        dense_bytes=longest_sample.dense_bytes(first_setting.prepared.policy.layout),
        original=original_results.tasks,
        points=tuple(_point(setting, evaluation, longest_sample) for setting in settings),
    )


def _point(setting: SweptSetting | Refused, evaluation: Evaluation, longest_sample: LongestSample) -> Point:
    if isinstance(setting, Refused):
        return Point(setting.options, skipped=setting.reason)
    results = evaluation.results({ORIGINAL: ORIGINAL, CONVERTED: setting.answers})
    policy = setting.prepared.policy
    return Point(setting.options, policy.hash, longest_sample.kv_bytes(policy.layout), tasks=results.tasks)
