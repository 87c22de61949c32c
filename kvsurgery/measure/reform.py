"""Ranking of REFORM's embedding heads (Song et al. 2025, arXiv 2506.01215): whose states find what is asked for.

A sample is a context, a question after it, and the gold tokens of the context that answer it. Every head's q, k and v
score every token of the context: the cosine similarity of its state, before RoPE, to that of each question token, the
largest of them, then the mean over neighboring tokens. A head is the better, the earlier it puts the gold tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from kvsurgery.display.progress import Progress, silent
from kvsurgery.errors import ProfileError, UnsupportedModel
from kvsurgery.measure.kept_samples import KeptSamples
from kvsurgery.measure.mesh import Mesh
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.measure.recurrence import LayerStates, RecurrentPass, chunks
from kvsurgery.profile.embedding_heads import RANKED_KINDS, RANKING_TASKS, Ranking
from kvsurgery.profile.head_profile import REFORM, HeadProfile
from kvsurgery.templates.kv_reform import Reform
from kvsurgery.version import TOOL

NEIGHBORS = 20  # tokens over which scores are averaged
PAPER = Reform((), chunk=2048, encode_budget=768)  # 256 heavy hitters besides the first and the last tokens


@dataclass(frozen=True, eq=False)
class RankedPrompt:
    """An input whose end asks about its middle.

    Attributes:
        tokens: int64 [tokens], the whole input.
        context: the tokens that are ranked.
        question: the tokens that ask, after the context; what follows them, an answer's prefix say, is neither.
        gold: the parts of the context that are needed to answer.

    Raises:
        ProfileError: they do not lie like this.
    """

    tokens: np.ndarray
    context: range
    question: range
    gold: tuple[range, ...]

    def __post_init__(self) -> None:
        if not self.question or not 0 <= self.context.start < self.context.stop <= self.question.start:
            raise ProfileError(f"a sample's question, {self.question}, must follow its context, {self.context}")
        if self.question.stop > len(self.tokens):
            raise ProfileError(f"a sample's question, {self.question}, is beyond its {len(self.tokens)} tokens")
        if not any(self.gold):
            raise ProfileError("a sample without gold tokens: there is nothing to rank")
        for span in self.gold:
            if span.start < self.context.start or span.stop > self.context.stop:
                raise ProfileError(f"gold tokens, {span}, lie outside the context, {self.context}")

    @property
    def facts(self) -> list[Any]:
        """All fields in JSON's values."""
        return [self.tokens.tolist(), *map(str, (self.context, self.question, self.gold))]

    @property
    def gold_places(self) -> np.ndarray:
        """int64, ascending: the gold tokens as places in the context."""
        return np.unique(np.concatenate([np.array(span) for span in self.gold])).astype(int) - self.context.start


