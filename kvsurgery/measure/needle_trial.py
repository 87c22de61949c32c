"""The trial that chooses the needles of retrieval scores: the hardest set that the model answers."""

from __future__ import annotations

import numpy as np

from kvsurgery.display.progress import Progress, silent
from kvsurgery.measure.mesh import Mesh
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.measure.retrieval import RETRIEVAL_METHODS, RIGHT, Trials, answer, checked_prompts, judge_answer
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.needle_sets import NeedleChoice, choose_set, read_set, trial_note, trial_places
from kvsurgery.text.needles import needle_place

INSTEAD = {
    "retrieval": "or use `method` duo or attention, which hide passkeys",
    "reasoning": "or use `method` headkv-er, the same score over needles without a reason, duo or attention",
}


def choose_needles(
    measured: MeasuredModel,
    haystack: Haystack,
    method: str,
    trials: Trials,
    *,
    progress: Progress = silent,
    mesh: Mesh = Mesh(),
) -> NeedleChoice:
    """The hardest set of a method's kind of which the model answers at least half of the trials.

    headkv-r2 is defined over needles with a reason, so no set without one is tried for it.

    Args:
        haystack: the text around the needles.
        method: a key of `RETRIEVAL_METHODS`.
        trials: the grid that the scores will hide needles in; the trial is of its shortest length.
        progress: told of each trial, of an unknown number.
        mesh: the processes that share heads, and their groups trials.

    Raises:
        TextError: no set is answered, or the tokenizer does not know a needle's words.
        ProfileError: the lengths or the depths are out of range.
        UnsupportedModel: the model has no tokenizer, or one that cannot be used.
    """
    kind, shortest = RETRIEVAL_METHODS[method].kind, min(trials.lengths)

    def count_right(name: str) -> int:
        needles = read_set(name)
        prompts, limits = checked_prompts(measured, haystack, method, needles, trials)
        count = 0
        for number, depth in trial_places(trials.depths)[mesh.group :: mesh.groups]:
            progress(0, None, trial_note(name, number))
            prompt = prompts[number]
            text = haystack.piece(np.random.default_rng([trials.seed, number]), shortest - prompt.overhead)
            tokens, _ = prompt.around(text, needle_place(text, depth, measured.text))
            steps = answer(measured, tokens, top=1, limit=limits[number])
            count += judge_answer(measured, method, needles[number], steps)[1] > RIGHT
        return sum(mesh.processes.gather([count])) // mesh.tp

    return choose_set(kind, count_right, shortest, INSTEAD[kind])
