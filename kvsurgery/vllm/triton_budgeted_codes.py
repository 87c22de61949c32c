"""Attention of budgeted heads on a GPU whose older tokens lie in quantized tiles.

Prompts are read as without tiles. Tokens after them see tiles that differ by budget, so a step is planned for all heads
of a cache group at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from kvsurgery.templates.kv_codes import nearest, rotated
from kvsurgery.templates.kv_layout import TILE
from kvsurgery.templates.kv_softmax import Scoring
from kvsurgery.vllm import paged_budgets, paged_codes
from kvsurgery.vllm.budgeted import first_block
from kvsurgery.vllm.budgeted_selection import Reading, SelectingTilesImpl
from kvsurgery.vllm.paged_budgets import Blocks
from kvsurgery.vllm.paged_codes import Line, Pages, QueryBlocks, lines, programs_of
from kvsurgery.vllm.paged_pack import DueTiles, most_due, pack
from kvsurgery.vllm.pages import from_page, rotated_query, stored_form
from kvsurgery.vllm.rows import Places
from kvsurgery.vllm.triton_budgets import Batch, BudgetedBuilder
from kvsurgery.vllm.triton_pages import PagesBackend, PagesImpl


@dataclass(frozen=True)
class NewestStep:
    """A step in a cache group of newest tokens.

    Attributes:
        slots: where the new tokens are stored.
        table: [requests, blocks], the block table.
        prompts: the new tokens of prompts; None where there are none.
        reading: the requests of which this step reads them.
        heads: the number of each head, by the name of its cache.
        due_pages, due_slots: [heads, due, TILE], where the tokens lie that a head packs.
    """

    slots: Places
    table: torch.Tensor
    prompts: Blocks | None
    reading: list[Reading]
    heads: dict[str, int]
    due_pages: torch.Tensor
    due_slots: torch.Tensor


@dataclass(frozen=True)
class CodesStep:
    """A step in a cache group of tiles.

    Attributes:
        table: [requests, blocks], the block table.
        heads: the number of each head, by the name of its cache.
        due: [heads, due], the page of each tile that a head packs; -1: there is none.
        most: of each head, the number of the first of these that there may be.
        tokens: [after], the places in the batch of tokens after prompts; None: those of all of the batch, in order.
        blocks: a block for each of these and each head, [heads, after].
        lines: units of work of all heads.
    """

    table: torch.Tensor
    heads: dict[str, int]
    due: torch.Tensor
    most: list[int]
    tokens: torch.Tensor | None
    blocks: QueryBlocks
    lines: list[Line]

    def of(self, head: int) -> tuple[QueryBlocks, list[Line]]:
        """Blocks and lines of a head."""
        blocks = self.blocks._replace(rows=self.blocks.rows[head])
        return blocks, [Line(*(part[head] for part in line)) for line in self.lines]


class TiledBudgetsBuilder(BudgetedBuilder):
    """Finds which tiles the heads of a cache group pack."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
        self.heads = {name: number for number, name in enumerate(layer_names)}
        self.kept = torch.tensor([[layer.kept] for layer in layers], dtype=torch.int32, device=device)
        self.tiling, self.most_kept = self.layer.tiling, self.layer.bin.kept

    def dropped(self, prompts: torch.Tensor) -> torch.Tensor:
        """Tokens of prompts [n] that each head has dropped: [heads, n]."""
        return (prompts - self.kept).clamp(min=0)

    def due(self, batch: Batch) -> tuple[DueTiles, torch.Tensor]:
        """Tiles that each head completes, and the tokens that it has dropped of the tiles' requests."""
        dropped = self.dropped(batch.prompts)

        def packed(tokens: torch.Tensor) -> torch.Tensor:
            return torch.where(tokens >= batch.prompts, self.tiling.packed(tokens - dropped), 0)

        due = DueTiles.of(packed(batch.pasts), packed(batch.totals), self._most_due(batch))
        return due, dropped.gather(1, due.requests)

    def _most_due(self, batch: Batch) -> int:
        """Most tiles that a head completes: the host knows positions only of requests whose prompts are read."""
        decoding = [count for row, count in enumerate(batch.new) if row not in batch.reading]
        complete = [
            min(request.prompt, self.most_kept) + request.total - request.prompt
            for request in batch.reading.values()
            if request.total >= request.prompt
        ]
        return most_due(decoding) + sum(max(tokens - self.tiling.sink, 0) // TILE for tokens in complete)


class BudgetedNewestBuilder(TiledBudgetsBuilder):
    """Finds the slots of prompts that are read, and of the newest tokens."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> NewestStep:
        """Translate the work of a batch to slots of this cache group."""
        batch = Batch.of(common_attn_metadata)
        table = common_attn_metadata.block_table_tensor
        due, dropped = self.due(batch)
        tokens = due.tokens(self.tiling) + dropped[..., None]
        columns = (tokens // self.size).clamp(max=table.shape[1] - 1)  # of room for tiles that are not due
        return NewestStep(
            batch.slots(common_attn_metadata, self.size),
            table,
            batch.of_prompts(self.block_size(batch)) if batch.reading else None,
            [*batch.reading.values()],
            self.heads,
            table[due.requests[..., None], columns].long(),
            tokens % self.size,
        )


class BudgetedCodesBuilder(TiledBudgetsBuilder):
    """Finds the pages of the tiles, and what tokens after prompts read.

    Each is a block of its own: only requests that are computed again have several in a step.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        # to round by the queries takes so many launches that the device is waited for, to know what is due
        self.waits = any(layers[name].round_keys is not nearest for name in layer_names)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> CodesStep:
        """Translate the work of a batch to pages of this cache group."""
        batch = Batch.of(common_attn_metadata)
        table = common_attn_metadata.block_table_tensor
        due, dropped = self.due(batch)
        columns = self.tiling.block(due.tiles, dropped).clamp(max=table.shape[1] - 1)
        pages = torch.where(due.valid, table[due.requests, columns].long(), -1)
        most = due.valid.sum(1).tolist() if self.waits else [due.valid.shape[1]] * len(self.heads)
        request, token, count, position, prompt = batch.after_prompts(1).rows.unbind(1)
        number = torch.arange(len(token), device=token.device)
        gaps = self.dropped(prompt)
        tiles = self.tiling.read(position - gaps)
        layer, programs = self.layer, programs_of(table.device)
        first_sinks = first_block(prompt, self.most_kept, layer.newest.size) * layer.newest.size
        fields = (request, number, count, position, tiles, gaps, first_sinks)
        rows = torch.stack(torch.broadcast_tensors(*fields), -1).int()
        blocks = QueryBlocks(1, rows, number)
        in_lines = lines(blocks, 1, layer.num_heads, layer.head_size, self.dtype, programs) if len(token) else []
        return CodesStep(table, self.heads, pages, most, token.long() if batch.reading else None, blocks, in_lines)


class BudgetedCodesImpl(SelectingTilesImpl, PagesImpl):
    """Attention of one KV head with a budget: reads prompts as they are, and then attends to tiles."""

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
        """Store new tokens in the caches of a head, and write their attention to an output.

        Key and value are [tokens, 1, head_dim], the cache [pages, 1, 1, bytes], query and output [tokens, query_heads,
        head_dim].
        """
        if attn_metadata is None:  # a step without requests, to measure memory
            return output.fill_(0)
        newest: NewestStep = get_forward_context().attn_metadata[layer.newest.layer_name]
        quantization, cache, count = layer.quantization, layer.newest.kv_cache, len(newest.slots.slots)
        query = rotated_query(quantization, query[:count])
        states = torch.cat(stored_form(quantization, key[:count], value[:count]), -1)
        newest.slots.store(cache, states)
        scoring = Scoring(self.scale, self.logits_soft_cap or None, sinks=self.sinks)
        if newest.prompts is not None:
            attended = torch.zeros_like(output[:count])
            paged_budgets.attend(query, cache, newest.table, newest.prompts, layer.kept, scoring, attended)
            rotates = quantization.rotate != "none"
            output[:count] = rotated(attended, rotates * self.num_queries_per_kv, back=True)
            for request in newest.reading:
                self.observe(layer, request, query, cache)
        step, head = attn_metadata, attn_metadata.heads[layer.layer_name]
        tiles = from_page(kv_cache[:, :, 0], self.head_size, cache.dtype, quantization)
        if most := step.most[head]:
            if layer.round_keys is not nearest:
                layer.round_keys = layer.round_keys.to(cache.device)
            newest_head = newest.heads[layer.newest.layer_name]
            due = newest.due_pages[newest_head, :most], newest.due_slots[newest_head, :most], step.due[head, :most]
            pack(cache, *due, tiles, quantization, layer.round_keys)
        if step.lines:
            chosen = slice(count) if step.tokens is None else step.tokens
            after = output[chosen]
            pages = Pages(tiles, step.table, cache, newest.table)
            paged_codes.attend(query[chosen], pages, *step.of(head), scoring, quantization, after)
            if step.tokens is not None:
                output[chosen] = after
        return output


class BudgetedNewestBackend(PagesBackend):
    """Backend of the cache of newest tokens, which has no attention of its own."""

    impl = BudgetedCodesImpl
    builder = BudgetedNewestBuilder


class BudgetedCodesBackend(PagesBackend):
    """Backend of the cache of tiles."""

    impl = BudgetedCodesImpl
    builder = BudgetedCodesBuilder
