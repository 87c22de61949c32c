"""Generation from prompts beyond the context: gathers the tokens that the question needs and generates from these.

REFORM (Song et al. 2025): the similarity of every token's embedding to the question's, the most similar tokens in their
order, and one pass of those through the whole model.
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer
from transformers.utils.logging import tqdm

from .kv_cache import CACHE
from .kv_columns import check_padding, leading_padding
from .kv_encode import Encoder, Exit
from .kv_generation import check_cache
from .kv_layout import KVLayout
from .kv_reform import Reform

BLOCK = 2**24  # elements of a block of similarities
TOKEN_WEIGHT = 0.5  # of scores that the caller gives
# settings of a generation that count the prompt, or the time since it began
LIMITS = "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "token_healing"


def similarity(embeddings: torch.Tensor, question: torch.Tensor) -> torch.Tensor:
    """Sum over embedding heads of the cosine with that token of the question where it is largest, float32 [tokens].

    Args:
        embeddings: [tokens, embedding_heads * head_dim], each head's part of length 1; may lie in host memory.
        question: the same of the question's tokens, on the device that computes.
    """
    question_matrix = question.float().T
    blocks = embeddings.split(max(1, BLOCK // len(question)))
    return torch.cat([(block.to(question_matrix.device).float() @ question_matrix).amax(-1) for block in blocks])


def mixed(scores: torch.Tensor, token_scores: torch.Tensor) -> torch.Tensor:
    """Similarities mixed half and half with a retriever's scores, each brought to [0, 1], float32 [tokens]."""
    return torch.lerp(_unit_scaled(scores), _unit_scaled(token_scores.to(scores)), TOKEN_WEIGHT)


