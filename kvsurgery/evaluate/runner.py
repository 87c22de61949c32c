"""Run tasks on checkpoints: each reads the same tokens, answers are saved as they come, scores are paired by sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvsurgery.conversion.converted import original_fingerprint
from kvsurgery.conversion.inspection import inspect_checkpoint
from kvsurgery.display.progress import Progress, silent
from kvsurgery.errors import Interrupted, KVSurgeryError, OutputError
from kvsurgery.evaluate.answering import Respondent, free
from kvsurgery.evaluate.checkpoint import (
    check_processes,
    copy_code,
    fingerprint,
    load,
    read_text_config,
    reader_of,
)
from kvsurgery.evaluate.held import with_kv_bytes
from kvsurgery.evaluate.options import Options
from kvsurgery.evaluate.records import (
    check_settings,
    prompt_record,
    read_answers,
    recorded_tasks,
    run_settings,
    write_settings,
)
from kvsurgery.evaluate.results import CONVERTED, FILE, SAMPLES, SETTINGS, Results, read_settings
from kvsurgery.evaluate.sample import Reader, Sample, Task, batched, distinct, limited_samples
from kvsurgery.evaluate.standing import Steps, standing
from kvsurgery.evaluate.statistics import task_result
from kvsurgery.evaluate.trial import Trial, needs_choice
from kvsurgery.system.files import write_whole
from kvsurgery.system.json_lines import append_lines, lines
from kvsurgery.system.processes import Processes, started_processes


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Samples, and the answers of any number of models to them, in a folder. Answers there are not computed again.

    The folder holds `settings.json`, `samples.jsonl` (the prompts), and `answers-NAME.jsonl` of each model, to which a
    batch's answers are appended once all of them are there. Batches depend on samples and options alone, so that a run
    that was killed and goes on gives what one run gives. Several processes call the same methods and share the batches;
    the first one writes.
    """

    folder: Path
    samples: tuple[Sample, ...]
    reader: Reader
    options: Options
    tasks: Mapping[str, Any]
    processes: Processes

    @classmethod
    def open(
        cls,
        folder: str | Path,
        checkpoint: str | Path,
        tasks: Mapping[str, Task],
        options: Options = Options(),
        processes: Processes = Processes(),
        progress: Progress = silent,
        note: Callable[[str], None] = lambda line: None,
        file: str = FILE,
    ) -> Evaluation:
        """Make the samples, and begin or go on in a folder.

        Args:
            checkpoint: whose tokenizer and context the samples are made for, and which chooses needles by a trial where
                a task leaves that open.
            tasks: by name.
            note: called with a line on the needles that were chosen.
            file: the name of the file that the results will be in, by which an interrupted run is known.

        Raises:
            KVSurgeryError: only some would share it; a task has no samples or cannot make them; no needles are answered
                in the trial; the folder cannot be used, or holds an evaluation with other settings.
        """
        if options.tp not in (1, processes.world):
            raise KVSurgeryError(
                f"the models need {options.tp} processes, but {processes.world} were started; start {options.tp}"
            )
        if not tasks:
            raise KVSurgeryError("there is no task to run; name some, such as needle")
        if processes.rank == 0:
            progress(0, None, f"loading {checkpoint}")
        with processes.first():
            reader = reader_of(checkpoint, options.seed, options.trust_remote_code)
        trial = Trial(Path(folder), checkpoint, reader, options, processes, progress, note)
        tasks = trial.with_recorded_choices(tasks)
        with processes.first():
            if processes.rank == 0 and (Path(folder) / SETTINGS).exists():
                check_settings(Path(folder), run_settings(recorded_tasks(tasks), options, processes.device))
        made: dict[str, list[Sample]] = {}
        # a trial loads a model, and what may be wrong with other tasks is found before
        cls._make(made, tasks, reader, options, processes, progress)
        tasks = trial.with_needle_choices(tasks)
        cls._make(made, tasks, reader, options, processes, progress)
        samples = tuple(distinct(sample for name in tasks for sample in made[name]))
        evaluation = cls(Path(folder), samples, reader, options, recorded_tasks(tasks), processes)
        with processes.first():
            if processes.rank == 0:
                evaluation._begin(file)
        return evaluation

    @staticmethod
    def _make(
        made: dict[str, list[Sample]],
        tasks: Mapping[str, Task],
        reader: Reader,
        options: Options,
        processes: Processes,
        progress: Progress,
    ) -> None:
        """Make the samples of the tasks that have none, but for those whose needles are not chosen."""
        with processes.first():
            for name, task in tasks.items():
                if name in made or needs_choice(task):
                    continue
                made[name] = []
                for sample in limited_samples({name: task}, reader, options.limit):
                    made[name].append(sample)
                    if processes.rank == 0:
                        count = sum(map(len, made.values()))
                        progress(0, None, f"made {count:,} prompts, the last of {sample.task}")

    @property
    def plan(self) -> str:
        """How many prompts each model answers, in one line."""
        counts = Counter(sample.task.partition("/")[0] for sample in self.samples)
        parts = ", ".join(f"{count:,} of {task}" for task, count in counts.items())
        longest = max(len(sample.tokens) for sample in self.samples)
        prompts = f"{len(self.samples):,} prompt{'s' * (len(self.samples) != 1)}"
        return f"{prompts} for each model, of at most {longest:,} tokens: {parts}"

    def enter(self, name: str, checkpoint: str | Path) -> None:
        """Record which model a name stands for, or check that it is the same one; only the first process does it.

        Raises:
            KVSurgeryError: the folder has answers of another model by this name, or damaged ones; the model has another
                vocabulary, or was not converted for this many processes.
        """
        check_processes(checkpoint, self.options.tp)
        if (rows := read_text_config(checkpoint).vocab_size) != self.reader.vocabulary:
            raise KVSurgeryError(
                f"{checkpoint} has a vocabulary of {rows} tokens, the samples are made for {self.reader.vocabulary}: "
                "it belongs to another model"
            )
        settings = read_settings(self.folder)
        digest = fingerprint(checkpoint)
        model_entry = settings["models"].get(name)
        if model_entry is None:
            facts = inspect_checkpoint(Path(checkpoint), str(checkpoint)).to_json()
            original = original_fingerprint(Path(checkpoint))
            entry = {"path": str(checkpoint), "fingerprint": digest, "original": original, "checkpoint": facts}
            settings["models"][name] = entry
            write_settings(self.folder, settings)
        elif model_entry["fingerprint"] != digest:
            raise OutputError(
                f"{self.folder} holds answers of another {name} model, {model_entry['path']}: {checkpoint} has other "
                "weights, configs or heads; give another folder"
            )
        self.answers(name)

    def answer(self, name: str, checkpoint: str | Path, progress: Progress = silent) -> None:
        """Let a model answer the samples that it has not answered yet.

        A sample beyond the model's context, or one that runs out of memory alone, is skipped; the reason is kept.

        Args:
            name: of its answers.

        Raises:
            KVSurgeryError: it cannot be loaded, has another vocabulary, or the folder has answers of another model by
                this name.
        """
        with self.processes.first():
            if self.processes.rank == 0:
                self.enter(name, checkpoint)
            records_by_key = self.answers(name)
        records = list(records_by_key.values())
        batches = [
            batch
            for batch in batched(self.samples, self.options.batch)
            if not all(sample.key in records_by_key for sample in batch)
        ]
        if not batches:
            return
        with self.processes.first():
            copy_code(checkpoint)
        count = sum(sample.key in records_by_key for sample in self.samples)

        def report(note: str) -> None:
            if self.processes.rank == 0:
                progress(count, len(self.samples), f"{name}: {note}")

        report("loading")
        model = load(checkpoint, device=self.processes.device, dtype=self.options.dtype, tp=self.options.tp)
        respondent = Respondent(model, self.reader.tokenizer, self.options.chunk, self.options.tp > 1)
        workers = Processes() if self.options.tp > 1 else self.processes  # those that share a model answer all together
        for start in range(0, len(batches), workers.world):
            own_batch = batches[start + workers.rank] if start + workers.rank < len(batches) else []
            gathered_records = workers.gather(respondent.records(own_batch, report))
            new_records = [
                record for record in gathered_records if (record["task"], record["sample"]) not in records_by_key
            ]
            if self.processes.rank == 0:
                append_lines(self._path(name), new_records)
            count += len(new_records)
            records.extend(new_records)
            report(standing(batches[start][0].task, records))
        del respondent, model
        free()

    def answers(self, name: str) -> dict[tuple[str, str], dict[str, Any]]:
        """The records of a model's answers so far, by the keys of samples.

        Raises:
            KVSurgeryError: a line of their file is damaged.
        """
        return read_answers(self._path(name), self.samples)

    def missing(self, name: str) -> int:
        """How many samples a model has not answered."""
        answered_keys = self.answers(name).keys()
        return sum(sample.key not in answered_keys for sample in self.samples)

    def results(self, models: Mapping[str, str], command: str = "") -> Results:
        """The scores of the answers.

        Args:
            models: the names of answers that are the "original" and the "converted" ones, or of one of them.
            command: what was typed.

        Raises:
            KVSurgeryError: a model has not answered all samples.
        """
        settings = read_settings(self.folder)
        for name in models.values():
            if missing := self.missing(name):
                raise KVSurgeryError(f"{self.folder}: {name} has not answered {missing} of {len(self.samples)} samples")
        answers = {role: self.answers(name) for role, name in models.items()}
        model_entries = {role: settings["models"][name] for role, name in models.items()}
        by_metric: dict[tuple[str, str], list[Sample]] = {}
        for sample in self.samples:
            for metric in sample.metrics:
                by_metric.setdefault((sample.task, metric), []).append(sample)
        return Results(
            models={role: entry["path"] for role, entry in model_entries.items()},
            command=command,
            settings={**self.options.settings, "tasks": self.tasks},
            versions=settings["versions"],
            checkpoint=model_entries[[*model_entries][-1]]["checkpoint"],
            tasks=tuple(
                task_result(task, metric, samples, answers, self.options.seed)
                for (task, metric), samples in by_metric.items()
            ),
        )

    def _path(self, name: str) -> Path:
        return self.folder / f"answers-{name}.jsonl"

    def _begin(self, file: str) -> None:
        """Write settings and samples, or check that the folder has the same ones."""
        content = lines(prompt_record(sample, self.reader.tokenizer) for sample in self.samples)
        settings = {
            **run_settings(self.tasks, self.options, self.processes.device),
            "samples": blake3(content.encode()).hexdigest()[:32],
        }
        try:
            is_begun = (self.folder / SETTINGS).exists()
            if is_begun:
                check_settings(self.folder, settings)
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / SAMPLES, content)
            if not is_begun:
                write_settings(self.folder, {**settings, "file": file, "models": {}})
        except OSError as error:
            raise OutputError(f"cannot write {self.folder}: {error.strerror}") from error


