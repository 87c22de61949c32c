"""Attention of heads whose older tokens are quantized, on a GPU: packs tiles into pages, and attends to their codes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from kvsurgery.templates.kv_codes import nearest
from kvsurgery.templates.kv_softmax import Scoring
from kvsurgery.vllm.paged_codes import Line, Pages, QueryBlocks, attend, block_size, lines, programs_of
from kvsurgery.vllm.paged_pack import DueTiles, most_due, pack
from kvsurgery.vllm.pages import from_page, rotated_query, stored_form
from kvsurgery.vllm.triton_pages import PagesBackend, PagesImpl


@dataclass(frozen=True)
class NewestStep:
    """A step in a cache group of newest tokens.

    Attributes:
        table: [requests, blocks], the block table.
        pages, slots: [tokens], where the new tokens are stored.
        due_pages, due_slots: [due, TILE], where the tokens lie that the step packs.
    """

    table: torch.Tensor
    pages: torch.Tensor
    slots: torch.Tensor
    due_pages: torch.Tensor
    due_slots: torch.Tensor

    @property
    def computed(self) -> list[torch.Tensor]:
        """Tensors that differ from step to step; vLLM keeps its block tables in place."""
        return [self.pages, self.slots, self.due_pages, self.due_slots]


@dataclass(frozen=True)
class CodesStep:
    """A step in a cache group of tiles.

    Attributes:
        table: [requests, blocks], the block table.
        due: [due], the page of each tile that the step packs; -1: there is none.
        blocks: the new tokens, divided by the tiles that they read.
        lines: units of work for these.
    """

    table: torch.Tensor
    due: torch.Tensor
    blocks: QueryBlocks
    lines: list[Line]

    @property
    def computed(self) -> list[torch.Tensor]:
        """Tensors that differ from step to step; blocks of one token need no `places`."""
        return [self.due, self.blocks.rows, *(part for line in self.lines for part in (line.ends, line.starts))]


class TiledBuilder(AttentionMetadataBuilder[Any]):
    """Finds the work of a step on the device, once for all layers of a cache group that have the same number of heads.

    What is launched depends on the numbers of new tokens and of due tiles. Full CUDA graphs hold decode steps, in which
    no request has more than one new token: these have room for one token and one tile of each request. A captured step
    keeps its tensors, which `build` fills for later batches of as many requests.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self.tiling, self.size = self.layer.tiling, kv_cache_spec.block_size
        self.dtype, self.exact = vllm_config.model_config.dtype, vllm_config.speculative_config is None
        self.captured: dict[int, NewestStep | CodesStep] = {}  # steps that graphs hold, by number of requests

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> NewestStep | CodesStep:
        """The work of a batch in this cache group, in the tensors of a captured step where there is one."""
        new = common_attn_metadata.query_start_loc_cpu.diff().tolist()
        mode = self.vllm_config.compilation_config.cudagraph_mode  # which vLLM resolves after it has made builders
        if mode.decode_mode() != CUDAGraphMode.FULL or max(new) > 1:
            return self.step(common_attn_metadata, new, self.most_due(common_attn_metadata, new))
        requests = len(new)  # those that pad a batch have no new token
        # steps outside of graphs have the same room, so that the one before a capture compiles all kernels
        step = self.step(common_attn_metadata, [1] * requests, requests)
        captured = self.captured.get(requests)
        if captured is None:
            return step
        for kept, computed in zip(captured.computed, step.computed, strict=True):
            kept.copy_(computed)
        return replace(captured, table=step.table)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> NewestStep | CodesStep:
        """The work of a batch, whose tensors `build` fills again for later batches of as many requests."""
        step = self.build(0, common_attn_metadata)
        self.captured.setdefault(len(step.table), step)
        return step

    @abstractmethod
    def step(self, metadata: Any, new: list[int], most: int) -> NewestStep | CodesStep:
        """The work of a batch, with room for `new` tokens of each request and `most` due tiles."""

    def most_due(self, metadata: Any, new: list[int]) -> int:
        """Most tiles that the step completes: without speculation the host knows all lengths, thus how many."""
        known = getattr(metadata, "seq_lens_cpu_upper_bound", None)
        if not self.exact or known is None:
            return most_due(new)
        past = known - metadata.query_start_loc_cpu.diff()
        return int((self.tiling.packed(known) - self.tiling.packed(past)).sum())

    def due(self, metadata: Any, most: int) -> DueTiles:
        """Tiles that the step completes."""
        lengths = metadata.seq_lens
        before = self.tiling.packed(lengths - metadata.query_start_loc.diff())
        return DueTiles.of(before, self.tiling.packed(lengths), most)


