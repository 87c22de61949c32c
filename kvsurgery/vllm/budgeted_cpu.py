"""Attention of budgeted heads on a CPU: to the whole prompt while it comes in, then to what a head has selected."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder

from kvsurgery.vllm.budgeted_selection import Reading, SelectingImpl, ask_for_prompts
from kvsurgery.vllm.cpu import FullBackend, StreamingImpl
from kvsurgery.vllm.rows import Places

QUERIES = 512  # new tokens of a request that attend at a time, which bounds the scores


@dataclass
class Decoding:
    """Requests of which this step reads one token after the prompt; the keys of heads with a budget are found once.

    Attributes:
        tokens: [requests], of the batch.
        lengths, prompts: [requests]
        table: [requests, blocks]
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    prompts: torch.Tensor
    table: torch.Tensor
    size: int
    _keys: dict[tuple[int, int], tuple[Places, torch.Tensor | None]] = field(default_factory=dict)

    def keys(self, budget: int, window: int, dtype: torch.dtype) -> tuple[Places, torch.Tensor | None]:
        """The slots that a head with this budget attends to, and a bias of the scores [requests, 1, 1, keys]."""
        if (budget, window) not in self._keys:
            firsts = (self.prompts - window - budget).clamp(min=0)[:, None]
            columns = firsts + torch.arange(int((self.lengths[:, None] - firsts).max()))
            outside = columns >= self.lengths[:, None]
            bias = None
            if outside.any():
                bias = torch.zeros(outside.shape, dtype=dtype).masked_fill_(outside, float("-inf"))[:, None, None]
            columns = torch.minimum(columns, self.lengths[:, None] - 1)
            blocks = self.table.gather(1, columns // self.size)
            self._keys[budget, window] = Places(blocks[:, None], (columns % self.size)[:, None]), bias
        return self._keys[budget, window]


@dataclass
class Step:
    """A batch for a cache group: the number of tokens, their slots, and the requests that decode and that read."""

    tokens: int
    slots: Places
    decoding: Decoding | None
    reading: list[Reading]


class BudgetedBuilder(AttentionMetadataBuilder[Step]):
    """Finds the requests of a step."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.size = kv_cache_spec.block_size
        ask_for_prompts(vllm_config)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        """The requests of a batch, in slots of this cache group."""
        starts = common_attn_metadata.query_start_loc.long()
        lengths = common_attn_metadata.seq_lens.long()
        prompts = common_attn_metadata.rswa_prefix_lens.long()[: len(lengths)]
        table = common_attn_metadata.block_table_tensor.long()
        new = starts.diff()
        decodes = (new == 1) & (lengths > prompts)
        decoding = None
        if decodes.any():
            decoding = Decoding(starts[:-1][decodes], lengths[decodes], prompts[decodes], table[decodes], self.size)
        reading = [
            Reading(int(starts[row]), int(lengths[row] - new[row]), int(lengths[row]), int(prompts[row]), table[row])
            for row in (~decodes & (new > 0)).nonzero().flatten().tolist()
        ]
        count = int(starts[-1])
        slots = common_attn_metadata.slot_mapping[:count, None, None]  # tokens after these are padding
        return Step(count, Places(slots // self.size, slots % self.size), decoding, reading)


class BudgetedImpl(SelectingImpl, StreamingImpl):
    """Attention of one KV head with a budget, over rows of its cache."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store new tokens in a cache, and write their attention to an output.

        Key and value are [tokens, 1, head_dim], the cache [blocks, 1, slots, 2 * head_dim], query and output [tokens,
        query_heads, head_dim].
        """
        if attn_metadata is None:  # a step without requests, to measure memory
            return output
        # layers that share a cache are refused
        assert key is not None
        assert value is not None
        count = attn_metadata.tokens
        attn_metadata.slots.store(kv_cache, torch.cat((key[:count], value[:count]), -1))
        if decoding := attn_metadata.decoding:
            places, bias = decoding.keys(layer.budget, layer.selection.window, query.dtype)
            keys, values = places.read(kv_cache).split(self.head_size, -1)
            output[decoding.tokens] = self._attend(query[decoding.tokens][:, None], keys, values, bias)[:, 0]
        for request in attn_metadata.reading:
            self._read_prompt(layer, request, query, kv_cache, output)
            if request.total > request.prompt:
                begin = max(request.past, request.prompt)
                first, _ = layer.selected(request.prompt)
                self._attend_from(request, first, begin, request.total, query, kv_cache, output)
        return output

    def _read_prompt(
        self, layer: Any, request: Reading, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Attend from new tokens of a prompt to all before; at its end select."""
        if request.past < request.prompt:
            self._attend_from(request, 0, request.past, min(request.prompt, request.total), query, kv_cache, output)
            self.observe(layer, request, query, kv_cache)

    def _attend_from(
        self,
        request: Reading,
        first: int,
        begin: int,
        end: int,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Attend from positions [begin, end) to those from `first` on."""
        keys, values = self._states(request, first, end, kv_cache)
        for place in range(begin, end, QUERIES):
            stop = min(place + QUERIES, end)
            tokens = slice(request.start + place - request.past, request.start + stop - request.past)
            bias = torch.full((stop - place, stop - first), float("-inf"), dtype=query.dtype).triu_(place - first + 1)
            states = query[tokens].transpose(0, 1).reshape(1, 1, -1, self.head_size)
            bias = bias.repeat(self.num_queries_per_kv, 1)
            attended = self._attend(states, keys[:, :, : stop - first], values[:, :, : stop - first], bias)
            output[tokens] = attended.view(self.num_queries_per_kv, stop - place, -1).transpose(0, 1)


class BudgetedBackend(FullBackend):
    """Keeps the stock backend's name, which vLLM looks up in an enum."""

    forward_includes_kv_cache_update = True
    impl = BudgetedImpl
    builder = BudgetedBuilder