@contextmanager
def started_evaluation(
    folder: str | Path,
    checkpoint: str | Path,
    tasks: Mapping[str, Task],
    options: Options,
    device: str | None,
    progress: Progress,
    note: Callable[[str], None],
    file: str = FILE,
) -> Generator[Evaluation]:
    """`Evaluation.open` in the processes that were started, on a device; Ctrl-C becomes `Interrupted`."""
    with started_processes(device) as processes:
        try:
            yield Evaluation.open(folder, checkpoint, tasks, options, processes, progress, note, file)
        except KeyboardInterrupt:
            raise Interrupted() from None


def evaluate(
    models: Mapping[str, str | Path],
    tasks: Mapping[str, Task],
    folder: str | Path,
    options: Options = Options(),
    *,
    device: str | None = None,
    command: str = "",
    progress: Progress = silent,
    note: Callable[[str], None] = lambda line: None,
) -> Results:
    """Run tasks on one or two models, "original" and "converted", and write `results.json`.

    For many converted models with the same samples, use an `Evaluation`: it lets the original answer once.

    Args:
        models: folders by name.
        tasks: by name.
        folder: where everything is written; an evaluation that was interrupted there goes on.
        device: default is CUDA where there is one.
        command: the command that was typed, for the results.
        note: as `Evaluation.open` takes it.

    Raises:
        KVSurgeryError: as `Evaluation.open` and `Evaluation.answer`.
        Interrupted: Ctrl-C.
    """
    first_checkpoint = next(iter(models.values()))
    with started_evaluation(folder, first_checkpoint, tasks, options, device, progress, note) as evaluation:
        with evaluation.processes.first():
            if evaluation.processes.rank == 0:
                for name, checkpoint in models.items():
                    evaluation.enter(name, checkpoint)
                note(evaluation.plan)
        steps = Steps(progress, len(evaluation.samples), len(models))
        for place, (name, checkpoint) in enumerate(models.items()):
            evaluation.answer(name, checkpoint, steps.of(place, name))
        with evaluation.processes.first():
            results = evaluation.results({name: name for name in models}, command)
            if CONVERTED in models:
                cache_arguments = evaluation.samples, evaluation.reader.max_context, options.dtype
                results = with_kv_bytes(results, models[CONVERTED], *cache_arguments)
            if evaluation.processes.rank == 0:
                results.save(evaluation.folder)
        return results
