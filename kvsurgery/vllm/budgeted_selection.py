"""What a budgeted head keeps of a prompt: selected and moved at the prompt's end, on any device.

A head moves what it selects to right before the prompt's last tokens. So later tokens keep the slots that vLLM
computes, and the blocks before can be freed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvsurgery.templates.kv_budget import most_important, weighted
from kvsurgery.templates.kv_received import attention_received
from kvsurgery.templates.kv_softmax import Scoring
from kvsurgery.vllm.budgeted import first_block
from kvsurgery.vllm.rows import Places


def ask_for_prompts(vllm_config: Any) -> None:
    """Let the runner tell builders the lengths of prompts, which it does for reference windows (R-SWA).

    Stock attention masks nothing by a window of all tokens.
    """
    vllm_config.model_config.model_arch_config.rswa_window = vllm_config.model_config.max_model_len


@dataclass(frozen=True)
class Reading:
    """A request of which this step reads tokens of the prompt, or several tokens.

    Attributes:
        start: its first new token in the batch.
        past, total: its tokens before this step and after it.
        prompt: tokens of its prompt.
        table: its blocks.
    """

    start: int
    past: int
    total: int
    prompt: int
    table: torch.Tensor


class SelectingImpl:
    """The part of an attention of one KV head that selects."""

    head_size: int
    scale: float
    logits_soft_cap: float | None
    sinks: torch.Tensor | None

    def observe(self, layer: Any, request: Reading, query: torch.Tensor, kv_cache: torch.Tensor) -> None:
        """Remember the queries of a prompt's last tokens, and select by them when the prompt is complete.

        Most prompts have these tokens in one chunk; the device is waited for only where they do not.

        Args:
            query: [tokens, query_heads, head_dim], of the batch.
            kv_cache: [blocks, 1, slots, 2 * head_dim], where the new tokens are stored already.
        """
        first, start = layer.selected(request.prompt)
        cut = min(request.prompt, request.total)
        if not first or request.past >= request.prompt or cut <= start:
            return
        begin = max(request.past, start) - request.past
        held = query[request.start + begin : request.start + cut - request.past]
        if request.past > start or cut < request.prompt:
            # no other request has the block of the first of these tokens: heads write before it
            block = int(request.table[start // kv_cache.shape[2]])
            if request.past > start:
                held = torch.cat((layer.waiting.pop(block), held))
            if cut < request.prompt:
                layer.waiting[block] = held.clone()
                return
        self._move(layer, request, self._chosen(layer, request, held, kv_cache), first, kv_cache)

    def _places(self, request: Reading, positions: torch.Tensor, kv_cache: torch.Tensor) -> Places:
        size = kv_cache.shape[2]
        return Places(request.table[positions // size][None, None], (positions % size)[None, None])

    def _states(self, request: Reading, first: int, end: int, kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Keys and values [1, 1, tokens, head_dim] at positions from `first` on."""
        places = self._places(request, torch.arange(first, end, device=kv_cache.device), kv_cache)
        return places.read(kv_cache).split(self.head_size, -1)

    def _chosen(self, layer: Any, request: Reading, queries: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        """The tokens before the last ones of a prompt that the last queries attend to most, ascending."""
        first, start = layer.selected(request.prompt)
        keys, values = self._states(request, 0, request.prompt, kv_cache)
        padding = torch.zeros(1, 1, 1, dtype=torch.long, device=kv_cache.device)
        scoring = Scoring(self.scale, self.logits_soft_cap or None, 0.0, self.sinks)
        attention = attention_received(queries.transpose(0, 1)[None], keys, padding, scoring)
        importance = weighted(attention, values, layer.selection)[..., :start]
        return most_important(importance, padding, [[start - first]], layer.selection)[0, 0].sort().values

    def _move(self, layer: Any, request: Reading, tokens: torch.Tensor, first: int, kv_cache: torch.Tensor) -> None:
        """Move tokens of a request to the positions from `first` on."""
        places = torch.arange(first, first + len(tokens), device=kv_cache.device)
        moved = self._places(request, tokens, kv_cache).read(kv_cache)
        self._places(request, places, kv_cache).store(kv_cache, moved)


class SelectingTilesImpl(SelectingImpl):
    """The part that selects where older tokens lie in quantized tiles, which are packed after that.

    What a head has selected moves as without tiles. Its first tokens are also copied to the start of the cache group's
    `first_block`, which no window passes. So a head that has dropped some tokens is a full head with gaps before its
    sinks and after them.
    """

    def _move(self, layer: Any, request: Reading, tokens: torch.Tensor, first: int, kv_cache: torch.Tensor) -> None:
        super()._move(layer, request, tokens, first, kv_cache)
        size = kv_cache.shape[2]
        sinks = torch.arange(first, first + layer.quantization.sink, device=kv_cache.device)
        super()._move(layer, request, sinks, first_block(request.prompt, layer.bin.kept, size) * size, kv_cache)
