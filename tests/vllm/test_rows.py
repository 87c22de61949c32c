"""Slots of a cache group: what is stored there is read again, and nothing else of a block changes."""

from __future__ import annotations

import pytest
import torch

from kvsurgery.vllm.rows import NewTokens, Places

BLOCKS, HEADS, SIZE, WIDTH, BEFORE = 5, 2, 4, 6, 9


@pytest.mark.parametrize("after", [3, 5], ids=["whole rows", "a part of a row"])
def test_tokens_are_read_where_they_are_stored(after: int) -> None:
    """Blocks hold something of other layers before and after; with it they may be no whole number of rows."""
    whole = torch.full((BLOCKS, BEFORE + HEADS * SIZE * WIDTH + after), float("nan"))
    cache = whole[:, BEFORE : BEFORE + HEADS * SIZE * WIDTH].unflatten(1, (HEADS, SIZE, WIDTH))
    slots = torch.tensor([6, 15, 16, 9])
    states = torch.arange(len(slots) * HEADS * WIDTH, dtype=torch.float32).view(len(slots), HEADS, WIDTH)
    heads = torch.arange(HEADS)[:, None] * SIZE
    NewTokens.of(slots, SIZE, heads, lean=False).store(cache, states)
    for slot, stored in zip(slots.tolist(), states, strict=True):
        assert torch.equal(cache[slot // SIZE, :, slot % SIZE], stored)
    assert whole.isnan().sum() == whole.numel() - states.numel()
    pairs = slots.view(2, 1, 2)
    found = Places(pairs // SIZE, pairs % SIZE + heads).read(cache)
    assert torch.equal(found, states.view(2, 2, HEADS, WIDTH).transpose(1, 2))