def embedding_ranking(
    measured: MeasuredModel,
    samples: Mapping[str, Sequence[RankedPrompt]],
    *,
    recurrence: Reform = PAPER,
    data: Mapping[str, Any] | None = None,
    kept: Path | None = None,
    progress: Progress = silent,
    mesh: Mesh = Mesh(),
) -> HeadProfile:
    """Rank the states of all heads by the mean normalized rank (MNR) of the gold tokens, and pick four.

    A context of more than a chunk is read in chunks beside a compressed cache, as REFORM reads its input, and twice:
    first for the states of the question, which comes last, then to compare each chunk's with them. So no more than the
    scores is held of the whole context. To compare with, hidden states (what enters a layer) are ranked likewise, and
    attention: the most that any question token pays, after RoPE and softmax, and none to what the cache does not keep.

    Args:
        samples: by task, "pattern" and "multihop" or one of them.
        recurrence: how long contexts are read: its chunk, and what is kept from one to the next.
        data: where the samples are from, for the provenance.
        kept: the file from which an interrupted measurement goes on; only for a single process.
        progress: of the samples.
        mesh: the processes that share heads, and their groups samples.

    Returns:
        A profile of method "reform": embedding heads and ranking, by the original's head indices.

    Raises:
        ProfileError: no samples, a context that the model has no positions for, or states that are not finite.
        UnsupportedModel: REFORM does not cover its family.
    """
    if measured.no_reform:
        raise UnsupportedModel(measured.no_reform)
    _check_samples(measured, samples, recurrence)
    all_samples = [sample for task_samples in samples.values() for sample in task_samples]
    local_query_heads = mesh.local_head_count(measured, measured.dimensions.query_heads)
    local_kv_heads = mesh.local_head_count(measured, measured.dimensions.kv_heads)
    heads = {
        "q": local_query_heads,
        "k": local_kv_heads,
        "v": local_kv_heads,
        "hidden": 1,
        "attention": local_query_heads,
    }
    # hidden states belong to no head
    copies = {kind: mesh.tp if kind == "hidden" else mesh.copies(measured) for kind in RANKED_KINDS}
    mnr, done, kept_samples = {}, 0, KeptSamples(kept, measured, REFORM, recurrence)
    for task, task_samples in samples.items():
        totals = {kind: np.zeros((measured.dimensions.layers, heads[kind])) for kind in RANKED_KINDS}
        for number, sample in enumerate(task_samples):
            done += 1
            if number % mesh.groups != mesh.group:
                continue
            measure_sample = partial(sample_ranks, measured, sample, recurrence, local_kv_heads)
            result, was_kept = kept_samples.result(sample.facts, measure_sample)
            for kind, ranks in result.items():
                totals[kind] += ranks
            progress(done, None if was_kept else len(all_samples))  # what was kept counts for no time
        means = {kind: mesh.total(total, copies[kind]) / len(task_samples) for kind, total in totals.items()}
        mnr[task] = {
            kind: mean if kind == "hidden" else measured.by_original_head(mean) for kind, mean in means.items()
        }
    ranking = Ranking(mnr)
    lengths = [len(sample.tokens) for sample in all_samples]
    provenance = {
        **(data or {}),
        "chunk": recurrence.chunk,
        "budget": recurrence.encode_budget,
        "keep": recurrence.keep,
        "window": recurrence.window,
        "neighbors": NEIGHBORS,
        "samples": {task: len(task_samples) for task, task_samples in samples.items()},
        "tokens": [min(lengths), max(lengths)],
        "tool": TOOL,
    }
    return measured.profile(None, REFORM, None, embedding_heads=ranking.pick(), ranking=ranking, provenance=provenance)


def _check_samples(measured: MeasuredModel, samples: Mapping[str, Sequence[RankedPrompt]], recurrence: Reform) -> None:
    """Raise ProfileError where samples are of unknown tasks, too long, or missing, or where nothing can be read so."""
    for name, minimum in (("chunk", 1), ("encode_budget", 1), ("window", 1), ("keep", 0)):
        if (value := getattr(recurrence, name)) < minimum:
            raise ProfileError(f"{name} is a number of tokens, got {value}")
    if recurrence.encode_budget < 2 * recurrence.keep:
        raise ProfileError(
            f"encode_budget {recurrence.encode_budget} does not hold the first and last {recurrence.keep} tokens, "
            "which always stay"
        )
    unknown = set(samples) - set(RANKING_TASKS)
    if unknown or not samples:
        raise ProfileError(f"samples are by task, {' or '.join(RANKING_TASKS)}; got {', '.join(unknown) or 'none'}")
    for task_samples in samples.values():
        for sample in task_samples:
            _check_positions(measured, sample, recurrence)
    for task, task_samples in samples.items():
        if not task_samples:
            raise ProfileError(f"there are no {task} samples to rank heads by")


def sample_ranks(
    measured: MeasuredModel, sample: RankedPrompt, recurrence: Reform, kv_heads: int | None = None
) -> dict[str, np.ndarray]:
    """Mean normalized rank of one sample's gold tokens, by every head; arguments as of `embedding_ranking`.

    Args:
        kv_heads: that a layer has here, where processes share them; default all.

    Returns:
        float64 [layers, heads] of the model's heads as they lie: "q", "k", "v", "attention", and [layers, 1] "hidden".

    Raises:
        ProfileError: states are not finite.
    """
    layers = measured.dimensions.layers
    scores = _Scores(sample, layers)
    tokens = torch.from_numpy(np.asarray(sample.tokens, dtype=np.int64))
    *earlier_chunks, last_chunk = chunks(recurrence, len(tokens), sample.question.start)
    recurrent_pass = RecurrentPass(measured, tokens, recurrence, kv_heads)
    for chunk in earlier_chunks:
        recurrent_pass.read(chunk)
    recurrent_pass.read(last_chunk, scores.visit_last)
    if earlier_chunks:
        recurrent_pass = RecurrentPass(measured, tokens, recurrence, kv_heads)
    for chunk in earlier_chunks:
        recurrent_pass.read(chunk, scores.visit)
    if any(not table.isfinite().all() for tables in scores.tables.values() for table in tables.values()):
        raise ProfileError(f"states of {measured.name} are not finite; measure it in another dtype")
    return {
        kind: np.stack([mean_rank(tables[layer], sample.gold_places, NEIGHBORS) for layer in range(layers)])
        for kind, tables in scores.tables.items()
    }


