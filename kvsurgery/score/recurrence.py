"""Recurrent chunked forwarding: a long input read chunk by chunk beside a compressed cache (REFORM, Song et al. 2025).

Before every chunk what a layer keeps of earlier ones gets new positions, 0, 1, ..., and the chunk those after it; keys
are kept as they are before RoPE for that. After it each KV head keeps what the chunk's last queries attend to most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from kvsurgery import resources
from kvsurgery.errors import ProfileError, UnsupportedModel
from kvsurgery.score.interception import attention_weights, intercepted

kv_torch = resources.template_module("kv_torch")
Rotation = resources.template_module("kv_encode").Rotation
LayerLayout = resources.template_module("kv_layout").LayerLayout


@dataclass(frozen=True)
class Recurrence:
    """How a long input is read; all are numbers of tokens.

    Attributes:
        chunk: read at once.
        budget: what a KV head keeps from chunk to chunk: 256 heavy hitters, as in the paper, and the first and last.
        keep: first and last tokens that always stay.
        window: last queries of a chunk, whose attention decides what stays beside them (H2O).

    Raises:
        ProfileError: a number out of range, or more always stays than the budget holds.
    """

    chunk: int = 2048
    budget: int = 768
    keep: int = 256
    window: int = 128

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < (name != "keep"):
                raise ProfileError(f"{name} is a number of tokens, got {value}")
        if self.budget < 2 * self.keep:
            raise ProfileError(
                f"budget {self.budget} does not hold the first and last {self.keep} tokens, which always stay"
            )

    def chunks(self, tokens: int, last: int) -> list[range]:
        """The chunks of an input; the last one goes on to the end from before token `last`, however far that is."""
        starts = range(0, last, self.chunk)
        return [range(start, start + self.chunk) for start in starts[:-1]] + [range(starts[-1], tokens)]

    def positions(self, chunks: Sequence[range]) -> int:
        """Positions that a model needs to read such chunks."""
        return max(min(chunk.start, self.budget) + len(chunk) for chunk in chunks)


@dataclass(frozen=True)
class LayerStates:
    """States of one chunk in one layer.

    Attributes:
        layer: the layer.
        chunk: the tokens of the input.
        hidden: [1, tokens, hidden], what enters the layer.
        query, key, value: float32 [heads, tokens, head_dim], before RoPE, after norm and bias.
        attention: of a range of the input's tokens, in the chunk, to all up to the chunk's end, by token of the input:
            float32 [query_heads, queries, chunk.stop], 0 for what is not kept.
    """

    layer: int
    chunk: range
    hidden: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attention: Callable[[range], torch.Tensor]


class Reading:
    """One input being read by a stock model, chunk by chunk from the start.

    Args:
        model: any causal language model whose attention goes through transformers' attention interface.
        windows: per layer, the model's own sliding window, or None. Such a layer keeps its last tokens.
        tokens: int64 [tokens], the input.
        recurrence: how it is read.
    """

    def __init__(
        self, model: PreTrainedModel, windows: Sequence[int | None], tokens: torch.Tensor, recurrence: Recurrence
    ):
        self.model, self.windows, self.recurrence = model, windows, recurrence
        self.tokens = tokens.to(model.device)
        # of each layer: keys before RoPE and values [1, kv_heads, kept, head_dim], and which tokens [kv_heads, kept]
        self.kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None] = [None] * len(windows)

    @torch.no_grad()
    def read(self, chunk: range, visit: Callable[[LayerStates], None] | None = None) -> None:
        """Run the model on the next chunk; `visit` is called in every layer."""
        self.chunk, self.visit = chunk, visit
        self.past = min(chunk.start, self.recurrence.budget)
        positions = torch.arange(self.past + len(chunk), device=self.tokens.device)
        with intercepted(self.model, self._attend, masks=False), self._observed():
            # positions of what is kept too: layers rotate it by them, see `_positioned`
            self.model.get_decoder()(
                self.tokens[None, chunk.start : chunk.stop], position_ids=positions[None], use_cache=False
            )

    @contextmanager
    def _observed(self) -> Iterator[None]:
        """Inside, `hidden` is what entered the layer that runs, and `rotation` its cosines and sines of RoPE."""
        with ExitStack() as hooks:
            for layer in self.model.get_decoder().layers:
                hooks.callback(layer.register_forward_pre_hook(self._entered).remove)
                hooks.callback(layer.self_attn.register_forward_pre_hook(self._positioned, with_kwargs=True).remove)
            yield

    def _entered(self, layer: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self.hidden = args[0]

    def _positioned(self, attention: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Keep the rotation of all positions, give the layer that of its own tokens."""
        if not isinstance(options.get("position_embeddings"), tuple):
            raise UnsupportedModel(
                f"{type(attention).__name__} takes no cosines and sines of RoPE; no states before it"
            )
        self.rotation = Rotation(*(part[:, None].float() for part in options["position_embeddings"]))
        own = tuple(part[:, self.past :] for part in options["position_embeddings"])
        return args, {**options, "position_embeddings": own}

    def _attend(
        self, stock, module, query, key, value, attention_mask, scaling=None, softcap=None, **options
    ) -> tuple[torch.Tensor, None]:
        layer, tokens = module.layer_idx, len(self.chunk)
        rotation = self.rotation.at(self.past, tokens)
        unturned = rotation.turn_back(key.float())
        keys, values, places = self._stored(layer, unturned.to(key.dtype), value)
        kept = keys.shape[2] - tokens
        before = self.rotation.at(self.past - kept, kept).turn(keys[:, :, :kept])
        seen = torch.cat([before, key], 2)
        options = {"dropout": 0.0, "scaling": scaling, "softcap": softcap}
        window = self.windows[layer]
        if window is None:
            output = kv_torch.causal(query, seen, values, 0, options)
        else:
            layout = LayerLayout(0, key.shape[1], 0, window, native=True)
            old, own = ((seen[:, :, part], values[:, :, part]) for part in (slice(kept), slice(kept, None)))
            nothing = seen[:, :, :0], values[:, :, :0]
            output = kv_torch.streaming(query, nothing, old, own, self.past, 0, layout, options)
        if self.visit is not None:
            states = rotation.turn_back(query.float())[0], unturned[0], value[0].float()
            attention = partial(_attention, query, seen, places, self.chunk, window, scaling, softcap)
            self.visit(LayerStates(layer, self.chunk, self.hidden, *states, attention))
        self._keep(layer, query, seen, (keys, values, places), scaling, softcap)
        return output.transpose(1, 2), None

    def _stored(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What is kept in a layer, and the chunk after it."""
        own = torch.arange(self.chunk.start, self.chunk.stop, device=key.device).expand(key.shape[1], -1)
        if self.kept[layer] is None:
            return key, value, own
        keys, values, places = self.kept[layer]
        return torch.cat([keys, key], 2), torch.cat([values, value], 2), torch.cat([places, own], 1)

    def _keep(self, layer: int, query, seen, stored, scaling, softcap) -> None:
        """Evict what is beyond the budget."""
        keys, values, places = stored
        budget, total = self.recurrence.budget, keys.shape[2]
        if self.windows[layer] is not None:
            first = max(0, total - min(self.windows[layer] - 1, budget))
            chosen = torch.arange(first, total, device=keys.device).expand(keys.shape[1], -1)
        elif total <= budget:
            self.kept[layer] = stored
            return
        else:
            weights = attention_weights(query[:, :, -self.recurrence.window :], seen, scaling, softcap)
            received = weights.view(keys.shape[1], -1, total).sum(1)
            chosen = heavy_hitters(received, budget, self.recurrence.keep)
        states = (part.gather(2, chosen[None, :, :, None].expand(-1, -1, -1, part.shape[3])) for part in (keys, values))
        self.kept[layer] = (*states, places.gather(1, chosen))


def _attention(query, seen, places, chunk: range, window, scaling, softcap, queries: range) -> torch.Tensor:
    """What `LayerStates.attention` is."""
    first = queries.start - chunk.start
    weights = attention_weights(query[:, :, first:], seen, scaling, softcap)[0, :, : len(queries)]
    if window is not None:
        columns = torch.arange(seen.shape[2], device=seen.device)
        own = seen.shape[2] - len(chunk) + first + torch.arange(len(queries), device=seen.device)
        weights = weights * (own[:, None] - columns < window)
        weights = weights / weights.sum(-1, keepdim=True)
    index = places.repeat_interleave(len(weights) // len(places), 0)[:, None].expand_as(weights)
    return weights.new_zeros(*weights.shape[:2], chunk.stop).scatter(2, index, weights)


def heavy_hitters(received: torch.Tensor, budget: int, keep: int) -> torch.Tensor:
    """Which entries a KV head keeps: the first and last `keep`, then those that receive most attention (H2O).

    Args:
        received: float32 [kv_heads, entries], attention that each receives.
        budget: entries to keep, fewer than there are; of equal ones the earlier stays.
        keep: at most half of the budget.

    Returns:
        int64 [kv_heads, budget], ascending.
    """
    importance = received.clone()
    importance[:, :keep] = importance[:, received.shape[1] - keep :] = float("inf")
    order = importance.sort(dim=-1, descending=True, stable=True).indices
    return order[:, :budget].sort().values
