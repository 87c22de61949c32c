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
from kvsurgery.vllm.rows import Places, rows_of
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
        after: those that come after the end of a prompt that the step reads, so that a head selects in between; None
            where there are none. Only requests that are computed again have some.
    """

    tokens: int
    slots: Places
    table: torch.Tensor
    blocks: Blocks
    reading: list[Reading]
    after: Blocks | None


class BudgetedBuilder(AttentionMetadataBuilder[Step]):
    """Divides the new tokens of a step, once for all heads of a cache group, whatever their budgets.

    How much there is to launch depends on the numbers of new tokens, so steps run without a full CUDA graph.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self.size, self.dtype = kv_cache_spec.block_size, vllm_config.model_config.dtype
        ask_for_prompts(vllm_config)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        """The work of a batch, in slots of this cache group. In a step that reads no prompt, nothing is waited for."""
        new = common_attn_metadata.query_start_loc_cpu.diff().tolist()
        starts, lengths = common_attn_metadata.query_start_loc, common_attn_metadata.seq_lens
        counts = starts.diff()
        pasts = lengths - counts
        prompts = common_attn_metadata.rswa_prefix_lens
        # there are none in a step without requests
        prompts = torch.zeros_like(lengths) if prompts is None else prompts[: len(new)]
        reading = self._reading(common_attn_metadata, new, prompts)
        prompts = prompts.to(lengths, non_blocking=True)
        size = block_size(self.layer.num_heads, max(new), self.layer.head_size, self.dtype)
        after = None
        if any(request.total > request.prompt for request in reading.values()):
            left = [
                max(reading[row].total - reading[row].prompt, 0) if row in reading else 0 for row in range(len(new))
            ]
            ends = torch.maximum(pasts, prompts)
            beyond = torch.where(pasts < prompts, lengths - ends, 0).clamp(min=0)
            after = Blocks.of(starts[:-1] + ends - pasts, beyond, ends, prompts, left, size, 1)
        slots = common_attn_metadata.slot_mapping[: sum(new), None, None]
        slots = slots.clamp(min=0)  # -1, of a step without requests: vLLM leaves block 0 unused
        return Step(
            sum(new),
            Places(slots // self.size, slots % self.size),
            common_attn_metadata.block_table_tensor,
            Blocks.of(starts[:-1], counts, pasts, prompts, new, size, programs_of(starts.device)),
            [*reading.values()],
            after,
        )

    def _reading(self, metadata: Any, new: list[int], prompts: torch.Tensor) -> dict[int, Reading]:
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
        kept = layer.budget + layer.selection.window
        states = torch.cat((key[: step.tokens], value[: step.tokens]), -1)[:, 0]
        rows_of(kv_cache).index_copy_(0, step.slots.rows(kv_cache), states)
        scoring = Scoring(self.scale, self.logits_soft_cap or None, sinks=self.sinks)
        attend(query, kv_cache, step.table, step.blocks, kept, scoring, output)
        for request in step.reading:
            self.observe(layer, request, query, kv_cache)
        if step.after is not None:
            attend(query, kv_cache, step.table, step.after, kept, scoring, output)
        return output


class BudgetedBackend(PagesBackend):
    """Backend of budgeted heads."""

    impl = BudgetedImpl
    builder = BudgetedBuilder
