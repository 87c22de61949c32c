"""The KV cache of budgeted heads as vLLM plans and manages it: blocks before what a prompt's heads keep are freed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvsurgery.templates.kv_layout import TILE
from kvsurgery.vllm.budgeted import Bin
from kvsurgery.vllm.tiles import Tiling


@dataclass(frozen=True, kw_only=True)
class WholePromptSpec(AttentionSpec):
    """All tokens until the prompt is complete, of which budgeted heads then keep a part.

    Heads of one `bin` share a cache group; see `BudgetedGroups`. This is neither a `FullAttentionSpec`, since vLLM
    would put it into the group of full heads, nor a sliding window, as whose vLLM would admit requests.
    """

    bin: int

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """What a request takes at most, while its prompt is read."""
        return cdiv(vllm_config.model_config.max_model_len, self.block_size) * self.page_size_bytes

    def is_uniform_with_collection(self, kv_cache_specs: Mapping[str, Any]) -> bool:
        """Whether these may share a cache group: budgeted heads of one bin."""
        return all(isinstance(spec, type(self)) and spec.bin == self.bin for spec in kv_cache_specs.values())


@dataclass(frozen=True, kw_only=True)
class BudgetedSpec(WholePromptSpec):
    """After the prompt, its last `kept` places, and all later tokens."""

    kept: int

    @classmethod
    def of(cls, spec: AttentionSpec, bin: Bin) -> BudgetedSpec:
        """The cache of a head whose stock spec is this."""
        common = {field.name: getattr(spec, field.name) for field in fields(AttentionSpec) if field.init}
        return cls(**common, kept=bin.kept, bin=bin.index)

    @classmethod
    def of_tiles(cls, head_dim: int, tile_bytes: int, bin: Bin) -> BudgetedSpec:
        """The cache of a head's tiles, a tile a block."""
        common: dict[str, Any] = {
            "block_size": TILE,
            "num_kv_heads": 1,
            "head_size": head_dim,
            "dtype": torch.uint8,
            "tokens_per_state": TILE,
            "state_content_bytes": tile_bytes,
        }
        return cls(**common, kept=bin.kept, bin=bin.index)


class BudgetedManager(FullAttentionManager):
    """Manages blocks like those of full heads, and frees those before what is kept once the prompt is complete."""

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks that no head of the group reads any more, once: a window that stands still."""
        assert num_prompt_tokens is not None  # the scheduler knows it
        if processed_computed_tokens >= num_prompt_tokens:
            end_block = max(num_prompt_tokens - self.kv_cache_spec.kept, 0) // self.block_size
            self._remove_blocks_in_range(request_id, 0, end_block)


@dataclass(frozen=True, kw_only=True)
class BudgetedNewestSpec(WholePromptSpec):
    """After the prompt, the first `sink` places, and a window of the newest tokens."""

    sink: int
    window: int

    @classmethod
    def of(cls, size: int, head_dim: int, dtype: torch.dtype, tiling: Tiling, bin: Bin) -> BudgetedNewestSpec:
        """The cache of a head's newest tokens, `size` of them a block."""
        common: dict[str, Any] = {"block_size": size, "num_kv_heads": 1, "head_size": head_dim, "dtype": dtype}
        return cls(**common, sink=tiling.sink, window=tiling.newest, bin=bin.index)


class BudgetedNewestManager(FullAttentionManager):
    """Manages blocks like those of full heads, and once the prompt is complete frees those between sinks and window."""

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks that no head of the group reads any more."""
        assert num_prompt_tokens is not None  # the scheduler knows it
        spec = self.kv_cache_spec
        sinks = cdiv(spec.sink, self.block_size)
        end_block = (processed_computed_tokens - spec.window + 1) // self.block_size
        if processed_computed_tokens >= num_prompt_tokens and end_block > sinks:
            self._remove_blocks_in_range(request_id, sinks, end_block)


KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(BudgetedSpec, BudgetedManager, uniform_type_base_spec=BudgetedSpec)
KVCacheSpecRegistry.register(BudgetedNewestSpec, BudgetedNewestManager, uniform_type_base_spec=BudgetedNewestSpec)
