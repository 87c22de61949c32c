"""The heads whose states find the tokens that a question needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvsurgery.errors import ProfileError
from kvsurgery.measure.methods.method import Measurement, Reporter, SampledMethod
from kvsurgery.setting import CHUNK_HELP, setting

if TYPE_CHECKING:
    from kvsurgery.measure.mesh import Mesh
    from kvsurgery.measure.model import MeasuredModel


@dataclass(frozen=True)
class Reform(SampledMethod):
    """REFORM's embedding heads.

    Attributes:
        samples: prompts of each kind.
        context: tokens of a prompt.
        chunk: tokens of it that are read at once.
    """

    name: str = "reform"
    samples: int = setting(50, "samples", "number of prompts")
    context: int = setting(8192, "context", "tokens of a prompt", tokens=True)
    chunk: int = setting(2048, "chunk", CHUNK_HELP, tokens=True)

    def check(self) -> None:
        if self.chunk < 1:
            raise ProfileError(f"`chunk` must be at least 1 token, got {self.chunk}")
        super().check()

    def measure(self, measured: MeasuredModel, mesh: Mesh, reporter: Reporter) -> Measurement:
        from kvsurgery.measure.reform import PAPER, embedding_ranking
        from kvsurgery.measure.reform_tasks import ranked_prompts
        from kvsurgery.profile.embedding_heads import RANKING_TASKS
        from kvsurgery.text.haystack import Haystack, tokens_needed

        needed_tokens = tokens_needed(self.text, self.context)
        haystack = Haystack.read(self.text, measured.text, needed_tokens, self.seed)
        prompt_options = {"count": self.samples, "length": self.context, "seed": self.seed}
        profile = embedding_ranking(
            measured,
            {task: ranked_prompts(task, measured.text, haystack, **prompt_options) for task in RANKING_TASKS},
            recurrence=replace(PAPER, chunk=self.chunk),
            data={"text": haystack.name, "seed": self.seed},
            kept=self.kept,
            progress=reporter.progress,
            mesh=mesh,
        )
        return Measurement(profile)