def similarity(context: torch.Tensor, question: torch.Tensor) -> torch.Tensor:
    """Cosine similarity of every context token to the question token that is most like it.

    Args:
        context: states [heads, tokens, size].
        question: states [heads, question tokens, size].

    Returns:
        float32 [heads, tokens].
    """
    context = F.normalize(context.float(), dim=-1)
    question = F.normalize(question.float(), dim=-1)
    return (context @ question.mT).amax(-1)


def neighbor_means(scores: torch.Tensor, neighbors: int) -> torch.Tensor:
    """Scores [heads, tokens], each the mean over `neighbors` tokens around it, itself included.

    Of an even number one more lies before than after: of 20, ten before and nine after. At an end the mean is over
    those that are there.
    """
    means = F.avg_pool1d(scores, neighbors, stride=1, padding=neighbors // 2, count_include_pad=False)
    return means[:, : scores.shape[1]]


def normalized_ranks(scores: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Share of the other tokens that score higher; one that scores the same counts half.

    Args:
        scores: [heads, tokens].
        places: int64 [gold], tokens to rank.

    Returns:
        float64 [heads, gold] in [0, 1], 0 = above all others.
    """
    ascending = scores.sort(-1).values
    gold = scores[:, places].contiguous()
    lower = torch.searchsorted(ascending, gold)
    upper = torch.searchsorted(ascending, gold, right=True)
    higher = scores.shape[1] - upper + (upper - lower - 1) / 2
    return higher.double() / max(scores.shape[1] - 1, 1)


def mean_rank(scores: torch.Tensor, gold: np.ndarray, neighbors: int) -> np.ndarray:
    """Mean normalized rank of gold tokens, float64 [heads], by scores [heads, tokens]."""
    places = torch.from_numpy(gold).to(scores.device)
    return normalized_ranks(neighbor_means(scores, neighbors), places).mean(-1).cpu().numpy()


class _Scores:
    """Scores of the context's tokens by every head, gathered chunk by chunk.

    `tables` holds one tensor [heads, context] a layer, of q, k, v, hidden states and attention.
    """

    def __init__(self, sample: RankedPrompt, layers: int):
        self.sample = sample
        self.tables: dict[str, dict[int, torch.Tensor]] = {kind: {} for kind in RANKED_KINDS}
        self.question: list[dict[str, torch.Tensor]] = [{} for _ in range(layers)]

    def visit_last(self, states: LayerStates) -> None:
        """The chunk that the question is in."""
        question_span = self.sample.question
        question_slice = slice(question_span.start - states.chunk.start, question_span.stop - states.chunk.start)
        self.question[states.layer] = {
            kind: kind_states[:, question_slice].clone() for kind, kind_states in _by_kind(states).items()
        }
        context = self.sample.context
        attention = states.attention(question_span).amax(1)[:, context.start : context.stop]
        self.tables["attention"][states.layer] = attention.clone()
        self.visit(states)

    def visit(self, states: LayerStates) -> None:
        """Any chunk, once the question's states are known."""
        context, chunk = self.sample.context, states.chunk
        start = max(context.start, chunk.start)
        stop = min(context.stop, chunk.stop)
        if start >= stop:
            return
        for kind, kind_states in _by_kind(states).items():
            table = self.tables[kind].get(states.layer)
            if table is None:
                table = self.tables[kind][states.layer] = kind_states.new_empty(
                    len(kind_states), len(context), dtype=torch.float32
                )
            table[:, start - context.start : stop - context.start] = similarity(
                kind_states[:, start - chunk.start : stop - chunk.start], self.question[states.layer][kind]
            )


def _by_kind(states: LayerStates) -> dict[str, torch.Tensor]:
    return {"q": states.query, "k": states.key, "v": states.value, "hidden": states.hidden}


def _check_positions(measured: MeasuredModel, sample: RankedPrompt, recurrence: Reform) -> None:
    input_chunks, budget = chunks(recurrence, len(sample.tokens), sample.question.start), recurrence.encode_budget
    positions = max(min(chunk.start, budget) + len(chunk) for chunk in input_chunks)
    if positions > measured.max_context:
        chunking = "in one chunk" if len(input_chunks) == 1 else f"in chunks of {recurrence.chunk} beside {budget}"
        raise ProfileError(
            f"a sample of {len(sample.tokens)} tokens read {chunking} takes {positions} positions, "
            f"{measured.name} has {measured.max_context}; give a smaller chunk or budget, or less context"
        )
