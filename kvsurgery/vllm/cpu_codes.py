"""Attention of heads whose older tokens are quantized, on a CPU: packs tiles into pages, and attends to their codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from kvsurgery.templates.kv_codes import dequantize, key_products, quantize, rotated, weighted_values
from kvsurgery.templates.kv_cpu import CodesLoop, codes_loop
from kvsurgery.templates.kv_layout import TILE, Quantization
from kvsurgery.templates.kv_softmax import LOWEST, Scoring, merge
from kvsurgery.vllm.cpu import GatheringBackend
from kvsurgery.vllm.pages import from_page, rotated_query, stored_form, to_page
from kvsurgery.vllm.rows import InputTokens, NewTokens, Places
from kvsurgery.vllm.tiles import TiledPiece, TiledPlan, plan

SCORES = 1 << 23  # scores of queries over tiles that are computed at a time
ROOM = 1 << 21  # elements that codes are decoded to at a time
PAGES = 1 << 24  # bytes of pages that are gathered at a time
UNPACKED = 32  # new tokens of a request for which tiles are unpacked first
STATES = 1 << 21  # elements of keys and values that are unpacked at a time


@dataclass
class NewestStep:
    """A step in a cache group of newest tokens.

    Attributes:
        new: the new tokens.
        due: slots of the tokens that the step packs into tiles.
        pieces: slots of the keys of each piece.
    """

    new: NewTokens
    due: Places
    pieces: list[Places]


@dataclass
class CodesStep:
    """A step in a cache group of tiles.

    Attributes:
        plan: the plan of the step.
        due: pages of the tiles that the step packs.
        pieces: pages of the tiles that each piece reads.
    """

    plan: TiledPlan
    due: torch.Tensor
    pieces: list[torch.Tensor]


class TiledBuilder(AttentionMetadataBuilder[Any]):
    """Finds the blocks of a step, once for all layers of a cache group that have the same number of heads."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self.tiling, self.size = layer.tiling, kv_cache_spec.block_size
        self.heads = torch.arange(layer.num_kv_heads)[:, None] * self.size

    def plan_of(self, metadata: Any) -> TiledPlan:
        """The plan of the batch of a step."""
        return plan(tuple(metadata.query_start_loc.tolist()), tuple(metadata.seq_lens.tolist()), self.tiling)


class NewestBuilder(TiledBuilder):
    """Finds the slots of the newest tokens, which are stored in the model's dtype."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.lean = kv_cache_spec.lean

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> NewestStep:
        """Translate the plan of a batch to slots of this cache group."""
        steps = self.plan_of(common_attn_metadata)
        starts, lengths = common_attn_metadata.query_start_loc, common_attn_metadata.seq_lens
        table = common_attn_metadata.block_table_tensor.long()

        def places(rows: torch.Tensor, tokens: torch.Tensor) -> Places:
            inputs = InputTokens.of(rows, tokens, starts, lengths) if self.lean else None
            blocks = table[rows, tokens // self.size][:, None]
            return Places(blocks, (tokens % self.size)[:, None] + self.heads, inputs)

        slots = common_attn_metadata.slot_mapping[: int(starts[-1])]  # tokens after these are padding
        return NewestStep(
            NewTokens.of(slots, self.size, self.heads, self.lean),
            places(steps.due.rows, steps.due.tokens),
            [places(piece.rows, piece.keys) for piece in steps.pieces],
        )


class CodesBuilder(TiledBuilder):
    """Finds the pages of the tiles."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        compile_loops(layer_names, vllm_config)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> CodesStep:
        """Translate the plan of a batch to pages of this cache group."""
        steps = self.plan_of(common_attn_metadata)
        table = common_attn_metadata.block_table_tensor.long()
        block = self.tiling.block
        due = table[steps.due.rows, block(steps.due.tiles)].flatten()
        return CodesStep(steps, due, [table[piece.rows, block(piece.tiles)] for piece in steps.pieces])


def compile_loops(layer_names: list[str], vllm_config: Any) -> None:
    """Compile what attends to the tiles of these layers, so that no request waits for it."""
    for name in layer_names:
        layer = vllm_config.compilation_config.static_forward_context[name]
        codes_loop(layer.quantization, layer.head_size, layer.newest.kv_cache_torch_dtype)


