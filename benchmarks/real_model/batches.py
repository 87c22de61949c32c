"""Prompts of several lengths that a model answers through any cache: together, or one from drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from benchmarks.caches import filled
from benchmarks.real_model.which_cache import ORIGINAL, Contender

GROUP = 64  # tokens that quanto quantizes together: prompts are padded to a multiple, so that no group has two rows


@dataclass(eq=False)
class Batch:
    """Prompts that are answered together, padded on the left.

    Attributes:
        tokens, mask: int64 [rows, tokens]; the mask is 1 where a token is not padding.
        states: the original's keys and values of the prompts by layer, once it has read them.
        first: the first token of its answers, int64 [rows, 1].
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    states: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    first: torch.Tensor | None = None

    @classmethod
    def of(cls, prompts: list[np.ndarray]) -> Batch:
        """Batch of prompts, int64 [tokens] each."""
        width = -(-max(map(len, prompts)) // GROUP) * GROUP
        padded = torch.zeros(len(prompts), width, dtype=torch.long)
        batch = cls(padded, padded.clone())
        for row, prompt in enumerate(prompts):
            batch.tokens[row, -len(prompt) :] = torch.from_numpy(prompt)
            batch.mask[row, -len(prompt) :] = 1
        return batch


@torch.inference_mode()
def read(contender: Contender, model: PreTrainedModel, batch: Batch) -> tuple[Any, torch.Tensor]:
    """A cache that holds the prompts, and the first tokens of the answers.

    What the original reads is kept in the batch, and given to each cache with the same states.
    """
    if contender.keeps_states and batch.first is not None:
        return filled(contender.cache(model), batch.states, batch.mask), batch.first
    positions = (batch.mask.cumsum(1) - 1).clamp(min=0)
    options = {"attention_mask": batch.mask, "position_ids": positions, "past_key_values": contender.cache(model)}
    output = model(batch.tokens, **options, logits_to_keep=1)
    cache, tokens = output.past_key_values, output.logits[:, -1:].argmax(-1)
    if contender.name == ORIGINAL:
        batch.states = [(layer.keys, layer.values) for layer in cache.layers]
        batch.first = tokens
    return cache, tokens


@torch.inference_mode()
def written(
    contender: Contender, model: PreTrainedModel, batch: Batch, ended: Callable[[list[int]], bool]
) -> list[list[int]]:
    """Tokens of greedy answers to the prompts of a batch, each up to where it has ended."""
    answers: list[list[int]] = [[] for _ in batch.tokens]
    rows, going_on = [*range(len(answers))], {*range(len(answers))}
    mask, positions = batch.mask, batch.mask.sum(1, keepdim=True) - 1
    cache, tokens = read(contender, model, batch)
    while True:
        for row, [token] in zip(rows, tokens.tolist(), strict=True):
            if row in going_on:
                answers[row].append(token)
        remaining = {row for row in going_on if not ended(answers[row])}
        if not remaining:
            return answers
        mask, positions = torch.cat([mask, mask[:, -1:]], 1), positions + 1
        if remaining < going_on and contender.drops_rows:
            kept = torch.tensor([place for place, row in enumerate(rows) if row in remaining])
            cache.batch_select_indices(kept)
            rows = [rows[place] for place in kept]
            tokens, mask, positions = tokens[kept], mask[kept], positions[kept]
        going_on = remaining
        options = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
        tokens = model(tokens, **options, logits_to_keep=1).logits[:, -1:].argmax(-1)


@torch.inference_mode()
def drafted(
    contender: Contender,
    model: PreTrainedModel,
    batch: Batch,
    draft: Callable[[list[int]], list[int]],
    ended: Callable[[list[int]], bool],
) -> list[int]:
    """Tokens of a greedy answer to the prompt of a batch of one, up to where it has ended.

    A forward reads the newest token with a draft of what follows, and the cache keeps as much of it as is the most
    likely token: the answer of greedy decoding in fewer forwards. Our tiles are packed up to a draft later.

    Args:
        draft: how an answer might go on.
    """
    columns, length = batch.tokens.shape[1], batch.mask.sum()
    cache, first = read(contender, model, batch)
    answer = [int(first)]
    contender.keep(cache, columns)
    while not ended(answer):
        tokens = [answer[-1], *draft(answer)][: contender.tokens_at_once(cache)]
        mask = F.pad(batch.mask, (0, len(answer) - 1 + len(tokens)), value=1)
        positions = length + len(answer) - 1 + torch.arange(len(tokens))[None]
        options = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
        likeliest = model(torch.tensor([tokens]), **options).logits[0].argmax(-1).tolist()
        for token, next_draft in zip(likeliest, [*tokens[1:], None], strict=True):
            answer.append(token)
            if token != next_draft or ended(answer):
                break
        contender.keep(cache, columns + len(answer) - 1)
    return answer
