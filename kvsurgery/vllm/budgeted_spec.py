"""The KV cache of budgeted heads as vLLM plans and manages it: blocks before what a prompt's heads keep are freed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import torch
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvsurgery.templates.kv_layout import TILE
from kvsurgery.vllm.budgeted import Bin, first_block
from kvsurgery.vllm.manager import SinkWindowManager
from kvsurgery.vllm.spec import SinkWindowSpec, arguments
from kvsurgery.vllm.tiles import Tiling


class PromptsManager(SingleTypeKVCacheManager):
    """The part of a cache manager beside budgeted heads that lets requests share blocks of prompts only.

    Keys and values of later tokens depend on what heads have dropped, those of full heads too: as a part of a prompt,
    the same tokens have others.
    """

    def shared_tokens(self, request: Any) -> int:
        """The first tokens of a request whose blocks others may share."""
        return request.num_prompt_tokens

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **options: Any) -> None:
        """Let later requests find the blocks of the first tokens."""
        super().cache_blocks(request, min(num_tokens, self.shared_tokens(request)), *args, **options)


@dataclass(frozen=True, kw_only=True)
class PromptsSpec(FullAttentionSpec):
    """Full heads beside budgeted ones, or their tiles."""

    @classmethod
    def beside(cls, spec: FullAttentionSpec) -> PromptsSpec:
        """The cache of full heads whose spec is this where no heads have budgets."""
        return cls(**arguments(spec))


class PromptsFullManager(PromptsManager, FullAttentionManager):
    """Manages the blocks of full heads beside budgeted ones."""


@dataclass(frozen=True, kw_only=True)
class PromptsWindowSpec(SinkWindowSpec):
    """The newest tokens of full heads beside budgeted ones."""

    @classmethod
    def beside(cls, spec: SinkWindowSpec) -> PromptsWindowSpec:
        """The cache of newest tokens whose spec is this where no heads have budgets."""
        return cls(**arguments(spec))


class PromptsWindowManager(PromptsManager, SinkWindowManager):
    """Manages the blocks of newest tokens of full heads beside budgeted ones."""

    @classmethod
    def reachable_block_mask(cls, *args: Any, **options: Any) -> None:
        """Cache every full block: prefixes end before what heads keep, where vLLM by default caches no window."""


@dataclass(frozen=True, kw_only=True)
class WholePromptSpec(AttentionSpec):
    """All tokens until the prompt is complete, of which budgeted heads then keep a part.

    Heads of one `bin` share a cache group, and keep at most `kept` tokens of a prompt, which they move to its last
    places; see `BudgetedGroups`. This is neither a `FullAttentionSpec`, since vLLM would put it into the group of full
    heads, nor a sliding window, as whose vLLM would admit requests.
    """

    bin: int
    kept: int

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """What a request takes at most, while its prompt is read."""
        return cdiv(vllm_config.model_config.max_model_len, self.block_size) * self.page_size_bytes

    def is_uniform_with_collection(self, kv_cache_specs: Mapping[str, Any]) -> bool:
        """Whether these may share a cache group: budgeted heads of one bin."""
        return all(isinstance(spec, type(self)) and spec.bin == self.bin for spec in kv_cache_specs.values())


class WholePromptManager(PromptsManager, FullAttentionManager):
    """Manages blocks like those of full heads, but each request has the last `kept` places of its prompt for itself.

    Its heads move tokens there. A request that is computed again reads no cached blocks: its tokens after the prompt
    may be a part of another prompt, whose blocks hold all tokens.
    """

    def __init__(self, kv_cache_spec: Any, **options: Any) -> None:
        super().__init__(kv_cache_spec, **options)
        self.requests: dict[str, Any] = {}  # those that hold blocks

    def shared_tokens(self, request: Any) -> int:
        """The first tokens of a request whose blocks others may share."""
        return request.num_prompt_tokens - self.kv_cache_spec.kept

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **options: Any) -> None:
        """Let later requests find the blocks of the first tokens."""
        self.requests[request.request_id] = request
        super().cache_blocks(request, num_tokens, *args, **options)

    def _cache_partial_tail_block(self, request: Any, num_tokens: int) -> None:
        """Cache no part of a block: heads write to the last blocks of a prompt."""

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """Forget a request, and return its blocks."""
        blocks = super().pop_blocks_for_free(request_id)
        request = self.requests.pop(request_id, None)
        if request is not None and len(blocks) * self.block_size >= request.num_prompt_tokens:
            request.skip_reading_prefix_cache = True  # tokens after the prompt may be there, or still come
        return blocks

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        *,
        alignment_tokens: int,
        **options: Any,
    ) -> tuple[tuple[list[Any], ...], int]:
        """The longest cached prefix before the last `kept` places of a prompt."""
        size = kv_cache_spec.block_size
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, size)
        # the limit does not follow from `max_length`: where groups differ, vLLM asks again with the least answer
        prompt = len(block_hashes) * block_pool.hash_block_size
        limit = max(min(max_length, prompt - kv_cache_spec.kept), 0)
        found = []
        for block_hash in islice(hashes, limit // size):
            if (blocks := block_pool.get_cached_block(block_hash, kv_cache_group_ids)) is None:
                break
            found.append(blocks)
        length = len(found) * size // alignment_tokens * alignment_tokens
        del found[length // size :]
        return tuple([blocks[group] for blocks in found] for group in range(len(kv_cache_group_ids))), length


@dataclass(frozen=True, kw_only=True)
class BudgetedSpec(WholePromptSpec):
    """After the prompt, its last `kept` places, and all later tokens."""

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


class BudgetedManager(WholePromptManager):
    """Frees the blocks before what is kept once the prompt is complete."""

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks that no head of the group reads any more, once: a window that stands still."""
        assert num_prompt_tokens is not None  # the scheduler knows it
        if processed_computed_tokens >= num_prompt_tokens:
            end_block = first_block(num_prompt_tokens, self.kv_cache_spec.kept, self.block_size)
            self._remove_blocks_in_range(request_id, 0, end_block)


