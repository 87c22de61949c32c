"""DuoAttention's gates, trained on long answers that the model itself generates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvsurgery.errors import ProfileError
from kvsurgery.measure.methods.gates import GateMethod
from kvsurgery.measure.methods.method import Reporter
from kvsurgery.setting import setting

if TYPE_CHECKING:
    from kvsurgery.measure.mesh import Mesh
    from kvsurgery.measure.model import MeasuredModel
    from kvsurgery.measure.own_answers import OwnAnswers


@dataclass(frozen=True)
class RLKVLite(GateMethod):
    """Gates of the model's own answers.

    Attributes:
        samples: answers that are generated.
        answers: a file of answers: read where it exists, written where it does not.
    """

    name: str = "rlkv-lite"
    samples: int = setting(64, "samples", "number of answers")
    answers: Path | None = setting(
        None, "answers", "file of answers (JSON lines): read if it exists, otherwise written after generation"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text is not None:
            raise ProfileError(
                "`text` does not go with `method` rlkv-lite, which trains on the model's own answers; leave it out"
            )

    def check(self) -> None:
        from kvsurgery.measure.own_answers import read_answers
        from kvsurgery.system.files import check_file

        if self.answers is not None:
            if self.answers.exists():
                read_answers(self.answers)
            else:
                check_file(self.answers)
        super().check()

    def prompts(self, measured: MeasuredModel, mesh: Mesh, reporter: Reporter) -> OwnAnswers:
        from kvsurgery.measure.own_answers import OwnAnswers

        contexts = self.contexts(measured)
        return OwnAnswers.of(measured, contexts, self.samples, self.answers, reporter.progress, mesh)
