"""vLLM's manager of the KV cache blocks of streaming heads: sinks and window stay, blocks between them are freed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

from kvsurgery.vllm.groups import skipped_tokens


class SinkWindowManager(SlidingWindowManager):
    """Manages blocks like a sliding window's, except that a request never gives up the blocks of its sinks.

    In a lean group, a step's tokens get blocks only where later steps see them. They get those of the request's tokens
    that no later step sees, even if this step still does: attention stores its new tokens last. Such a request never
    holds more than a window and the sinks, however many tokens a step computes. A block that is given on stays at its
    old place too until the next step: where a prompt grows, the worker gets the whole table anew.
    """

    def __init__(self, kv_cache_spec: Any, **options: Any) -> None:
        super().__init__(kv_cache_spec, **options)
        assert not (kv_cache_spec.lean and self.enable_caching), (
            "other requests could read blocks before they are stored"
        )
        self.sink_blocks = cdiv(kv_cache_spec.sink, self.block_size)
        self.window_starts: dict[str, int] = {}  # the blocks from there to the sinks are freed
        self.old_places: dict[str, list[int]] = {}  # of blocks that the last step has given on

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens before the window of the next token."""
        spec = self.kv_cache_spec
        return skipped_tokens(num_computed_tokens, spec.sink, spec.sliding_window, spec.stride)

    def _skipped_blocks(self, computed_tokens: int) -> int:
        return self.get_num_skipped_tokens(computed_tokens) // self.block_size

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks between the sinks and the window."""
        self._leave_old_places(request_id)
        blocks = self.req_to_blocks[request_id]
        first_block = self.window_starts.get(request_id, self.sink_blocks)
        end_block = min(self._skipped_blocks(processed_computed_tokens), len(blocks))
        if end_block > first_block:
            # unlike the stock method, this passes blocks that are null already
            self.block_pool.free_blocks(
                [block for block in reversed(blocks[first_block:end_block]) if not block.is_null]
            )
            blocks[first_block:end_block] = [self._null_block] * (end_block - first_block)
            self.window_starts[request_id] = end_block

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """Forget a request, and return its blocks."""
        self._leave_old_places(request_id)
        self.window_starts.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def _leave_old_places(self, request_id: str) -> None:
        """Let a request have each of its blocks at one place."""
        for index in self.old_places.pop(request_id, ()):
            self.req_to_blocks[request_id][index] = self._null_block

    def _lean_changes(self, request_id: str, num_tokens: int) -> tuple[list[int], list[int]]:
        """Blocks of a request that it needs for so many tokens, and held ones that it needs for this step at most."""
        blocks = self.req_to_blocks.get(request_id, [])
        seen = max(self._skipped_blocks(num_tokens - self.kv_cache_spec.drafts), self.sink_blocks)
        new = range(len(blocks), cdiv(num_tokens, self.block_size))
        old = range(self.window_starts.get(request_id, self.sink_blocks), min(seen, len(blocks)))
        return (
            [index for index in new if index < self.sink_blocks or index >= seen],
            [index for index in old if not blocks[index].is_null],
        )

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        """Give a request the blocks of its new tokens; returns them, null ones included."""
        if not self.kv_cache_spec.lean:
            return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        needed, left = self._lean_changes(request_id, num_tokens)
        blocks = self.req_to_blocks[request_id]
        first_new = len(blocks)
        blocks.extend([self._null_block] * (cdiv(num_tokens, self.block_size) - first_new))
        for index, old in zip(needed, left, strict=False):
            blocks[index] = blocks[old]
        self.old_places[request_id] = left[: len(needed)]
        further = needed[len(left) :]
        for index, block in zip(further, self.block_pool.get_new_blocks(len(further)), strict=True):
            blocks[index] = block
        if self._record_new_block_ids:
            self.new_block_ids.extend(blocks[index].block_id for index in further)
        return blocks[first_new:]

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Any],
        total_computed_tokens: int,
        *args: Any,
        **options: Any,
    ) -> int:
        """Blocks that a request takes from the pool.

        The stock count leaves out cached blocks before the window; the sinks among them are taken too."""
        if self.kv_cache_spec.lean and not options.get("apply_admission_cap"):
            needed, left = self._lean_changes(request_id, num_tokens)
            return max(len(needed) - len(left), 0)
        count = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, *args, **options
        )
        if request_id not in self.num_cached_block:
            skipped_sinks = min(self._skipped_blocks(total_computed_tokens), self.sink_blocks)
            count += self._get_num_evictable_blocks(new_computed_blocks[:skipped_sinks])
        return count

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[Any],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Give a request its cached blocks: those of the sinks and of the window."""
        assert not num_external_computed_tokens, "KV connectors are refused at start"
        blocks = list(new_computed_blocks)
        for index in range(self.sink_blocks, min(self._skipped_blocks(num_local_computed_tokens), len(blocks))):
            blocks[index] = self._null_block
        if self.enable_caching:
            self.block_pool.touch([block for block in blocks if not block.is_null])
        self.req_to_blocks[request_id].extend(blocks)
        self.num_cached_block[request_id] = len(blocks)

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
        """The longest cached prefix: a window and all sinks, or else the sinks before the first that is missing."""
        hit_blocks, length = super().find_longest_cache_hit(
            block_hashes=block_hashes,
            max_length=max_length,
            kv_cache_group_ids=kv_cache_group_ids,
            block_pool=block_pool,
            kv_cache_spec=kv_cache_spec,
            alignment_tokens=alignment_tokens,
            **options,
        )
        size = kv_cache_spec.block_size
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
            alignment_tokens=alignment_tokens,
        )
        for index in range(min(cdiv(kv_cache_spec.sink, size), length // size)):
            cached_blocks = block_pool.get_cached_block(hashes[index], kv_cache_group_ids)
            if cached_blocks is None:
                length = index * size // alignment_tokens * alignment_tokens
                break
            for blocks, block in zip(hit_blocks, cached_blocks, strict=True):
                blocks[index] = block
        for blocks in hit_blocks:
            del blocks[length // size :]
        return hit_blocks, length

    @classmethod
    def reachable_block_mask(
        cls,
        start_block: int,
        end_block: int,
        alignment_tokens: int | None,
        kv_cache_spec: Any,
        *args: Any,
        **options: Any,
    ) -> list[bool] | None:
        """Which full blocks are worth caching: the stock choice, and every sink."""
        mask = super().reachable_block_mask(start_block, end_block, alignment_tokens, kv_cache_spec, *args, **options)
        if mask is not None:
            sinks = cdiv(kv_cache_spec.sink, kv_cache_spec.block_size)
            for index in range(start_block, min(end_block, sinks)):
                mask[index - start_block] = True
        return mask
