"""DuoAttention's gates, trained on long answers that the model itself generates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvsurgery.errors import ProfileError
from kvsurgery.measure.methods.gates import GateMethod
from kvsurgery.measure.methods.method import Reporter
from kvsurgery.setting import setting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvsurgery.measure.mesh import Mesh
    from kvsurgery.measure.model import MeasuredModel
    from kvsurgery.measure.own_answers import OwnAnswers


SAMPLES, LEAST_SAMPLES = 64, 8
TIMED_TOKENS = 16  # of the answers that are timed
ANSWERING = 1 / 3  # share of the time in which answers are generated


@dataclass(frozen=True)
class RLKVLite(GateMethod):
    """Gates of the model's own answers.

    Attributes:
        samples: answers that are generated.
        answers: a file of answers: read where it exists, written where it does not.
    """

    name: str = "rlkv-lite"
    samples: int | None = setting(None, "samples", "number of answers", default=SAMPLES)
    answers: Path | None = setting(
        None, "answers", "file of answers (JSON lines): read if it exists, otherwise written after generation"
    )

    paced = ("steps", "samples", "min_context", "max_context")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text is not None:
            raise ProfileError(
                "`text` does not apply to `method` rlkv-lite, which trains on the model's own answers; leave it out"
            )

    def check(self) -> None:
        from kvsurgery.system.files import check_file

        if self.answers is not None and not self.answers.exists():
            check_file(self.answers)
        super().check()

    def check_state(self) -> None:
        from kvsurgery.measure.own_answers import read_answers

        super().check_state()
        if self.answers is not None and self.answers.exists():
            read_answers(self.answers)

    def prompts(self, measured: MeasuredModel, mesh: Mesh, reporter: Reporter) -> OwnAnswers:
        from kvsurgery.measure.own_answers import OwnAnswers

        contexts = self.contexts(measured)
        return OwnAnswers.of(measured, contexts, self.samples or SAMPLES, self.answers, reporter.progress, mesh)

    def planned(
        self, measured: MeasuredModel, mesh: Mesh, reporter: Reporter, saved_facts: Mapping[str, Any] | None
    ) -> Self:
        from kvsurgery.measure.pace import TrainingPlan

        if self.minutes is None:
            return self
        if saved_facts is not None:
            saved = TrainingPlan.of(saved_facts)
            plan = {"steps": saved.steps, "min_context": saved.min_context, "max_context": saved.max_context}
            plan["samples"] = saved_facts["data"].get("answers")
        else:
            reporter.note("timing some answers and steps of the training")
            plan = self.plan(measured, mesh)
            chosen_text = " ".join(f"`{name}` {value}" for name, value in plan.items())
            reporter.note(f"chosen for {self.minutes:g} min: {chosen_text}")
        given = {name: value for name in plan if (value := getattr(self, name)) is not None}
        return replace(self, minutes=None, until_settled=True, **(plan | given))

    def plan(self, measured: MeasuredModel, mesh: Mesh) -> dict[str, Any]:
        """Settings of which generation and training both fit the time.

        Raises:
            TooLittleTime: there is time for too few steps.
        """
        from kvsurgery.measure.own_answers import TOGETHER, task_prompts, token_seconds
        from kvsurgery.measure.pace import (
            LEAST_STEPS,
            WANTED_STEPS,
            Candidate,
            Lengths,
            fitted,
            length_pairs,
            mean_seconds,
            step_seconds,
        )

        is_read = self.answers is not None and self.answers.exists()
        # what every prompt has to be longer than: the window, and a task without its answer
        least_tokens = self.sink + self.recent
        if not is_read:
            least_tokens = max(least_tokens, *map(len, task_prompts(measured, self.samples or SAMPLES, self.seed)))
        answer_seconds = 0.0 if is_read else mesh.processes.agree(token_seconds(measured, TIMED_TOKENS))
        seconds = step_seconds(measured, self.options(), mesh)
        lengths = Lengths(self.min_context, self.max_context)

        def candidates():
            for shortest, longest in length_pairs(measured.max_context, lengths, least_tokens):
                batch_seconds = longest * answer_seconds
                batches = int(60 * (self.minutes or 0) * ANSWERING / batch_seconds) if batch_seconds else SAMPLES
                samples = self.samples or min(max(batches * TOGETHER, LEAST_SAMPLES), SAMPLES)
                settings = {"samples": samples, "min_context": shortest, "max_context": longest}
                ahead = -(-samples // TOGETHER) * batch_seconds
                yield Candidate(settings, mean_seconds(seconds, shortest, longest), ahead)

        return fitted(self.minutes or 0, candidates(), "steps", LEAST_STEPS, WANTED_STEPS)
