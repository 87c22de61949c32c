"""The heads whose states find the tokens that a question needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvsurgery.errors import ProfileError
from kvsurgery.measure.methods.method import Measurement, Reporter, SampledMethod
from kvsurgery.setting import CHUNK_HELP, setting

if TYPE_CHECKING:
    from kvsurgery.measure.mesh import Mesh
    from kvsurgery.measure.model import MeasuredModel


SAMPLES, LEAST_SAMPLES, CONTEXT = 50, 10, 8192


@dataclass(frozen=True)
class Reform(SampledMethod):
    """REFORM's embedding heads.

    Attributes:
        samples: prompts of each kind.
        context: tokens of a prompt.
        chunk: tokens of it that are read at once.
    """

    name: str = "reform"
    samples: int | None = setting(None, "samples", "number of prompts", default=SAMPLES)
    context: int | None = setting(None, "context", "tokens of a prompt", default=CONTEXT, tokens=True)
    chunk: int = setting(2048, "chunk", CHUNK_HELP, tokens=True)

    paced = ("samples", "context")

    def check(self) -> None:
        if self.chunk < 1:
            raise ProfileError(f"`chunk` must be at least 1 token, got {self.chunk}")
        super().check()

    def measure(self, measured: MeasuredModel, mesh: Mesh, reporter: Reporter) -> Measurement:
        from kvsurgery.measure.reform import PAPER, embedding_ranking
        from kvsurgery.measure.reform_tasks import ranked_prompts
        from kvsurgery.profile.embedding_heads import RANKING_TASKS
        from kvsurgery.text.haystack import Haystack, tokens_needed

        method = self.fitting(measured, mesh, reporter)
        samples = SAMPLES if method.samples is None else method.samples
        context = CONTEXT if method.context is None else method.context
        needed_tokens = tokens_needed(self.text, context)
        haystack = Haystack.read(self.text, measured.text, needed_tokens, self.seed)
        prompt_options = {"count": samples, "length": context, "seed": self.seed}
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

    def plan(self, measured: MeasuredModel, mesh: Mesh) -> dict[str, Any]:
        from kvsurgery.measure.pace import LEAST_CONTEXT, Candidate, fitted, scaled_seconds, timed_ids
        from kvsurgery.measure.reform import PAPER, RankedPrompt, sample_ranks
        from kvsurgery.profile.embedding_heads import RANKING_TASKS

        recurrence = replace(PAPER, chunk=self.chunk)
        ids = timed_ids(measured)
        middle = len(ids) // 2
        sample = RankedPrompt(ids, range(1, middle), range(middle, len(ids)), (range(1, 2),))
        kv_heads = mesh.local_head_count(measured, measured.dimensions.kv_heads)
        seconds = scaled_seconds(measured, len(ids), lambda: sample_ranks(measured, sample, recurrence, kv_heads), mesh)

        def candidate(context: int) -> Candidate:
            passes = 1 if context <= self.chunk else 2
            return Candidate({"context": context}, len(RANKING_TASKS) * passes * seconds(context) / mesh.groups)

        # what fits in one chunk needs no positions for what is kept beside it
        fits_chunks = recurrence.encode_budget + self.chunk <= measured.max_context
        longest = CONTEXT if fits_chunks else min(self.chunk, measured.max_context)
        contexts = [self.context or longest]
        while self.context is None and contexts[-1] > LEAST_CONTEXT:
            contexts.append(max(contexts[-1] // 2, LEAST_CONTEXT))
        least, most = (LEAST_SAMPLES, SAMPLES) if self.samples is None else (self.samples, self.samples)
        return fitted(self.minutes or 0, map(candidate, contexts), "samples", least, most)
