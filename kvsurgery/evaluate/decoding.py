"""Answers and likelihoods through the KV cache, as they are when a model is deployed.

A single forward over all tokens would see no eviction, no budget and no quantized state. Here the prompt is prefilled
into the cache, and the tokens that follow are read one at a time. Where answers are short, so are the last 50 tokens of
the prompt, as in the appendix of DuoAttention (Xiao et al. 2024): otherwise the first tokens of an answer, often its
only ones, would come from the prefill alone. Budgeted heads select at the end of the whole prompt, question included,
as in HeadKV (Fu et al. 2024), so the cache is told where the prompt ends. A context that is asked about later counts as
the whole prompt.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from itertools import takewhile
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from kvsurgery.evaluate.sample import SHORT_ANSWER
from kvsurgery.templates.kv_cache import CACHE

LAST_TOKENS = 50  # tokens of a prompt that come one by one before a short answer
STEPS_PER_REPORT = 16  # steps between two calls of `progress`


class Reading:
    """Sequences on their way through a model's KV cache.

    Args:
        rows: int64 [tokens] each; shorter ones are padded on the left.
        prompt: columns of the prompt, including padding.
        capacity: columns in the end, including answers.
        images: of a single row, what the model takes beside its tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Sequence[np.ndarray],
        prompt: int,
        capacity: int,
        images: Mapping[str, torch.Tensor] | None = None,
    ):
        self.model = model
        self._set_rows(rows)
        # an image's tokens may lie on both sides of a border between chunks; their embeddings can be cut anywhere
        self.embeddings = prompt_embeddings(model, self.ids, images) if images else None
        self.cache, self.columns_read = empty_cache(model, prompt, capacity), 0

    def branch(self, rows: Sequence[np.ndarray]) -> Reading:
        """A reading of other rows, which begin with what has been read, on a copy of the cache."""
        reading = copy(self)
        reading._set_rows(rows)
        with torch.inference_mode(False):  # an emitted cache is written anywhere
            reading.cache = deepcopy(self.cache)
        return reading

    def feed(self, tokens: int) -> torch.Tensor:
        """Read this many more columns; logits of the last one, float32 [batch, vocabulary]."""
        stop = self.columns_read + tokens
        name, inputs = ("input_ids", self.ids) if self.embeddings is None else ("inputs_embeds", self.embeddings)
        output = self.model(
            **{name: inputs[:, self.columns_read : stop]},
            attention_mask=self.mask[:, :stop],
            position_ids=self.positions[:, self.columns_read : stop],
            use_cache=True,
            logits_to_keep=1,
            **{CACHE: self.cache},
        )
        self.cache, self.columns_read = output[CACHE], stop
        return output.logits[:, -1].float()

    def prefill(self, tokens: int, chunk: int | None = None) -> torch.Tensor:
        """Read many columns, `chunk` of them at once; logits as `feed`."""
        chunk = chunk or tokens
        for start in range(0, tokens, chunk):
            logits = self.feed(min(chunk, tokens - start))
        return logits

    def _set_rows(self, rows: Sequence[np.ndarray]) -> None:
        self.ids, self.mask = left_padded(rows, self.model)
        self.positions = (self.mask.cumsum(-1) - 1).clamp(min=0)


@torch.inference_mode()
def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[np.ndarray],
    limit: int,
    *,
    stops: Sequence[str] = (),
    chunk: int | None = None,
    images: Mapping[str, torch.Tensor] | None = None,
) -> list[list[int]]:
    """Greedy answers to a batch of prompts, without the end token but with the text that stopped them.

    A prompt that the checkpoint reads by REFORM goes to `generate` as it is.

    Args:
        prompts: int64 [tokens] each, two or more.
        limit: the most tokens of an answer; up to `SHORT_ANSWER`, the last tokens of the prompts come one by one.
        stops: texts, any of which ends an answer.
        chunk: tokens of a prompt that are read at once. Default: all.
        images: of a single prompt, what the model takes beside its tokens.
    """
    width = max(map(len, prompts))
    budget = recompute_budget(model)
    if budget is not None and width > budget:
        ids, mask = left_padded(prompts, model)
        return _generate(model, tokenizer, ids, mask, limit, stops, **_on_device(images or {}, model))
    return _read_and_answer(Reading(model, prompts, width, width + limit, images), tokenizer, limit, stops, chunk)


@torch.inference_mode()
def later_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[np.ndarray],
    limits: Sequence[int],
    context: int,
    *,
    stops: Sequence[str] = (),
    chunk: int | None = None,
) -> list[list[int]]:
    """Greedy answers to questions about one context, which is read once, before any of them is known.

    Each is asked on a copy of the cache as the context left it: for a compressed one, the context is the whole prompt.

    Args:
        prompts: int64 [tokens] each, of which the first `context` are the same, and at least one more is the question.
        limits: tokens of each answer, at most.
        stops, chunk: as in `answers`.
    """
    capacity = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
    reading = Reading(model, [prompts[0][:context]], context, capacity)
    reading.prefill(context, chunk)
    requests = zip(prompts, limits, strict=True)
    return [_read_and_answer(reading.branch([prompt]), tokenizer, limit, stops, chunk)[0] for prompt, limit in requests]


