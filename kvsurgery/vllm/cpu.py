"""Attention of streaming heads on a CPU: gathers sinks and window, and lets PyTorch attend to them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.v1.attention.backend import AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvsurgery.vllm.rows import InputTokens, NewTokens, Places

QUERIES = 128  # new tokens of a request that attend at a time: more would gather a wider window
GATHERED = 1 << 14  # keys of a head that are gathered at a time


class FullBuilder(CPUAttentionMetadataBuilder):
    """The stock builder, for blocks that may have held codes, or the states of linear attention."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """The stock metadata of a step, after setting a block to 0 where the first of its slots gets a token.

        The kernel multiplies the values of empty slots by 0, and other bytes may read as NaN. vLLM clears new blocks on
        a CPU only where all layers of a cache group have as many heads.
        """
        slots = common_attn_metadata.slot_mapping[: common_attn_metadata.num_actual_tokens]
        new_blocks = slots[slots % self.block_size == 0] // self.block_size
        layers = self.vllm_config.compilation_config.static_forward_context
        for name in self.layer_names:
            layers[name].kv_cache.index_fill_(0, new_blocks, 0)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class FullBackend(CPUAttentionBackend):
    """The stock backend with blocks outermost in memory, where pages of different numbers of heads lie unpadded.

    The stock kernels take such strides, though their backend does not say so.
    """

    impl: type[CPUAttentionBackendImpl] = CPUAttentionBackendImpl
    builder: type[AttentionMetadataBuilder] = FullBuilder

    @classmethod
    def get_impl_cls(cls) -> type[CPUAttentionBackendImpl]:
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder]:
        return cls.builder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC,)


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees: `sink` and `recent` tokens.

    It also has the tokens of a block, the queries of a KV head and the dtype of a bias."""

    sink: int
    recent: int
    size: int
    group: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Piece:
    """New tokens of some requests, as many of each, and the keys they see.

    Attributes:
        tokens: the new tokens in the batch, request by request; a slice where they are adjacent.
        rows: [requests, 1], the requests' rows in block tables.
        new: new tokens of each request.
        columns: [requests, keys], the column of each key's block in those rows.
        offsets: [requests, 1, keys], the slot of each key in its block.
        bias: [requests, 1, group * new, keys], 0 where a query of a group sees a key and -inf where not; None where
            all are seen.
    """

    tokens: slice | torch.Tensor
    rows: torch.Tensor
    new: int
    columns: torch.Tensor
    offsets: torch.Tensor
    bias: torch.Tensor | None


