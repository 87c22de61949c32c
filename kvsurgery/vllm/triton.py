"""Attention of streaming heads on a GPU: vLLM's Triton kernel, over block tables without the blocks that are freed.

The kernel can mask a reference prefix beside a window (R-SWA): key < prefix or query - key < window. With the sinks as
prefix this is the mask of a streaming head. By itself the kernel visits every block of the sequence; so it gets tables
without the blocks between sinks and window, and lengths that are as much shorter. Distances inside the window stay the
same, and keys that come before it stay before it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_layout import KVCacheLayout


def without_gap(
    table: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, sink: int, recent: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables and lengths of requests without the blocks that none of their new tokens sees.

    The shapes depend on those of the arguments only, so that CUDA graphs can replay the step.

    Args:
        table: [requests, blocks], the block of each `size` tokens.
        starts: [requests + 1], first new token of each request in the batch, and the end.
        lengths: [requests], tokens of each request, new ones included.
    """
    past = lengths - starts.diff()
    sink_blocks = -(-sink // size)
    gap = ((past - recent + 1).clamp(min=0) // size - sink_blocks).clamp(min=0)
    columns = torch.arange(table.shape[1], device=table.device)
    source = torch.where(columns < sink_blocks, columns, columns + gap[:, None])
    return table.gather(1, source.clamp(max=table.shape[1] - 1)), lengths - gap.to(lengths.dtype) * size


class StreamingBuilder(TritonAttentionMetadataBuilder):
    """Shortens the tables of a step, in buffers whose addresses a CUDA graph can keep."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self.sink, self.recent = layer.sink, layer.recent
        requests = vllm_config.scheduler_config.max_num_seqs
        # metadata updated in place would have lengths and tables that are not shortened
        self.supports_draft_decode_metadata_update = False
        self.prefixes = torch.full((requests,), self.sink, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(requests, dtype=torch.int32, device=device)
        self.table: torch.Tensor | None = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TritonAttentionMetadata:
        """The stock metadata of a step, with shortened tables and lengths, and sinks and window as R-SWA."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        table, lengths = without_gap(
            metadata.block_table, metadata.query_start_loc, metadata.seq_lens, self.sink, self.recent, self.block_size
        )
        count, width = table.shape
        if self.table is None:
            self.table = torch.zeros(len(self.lengths), width, dtype=table.dtype, device=table.device)
        longest = self.sink + self.recent + metadata.max_query_len + 2 * self.block_size
        return replace(
            metadata,
            block_table=self.table[:count].copy_(table),
            seq_lens=self.lengths[:count].copy_(lengths),
            max_seq_len=min(metadata.max_seq_len, longest),
            rswa_prefix_lens=self.prefixes[:count],
            rswa_window=self.recent,
        )


class StreamingBackend(TritonAttentionBackend):
    """Keeps the stock backend's name, which vLLM looks up in an enum."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Blocks outermost in memory, where pages of different numbers of heads lie unpadded."""
        return (KVCacheLayout.BLNHC, KVCacheLayout.BLHNC)

    @staticmethod
    def get_builder_cls() -> type[StreamingBuilder]:
        return StreamingBuilder
