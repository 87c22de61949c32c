"""Which tiles a step packs and which tokens it reads, planned without an engine."""

from __future__ import annotations

from itertools import accumulate

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.templates.kv_layout import EVERY, TILE, Quantization
from kvsurgery.vllm.tiles import TiledPiece, Tiling, plan

REQUESTS = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 500)), min_size=1, max_size=4)
TILINGS = st.builds(Tiling, st.integers(0, 150), st.integers(0, 200), st.sampled_from([EVERY, 700]))


def read_by(piece: TiledPiece, index: int, query: int) -> tuple[list[int], list[int]]:
    """Tokens that a query of a request reads as they came, and from tiles."""
    kept = piece.keys[index][~piece.hidden[index, 0, 0, query]].tolist()
    columns = piece.tiles.shape[1]
    tokens = piece.tiles[index, :, None] * TILE + piece.tiling.sink + torch.arange(TILE)
    packed = []
    for span in (slice(0, 2), slice(2, columns)):
        if tokens[span].numel():
            hidden = piece.hidden_in(span)[index, 0, 0, query]
            packed += tokens[span][~hidden.expand(-1, TILE)].tolist()
    return kept, packed


@given(REQUESTS, TILINGS)
def test_every_new_token_reads_all_that_it_sees_once_and_the_tiles_of_the_emitted_model(
    requests: list[tuple[int, int]], tiling: Tiling
) -> None:
    """Requests have so many tokens in the cache, and so many new ones."""
    quantization = Quantization(4, residual=tiling.residual, sink=tiling.sink)
    starts = (0, *accumulate(new for _, new in requests))
    steps = plan(starts, tuple(past + new for past, new in requests), tiling)
    read: dict[int, tuple[list[int], list[int]]] = {}
    for piece in steps.pieces:
        for index, row in enumerate(piece.rows.flatten().tolist()):
            past, _ = requests[row]
            for query in {0, piece.new // 2, piece.new - 1}:
                token = int(piece.batch.view(-1, piece.new)[index, query])
                position = past + token - starts[row]
                assert int(piece.positions[index, query]) == position
                read[token] = read_by(piece, index, query)
                kept, packed = read[token]
                tokens = position + (tiling.recent == EVERY)  # streaming heads read what was packed before a token came
                end = tiling.sink + TILE * quantization.tiles(tokens - tiling.sink)
                in_window = range(max(tiling.sink, position - tiling.recent + 1), position + 1)
                assert sorted(packed) == [token for token in in_window if token < end]
                assert sorted(kept) == [
                    token for token in range(position + 1) if token < tiling.sink or token >= max(end, tiling.sink)
                ]
                # what the cache of newest tokens has not freed before this step
                assert min((token for token in kept if token >= tiling.sink), default=past) > past - tiling.newest
    assert sorted(torch.cat([piece.batch for piece in steps.pieces]).tolist()) == [*range(starts[-1])]


@given(REQUESTS, TILINGS)
def test_a_tile_is_packed_with_its_last_token_into_the_block_of_that_token(
    requests: list[tuple[int, int]], tiling: Tiling
) -> None:
    starts = (0, *accumulate(new for _, new in requests))
    due = plan(starts, tuple(past + new for past, new in requests), tiling).due
    found = zip(due.rows.flatten().tolist(), due.tiles.flatten().tolist(), due.tokens.tolist(), strict=True)
    expected = []
    for row, (past, new) in enumerate(requests):
        for tile in range((past + new) // TILE + 1):
            tokens = [*range(tiling.sink + tile * TILE, tiling.sink + (tile + 1) * TILE)]
            if past <= tokens[-1] < past + new:
                expected.append((row, tile, tokens))
                assert tokens[-1] // TILE == tiling.block(torch.tensor(tile))
                assert tokens[0] > past - tiling.newest
    assert [*found] == expected
