"""Attention of budgeted heads on a GPU: to the whole prompt while it comes in, then to what a head has selected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder

from kvsurgery.templates.kv_softmax import Scoring
from kvsurgery.vllm.budgeted_selection import Reading, SelectingImpl, ask_for_prompts
from kvsurgery.vllm.paged_budgets import Blocks, attend, block_size
from kvsurgery.vllm.paged_codes import programs_of
from kvsurgery.vllm.rows import Places
from kvsurgery.vllm.triton_pages import PagesBackend, PagesImpl


@dataclass(frozen=True)
class Step:
    """A step in a cache group.

    Attributes:
        tokens: number of new tokens, without padding.
        slots: where these are stored.
        table: [requests, blocks], the block table.
        blocks: the new tokens, which see all before while their prompt is read.
        reading: requests of which this step reads tokens of the prompt.
        after: those after prompts, attended to again where a head selects in between, None where it does not. Only
            requests that are computed again have tokens after the end of a prompt that the step reads.
    """

    tokens: int
    slots: Places
    table: torch.Tensor
    blocks: Blocks
    reading: list[Reading]
    after: Blocks | None


@dataclass(frozen=True)
class Batch:
    """Requests of a step. Where one reads no prompt, nothing was waited for.

    Attributes:
        new: numbers of new tokens, on the host.
        firsts, pasts, totals, prompts: [requests], the first new token of each in the batch, and its tokens before this
            step, after it and of the prompt.
        reading: the requests of which this step reads tokens of the prompt, by row.
    """

    new: list[int]
    firsts: torch.Tensor
    pasts: torch.Tensor
    totals: torch.Tensor
    prompts: torch.Tensor
    reading: dict[int, Reading]

    @classmethod
    def of(cls, metadata: Any) -> Batch:
        """What vLLM tells a builder."""
        new = metadata.query_start_loc_cpu.diff().tolist()
        starts, totals, prompts = metadata.query_start_loc, metadata.seq_lens, metadata.rswa_prefix_lens
        # there are none in a step without requests
        prompts = torch.zeros_like(totals) if prompts is None else prompts[: len(new)]
        reading = _reading(metadata, new, prompts)
        prompts = prompts.to(totals, non_blocking=True)
        return cls(new, starts[:-1], totals - starts.diff(), totals, prompts, reading)

    @property
    def tokens(self) -> int:
        """Number of new tokens, without padding."""
        return sum(self.new)

    def slots(self, metadata: Any, size: int) -> Places:
        """Where they are stored, in blocks of `size` tokens."""
        slots = metadata.slot_mapping[: self.tokens, None, None]
        slots = slots.clamp(min=0)  # -1, of a step without requests: vLLM leaves block 0 unused
        return Places(slots // size, slots % size)

    def of_prompts(self, size: int) -> Blocks:
        """The new tokens of prompts, which see all before."""
        counts = (torch.minimum(self.totals, self.prompts) - self.pasts).clamp(min=0)
        new = [0] * len(self.new)
        for row, request in self.reading.items():
            new[row] = min(request.prompt, request.total) - request.past
        return Blocks.of(self.firsts, counts, self.pasts, self.prompts, new, size, 1)

    def after_prompts(self, size: int) -> Blocks:
        """The new tokens after prompts."""
        ends = torch.maximum(self.pasts, self.prompts)
        counts = (self.totals - ends).clamp(min=0)
        new = [*self.new]
        for row, request in self.reading.items():
            new[row] = max(request.total - request.prompt, 0)
        return Blocks.of(self.firsts + ends - self.pasts, counts, ends, self.prompts, new, size, 1)


def _reading(metadata: Any, new: list[int], prompts: torch.Tensor) -> dict[int, Reading]:
    """The requests of which a step reads tokens of the prompt, by row.

    The device is waited for where the runner has the lengths of prompts there, which vLLM's second one does.
    """
    if not metadata.is_prefilling.any():
        return {}
    starts = metadata.query_start_loc_cpu.tolist()
    totals = metadata.seq_lens_cpu_upper_bound.tolist()
    requests = {
        row: Reading(starts[row], totals[row] - count, totals[row], prompt, metadata.block_table_tensor[row])
        for row, (count, prompt) in enumerate(zip(new, prompts.tolist(), strict=True))
        if count
    }
    return {row: request for row, request in requests.items() if request.past < request.prompt}


class BudgetedBuilder(AttentionMetadataBuilder[Any]):
    """Divides the new tokens of a step, once for all heads of a cache group, whatever their budgets.

    How much there is to launch depends on the numbers of new tokens, so steps run without a full CUDA graph.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self.size, self.dtype = kv_cache_spec.block_size, vllm_config.model_config.dtype
        ask_for_prompts(vllm_config)

    def block_size(self, batch: Batch) -> int:
        """Most tokens of a block."""
        return block_size(self.layer.num_heads, max(batch.new), self.layer.head_size, self.dtype)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """The work of a batch, in slots of this cache group."""
        batch = Batch.of(common_attn_metadata)
        size = self.block_size(batch)
        counts, programs = batch.totals - batch.pasts, programs_of(batch.totals.device)
        return Step(
            batch.tokens,
            batch.slots(common_attn_metadata, self.size),
            common_attn_metadata.block_table_tensor,
            Blocks.of(batch.firsts, counts, batch.pasts, batch.prompts, batch.new, size, programs),
            [*batch.reading.values()],
            batch.after_prompts(size) if any(one.total > one.prompt for one in batch.reading.values()) else None,
        )


class BudgetedImpl(SelectingImpl, PagesImpl):
    """Attention of one KV head with a budget."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Step | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store new tokens in a cache, and write their attention to an output; at the end of a prompt select.

        Key and value are [tokens, 1, head_dim], the cache [blocks, 1, slots, 2 * head_dim], query and output [tokens,
        query_heads, head_dim].
        """
        if attn_metadata is None:  # a step without requests, to measure memory
            return output.fill_(0)
        step = attn_metadata
        step.slots.store(kv_cache, torch.cat((key[: step.tokens], value[: step.tokens]), -1))
        scoring = Scoring(self.scale, self.logits_soft_cap or None, sinks=self.sinks)
        attend(query, kv_cache, step.table, step.blocks, layer.kept, scoring, output)
        for request in step.reading:
            self.observe(layer, request, query, kv_cache)
        if step.after is not None:
            attend(query, kv_cache, step.table, step.after, layer.kept, scoring, output)
        return output


class BudgetedBackend(PagesBackend):
    """Backend of budgeted heads."""

    impl = BudgetedImpl
    builder = BudgetedBuilder