class CodesImpl(CPUAttentionBackendImpl):
    """Stores new tokens, packs the due tiles of all requests, and then attends.

    The order matters: a request may share a prefix whose blocks another request fills in the same step. Blocks of lean
    caches are not shared, and there new tokens are stored last.
    """

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: CodesStep | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store new tokens in the caches of a layer and write their attention to `output`.

        Args:
            query, output: [tokens, query_heads, head_dim]
            key, value: [tokens, heads, head_dim]; None for queries of a layer that shares these caches
            kv_cache: [blocks, heads, 1, bytes]
        """
        if attn_metadata is None:  # a step without requests, to measure memory
            return output
        newest: NewestStep = get_forward_context().attn_metadata[layer.newest.layer_name]
        count, states = newest.new.count, None
        if key is not None and value is not None:
            states = torch.cat(stored_form(layer.quantization, key[:count], value[:count]), -1)
            if not newest.new.lean:
                newest.new.store(layer.newest.kv_cache, states)
            self._pack(layer, kv_cache, newest, attn_metadata, states)
        query = rotated_query(layer.quantization, query[:count])
        self._attend_to_both(layer, query, kv_cache, newest, attn_metadata, states, output)
        if states is not None and newest.new.lean:
            newest.new.store(layer.newest.kv_cache, states)
        return output

    def _rotated_back(self, quantization: Quantization, attended: torch.Tensor) -> torch.Tensor:
        """Attention [tokens, query_heads, head_dim] to values as they came."""
        return rotated(attended, (quantization.rotate != "none") * attended.shape[1], back=True)

    def _pack(
        self, layer: Any, kv_cache: torch.Tensor, newest: NewestStep, step: CodesStep, states: torch.Tensor
    ) -> None:
        """Pack the tiles of a step with these new keys and values [tokens, heads, 2 * head_dim]."""
        if len(step.due):
            due = newest.due.read(layer.newest.kv_cache, states).split(self.head_size, -1)
            tiles = quantize(*due, layer.quantization, layer.round_keys)
            kv_cache[:, :, 0].index_copy_(0, step.due, to_page(tiles))

    def _attend_to_both(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        newest: NewestStep,
        step: CodesStep,
        states: torch.Tensor | None,
        output: torch.Tensor,
    ) -> None:
        """Write the attention, to tiles and newest tokens, of queries that are rotated as the keys are."""
        quantization, heads, size = layer.quantization, self.num_kv_heads, self.head_size
        scoring = Scoring(self.scale, self.logits_soft_cap or None, sinks=self.sinks)
        pages = kv_cache[:, :, 0]
        loop = codes_loop(quantization, size, layer.newest.kv_cache.dtype)
        for piece, keys, blocks in zip(step.plan.pieces, newest.pieces, step.pieces, strict=True):
            queries = query[piece.batch].view(-1, piece.new, heads, self.num_queries_per_kv, size)
            queries = queries.permute(0, 2, 3, 1, 4)
            unpacked = keys.read(layer.newest.kv_cache, states)
            if piece.new >= UNPACKED and not scoring.explicit:
                attend = partial(_attend_to_unpacked, loop)
            elif loop is not None and piece.new < UNPACKED:
                attend = partial(_attend_by_loop, loop)
            else:
                attend = _attend_to_codes
            attended = attend(queries, unpacked, pages, blocks, piece, quantization, scoring)
            attended = attended.transpose(1, 2).reshape(len(piece.batch), -1, size)
            output[piece.batch] = self._rotated_back(quantization, attended).to(output.dtype)


def _attend_by_loop(
    loop: CodesLoop,
    query: torch.Tensor,
    states: torch.Tensor,
    pages: torch.Tensor,
    blocks: torch.Tensor,
    piece: TiledPiece,
    quantization: Quantization,
    scoring: Scoring,
) -> torch.Tensor:
    """As `_attend_to_codes`, by the compiled loop."""
    size = query.shape[4]
    tiles = from_page(pages, size, states.dtype, quantization)
    output, lse = loop(
        query.flatten(2, 3), states.split(size, -1), piece.hidden[:, 0, 0], tiles, blocks, piece.seen, scoring
    )
    by_query_head = len(blocks), -1, piece.new
    return scoring.sunk(output.view(*by_query_head, size), lse.view(by_query_head))


def _attend_to_codes(
    query: torch.Tensor,
    states: torch.Tensor,
    pages: torch.Tensor,
    blocks: torch.Tensor,
    piece: TiledPiece,
    quantization: Quantization,
    scoring: Scoring,
) -> torch.Tensor:
    """Attention of queries over states and the codes of tiles, in float32.

    Args:
        query: [requests, heads, group, new, head_dim].
        states: keys and values that are not in tiles, [requests, heads, keys, 2 * head_dim].
        pages: [blocks, heads, bytes].
        blocks: of the tiles, [requests, tiles].

    Returns:
        [requests, query_heads, new, head_dim].
    """
    requests, size = len(blocks), query.shape[4]
    query = query.flatten(2, 3).float()
    keys, values = states.float().split(size, -1)
    weights, lse = _weights(scoring.scores(query @ keys.mT), piece.hidden[..., None], piece.new)
    output, widths = weights @ values, quantization.widths
    for span in _spans(query, blocks.shape[1], pages.shape[2]):
        gathered = pages.index_select(0, blocks[:, span].flatten()).unflatten(0, (requests, -1))
        tiles = from_page(gathered.transpose(1, 2), size, states.dtype, quantization)
        room = query.new_empty(max(ROOM, tiles.key_codes[:, :, 0].numel() * 8 // widths.keys))
        scores = scoring.scores(key_products(query, tiles, widths.keys, room))
        weights, part_lse = _weights(scores, piece.hidden_in(span), piece.new)
        part = weighted_values(weights, tiles, widths.values, room)
        output, lse = merge((output, lse), (part, part_lse))
    by_query_head = requests, -1, piece.new
    return scoring.sunk(output.view(*by_query_head, size), lse.view(by_query_head))


def _attend_to_unpacked(
    loop: CodesLoop | None,
    query: torch.Tensor,
    states: torch.Tensor,
    pages: torch.Tensor,
    blocks: torch.Tensor,
    piece: TiledPiece,
    quantization: Quantization,
    scoring: Scoring,
) -> torch.Tensor:
    """As `_attend_to_codes`, where many queries share the work of unpacking tiles; `scoring` is not explicit."""
    size, allowed = query.shape[4], piece.allowed
    output, others = torch.empty_like(query), states.shape[2]
    at_once = max(1, STATES // (2 * size * allowed.shape[2]))
    for request, row in enumerate(blocks):
        for head in range(0, query.shape[1], at_once):
            some = slice(head, head + at_once)
            newest = states[request, some].unflatten(2, (2, size)).movedim(2, 0)
            unpacked = newest.new_empty(*newest.shape[:2], allowed.shape[2], size)
            unpacked[:, :, :others] = newest
            older = unpacked[:, :, others:]
            if loop is None:
                tiles = from_page(pages[row, some].transpose(0, 1), size, states.dtype, quantization)
                for part, tile_part in zip(older, dequantize(tiles, quantization.widths), strict=True):
                    part.copy_(tile_part.flatten(1, 2))
            else:
                loop.unpack(from_page(pages[:, some], size, states.dtype, quantization), row, *older)
            keys, values = unpacked[:, :, None].expand(-1, -1, query.shape[2], -1, -1)
            output[request, some] = scaled_dot_product_attention(
                query[request, some], keys, values, allowed[request], scale=scoring.scale
            )
    return output.flatten(1, 2)


def _weights(scores: torch.Tensor, hidden: torch.Tensor, new: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax of scores [requests, heads, group * new, keys] over keys that are not hidden, and the log-sum-exps."""
    scores.view(*scores.shape[:2], -1, new, hidden.shape[4], scores.shape[3] // hidden.shape[4]).masked_fill_(
        hidden, LOWEST
    )
    lse = scores.logsumexp(3)
    return (scores - lse[..., None]).exp_(), lse


def _spans(query: torch.Tensor, tiles: int, page: int) -> Iterator[slice]:
    """Ranges of tiles that are read together, for queries [requests, heads, n, head_dim]."""
    requests, heads, count, _ = query.shape
    step = max(1, min(SCORES // (requests * heads * count * TILE), PAGES // (requests * heads * page)))
    for begin in range(0, tiles, step):
        yield slice(begin, begin + step)


class NewestBackend(GatheringBackend):
    """Backend of the cache of newest tokens, which has no attention of its own."""

    impl = CodesImpl
    builder = NewestBuilder


class CodesBackend(GatheringBackend):
    """Backend of the cache of tiles."""

    impl = CodesImpl
    builder = CodesBuilder
