"""Retrieval scores: how much of an answer from far back comes through each query head.

A needle lies somewhere in long text, and is asked for at the end. While the model answers, token by token, each head's
attention is read, of the last query over the cached keys. Of a right answer, with N the needle's tokens and a sum over
the answer's tokens:

    headkv-r    1/N where the most attended token is in the needle, and is said (Wu et al. 2024, arXiv 2404.15574)
    headkv-er   1/N x the attention on those of the N most attended tokens that are in the needle
    headkv-r2   the same over the right answer c2 of retrieval-reasoning needles (both Fu et al. 2024, arXiv 2410.19258)

The needle is its `real_needle` in all three. Published HeadKV files hold R2 x 10 / the answer's tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from blake3 import blake3

from kvsurgery.display.progress import Progress, silent
from kvsurgery.errors import ProfileError
from kvsurgery.measure.attention_hooks import attention_weights, intercepted, scoring_of
from kvsurgery.measure.kept_samples import KeptSamples
from kvsurgery.measure.mesh import Mesh
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.metrics.words import qa_f1, rouge1_recall
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.templates.kv_cache import CACHE
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.lengths import DEPTHS
from kvsurgery.text.needle_sets import SETS, NeedleChoice, read_set
from kvsurgery.text.needles import KEYS, Kind, Needle, Prompt, needle_place
from kvsurgery.text.tokens import end_tokens, text_of, token_ids
from kvsurgery.version import TOOL


class RetrievalMethod(NamedTuple):
    """The kind of needle, the metric of its answers, and the part of the needle that they are compared with."""

    kind: Kind
    metric_name: str
    metric: Callable[[str, str], float]
    reference: str


RETRIEVAL_METHODS = {
    "headkv-r": RetrievalMethod("retrieval", "ROUGE-1 recall", rouge1_recall, "real_needle"),
    "headkv-er": RetrievalMethod("retrieval", "QA-F1", qa_f1, "answer"),
    "headkv-r2": RetrievalMethod("reasoning", "QA-F1", qa_f1, "answer"),
}
RIGHT = 0.5  # an answer above counts
ANSWER_FACTOR = 2  # tokens to generate for one of the right answer; one that goes on after it still has an F1 of 2/3
PROMPT_CHUNK = 1024  # tokens of a prompt in one forward


class Attended(NamedTuple):
    """The tokens of one layer's keys that the last query attends to most, in falling order.

    Attributes:
        weights: float32 [query_heads, top].
        positions: in the sequence, int64 [query_heads, top].
    """

    weights: torch.Tensor
    positions: torch.Tensor


class AnswerStep(NamedTuple):
    """One token of an answer, and what every layer with attention attended to when it was said."""

    token: int
    layers: dict[int, Attended]


@dataclass(frozen=True)
class Trials:
    """Where each needle is hidden, and how long its answer may be.

    Attributes:
        lengths: of a whole prompt, in tokens.
        depths: of the needle, 0 (first) to 1 (last).
        max_new_tokens: of an answer, which ends earlier at an end token or after a line. None: twice as many as the
            right answer has.
        seed: of the pieces of text.
    """

    lengths: Sequence[int]
    depths: Sequence[float] = DEPTHS
    max_new_tokens: int | None = None
    seed: int = 0


def retrieval_scores(
    measured: MeasuredModel,
    haystack: Haystack,
    needles: Sequence[Needle] | NeedleChoice,
    trials: Trials,
    *,
    method: str = "headkv-r2",
    kept: Path | None = None,
    progress: Progress = silent,
    mesh: Mesh = Mesh(),
) -> HeadProfile:
    """Scores per query head, mean over the trials with a right answer; a trial is a needle at a length and a depth.

    Args:
        haystack: the text, of which each trial takes a piece from anywhere; `max(lengths)` tokens are enough.
        needles: to hide, or the choice of a set (`choose_needles`), which is recorded; those of another kind than the
            method's are left out.
        trials: the grid that each needle is hidden in.
        method: a key of `RETRIEVAL_METHODS`.
        kept: the file from which an interrupted measurement goes on; only for a single process.
        progress: of the trials, from before the first one, with the number of right answers.
        mesh: the processes that share heads, and their groups trials.

    Raises:
        ProfileError: an option is out of range, the text or the model's maximum is too short, a needle cannot be told,
            no needle is of the method's kind, or no trial had a right answer.
        UnsupportedModel: the model has no tokenizer, or one that cannot be used.
    """
    if method not in RETRIEVAL_METHODS:
        raise ProfileError(f"unknown retrieval method {method!r}; known: {', '.join(RETRIEVAL_METHODS)}")
    _, metric_name, _, reference = RETRIEVAL_METHODS[method]
    choice, given = (needles, read_set(needles.name)) if isinstance(needles, NeedleChoice) else (None, needles)
    needles = _of_kind(given, method)
    prompts, limits = checked_prompts(measured, haystack, method, needles, trials)
    rng = np.random.default_rng(trials.seed)
    kept_trials = KeptSamples(kept, measured, method)
    grid = list(product(trials.depths, zip(needles, prompts, limits, strict=True), trials.lengths))
    heads = mesh.local_head_count(measured, measured.dimensions.query_heads)
    total, successes, best_answer = np.zeros((measured.dimensions.layers, heads)), 0, (-1.0, "")
    progress(0, len(grid), "0 right")  # preparation is no part of the estimate
    for done, (depth, (needle, prompt, limit), length) in enumerate(grid, 1):
        text = haystack.piece(rng, length - prompt.overhead)
        if (done - 1) % mesh.groups != mesh.group:
            continue
        tokens, needle_span = prompt.around(text, needle_place(text, depth, measured.text))
        right_answer = getattr(needle, reference)
        facts = tokens.tolist(), str(needle_span), limit, right_answer
        measure_trial = partial(_trial, measured, method, needle, tokens, needle_span, limit)
        trial, was_kept = kept_trials.result(facts, measure_trial)
        if trial["right"] > RIGHT:
            successes += 1
            total += trial["scores"]
        if trial["right"] > best_answer[0]:
            best_answer = trial["right"], f"{trial['answer'][:80]!r} for {right_answer[:80]!r}"
        # what was kept counts for no time
        progress(done, None if was_kept else len(grid), f"{successes} right")
    successes = sum(mesh.processes.gather([successes])) // mesh.tp
    if not successes:
        share, description = max(mesh.processes.gather([best_answer]))
        raise ProfileError(
            f"none of {len(grid)} trials had a right answer, so there are no scores: the best {metric_name} was "
            f"{100 * share:.0f} ({description}), but a right answer has over {100 * RIGHT:.0f}; try shorter `lengths`, "
            "needles that this model can answer (`needles`), or its instruction-tuned variant"
        )
    return measured.profile(
        mesh.total(total, mesh.copies(measured)) / successes,
        method,
        "query",
        provenance={
            **haystack.facts,
            "needles": len(needles),
            "needles_hash": _hash(needles),
            "needle_choice": choice and asdict(choice),
            "prompt": "chat" if measured.text.chat_template else "plain",
            "lengths": [int(length) for length in trials.lengths],
            "depths": [float(depth) for depth in trials.depths],
            "max_new_tokens": trials.max_new_tokens or f"{ANSWER_FACTOR} x answer",
            "seed": trials.seed,
            "trials": len(grid),
            "successes": successes,
            "tool": TOOL,
        },
    )


def _of_kind(needles: Sequence[Needle], method: str) -> list[Needle]:
    """The needles of a method's kind, and needles without a kind.

    Raises:
        ProfileError: no needle is of either.
    """
    kind = RETRIEVAL_METHODS[method].kind
    matching = [needle for needle in needles if needle.kind in (None, kind)]
    if not matching:
        raise ProfileError(
            f'{method} needs {kind} needles, and none of those given is one ("kind"); sets of them are '
            f"{' and '.join(SETS[kind])}"
        )
    return matching


def _trial(
    measured: MeasuredModel, method: str, needle: Needle, tokens: np.ndarray, needle_span: range, limit: int
) -> dict[str, Any]:
    """What the model answers, how right that is, and where it is right the scores of heads over the whole answer."""
    steps = answer(measured, tokens, top=len(needle_span), limit=limit)
    answer_text, right = judge_answer(measured, method, needle, steps)
    trial = {"answer": answer_text, "right": float(right)}
    if right <= RIGHT:
        return trial
    heads = len(next(iter(steps[0].layers.values())).weights)
    scores = np.zeros((measured.dimensions.layers, heads))
    for step in steps:
        for layer, attended in step.layers.items():
            is_copy = method == "headkv-r"
            scores[layer] += (
                copy_score(attended, needle_span, tokens, step.token) if is_copy else mass_score(attended, needle_span)
            )
    return {**trial, "scores": scores}


def judge_answer(
    measured: MeasuredModel, method: str, needle: Needle, steps: Sequence[AnswerStep]
) -> tuple[str, float]:
    """What an answer says, and how right that is, 0 to 1."""
    retrieval_method = RETRIEVAL_METHODS[method]
    answer_text = text_of(measured.text, [step.token for step in steps], skip_special_tokens=True).strip()
    return answer_text, retrieval_method.metric(answer_text, getattr(needle, retrieval_method.reference))


@torch.no_grad()
def answer(measured: MeasuredModel, tokens: np.ndarray, *, top: int, limit: int) -> list[AnswerStep]:
    """The greedy answer to a prompt, with the tokens that each head attended to most at every step.

    The prompt, but for its last token, is read by the stock model in chunks; only then attention is looked at, of one
    query at a time.

    Args:
        tokens: the prompt, int64 [tokens], two or more.
        top: how many attended tokens are kept.
        limit: tokens of the answer, at most; it ends before an end token, or before a break after its first line.
    """
    model = measured.model
    ids = torch.from_numpy(tokens)[None].to(model.device)
    cache = None
    for chunk in ids[:, :-1].split(PROMPT_CHUNK, dim=1):
        cache = model(chunk, use_cache=True, logits_to_keep=1, **{CACHE: cache})[CACHE]

    def attend(stock, module, query, key, value, attention_mask, **options):
        # a sliding layer's cache holds its newest keys only, as many as it sees, if it does not see a chunk
        length, window = len(tokens) + len(answer_tokens), measured.windows[module.layer_idx]
        visible_keys = key[:, :, -((length - 1) % window + 1) :] if window and measured.layers.chunked else key
        # fp32, since scores of 16 bits would tie
        weights = attention_weights(query.float(), visible_keys.float(), scoring_of(query, options))
        first_visible = length - visible_keys.shape[2]
        layers[module.layer_idx] = most_attended(weights[0, :, 0], top, first_visible)
        return stock(module, query, key, value, attention_mask, **options)

    end_tokens, steps, answer_tokens = _end_tokens(measured), [], []
    with intercepted(model, attend):
        for _ in range(limit):
            layers: dict[int, Attended] = {}
            logits = model(ids[:, -1:], use_cache=True, **{CACHE: cache}).logits
            ids = logits[:, -1:].argmax(-1)
            answer_tokens.append(ids.item())
            if answer_tokens[-1] in end_tokens or "\n" in text_of(measured.text, answer_tokens).lstrip():
                break
            steps.append(AnswerStep(answer_tokens[-1], layers))
    return steps


def most_attended(weights: torch.Tensor, top: int, first_position: int = 0) -> Attended:
    """The most attended tokens of one query; of equal weights the earlier token's comes first.

    Args:
        weights: float32 [query_heads, n], not negative.
        top: how many; all where there are fewer.
        first_position: position of the first of the n tokens.
    """
    n = weights.shape[1]
    # the bits of floats that are not negative rise with them; below, a rank that is lower for later tokens
    bits = weights.contiguous().view(torch.int32).long()
    sort_keys = (bits << 32) | torch.arange(n - 1, -1, -1, device=weights.device)
    places = sort_keys.topk(min(top, n)).indices
    return Attended(weights.gather(1, places).cpu(), places.cpu() + first_position)


def copy_score(attended: Attended, needle: range, tokens: np.ndarray, token: int) -> np.ndarray:
    """R of one step: 1/N for a head whose most attended token is in the needle and is the one that is said.

    A needle's token that is said twice counts twice, so an answer may come to more than 1: as in the code of both
    papers, where Wu et al.'s text has it once (|g & k| / |k|, g what is copied and k the needle).

    Args:
        attended: of one layer.
        needle: N positions.
        tokens: of the prompt, int64.
        token: the token that the step generated.

    Returns:
        float64 [query_heads].
    """
    copied_places = [place for place in needle if tokens[place] == token]
    return np.isin(attended.positions[:, 0].numpy(), copied_places) / len(needle)


def mass_score(attended: Attended, needle: range) -> np.ndarray:
    """ER and R2 of one step: 1/N x the attention on those of the N most attended tokens that are in the needle.

    Args:
        attended: of one layer; of its tokens the first N.
        needle: N positions.

    Returns:
        float64 [query_heads].
    """
    weights, positions = (tensor[:, : len(needle)].numpy() for tensor in attended)
    return (weights * np.isin(positions, needle)).sum(1, dtype=np.float64) / len(needle)


def checked_prompts(
    measured: MeasuredModel, haystack: Haystack, method: str, needles: Sequence[Needle], trials: Trials
) -> tuple[list[Prompt], list[int]]:
    """The prompt of each needle and the most tokens of its answer, once all is checked that can fail before a trial."""
    prompts = [Prompt.of(needle, measured.text) for needle in needles]
    right_answers = [
        token_ids(measured.text, getattr(needle, RETRIEVAL_METHODS[method].reference)) for needle in needles
    ]
    max_new_tokens, lengths, depths = trials.max_new_tokens, trials.lengths, trials.depths
    limits = [
        ANSWER_FACTOR * len(right_answer) if max_new_tokens is None else max_new_tokens
        for right_answer in right_answers
    ]
    if not len(lengths) or not len(depths) or min(limits) < 1:
        raise ProfileError("`lengths` and `depths` need a value or more, and an answer needs a token or more")
    if not all(0 <= depth <= 1 for depth in depths):
        raise ProfileError(f"`depths` must lie in [0, 1], got {', '.join(map(str, depths))}")
    for prompt in prompts:
        room = min(lengths) - prompt.overhead
        if room < len(prompt.needle):
            raise ProfileError(
                f"a needle of {len(prompt.needle)} tokens is longer than the text around it, {max(0, room)} tokens "
                f"of a prompt of {min(lengths)}; give longer `lengths`"
            )
    if max(lengths) + max(limits) > measured.max_context:
        raise ProfileError(
            f"a prompt of {max(lengths)} tokens and an answer of {max(limits)} are beyond the {measured.max_context} "
            f"that {measured.name} has positions for; give shorter `lengths`"
        )
    haystack.require(max(lengths) - min(prompt.overhead for prompt in prompts))
    return prompts, limits


def _end_tokens(measured: MeasuredModel) -> set[int]:
    """Tokens that end an answer by the generation config or by the tokenizer."""
    tokens = (*end_tokens(measured.model.generation_config), measured.text.eos_token_id)
    return {token for token in tokens if token is not None}


def _hash(needles: Sequence[Needle]) -> str:
    content = [[getattr(needle, key) for key in (*KEYS, "cue")] for needle in needles]
    return blake3(json.dumps(content, separators=(",", ":")).encode()).hexdigest()[:32]
