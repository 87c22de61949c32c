"""Budgeted heads in vLLM: each KV head is an attention of its own, so that heads of like budgets can share blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import AttentionSpec

from kvsurgery.templates.kv_layout import LayerLayout, Selection
from kvsurgery.vllm.backends import budgeted_backend
from kvsurgery.vllm.budgeted import Bin
from kvsurgery.vllm.budgeted_spec import BudgetedSpec


class BudgetedAttention(Attention):
    """Attention of a KV head that keeps `budget` tokens of a prompt, the prompt's last ones, and all later tokens.

    `size` is its tokens of a block, None where they are the engine's.
    """

    def __init__(
        self, *args: Any, budget: int, selection: Selection, bin: Bin, size: int | None, **options: Any
    ) -> None:
        super().__init__(*args, attn_backend=self.backend(), **options)
        self.budget, self.selection, self.bin, self.size = budget, selection, bin, size
        # queries of prompts that come in chunks, by the block of the first one. Those of a cancelled prompt stay until
        # another prompt has first ones in the block.
        self.waiting: dict[int, torch.Tensor] = {}

    def backend(self) -> type:
        """The backend of this head on this platform."""
        return budgeted_backend()

    @property
    def kept(self) -> int:
        """Most tokens of a prompt that it keeps."""
        return self.budget + self.selection.window

    def selected(self, prompt: int) -> tuple[int, int]:
        """The places that selected tokens of a prompt of so many tokens move to: the first, and that after the last."""
        start = max(prompt - self.selection.window, 0)
        return max(start - self.budget, 0), start

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """The cache of this head."""
        stock = super().get_kv_cache_spec(vllm_config)
        assert isinstance(stock, AttentionSpec)
        return BudgetedSpec.of(replace(stock, block_size=self.size or stock.block_size), self.bin)


class BudgetedHeads(nn.Module):
    """The budgeted heads of a layer."""

    def __init__(
        self,
        attention: Attention,
        layer: LayerLayout,
        bins: dict[str, Bin],
        sinks: dict[str, torch.Tensor],
        settings: dict[str, Any],
        kinds: Sequence[Callable[..., BudgetedAttention]],
    ) -> None:
        """Take the place of a layer's stock attention, with its learned sinks and settings.

        `bins` has the bin of each head, by the head's name in vLLM. Of `kinds`, each makes the attention of a head.
        """
        super().__init__()
        assert layer.selection is not None  # as there are budgets
        group = attention.num_heads // attention.num_kv_heads
        self.heads = nn.ModuleList(
            kind(
                num_heads=group,
                num_kv_heads=1,
                prefix=name,
                budget=budget,
                selection=layer.selection,
                bin=bin,
                **{option: logits[index * group : (index + 1) * group] for option, logits in sinks.items()},
                **settings,
            )
            for index, (budget, (name, bin), kind) in enumerate(zip(layer.budgets, bins.items(), kinds, strict=True))
        )

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of [tokens, heads * head_dim]."""
        count = len(self.heads)
        states = zip(*(part.chunk(count, -1) for part in (query, key, value)), strict=True)
        attended = [
            head(*(part.contiguous() for part in parts)) for head, parts in zip(self.heads, states, strict=True)
        ]
        return torch.cat(attended, -1)
