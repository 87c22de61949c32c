"""How much of a needle's answer comes through each head: copied (r, er) or reasoned about (r2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvsurgery.measure.methods.method import Measurement, Reporter, SampledMethod
from kvsurgery.setting import depths_setting, lengths_setting, needles_setting

if TYPE_CHECKING:
    from kvsurgery.measure.mesh import Mesh
    from kvsurgery.measure.model import MeasuredModel


LEAST_DEPTHS = 2
TIMED_ANSWER = 8  # tokens of the answer that is timed


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

    paced = ("lengths", "depths")

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

        method = self.fitting(measured, mesh, reporter)
        lengths = method.lengths or default_lengths(measured.max_context)
        haystack = Haystack.read(self.text, measured.text, max(lengths), self.seed)
        trials = Trials(lengths, method.depths or DEPTHS, seed=self.seed)
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

    def plan(self, measured: MeasuredModel, mesh: Mesh) -> dict[str, Any]:
        from kvsurgery.measure.cost import NEEDLES_IN_SET
        from kvsurgery.measure.pace import Candidate, Lengths, fitted, length_pairs, scaled_seconds, timed_ids
        from kvsurgery.measure.retrieval import answer
        from kvsurgery.text.lengths import DEPTHS, ROOM, default_lengths
        from kvsurgery.text.needle_sets import AUTO, SETS, TRIALS, read_set

        ids = timed_ids(measured)
        seconds = scaled_seconds(
            measured, len(ids), lambda: answer(measured, ids, top=TIMED_ANSWER, limit=TIMED_ANSWER), mesh
        )
        needle_count = NEEDLES_IN_SET if self.needles == AUTO else len(read_set(self.needles))
        trial_count = TRIALS * max(map(len, SETS.values())) if self.needles == AUTO else 0

        def candidate(lengths: tuple[int, ...]) -> Candidate:
            depth_seconds = needle_count * sum(map(seconds, lengths)) / mesh.groups
            return Candidate({"lengths": lengths}, depth_seconds, trial_count * seconds(min(lengths)) / mesh.groups)

        pairs = length_pairs(measured.max_context - ROOM, Lengths(), 0)
        default_grids = (tuple(dict.fromkeys(default_lengths(longest + ROOM))) for _, longest in pairs)
        grids = [self.lengths] if self.lengths else default_grids
        given = len(self.depths) if self.depths else None
        least, most = (LEAST_DEPTHS, len(DEPTHS)) if given is None else (given, given)
        plan = fitted(self.minutes or 0, map(candidate, grids), "depths", least, most)
        places = range(plan["depths"])
        spread = tuple(DEPTHS[round(place * (len(DEPTHS) - 1) / max(len(places) - 1, 1))] for place in places)
        return {**plan, "depths": self.depths or spread}
