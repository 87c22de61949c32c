"""Attention of streaming heads on a CPU: gathers sinks and window, and lets PyTorch attend to them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.kv_cache_layout import KVCacheLayout

QUERIES = 128  # new tokens of a request that attend at a time: more would gather a wider window
GATHERED = 1 << 14  # keys of a head that are gathered at a time


class FullBackend(CPUAttentionBackend):
    """The stock backend with blocks outermost in memory, where pages of different numbers of heads lie unpadded.

    The stock kernels take such strides, though their backend does not say so.
    """

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC,)


@dataclass
class Places:
    """Slots of a cache group, the same in each of its layers: blocks and offsets in them, [requests, tokens]."""

    blocks: torch.Tensor
    offsets: torch.Tensor
    _rows: torch.Tensor | None = None

    def rows(self, cache: torch.Tensor) -> torch.Tensor:
        """Their rows in `rows_of` a layer's cache, head by head: [requests * heads * tokens]."""
        if self._rows is None:
            _, heads, size, width = cache.shape
            blocks, offsets = self.blocks[:, None], self.offsets[:, None]
            head = torch.arange(heads)[:, None] * size
            self._rows = (blocks * (cache.stride(0) // width) + head + offsets).flatten()
        return self._rows


def rows_of(cache: torch.Tensor) -> torch.Tensor:
    """A layer's cache [blocks, heads, slots, 2 * head_dim] as rows of a slot each, those of other layers between them.

    Moving whole rows is several times as fast as indexing blocks, heads and slots.
    """
    blocks, heads, size, width = cache.shape
    count = (blocks - 1) * (cache.stride(0) // width) + heads * size
    return cache.as_strided((count, width), (width, 1))


@dataclass
class Piece:
    """New tokens of some requests, as many of each, and the keys they see.

    Attributes:
        tokens: [requests, new], indices of the new tokens in the batch.
        keys: [requests, keys], where the keys lie.
        bias: [requests, 1, group * new, keys], 0 where a query of a group sees a key and -inf where not; None where
            all are seen.
    """

    tokens: torch.Tensor
    keys: Places
    bias: torch.Tensor | None


@dataclass
class Step:
    """A batch: indices of the tokens that have a slot, [tokens], the slots, [1, tokens], and what attends to what."""

    written: torch.Tensor
    slots: Places
    pieces: list[Piece]


class StreamingBuilder(AttentionMetadataBuilder[Step]):
    """Plans what a step gathers, once for the layers of a cache group with as many heads."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self.size, self.sink, self.recent = kv_cache_spec.block_size, layer.sink, layer.recent
        self.group = layer.num_heads // layer.num_kv_heads
        self.dtype = vllm_config.model_config.dtype

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        """The plan of a batch. A long prompt becomes several pieces, so that none gathers much more than its window."""
        starts = common_attn_metadata.query_start_loc.tolist()
        lengths = common_attn_metadata.seq_lens.tolist()
        alike: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for row in range(common_attn_metadata.num_reqs):
            past = lengths[row] - (starts[row + 1] - starts[row])
            for first in range(starts[row], starts[row + 1], QUERIES):
                new = min(QUERIES, starts[row + 1] - first)
                alike[new].append((row, first, past + first - starts[row]))
        pieces = []
        for new, members in alike.items():
            step = max(1, GATHERED // (self.sink + self.recent + new))
            for start in range(0, len(members), step):
                rows, firsts, pasts = torch.tensor(members[start : start + step]).T
                pieces.append(self._piece(common_attn_metadata.block_table_tensor[rows], firsts, pasts, new))
        mapping = common_attn_metadata.slot_mapping
        written = (mapping >= 0).nonzero().flatten()  # padding has no slot
        slots = mapping[written][None]
        return Step(written, Places(slots // self.size, slots % self.size), pieces)

    def _piece(self, tables: torch.Tensor, firsts: torch.Tensor, pasts: torch.Tensor, new: int) -> Piece:
        """The plan for `new` tokens of each request: tables [requests, blocks], the rest [requests]."""
        window = (pasts - self.recent + 1).clamp(min=self.sink)  # first key of the window that is not a sink
        last = pasts + new - 1
        columns = torch.arange(self.sink + max(0, int((last - window).max()) + 1))
        keys = torch.where(columns < self.sink, columns, columns - self.sink + window[:, None])
        queries = (pasts[:, None] + torch.arange(new))[:, :, None]
        visible = (keys[:, None] <= queries) & ((keys[:, None] < self.sink) | (queries - keys[:, None] < self.recent))
        bias = None
        if not visible.all():
            bias = torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(~visible, float("-inf"))
            bias = bias.repeat(1, self.group, 1)[:, None]
        keys = torch.minimum(keys, last[:, None])  # a slot after a request's last token is not its own
        blocks = tables.long().gather(1, keys // self.size)
        return Piece(firsts[:, None] + torch.arange(new), Places(blocks, keys % self.size), bias)


class StreamingImpl(CPUAttentionBackendImpl):
    """Writes keys and values side by side into the slots of the cache, and reads those that are visible."""

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Step | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store new tokens, key and value [tokens, heads, head_dim], in a cache [blocks, heads, slots, 2 * head_dim],
        and write their attention, query [tokens, query_heads, head_dim], to an output of that shape."""
        if attn_metadata is None:  # a step without requests, to measure memory
            return output
        rows, written = rows_of(kv_cache), attn_metadata.written
        states = torch.cat((key[written], value[written]), -1).transpose(0, 1)
        rows.index_copy_(0, attn_metadata.slots.rows(kv_cache), states.flatten(0, 1))
        for piece in attn_metadata.pieces:
            requests, new = piece.tokens.shape
            shape = (requests, new, self.num_kv_heads, self.num_queries_per_kv, self.head_size)
            # the queries of a group one after the other, since they share keys
            states = query[piece.tokens].view(shape).permute(0, 2, 3, 1, 4).flatten(2, 3)
            held = rows.index_select(0, piece.keys.rows(kv_cache)).view(requests, self.num_kv_heads, -1, rows.shape[1])
            attended = self._attend(states, *held.split(self.head_size, -1), piece.bias)
            attended = attended.unflatten(2, (self.num_queries_per_kv, new))
            output[piece.tokens] = attended.permute(0, 3, 1, 2, 4).flatten(2, 3)
        return output

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention over [requests, heads, tokens, head_dim], with the model's soft cap if it has one."""
        if not self.logits_soft_cap:
            return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=self.scale)
        scores = (query @ key.mT * self.scale / self.logits_soft_cap).tanh() * self.logits_soft_cap
        if bias is not None:
            scores = scores + bias
        return scores.float().softmax(-1).to(value.dtype) @ value


class StreamingBackend(FullBackend):
    """Keeps the stock backend's name, which vLLM looks up in an enum."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[StreamingImpl]:
        return StreamingImpl

    @staticmethod
    def get_builder_cls() -> type[StreamingBuilder]:
        return StreamingBuilder