def gather(scores: torch.Tensor, question: int, reform: Reform) -> torch.Tensor:
    """Places of a prompt that are kept, int64 [recompute_budget], ascending; of equal ones, the earlier.

    Args:
        scores: float32 [tokens], more than the budget; max-pooled here.
        question: where the question begins; it is kept, and so are the first and last `keep` tokens.

    Raises:
        ValueError: what is always kept exceeds the budget.
    """
    tokens = len(scores)
    pooled = F.max_pool1d(scores[None], reform.pool, 1, reform.pool // 2)[0]
    always_kept = torch.zeros_like(pooled, dtype=torch.bool)
    always_kept[: reform.keep] = always_kept[min(question, tokens - reform.keep) :] = True
    if (kept_count := int(always_kept.sum())) > reform.recompute_budget:
        raise ValueError(
            f"recompute_budget {reform.recompute_budget} is less than the {kept_count} tokens that are always kept: "
            f"the first and last {reform.keep}, and the question of {tokens - question}"
        )
    pooled[always_kept] = float("inf")
    return pooled.sort(descending=True, stable=True).indices[: reform.recompute_budget].sort().values


def question_start(
    tokens: torch.Tensor, reform: Reform, query_length: int | None = None, query_start: int | None = None
) -> int:
    """Where the question of a prompt begins.

    As stated; else after the last marker of a user's turn, if what follows takes no more than half of the recompute
    budget; else `query_length` tokens before the end.

    Args:
        tokens: ids [tokens] or embeddings [tokens, hidden] of one row without padding.
        query_length, query_start: what is stated.

    Raises:
        ValueError: both are stated, or the question is not a part of the prompt.
    """
    length, marker = len(tokens), reform.query_marker
    if query_length is not None and query_start is not None:
        raise ValueError("query_length and query_start exclude each other; give one")
    if query_length is not None:
        query_start = length - query_length
    if query_start is not None:
        if not 0 <= query_start < length:
            raise ValueError(f"the question would begin at token {query_start} of a prompt of {length}")
        return query_start
    if tokens.ndim == 1 and marker and length > len(marker):
        matches = (tokens.unfold(0, len(marker), 1) == torch.tensor(marker, device=tokens.device)).all(-1).nonzero()
        if len(matches) and 0 < length - (start := int(matches[-1]) + len(marker)) <= reform.recompute_budget // 2:
            return start
    return max(length - reform.query_length, 0)


class LongPrompts:
    """Mixin before a model that generates: of prompts longer than `recompute_budget`, tokens are gathered first."""

    image_inputs: tuple[str, ...] = ()  # arguments of `generate` that become embeddings in the prompt

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: Any = None,
        *args,
        query_length: int | None = None,
        query_start: int | None = None,
        recompute_budget: int | None = None,
        token_scores: torch.Tensor | None = None,
        return_gathered: bool = False,
        progress: bool | Callable[[int, int], None] = False,
        **kwargs,
    ) -> Any:
        """`generate` of transformers. Sequences that it returns begin with the whole prompt.

        To logits processors, stopping criteria and an assistant, the gathered tokens are the prompt. An image's tokens
        are gathered like others, one by one.

        Args:
            query_length: tokens of the question, at the end of the prompt.
            query_start: or where it begins, counted without left padding. By default as `question_start` says.
            recompute_budget: tokens that go through the whole model, in place of what the config says.
            token_scores: of every token of the prompt [batch, tokens], a retriever's say; mixed half and half with its
                similarity to the question, each brought to [0, 1].
            return_gathered: return the places of the tokens that were kept too, as (output, places): int64 [kept] for
                each row, counted without left padding.
            progress: show a bar while long prompts are read; or call this with the tokens read and their total.

        Raises:
            ValueError: an option contradicts the prompt or the checkpoint.
        """
        reform = Reform.from_config(self.config)
        assert reform is not None  # checkpoints without it have another model class
        reform = reform.with_budget(recompute_budget)
        ids = kwargs.get("input_ids") if inputs is None else inputs
        # stock code takes both: embeddings are what it reads, ids what it returns
        prompt = {"input_ids": ids, "inputs_embeds": kwargs.get("inputs_embeds")}
        prompt = {name: states for name, states in prompt.items() if states is not None}
        if not prompt:  # generation begins with a special token
            return super().generate(inputs, generation_config, *args, **kwargs)
        states = next(iter(prompt.values()))
        special_tokens = [self._setting(name, kwargs, generation_config) for name in ("pad_token_id", "eos_token_id")]
        pads = _padding(states, kwargs.get("attention_mask"), *special_tokens)
        rows = _without_padding(states, pads)
        questions = [question_start(row, reform, query_length, query_start) for row in rows]
        if token_scores is not None and token_scores.shape != states.shape[:2]:
            raise ValueError(f"token_scores are {list(token_scores.shape)}, the prompt is {list(states.shape[:2])}")
        if max(map(len, rows)) <= reform.recompute_budget:
            output = super().generate(inputs, generation_config, *args, **kwargs)
            return (output, [torch.arange(len(row)) for row in rows]) if return_gathered else output
        cache = kwargs.get(CACHE, kwargs.get("past_key_values"))
        if cache is not None:
            check_cache(cache)
        if cache is not None and cache.get_seq_length():
            raise ValueError("a long prompt is gathered anew in every turn; leave past_key_values out")

        begin, tokens = time.time(), states.shape[1]
        limits = {name: self._setting(name, kwargs, generation_config) for name in LIMITS}
        _check_limits(limits, tokens)
        _check_positions(kwargs.get("position_ids"), pads)
        images = {name: kwargs.pop(name) for name in self.image_inputs if name in kwargs}
        if images:
            prompt["inputs_embeds"] = self._embedded(prompt, images)
        rows, places = _without_padding([*prompt.values()][-1], pads), []
        with _progress(progress, sum(len(row) for row in rows if len(row) > reform.recompute_budget)) as advance:
            for index, (row, question) in enumerate(zip(rows, questions, strict=True)):
                external_scores = None if token_scores is None else token_scores[index, pads[index] :]
                places.append(self._places(row, question, reform, external_scores, advance))
        kwargs = _gathered_arguments(kwargs, prompt, pads, places)
        width = kwargs["attention_mask"].shape[1]
        kwargs |= _remaining_limits(limits, tokens - width, time.time() - begin)
        if kwargs.get("streamer") is not None and ids is not None:
            kwargs["streamer"] = PromptFirst(kwargs["streamer"], ids)
        output = super().generate(None, generation_config, *args, **kwargs)
        if ids is not None:  # of embeddings alone, stock code returns what follows only
            output = _after_prompt(output, ids, width)
        return (output, [row_places.cpu() for row_places in places]) if return_gathered else output

    def _setting(self, name: str, kwargs: dict[str, Any], generation_config: Any) -> Any:
        """A setting of `generate`: its keyword's, else the given config's, else the model's; None for the default."""
        if name in kwargs:
            return kwargs[name]
        default = getattr(GenerationConfig(), name)  # None, but for lengths in transformers 4
        settings = [getattr(config, name, None) for config in (generation_config, self.generation_config)]
        return next((setting for setting in settings if setting not in (None, default)), None)

    def _embedded(self, prompt: dict[str, torch.Tensor], images: dict) -> torch.Tensor:
        """Embeddings of a prompt with its images in place, [batch, tokens, hidden], as the text model gets them."""
        embeddings = []

        def take(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            embeddings.append(kwargs["inputs_embeds"])
            raise Exit

        [*_, (name, states)] = prompt.items()
        with self.get_decoder().register_forward_pre_hook(take, with_kwargs=True), suppress(Exit):
            self.model(**{name: states}, **images)
        return embeddings[0]

    def _places(
        self,
        row: torch.Tensor,
        question: int,
        reform: Reform,
        external_scores: torch.Tensor | None,
        advance: Callable[[int], None],
    ) -> torch.Tensor:
        """Places of a row's tokens that are kept."""
        if len(row) <= reform.recompute_budget:
            return torch.arange(len(row), device=row.device)
        encoder = Encoder(self.get_decoder(), KVLayout.from_config(self.config), reform)
        name = "input_ids" if row.ndim == 1 else "inputs_embeds"
        embeddings = encoder.read(advance, **{name: row[None]})
        scores = similarity(embeddings, embeddings[question:].to(row.device))
        if external_scores is not None:
            scores = mixed(scores, external_scores)
        return gather(scores, question, reform)


class PromptFirst(BaseStreamer):
    """Streams the whole prompt in place of the gathered one, then what follows it."""

    def __init__(self, streamer: BaseStreamer, prompt: torch.Tensor):
        self.streamer, self.prompt = streamer, prompt

    def put(self, value: torch.Tensor) -> None:
        if self.prompt is not None:
            value, self.prompt = self.prompt.cpu(), None
        self.streamer.put(value)

    def end(self) -> None:
        self.streamer.end()


def _padding(
    states: torch.Tensor, mask: torch.Tensor | None, pad: int | None, eos: int | list[int] | None
) -> list[int]:
    """Left padding of each row; without a mask, as stock code infers it."""
    if mask is None:
        if states.ndim == 3 or pad is None or pad == eos or (isinstance(eos, list) and pad in eos):
            return [0] * len(states)
        mask = states != pad
    if check_padding(mask)[1]:
        raise ValueError("the prompt is padded on the right, so nothing can follow; pad it on the left")
    return leading_padding(mask).tolist()


def _without_padding(states: torch.Tensor, pads: list[int]) -> list[torch.Tensor]:
    """The rows of ids [batch, tokens] or embeddings [batch, tokens, hidden]."""
    return [row[pad:] for row, pad in zip(states, pads, strict=True)]


def _check_limits(limits: dict[str, Any], tokens: int) -> None:
    """Raise ValueError for settings of a generation that a prompt of this many tokens leaves no room for."""
    if limits["token_healing"]:
        raise ValueError("token_healing changes the end of a prompt, which is gathered; leave it out")
    if limits["max_new_tokens"] is None and limits["max_length"] is not None and limits["max_length"] <= tokens:
        raise ValueError(
            f"the prompt has {tokens} tokens and max_length={limits['max_length']} counts them; set max_new_tokens"
        )


def _check_positions(positions: torch.Tensor | None, pads: list[int]) -> None:
    """Raise ValueError for positions [rows, tokens] other than 0, 1, ... after the padding; gathering renews them."""
    if positions is None:
        return
    for row, pad in zip(positions.expand(len(pads), -1), pads, strict=True):
        if row[pad:].tolist() != [*range(len(row) - pad)]:
            raise ValueError("gathered tokens of a long prompt get new positions; leave position_ids out")


def _remaining_limits(limits: dict[str, Any], dropped: int, seconds: float) -> dict[str, Any]:
    """Limits of a generation after `dropped` tokens of its prompt and some time; what callers set counts them too."""
    remaining = {}
    for name, new_tokens in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        if limits[name] and limits[new_tokens] is None:
            remaining[name] = max(limits[name] - dropped, 0)
    if limits["max_time"] is not None:
        remaining["max_time"] = limits["max_time"] - seconds
    return remaining


def _gathered_arguments(
    kwargs: dict, prompt: dict[str, torch.Tensor], pads: list[int], places: list[torch.Tensor]
) -> dict:
    """The arguments of `generate` with the gathered rows, padded on the left, in place of the prompt's."""
    width = max(map(len, places))
    kwargs = {name: value for name, value in kwargs.items() if name != "position_ids"}
    [*_, inputs] = prompt.values()
    for name, states in {**prompt, "attention_mask": inputs.new_ones(inputs.shape[:2], dtype=torch.long)}.items():
        kwargs[name] = states.new_zeros(len(states), width, *states.shape[2:])
        for gathered_row, row, row_places in zip(kwargs[name], _without_padding(states, pads), places, strict=True):
            gathered_row[width - len(row_places) :] = row[row_places]
    return kwargs


def _after_prompt(output: Any, prompt: torch.Tensor, width: int) -> Any:
    """What `generate` returned for gathered prompts of `width` columns, with the whole ones in their place."""
    gathered_sequences = output if torch.is_tensor(output) else output.sequences
    whole_prompts = prompt.repeat_interleave(len(gathered_sequences) // len(prompt), 0)
    sequences = torch.cat([whole_prompts, gathered_sequences[:, width:]], 1)
    if torch.is_tensor(output):
        return sequences
    output.sequences = sequences
    return output


def _unit_scaled(scores: torch.Tensor) -> torch.Tensor:
    """Scores brought to [0, 1]."""
    low, high = scores.aminmax()
    return (scores - low) / (high - low).clamp(min=1e-12)


@contextmanager
def _progress(progress: bool | Callable[[int, int], None], total: int) -> Generator[Callable[[int], None]]:
    """What to call with the number of tokens that a chunk had."""
    if not progress:
        yield lambda tokens: None
    elif progress is True:
        with tqdm(total=total, unit="tok", unit_scale=True, desc="reading") as bar:
            yield bar.update
    else:
        done = 0

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            progress(done, total)

        yield advance
