"""Attention of budgeted heads on a CPU whose older tokens lie in quantized tiles."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.functional import pad
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionMetadataBuilder

from kvsurgery.vllm.budgeted import first_block
from kvsurgery.vllm.budgeted_cpu import BudgetedBuilder, BudgetedImpl
from kvsurgery.vllm.budgeted_selection import Reading, SelectingTilesImpl
from kvsurgery.vllm.cpu import GatheringBackend
from kvsurgery.vllm.cpu_codes import CodesImpl, CodesStep, NewestStep, compile_loops
from kvsurgery.vllm.pages import rotated_query, stored_form
from kvsurgery.vllm.rows import NewTokens, Places
from kvsurgery.vllm.tiles import TiledPlan, Tiling, due_tiles, pieces_of


@dataclass(frozen=True)
class NewestBudgets:
    """A step in a cache group of newest tokens.

    Attributes:
        slots: slots of the new tokens.
        reading: requests of which this step reads tokens of the prompt.
        table: [requests, blocks], of the requests whose prompt is complete after this step; so are the next ones.
        batch: [tokens], indices of their new tokens after the prompt in the batch, request by request.
        pasts, totals, prompts: [requests], tokens before and after this step, and of the prompt.
        firsts: [requests], the place of the first token of each head.
        rows: [requests], their rows in block tables.
    """

    slots: Places
    reading: list[Reading]
    table: torch.Tensor
    batch: torch.Tensor
    pasts: torch.Tensor
    totals: torch.Tensor
    prompts: torch.Tensor
    firsts: torch.Tensor
    rows: torch.Tensor
    size: int

    @property
    def starts(self) -> torch.Tensor:
        """[requests + 1], places in `batch` where the tokens of each request start, and the end."""
        new = self.totals - torch.maximum(self.pasts, self.prompts)
        return pad(new.cumsum(0), (1, 0))

    def places(self, rows: torch.Tensor, positions: torch.Tensor, dropped: torch.Tensor, sink: int) -> Places:
        """Slots of a head at positions among what it has kept, of requests that have dropped some tokens."""
        columns = positions + torch.where(positions < sink, self.firsts[rows], dropped[rows])
        return Places(self.table[rows, columns // self.size][:, None], (columns % self.size)[:, None])


@dataclass
class BudgetedCodesStep:
    """A step in a cache group of tiles: the block table, and the work of heads with a budget, found once."""

    table: torch.Tensor
    _found: dict[tuple[int, int], tuple[CodesStep, NewestStep]] = field(default_factory=dict)

    def of(self, budget: int, window: int, tiling: Tiling, newest: NewestBudgets) -> tuple[CodesStep, NewestStep]:
        """What is packed and read; `newest` is the step of the head's newest tokens."""
        if (budget, id(newest)) not in self._found:
            dropped = (newest.prompts - window - budget).clamp(min=0)
            before = tiling.packed(newest.pasts - dropped).where(newest.pasts >= newest.prompts, 0)
            totals = newest.totals - dropped
            due = due_tiles(before, totals, tiling)
            pieces = pieces_of(newest.starts, totals, tiling)

            def pages(rows: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
                return self.table[newest.rows[rows], tiling.block(tiles, dropped[rows])]

            def places(rows: torch.Tensor, positions: torch.Tensor) -> Places:
                return newest.places(rows, positions, dropped, tiling.sink)

            self._found[budget, id(newest)] = (
                CodesStep(
                    TiledPlan(due, tuple(replace(piece, batch=newest.batch[piece.batch]) for piece in pieces)),
                    pages(due.rows, due.tiles).flatten(),
                    [pages(piece.rows, piece.tiles) for piece in pieces],
                ),
                NewestStep(
                    NewTokens(len(newest.slots.slots), newest.slots),
                    places(due.rows, due.tokens),
                    [places(piece.rows, piece.keys) for piece in pieces],
                ),
            )
        return self._found[budget, id(newest)]


class BudgetedNewestBuilder(BudgetedBuilder):
    """Finds the slots of prompts that are read, and of the newest tokens."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.kept = kv_cache_spec.kept

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """The requests of a batch, in slots of this cache group."""
        step = super().build(common_prefix_len, common_attn_metadata, fast_build)
        starts = common_attn_metadata.query_start_loc.long()
        totals = common_attn_metadata.seq_lens.long()
        prompts = common_attn_metadata.rswa_prefix_lens.long()[: len(totals)]
        pasts = totals - starts.diff()
        (rows,) = ((totals >= prompts) & (totals > pasts)).nonzero(as_tuple=True)
        firsts = starts[:-1] + (prompts - pasts).clamp(min=0)
        spans = [torch.arange(first, end) for first, end in zip(firsts[rows], starts[1:][rows], strict=True)]
        return NewestBudgets(
            step.slots,
            [request for request in step.reading if request.past < request.prompt],
            common_attn_metadata.block_table_tensor.long()[rows],
            torch.cat([firsts[:0], *spans]),
            pasts[rows],
            totals[rows],
            prompts[rows],
            first_block(prompts[rows], self.kept, self.size) * self.size,
            rows,
            self.size,
        )


class BudgetedCodesBuilder(AttentionMetadataBuilder[BudgetedCodesStep]):
    """Takes the block table of the tiles."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        compile_loops(layer_names, vllm_config)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> BudgetedCodesStep:
        """The block table of a step; what is read from it depends on a head's budget."""
        return BudgetedCodesStep(common_attn_metadata.block_table_tensor.long())


class BudgetedCodesImpl(SelectingTilesImpl, BudgetedImpl, CodesImpl):
    """Reads prompts as they are, and then attends to tiles."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store new tokens in the caches of a head, and write their attention to an output, as `CodesImpl` does."""
        if attn_metadata is None:  # a step without requests, to measure memory
            return output
        # layers that share a cache are refused
        assert key is not None
        assert value is not None
        newest: NewestBudgets = get_forward_context().attn_metadata[layer.newest.layer_name]
        count, cache = len(newest.slots.slots), layer.newest.kv_cache
        query = rotated_query(layer.quantization, query[:count])
        states = torch.cat(stored_form(layer.quantization, key[:count], value[:count]), -1)
        newest.slots.store(cache, states)
        for request in newest.reading:
            self._read_prompt(layer, request, query, cache, output)
            read = slice(request.start, request.start + min(request.prompt, request.total) - request.past)
            output[read] = self._rotated_back(layer.quantization, output[read])
        step, newest_step = attn_metadata.of(layer.budget, layer.selection.window, layer.tiling, newest)
        self._pack(layer, kv_cache, newest_step, step, states)
        self._attend_to_both(layer, query, kv_cache, newest_step, step, states, output)
        return output


class BudgetedNewestBackend(GatheringBackend):
    """Backend of the cache of newest tokens, which has no attention of its own."""

    impl = BudgetedCodesImpl
    builder = BudgetedNewestBuilder


class BudgetedCodesBackend(GatheringBackend):
    """Backend of the cache of tiles."""

    impl = BudgetedCodesImpl
    builder = BudgetedCodesBuilder