@dataclass(frozen=True, kw_only=True)
class BudgetedNewestSpec(WholePromptSpec):
    """After the prompt, `sink` places from its `first_block` on, and a window of the newest tokens."""

    sink: int
    window: int

    @classmethod
    def of(cls, size: int, head_dim: int, dtype: torch.dtype, tiling: Tiling, bin: Bin) -> BudgetedNewestSpec:
        """The cache of a head's newest tokens, `size` of them a block."""
        common: dict[str, Any] = {"block_size": size, "num_kv_heads": 1, "head_size": head_dim, "dtype": dtype}
        return cls(**common, sink=tiling.sink, window=tiling.newest, kept=bin.kept, bin=bin.index)


class BudgetedNewestManager(WholePromptManager):
    """Frees the blocks before the sinks and those between sinks and window, once the prompt is complete."""

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks that no head of the group reads any more."""
        assert num_prompt_tokens is not None  # the scheduler knows it
        if processed_computed_tokens < num_prompt_tokens:
            return
        spec = self.kv_cache_spec
        sinks = first_block(num_prompt_tokens, spec.kept, self.block_size)
        self._remove_blocks_in_range(request_id, 0, sinks)
        end_block = (processed_computed_tokens - spec.window + 1) // self.block_size
        self._remove_blocks_in_range(request_id, sinks + cdiv(spec.sink, self.block_size), end_block)


KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(PromptsSpec, PromptsFullManager, uniform_type_base_spec=PromptsSpec)
KVCacheSpecRegistry.register(PromptsWindowSpec, PromptsWindowManager, uniform_type_base_spec=SinkWindowSpec)
KVCacheSpecRegistry.register(BudgetedSpec, BudgetedManager, uniform_type_base_spec=BudgetedSpec)
KVCacheSpecRegistry.register(BudgetedNewestSpec, BudgetedNewestManager, uniform_type_base_spec=BudgetedNewestSpec)
