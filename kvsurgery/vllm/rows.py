"""Slots of a cache group as rows of a layer's cache, so that whole rows are read and written at once. Needs no vLLM."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Places:
    """Slots of a cache group, the same in each of its layers.

    They are blocks [requests, 1, tokens], and each head's slots in them [requests, heads, tokens]."""

    blocks: torch.Tensor
    slots: torch.Tensor
    _rows: torch.Tensor | None = None

    def rows(self, cache: torch.Tensor) -> torch.Tensor:
        """Their rows in `rows_of` a layer's cache, head by head: [requests * heads * tokens]."""
        if self._rows is None:
            self._rows = torch.add(self.slots, self.blocks, alpha=cache.stride(0) // cache.shape[3]).flatten()
        return self._rows


def rows_of(cache: torch.Tensor) -> torch.Tensor:
    """A layer's cache [blocks, heads, slots, 2 * head_dim] as rows of a slot each, those of other layers between them.

    Moving whole rows is several times as fast as indexing blocks, heads and slots.
    """
    blocks, heads, size, width = cache.shape
    count = (blocks - 1) * (cache.stride(0) // width) + heads * size
    return cache.as_strided((count, width), (width, 1))
