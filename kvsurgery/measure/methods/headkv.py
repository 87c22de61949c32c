"""How much of a needle's answer comes through each head: copied (r, er) or reasoned about (r2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvsurgery.measure.methods.method import Measurement, Reporter, SampledMethod
from kvsurgery.setting import depths_setting, lengths_setting, needles_setting

if TYPE_CHECKING:
    from kvsurgery.measure.mesh import Mesh
    from kvsurgery.measure.model import MeasuredModel


@dataclass(frozen=True)
class HeadKV(SampledMethod):
    """Retrieval scores: `name` is a key of `retrieval.RETRIEVAL_METHODS`.

    Attributes:
        needles: a shipped set, a JSONL file, or "auto": the hardest set that the model answers.
        lengths: of whole prompts, in tokens. None: five, from 1,000 to 32,000 or to what fits the model's context.
        depths: of needles in the text, 0 (first) to 1 (last). None: ten.
    """

    needles: str = needles_setting()
    lengths: tuple[int, ...] | None = lengths_setting()
    depths: tuple[float, ...] | None = depths_setting(None)

    def check(self) -> None:
        from kvsurgery.text.needle_sets import AUTO, read_set

        super().check()
        if self.needles != AUTO:
            read_set(self.needles)

    def measure(self, measured: MeasuredModel, mesh: Mesh, reporter: Reporter) -> Measurement:
        from kvsurgery.measure.needle_trial import choose_needles
        from kvsurgery.measure.retrieval import Trials, retrieval_scores
        from kvsurgery.text.haystack import Haystack
        from kvsurgery.text.lengths import DEPTHS, default_lengths
        from kvsurgery.text.needle_sets import AUTO, read_set

        lengths = self.lengths or default_lengths(measured.max_context)
        haystack = Haystack.read(self.text, measured.text, max(lengths), self.seed)
        trials = Trials(lengths, self.depths or DEPTHS, seed=self.seed)
        if self.needles == AUTO:
            needles = choose_needles(measured, haystack, self.name, trials, progress=reporter.progress, mesh=mesh)
            reporter.note(str(needles))
        else:
            needles = read_set(self.needles)
        profile = retrieval_scores(
            measured,
            haystack,
            needles,
            trials,
            method=self.name,
            kept=self.kept,
            progress=reporter.progress,
            mesh=mesh,
        )
        return Measurement(profile)