def _read_and_answer(
    reading: Reading, tokenizer: PreTrainedTokenizerBase, limit: int, stops: Sequence[str], chunk: int | None
) -> list[list[int]]:
    """Read the rest of the prompt, its last tokens one by one before a short answer, and answer."""
    columns, shortest_tokens = reading.ids.shape[1], int(reading.mask.sum(1).min())
    # generate reads the last token; every row has one before those that come one by one
    single_steps = min(LAST_TOKENS, shortest_tokens - 1, columns - reading.columns_read) if limit <= SHORT_ANSWER else 1
    if prefill_columns := columns - single_steps - reading.columns_read:
        reading.prefill(prefill_columns, chunk)
    for _ in range(single_steps - 1):
        reading.feed(1)
    return _generate(reading.model, tokenizer, reading.ids, reading.mask, limit, stops, **{CACHE: reading.cache})


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: torch.Tensor,
    mask: torch.Tensor,
    limit: int,
    stops: Sequence[str],
    **model_inputs: Any,
) -> list[list[int]]:
    stopping = StopsAtText(tokenizer, stops)
    criteria = StoppingCriteriaList([stopping] if stops else [])
    output = model.generate(  # ty: ignore[not-callable]  # it is GenerationMixin's
        ids, attention_mask=mask, max_new_tokens=limit, stopping_criteria=criteria, **model_inputs
    )
    end_tokens = set(model.generation_config.eos_token_id or ())
    # what follows in a row that has ended is padding
    answer_rows = (row[: stopping.lengths.get(number)] for number, row in enumerate(output[:, ids.shape[1] :].tolist()))
    return [list(takewhile(lambda token: token not in end_tokens, row)) for row in answer_rows]


@torch.inference_mode()
def mean_nll(
    model: PreTrainedModel,
    rows: Sequence[np.ndarray],
    continuation: int,
    *,
    chunk: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[float]:
    """Mean negative log-likelihood, in nats, of the last `continuation` tokens of each row.

    The tokens before them are the prompt; they themselves are read one at a time.

    Args:
        rows: int64 [tokens] each, more than `continuation`.
        chunk: tokens of the prompt that are read at once. Default: all.
        progress: called with the steps done, now and then.
    """
    columns = max(map(len, rows))
    prompt = columns - continuation
    reading = Reading(model, rows, prompt, columns)
    logits, losses = reading.prefill(prompt, chunk), []
    for column in range(prompt, columns):
        losses.append(F.cross_entropy(logits, reading.ids[:, column], reduction="none"))
        if progress is not None and (column + 1 - prompt) % STEPS_PER_REPORT == 0:
            progress(column + 1 - prompt)
        if column + 1 < columns:
            logits = reading.feed(1)
    return torch.stack(losses).double().mean(0).tolist()


class StopsAtText(StoppingCriteria):
    """Ends a row once its answer holds one of some texts; leading space does not count.

    `lengths` has the tokens of each of those rows' answers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]):
        self.tokenizer, self.stops, self.start = tokenizer, stops, None
        self.lengths: dict[int, int] = {}

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.start is None:  # all but the first new token is the prompt, gathered or not
            self.start = input_ids.shape[1] - 1
        texts = self.tokenizer.batch_decode(input_ids[:, self.start :])
        for row, text in enumerate(texts):
            if any(stop in text.lstrip() for stop in self.stops):
                self.lengths.setdefault(row, input_ids.shape[1] - self.start)
        return torch.tensor([row in self.lengths for row in range(len(texts))], device=input_ids.device)


def left_padded(rows: Sequence[np.ndarray], model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and padding mask, int64 [batch, tokens], on the model's device."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), model.generation_config.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        ids[row, width - len(tokens) :] = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
        mask[row, width - len(tokens) :] = 1
    return ids.to(model.device), mask.to(model.device)


def prompt_embeddings(model: PreTrainedModel, ids: torch.Tensor, images: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Embeddings of a prompt with its images in place, [1, tokens, hidden], as the text model gets them."""
    captured: list[torch.Tensor] = []

    def capture(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        captured.append(kwargs["inputs_embeds"])
        raise _EmbeddingsCaptured  # the text model has nothing to do yet

    with model.get_decoder().register_forward_pre_hook(capture, with_kwargs=True), suppress(_EmbeddingsCaptured):
        model(input_ids=ids, **_on_device(images, model))
    return captured[0]


class _EmbeddingsCaptured(Exception):
    """A forward that ended where it was meant to."""


def _on_device(images: Mapping[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {
        name: value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)
        for name, value in images.items()
    }


def empty_cache(model: PreTrainedModel, prompt: int, capacity: int) -> Any:
    """The cache of an emitted model, told the length of the prompt. None: stock models make their own."""
    if getattr(model.config, "kv_surgery", None) is None:
        return None
    # the emitted files lie beside each other
    module = importlib.import_module(f"{type(model).__module__.rpartition('.')[0]}.kv_cache")
    cache = module.KVSurgeryCache(model.config, capacity)
    cache.expect_prompt(prompt)
    return cache


def recompute_budget(model: PreTrainedModel) -> int | None:
    """The longest prompt in tokens that a REFORM checkpoint reads like any other; None for other checkpoints."""
    reform = (getattr(model.config, "kv_surgery", None) or {}).get("reform")
    return reform and reform["recompute_budget"]
