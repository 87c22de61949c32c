"""Recurrent chunked forwarding: a long input read chunk by chunk beside a compressed cache (REFORM, Song et al. 2025).

A stock model is read by what reads prompts in an emitted checkpoint, `kv_encode`, and every layer's states can be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvsurgery.errors import UnsupportedModel
from kvsurgery.measure.attention_hooks import attention_weights, intercepted, scoring_of
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.templates import kv_encode, kv_layout, kv_softmax, kv_torch
from kvsurgery.templates.kv_reform import Reform


def chunks(recurrence: Reform, tokens: int, tail_start: int) -> list[range]:
    """The chunks of an input; the last one goes on to the end from before token `tail_start`, however far that is."""
    starts = range(0, tail_start, recurrence.chunk)
    return [range(start, start + recurrence.chunk) for start in starts[:-1]] + [range(starts[-1], tokens)]


@dataclass(frozen=True)
class LayerStates:
    """States of one chunk in one layer.

    Attributes:
        layer: the layer.
        chunk: the tokens of the input.
        hidden: [1, tokens, hidden], what enters the layer.
        query, key, value: [heads, tokens, head_dim], before RoPE, after norm and bias.
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


class RecurrentLayer(kv_encode.EncodingLayer):
    """Shows what passes, and knows which tokens of the input are kept: `places`, int64 [kv_heads, kept]."""

    encoder: RecurrentPass

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        super().lazy_initialization(key_states)
        self.places = torch.empty(key_states.shape[1], 0, dtype=torch.int64, device=key_states.device)

    def kept(self, query: torch.Tensor, keys: torch.Tensor, scoring: kv_softmax.Scoring) -> torch.Tensor:
        encoder, chunk = self.encoder, self.encoder.chunk
        chunk_places = torch.arange(chunk.start, chunk.stop, device=keys.device).expand(keys.shape[1], -1)
        places = torch.cat([self.places, chunk_places], 1)
        if encoder.visit is not None:
            states = (state()[0] for state in encoder.states.values())
            window = self.layout.recent if self.layout.native else None
            attention = partial(_attention, query, keys, places, chunk, window, scoring)
            encoder.visit(LayerStates(self.index, chunk, encoder.hidden, *states, attention))
        kept = super().kept(query, keys, scoring)
        self.places = places.gather(1, kept)
        return kept


class RecurrentPass(kv_encode.ChunkEncoder):
    """One input being read by a stock model, chunk by chunk from the start, as an emitted one reads prompts.

    Args:
        measured: any causal language model whose attention goes through transformers' attention interface. A layer with
            a sliding window keeps its last tokens.
        tokens: int64 [tokens], the input.
        recurrence: how it is read: its chunk, and what is kept from one to the next.
        kv_heads: that a layer has here, where processes share them; default all.
    """

    layer = RecurrentLayer

    def __init__(self, measured: MeasuredModel, tokens: torch.Tensor, recurrence: Reform, kv_heads: int | None = None):
        heads = kv_heads or measured.dimensions.kv_heads
        layers = (
            kv_layout.LayerLayout(((0, heads),), 0, window, native=True)
            if window
            else kv_layout.LayerLayout(((heads, 0),), 0, 1)
            for window in measured.windows
        )
        layout = kv_layout.KVLayout(tuple(layers), measured.dimensions.head_dim)
        super().__init__(measured.model.get_decoder(), layout, recurrence)
        self.stock_model, self.tokens = measured.model, tokens.to(measured.model.device)

    @torch.no_grad()
    def read(self, chunk: range, visit: Callable[[LayerStates], None] | None = None) -> None:
        """Run the model on the next chunk; `visit` is called in every layer."""
        self.chunk, self.visit = chunk, visit
        with intercepted(self.stock_model, _attend, masks=False), ExitStack() as hooks:
            for layer in self.model.get_submodule("layers").children():
                hooks.callback(layer.register_forward_pre_hook(self._record_hidden).remove)
            self.read_chunk(input_ids=self.tokens[None, chunk.start : chunk.stop])

    def _record_hidden(self, layer: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self.hidden = args[0]

    def position(self, attention: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if not isinstance(options.get("position_embeddings"), tuple):
            raise UnsupportedModel(
                f"{type(attention).__name__} takes no cosines and sines of RoPE, so states before it cannot be read"
            )
        return super().position(attention, args, options)

    def take(self, layer: int, states: dict[str, Callable[[], torch.Tensor]]) -> None:
        self.states = states


def _attend(stock, module, query, key, value, attention_mask, **options):
    handle = key
    states = query, handle.keys, handle.values
    return handle.layer.attend(*states, kv_torch, scoring_of(query, options)).transpose(1, 2), None


def _attention(query, keys, places, chunk: range, window, scoring, queries: range) -> torch.Tensor:
    """What `LayerStates.attention` is."""
    first_query = queries.start - chunk.start
    weights = attention_weights(query[:, :, first_query:], keys, scoring)[0, :, : len(queries)]
    if window is not None:
        columns = torch.arange(keys.shape[2], device=keys.device)
        query_columns = keys.shape[2] - len(chunk) + first_query + torch.arange(len(queries), device=keys.device)
        weights = weights * (query_columns[:, None] - columns < window)
        weights = weights / weights.sum(-1, keepdim=True)
    index = places.repeat_interleave(len(weights) // len(places), 0)[:, None].expand_as(weights)
    return weights.new_zeros(*weights.shape[:2], chunk.stop).scatter(2, index, weights)
