"""The KV cache of streaming heads as vLLM's planner sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager, FullAttentionManager
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvsurgery.templates.kv_layout import TILE
from kvsurgery.vllm.groups import Place
from kvsurgery.vllm.manager import SinkWindowManager

ONE_STATE = -1  # `tokens_per_state` of a block that holds one state, in which a shared prefix may end


def arguments(spec: Any) -> dict[str, Any]:
    """What a spec was made with, to make one of a subclass."""
    return {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}


@dataclass(frozen=True, kw_only=True)
class SinkWindowSpec(SlidingWindowSpec):
    """A sliding window beside the first `sink` tokens, whose start moves by `stride` tokens at a time.

    Layers of one `bin` share a cache group; see `Groups`. If the group is lean, a step's tokens have blocks only where
    later steps see them, although the last `drafts` of them may be rejected.
    """

    sink: int
    bin: int
    stride: int = 1
    drafts: int | None = None

    @property
    def lean(self) -> bool:
        """Whether only tokens that later steps see have blocks."""
        return self.drafts is not None

    @classmethod
    def of(cls, place: Place, heads: int, head_dim: int, dtype: torch.dtype, **options: Any) -> SinkWindowSpec:
        """The cache of so many heads in a place."""
        return cls(
            block_size=place.size,
            num_kv_heads=heads,
            head_size=head_dim,
            dtype=dtype,
            sliding_window=place.recent,
            sink=place.sink,
            bin=place.bin,
            stride=place.stride,
            drafts=place.drafts,
            **options,
        )

    @classmethod
    def of_tiles(cls, place: Place, heads: int, head_dim: int, tile_bytes: int) -> SinkWindowSpec:
        """The cache of the packed tiles of so many heads, which a step reads after it has packed them."""
        place = place._replace(drafts=None)
        return cls.of(place, heads, head_dim, torch.uint8, tokens_per_state=ONE_STATE, state_content_bytes=tile_bytes)

    @property
    def num_retained_tokens(self) -> int:
        """Tokens that a worker must not drop from its block table by itself: all, since it knows no sinks."""
        return 1 << 30

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Most blocks that a request holds at a time: those of a window, and those of the sinks."""
        in_flight = max_in_flight_tokens if self.drafts is None else self.drafts
        window = super().max_admission_blocks_per_request(in_flight, max_model_len)
        return min(window + cdiv(self.sink, self.block_size), cdiv(max_model_len, self.block_size) + 1)

    def is_uniform_with_collection(self, kv_cache_specs: Mapping[str, Any]) -> bool:
        """Whether these may share a cache group: streaming heads of one bin."""
        return all(
            isinstance(spec, SinkWindowSpec)
            and (spec.sink, spec.sliding_window, spec.bin) == (self.sink, self.sliding_window, self.bin)
            for spec in kv_cache_specs.values()
        )


@dataclass(frozen=True, kw_only=True)
class CodesSpec(FullAttentionSpec):
    """Packed tiles of full heads, a tile a block: bytes that vLLM does not look into.

    Full heads of layers without codes share the cache group, in blocks of as many tokens.
    """

    @classmethod
    def of(cls, heads: int, head_dim: int, tile_bytes: int) -> CodesSpec:
        """The cache of so many heads."""
        return cls(
            block_size=TILE,
            num_kv_heads=heads,
            head_size=head_dim,
            dtype=torch.uint8,
            tokens_per_state=ONE_STATE,
            state_content_bytes=tile_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class ChunkSpec(ChunkedLocalAttentionSpec):
    """Chunks of the model's own, which vLLM would put into one group: its blocks would be wider than the full heads.

    Layers of one `bin` share a cache group; see `Groups`.
    """

    bin: int

    @classmethod
    def of(cls, spec: ChunkedLocalAttentionSpec, bin: int) -> ChunkSpec:
        """A stock spec with a bin."""
        return cls(**arguments(spec), bin=bin)

    def is_uniform_with_collection(self, kv_cache_specs: Mapping[str, Any]) -> bool:
        """Whether these may share a cache group: chunks of one bin."""
        return all(
            isinstance(spec, ChunkSpec)
            and (spec.attention_chunk_size, spec.bin) == (self.attention_chunk_size, self.bin)
            for spec in kv_cache_specs.values()
        )


# the first registration of a spec keeps vLLM from registering its own
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(SinkWindowSpec, SinkWindowManager, uniform_type_base_spec=SinkWindowSpec)
KVCacheSpecRegistry.register(CodesSpec, FullAttentionManager, uniform_type_base_spec=FullAttentionSpec)
KVCacheSpecRegistry.register(ChunkSpec, ChunkedLocalAttentionManager, uniform_type_base_spec=ChunkSpec)
