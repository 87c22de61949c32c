"""Tiles of another size, which short texts fill."""

from functools import cache, lru_cache

import pytest

from kvsurgery.templates import kv_codes, kv_cpu, kv_layout, kv_tiles, kv_token_codes

MODULES = (kv_layout, kv_codes, kv_cpu, kv_tiles, kv_token_codes)  # which read how long a tile is
VECTOR = 16  # tokens that the loop in C reads at once


def use_tiles_of(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiles of the templates have this many tokens; the loop in C reads them if they fill its vectors."""
    for module in MODULES:
        monkeypatch.setattr(module, "TILE", tokens)
    loop = None if tokens % VECTOR else cache(kv_cpu.codes_loop.__wrapped__)
    monkeypatch.setattr(kv_tiles, "_codes_loop", lambda: loop)
    # what is kept of other tests is of other tiles
    monkeypatch.setattr(kv_tiles, "visible_to_newest", lru_cache(kv_tiles.visible_to_newest.__wrapped__))