class NewestBuilder(TiledBuilder):
    """Finds the slots of the newest tokens, which are stored in the model's dtype."""

    def step(self, metadata: Any, new: list[int], most: int) -> NewestStep:
        """Translate the work of a batch to slots of this cache group."""
        table, due = metadata.block_table_tensor, self.due(metadata, most)
        slots = metadata.slot_mapping[: sum(new)].long()
        slots = slots.clamp(min=0)  # -1, of padding and of a step without requests: vLLM leaves block 0 unused
        tokens = due.tokens(self.tiling)
        columns = (tokens // self.size).clamp(max=table.shape[1] - 1)  # of room for tiles that are not due
        pages = table[due.requests[:, None], columns].long()
        return NewestStep(table, slots // self.size, slots % self.size, pages, tokens % self.size)


class CodesBuilder(TiledBuilder):
    """Finds the pages of the tiles, and divides the new tokens."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """None where keys are rounded by the queries: this takes too many launches for tiles that may not be due."""
        layers = vllm_config.compilation_config.static_forward_context.values()
        if any(getattr(layer, "round_keys", nearest) is not nearest for layer in layers):
            return AttentionCGSupport.NEVER
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def step(self, metadata: Any, new: list[int], most: int) -> CodesStep:
        """Translate the work of a batch to pages of this cache group."""
        layer, starts, lengths = self.layer, metadata.query_start_loc, metadata.seq_lens
        table, due = metadata.block_table_tensor, self.due(metadata, most)
        columns = self.tiling.block(due.tiles).clamp(max=table.shape[1] - 1)
        pages = torch.where(due.valid, table[due.requests, columns].long(), -1)
        group = layer.num_heads // layer.num_kv_heads
        blocks = QueryBlocks.of(starts, lengths, new, block_size(group, max(new)), self.tiling)
        programs = programs_of(starts.device)
        in_lines = lines(blocks, layer.num_kv_heads, group, layer.head_size, self.dtype, programs)
        return CodesStep(table, pages, blocks, in_lines)


class CodesImpl(PagesImpl):
    """Stores new tokens, packs the due tiles of all requests, and then attends.

    The order matters: a request may share a prefix whose blocks another request fills in the same step.
    """

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CodesStep | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store new tokens in the caches of a layer and write their attention to `output`.

        Args:
            query, output: [tokens, query_heads, head_dim]
            key, value: [tokens, heads, head_dim]
            kv_cache: [pages, heads, 1, bytes]
        """
        if attn_metadata is None:  # a step without requests, to measure memory
            return output.fill_(0)
        newest: NewestStep = get_forward_context().attn_metadata[layer.newest.layer_name]
        quantization, cache, count = layer.quantization, layer.newest.kv_cache, len(newest.slots)
        query = rotated_query(quantization, query[:count])
        states = torch.cat(stored_form(quantization, key[:count], value[:count]), -1)
        cache.transpose(1, 2)[newest.pages, newest.slots] = states
        tiles = from_page(kv_cache[:, :, 0], self.head_size, cache.dtype, quantization)
        if len(attn_metadata.due):
            if layer.round_keys is not nearest:
                layer.round_keys = layer.round_keys.to(cache.device)
            due = newest.due_pages, newest.due_slots, attn_metadata.due
            pack(cache, *due, tiles, quantization, layer.round_keys)
        attend(
            query,
            Pages(tiles, attn_metadata.table, cache, newest.table),
            attn_metadata.blocks,
            attn_metadata.lines,
            Scoring(self.scale, self.logits_soft_cap or None, sinks=self.sinks),
            quantization,
            output[:count],
        )
        return output


class NewestBackend(PagesBackend):
    """Backend of the cache of newest tokens, which has no attention of its own."""

    impl = CodesImpl
    builder = NewestBuilder


class CodesBackend(PagesBackend):
    """Backend of the cache of tiles."""

    impl = CodesImpl
    builder = CodesBuilder
