"""The trial that chooses the needles of an evaluation: a model is asked the shipped sets, hardest first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from kvsurgery.display.progress import Progress
from kvsurgery.errors import TextError
from kvsurgery.evaluate.answering import Respondent, free
from kvsurgery.evaluate.checkpoint import copy_code, is_converted, load
from kvsurgery.evaluate.options import Options
from kvsurgery.evaluate.results import CONVERTED, ORIGINAL, SETTINGS, read_settings
from kvsurgery.evaluate.sample import Reader, Sample, Task
from kvsurgery.evaluate.tasks.needle import NeedleTask
from kvsurgery.measure.retrieval import RIGHT
from kvsurgery.system.processes import Processes
from kvsurgery.text.needle_sets import AUTO, SETS, NeedleChoice, choose_set, trial_note

KIND = "retrieval"  # of needles that are found, and not reasoned about
OTHERWISE = "or leave needle out of `tasks`"


@dataclass(frozen=True, eq=False)
class Trial:
    """A model, and the trials that it is asked.

    Attributes:
        folder: of the evaluation.
        checkpoint: the model's.
        reader: whom samples are written for.
        options: the evaluation's.
        processes: that share the trials.
        progress: told of each trial, by the first process.
        note: called with a line on what was chosen.
    """

    folder: Path
    checkpoint: str | Path
    reader: Reader
    options: Options
    processes: Processes
    progress: Progress
    note: Callable[[str], None]

    def with_recorded_choices(self, tasks: Mapping[str, Task]) -> dict[str, Task]:
        """The tasks, with the needle sets that an evaluation that goes on has recorded.

        Raises:
            OutputError: the folder's settings cannot be read.
        """
        recorded = self.processes.agree(self._recorded_choices() if self.processes.rank == 0 else None)
        return {
            name: self._chosen(task, NeedleChoice(**recorded[name]))
            if needs_choice(task) and name in recorded
            else task
            for name, task in tasks.items()
        }

    def with_needle_choices(self, tasks: Mapping[str, Task]) -> dict[str, Task]:
        """The tasks, with a needle set chosen for each task that leaves it to a trial.

        Raises:
            TextError: the model answers no set, or the sets cannot be asked.
            KVSurgeryError: it cannot be loaded.
        """
        return {
            name: self._chosen(task, self._choose(task)) if needs_choice(task) else task for name, task in tasks.items()
        }

    def _chosen(self, task: NeedleTask, choice: NeedleChoice) -> NeedleTask:
        if self.processes.rank == 0:
            self.note(str(choice))
        return replace(task, choice=choice)

    def _recorded_choices(self) -> dict[str, Any]:
        """The fields of a choice by task."""
        if not (self.folder / SETTINGS).exists():
            return {}
        tasks = read_settings(self.folder).get("tasks", {})
        return {name: fields["choice"] for name, fields in tasks.items() if (fields or {}).get("choice")}

    def _choose(self, task: NeedleTask) -> NeedleChoice:
        with self.processes.first():
            trial_samples = {name: task.trial(self.reader, name) for name in SETS[KIND]}
            copy_code(self.checkpoint)
        model = load(self.checkpoint, device=self.processes.device, dtype=self.options.dtype, tp=self.options.tp)
        respondent = Respondent(model, self.reader.tokenizer, self.options.chunk, self.options.tp > 1)
        [length] = {len(sample.tokens) for samples in trial_samples.values() for sample in samples}
        all_samples = [sample for samples in trial_samples.values() for sample in samples]
        if reason := next(filter(None, map(respondent.unusable_reason, all_samples)), None):
            raise TextError(f"needles in {length:,} tokens cannot be asked for: {reason}; give shorter `lengths`")
        role = CONVERTED if is_converted(self.checkpoint) else ORIGINAL
        choice = choose_set(KIND, partial(self._right_count, respondent, trial_samples), length, OTHERWISE, role)
        del model, respondent
        free()
        return choice

    def _right_count(self, respondent: Respondent, trial_samples: Mapping[str, list[Sample]], name: str) -> int:
        """How many trials of a set are right, over all processes. Those that share a model answer each one together."""
        samples = trial_samples[name]
        workers = Processes() if self.options.tp > 1 else self.processes
        own_samples = samples[workers.rank :: workers.world]
        records = []
        for place, sample in enumerate(own_samples):
            if self.processes.rank == 0:
                self.progress(0, None, trial_note(name, place * workers.world))
            records += respondent.records([sample], lambda note: None)
        scores = (record.get("scores", {}).get(samples[0].metric, 0) for record in records)
        return sum(workers.gather([sum(score > RIGHT for score in scores)]))


def needs_choice(task: Task) -> TypeGuard[NeedleTask]:
    """Whether a task leaves its needle set to a trial."""
    return isinstance(task, NeedleTask) and task.needles == AUTO and task.choice is None