@lru_cache(maxsize=2)
def plan(starts: tuple[int, ...], lengths: tuple[int, ...], mask: Mask) -> tuple[Piece, ...]:
    """The keys that the new tokens of a batch attend to, as positions, without the blocks of a cache group.

    All cache groups need the same plan in a step, so the last plans are kept. A long prompt becomes several pieces of
    one length, so that none gathers much more than its window.

    Args:
        starts: first new token of each request in the batch, and the end.
        lengths: tokens of each request, new ones included.
    """
    members_by_count: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for row, (length, (start, end)) in enumerate(zip(lengths, pairwise(starts), strict=True)):
        for first in range(start, end, QUERIES):
            members_by_count[min(QUERIES, end - first)].append((row, first, length - (end - first)))
    pieces = []
    for new, members in members_by_count.items():
        step = max(1, GATHERED // (mask.sink + mask.recent + new))
        pieces += [_piece(members[start : start + step], new, mask) for start in range(0, len(members), step)]
    return tuple(pieces)


def _piece(members: list[tuple[int, int, int]], new: int, mask: Mask) -> Piece:
    """The piece of `new` tokens of each member: its row, the first of the tokens, and tokens that came before."""
    rows, firsts, pasts = torch.tensor(members).T
    window = (pasts - mask.recent + 1).clamp(min=mask.sink)  # first key of the window that is not a sink
    last = pasts + new - 1
    columns = torch.arange(mask.sink + max(0, int((last - window).max()) + 1))
    keys = torch.where(columns < mask.sink, columns, columns - mask.sink + window[:, None])
    queries = (pasts[:, None] + torch.arange(new))[:, :, None]
    visible = (keys[:, None] <= queries) & ((keys[:, None] < mask.sink) | (queries - keys[:, None] < mask.recent))
    bias = None
    if not visible.all():
        bias = torch.zeros(visible.shape, dtype=mask.dtype).masked_fill_(~visible, float("-inf"))
        bias = bias.repeat(1, mask.group, 1)[:, None]
    keys = torch.minimum(keys, last[:, None])  # a slot after a request's last token is not its own
    tokens = (firsts[:, None] + torch.arange(new)).flatten()
    span = slice(int(tokens[0]), int(tokens[0]) + len(tokens))  # indexing by a slice copies nothing
    adjacent = torch.equal(tokens, torch.arange(span.start, span.stop))
    keys, offsets = keys // mask.size, (keys % mask.size)[:, None]
    return Piece(span if adjacent else tokens, rows[:, None], new, keys, offsets, bias)


@dataclass
class Step:
    """A batch for a cache group: its new tokens, and the slots of each piece's keys."""

    new: NewTokens
    pieces: list[tuple[Piece, Places]]


class StreamingBuilder(AttentionMetadataBuilder[Step]):
    """Finds the blocks of a step, once for the layers of a cache group with as many heads."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        group = layer.num_heads // layer.num_kv_heads
        dtype = vllm_config.model_config.dtype
        self.mask = Mask(layer.sink, layer.recent, kv_cache_spec.block_size, group, dtype)
        self.heads = torch.arange(layer.num_kv_heads)[:, None] * kv_cache_spec.block_size
        self.lean = layer.place.drafts is not None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        """The plan of a batch, in slots of this cache group."""
        starts, lengths = common_attn_metadata.query_start_loc, common_attn_metadata.seq_lens
        table = common_attn_metadata.block_table_tensor.long()

        def places(piece: Piece) -> Places:
            inputs = None
            if self.lean:
                positions = piece.columns * self.mask.size + piece.offsets[:, 0]
                inputs = InputTokens.of(piece.rows, positions, starts, lengths)
            return Places(table[piece.rows, piece.columns][:, None], piece.offsets + self.heads, inputs)

        pieces = plan(tuple(starts.tolist()), tuple(lengths.tolist()), self.mask)
        slots = common_attn_metadata.slot_mapping[: int(starts[-1])]  # tokens after these are padding
        new = NewTokens.of(slots, self.mask.size, self.heads, self.lean)
        return Step(new, [(piece, places(piece)) for piece in pieces])


class StreamingImpl(CPUAttentionBackendImpl):
    """Writes keys and values side by side into the slots of the cache, and reads those that are visible."""

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Step | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store new tokens in a cache, and write their attention to an output.

        Key and value are [tokens, heads, head_dim], the cache [blocks, heads, slots, 2 * head_dim], query and output
        [tokens, query_heads, head_dim]. A layer that
        shares the cache of an earlier one has no keys and values to store."""
        if attn_metadata is None:  # a step without requests, to measure memory
            return output
        new_tokens, states = attn_metadata.new, None
        if key is not None and value is not None:
            states = torch.cat((key[: new_tokens.count], value[: new_tokens.count]), -1)
        if states is not None and not new_tokens.lean:
            new_tokens.store(kv_cache, states)
        for piece, keys in attn_metadata.pieces:
            self._attend_to_piece(piece, keys.read(kv_cache, states), query, output)
        if states is not None and new_tokens.lean:
            new_tokens.store(kv_cache, states)
        return output

    def _attend_to_piece(
        self, piece: Piece, kv_states: torch.Tensor, query: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Write the attention of the tokens of a piece to keys and values [requests, heads, keys, 2 * head_dim]."""
        heads, group, size = self.num_kv_heads, self.num_queries_per_kv, self.head_size
        requests, new = len(piece.rows), piece.new
        queries = query[piece.tokens]
        if new > 1:  # the queries of a group one after the other, since they share keys
            queries = queries.view(requests, new, heads, group, size).permute(0, 2, 3, 1, 4)
        queries = queries.reshape(requests, heads, -1, size)
        attended = self._attend(queries, kv_states[..., :size], kv_states[..., size:], piece.bias)
        if new > 1:
            attended = attended.view(requests, heads, group, new, size).permute(0, 3, 1, 2, 4)
        output[piece.tokens] = attended.reshape(-1, heads * group, size)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention over [requests, heads, tokens, head_dim], with the model's soft cap and learned sinks if it has
        them."""
        if not self.logits_soft_cap and self.sinks is None:
            return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=self.scale)
        scores = query @ key.mT * self.scale
        if self.logits_soft_cap:
            scores = (scores / self.logits_soft_cap).tanh() * self.logits_soft_cap
        if bias is not None:
            scores = scores + bias
        if self.sinks is not None:  # one more score, whose value is 0
            new = query.shape[2] // self.num_queries_per_kv
            sinks = self.sinks.to(scores.dtype).view(self.num_kv_heads, -1).repeat_interleave(new, 1)
            scores = torch.cat((scores, sinks[None, :, :, None].expand(len(scores), -1, -1, -1)), -1)
        return scores.float().softmax(-1)[..., : key.shape[2]].to(value.dtype) @ value


class GatheringBackend(FullBackend):
    """Reads and writes the cache without the stock kernels, thus in blocks of any size.

    It keeps the stock backend's name, which vLLM looks up in an enum."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]


class StreamingBackend(GatheringBackend):
    """Of heads with sinks and a window."""

    impl = StreamingImpl
    builder = StreamingBuilder
