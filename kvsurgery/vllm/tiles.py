"""Tiles of a step: those it packs, those its new tokens read, and the tokens they read unpacked.

The result does not depend on how a prompt is cut into steps: the token at a position reads the tiles that the emitted
model has packed by then, and the later tokens unquantized. A tile is packed when its last token arrives, into the page
of that token's block, so a request with the same prefix finds every tile it needs in the pages of whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from kvsurgery.templates.kv_layout import EVERY, TILE, Quantization

QUERIES = TILE  # new tokens of a request that attend at a time: they differ by one tile at most
GATHERED = 1 << 14  # tokens of a head that are gathered at a time, beside those in tiles


@dataclass(frozen=True)
class Tiling:
    """Which tokens of a head are in tiles, and which a query sees.

    The first `sink` tokens, the newest `residual` tokens and those of an incomplete tile stay unpacked. Beyond the
    sinks, a query of a streaming head sees the `recent` latest tokens.
    """

    sink: int
    residual: int
    recent: int = EVERY

    @classmethod
    def of(cls, quantization: Quantization) -> Tiling:
        """The tiling of full heads."""
        return cls(quantization.sink, quantization.residual)

    @property
    def newest(self) -> int:
        """Most of the newest tokens that a new token reads unpacked or packs, itself included."""
        return self.residual + TILE

    def block(self, tiles: torch.Tensor, dropped: torch.Tensor | int = 0) -> torch.Tensor:
        """Index of the block that holds each tile, that of the tile's last token; blocks and tiles have the same size.

        Args:
            dropped: tokens between the sinks and the first tile that a head has dropped.
        """
        return (dropped + self.sink + (tiles + 1) * TILE - 1) // TILE

    def read(self, positions: torch.Tensor) -> torch.Tensor:
        """Number of tiles before the unpacked tokens of queries at these positions.

        It counts the tiles that they read and those that have left their window.
        """
        return (positions - self.sink - self.residual).clamp(min=0) // TILE

    def packed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Number of complete tiles in the first `tokens` tokens."""
        return (tokens - self.sink).clamp(min=0) // TILE

    def left(self, positions: torch.Tensor) -> torch.Tensor:
        """Number of tiles that have left the window of queries at these positions."""
        return (positions - self.sink - self.recent + 1).clamp(min=0) // TILE


@dataclass(frozen=True)
class Due:
    """Tiles that a step packs.

    Attributes:
        rows: [tiles, 1], rows of the requests in block tables.
        tiles: [tiles, 1], index of each tile in its request.
        tokens: [tiles, TILE], positions of the tokens.
    """

    rows: torch.Tensor
    tiles: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class TiledPiece:
    """New tokens of several requests, equally many of each, and the keys that they read.

    Attributes:
        batch: [requests * new], indices of the new tokens in the batch, request by request.
        rows: [requests, 1], rows of the requests in block tables.
        positions: [requests, new], positions of the new tokens.
        keys: [requests, keys], positions of the tokens that at least one query reads unpacked.
        hidden: [requests, 1, 1, new, keys], whether the query does not see the key.
        tiles: [requests, tiles], tiles that at least one query reads; rows are padded with their last tile.
        counts: [requests, new], the tile at which a query stops.
        tiling: the tiling of the heads.
    """

    batch: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    keys: torch.Tensor
    hidden: torch.Tensor
    tiles: torch.Tensor
    counts: torch.Tensor
    tiling: Tiling

    @property
    def new(self) -> int:
        """New tokens of each request."""
        return self.positions.shape[1]

    @cached_property
    def allowed(self) -> torch.Tensor:
        """Which keys a query sees, those of `keys` and then those of all tiles: bool [requests, new, keys]."""
        in_tiles = self.hidden_in(slice(None))[:, 0, 0]
        in_tiles = in_tiles.expand(*in_tiles.shape[:3], TILE).flatten(2)
        return ~torch.cat((self.hidden[:, 0, 0], in_tiles), 2)

    @cached_property
    def seen(self) -> torch.Tensor:
        """The first token that a query sees of those in its request's `tiles`, and the end: [requests, new, 2]."""
        begin = self.tiling.left(self.positions[:, :1]) * TILE
        oldest = self.positions + 1 - self.tiling.recent - self.tiling.sink
        return torch.stack(((oldest - begin).clamp(min=0), self.counts * TILE - begin), -1)

    def hidden_in(self, span: slice) -> torch.Tensor:
        """Mask of tokens that a query does not see, for columns of tiles: [requests, 1, 1, new, tiles, TILE or 1]."""
        columns = torch.arange(self.tiles.shape[1])[span]
        tiles = self.tiles[:, None, span]
        repeated = columns > (self.tiles[:, -1:] - self.tiles[:, :1])  # [requests, tiles]
        hidden = ((tiles >= self.counts[:, :, None]) | repeated[:, None])[..., None]
        if self.tiling.recent < EVERY:
            tokens = tiles[..., None] * TILE + self.tiling.sink + torch.arange(TILE)
            hidden = hidden | (self.positions[:, :, None, None] - tokens >= self.tiling.recent)
        return hidden[:, None, None]


@dataclass(frozen=True)
class TiledPlan:
    """The work of a batch: tiles to pack, then pieces to attend."""

    due: Due
    pieces: tuple[TiledPiece, ...]


@lru_cache(maxsize=4)
def plan(starts: tuple[int, ...], lengths: tuple[int, ...], tiling: Tiling) -> TiledPlan:
    """Plan a batch, in positions of its requests.

    Both cache groups of the heads need the plan of a step, so recent plans are cached.

    Args:
        starts: index of each request's first new token in the batch, then the end of the batch.
        lengths: tokens of each request, new ones included.
    """
    totals = torch.tensor(lengths)
    pasts = totals - torch.tensor(starts).diff()
    return TiledPlan(due_tiles(tiling.packed(pasts), totals, tiling), pieces_of(torch.tensor(starts), totals, tiling))


def pieces_of(starts: torch.Tensor, totals: torch.Tensor, tiling: Tiling) -> tuple[TiledPiece, ...]:
    """Plan the attention of a batch; `starts` and `totals` are the arguments of `plan`.

    A piece holds requests with the same number of new tokens whose numbers of tiles differ by less than a factor of
    two.
    """
    firsts, ends = starts[:-1], starts[1:]
    pasts = totals - (ends - firsts)
    row, index = _repeated(-(-(ends - firsts) // QUERIES))
    first = firsts[row] + index * QUERIES
    past = pasts[row] + index * QUERIES
    new = (ends[row] - first).clamp(max=QUERIES)
    begin = tiling.left(past)
    count = tiling.read(past + new - 1) - begin
    likeness = new * 64 + torch.frexp(count.float())[1]
    pieces = []
    for like in likeness.unique().tolist():
        (members,) = (likeness == like).nonzero(as_tuple=True)
        width = int(new[members[0]])
        for some in members.split(max(1, GATHERED // (tiling.sink + tiling.newest + width))):
            pieces.append(_piece(row[some], first[some], past[some], width, begin[some], count[some], tiling))
    return tuple(pieces)


def _repeated(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each index repeated `count` times, with the number of each repetition."""
    index = torch.arange(len(counts)).repeat_interleave(counts)
    return index, torch.arange(len(index)) - (counts.cumsum(0) - counts)[index]


def due_tiles(before: torch.Tensor, totals: torch.Tensor, tiling: Tiling) -> Due:
    """The complete tiles of requests with `totals` tokens, of which the first ones are packed: as many as `before`."""
    rows, index = _repeated(tiling.packed(totals) - before)
    tiles = (before[rows] + index)[:, None]
    return Due(rows[:, None], tiles, tiling.sink + tiles * TILE + torch.arange(TILE))


def _piece(
    rows: torch.Tensor,
    firsts: torch.Tensor,
    pasts: torch.Tensor,
    new: int,
    begins: torch.Tensor,
    counts: torch.Tensor,
    tiling: Tiling,
) -> TiledPiece:
    """The piece of `new` tokens of each row.

    Args:
        firsts: [requests], index of the first new token in the batch.
        pasts: [requests], tokens of the request before it.
        begins, counts: [requests], first tile that the tokens see, and number of tiles.
    """
    positions = pasts[:, None] + torch.arange(new)
    read = tiling.read(positions)
    last = positions[:, -1:]
    window = tiling.sink + read[:, :1] * TILE
    columns = torch.arange(tiling.sink + max(0, int((last - window).max()) + 1))
    keys = torch.where(columns < tiling.sink, columns, columns - tiling.sink + window)
    unpacked = (keys[:, None] < tiling.sink) | (keys[:, None] >= tiling.sink + read[:, :, None] * TILE)
    visible = (keys[:, None] <= positions[:, :, None]) & unpacked
    tiles = begins[:, None] + torch.arange(int(counts.max()))
    return TiledPiece(
        (firsts[:, None] + torch.arange(new)).flatten(),
        rows[:, None],
        positions,
        torch.minimum(keys, last),  # slots after a request's last token are not its own
        ~visible[:, None, None],
        torch.minimum(tiles, (begins + counts - 1)[:, None]),
        read,
        tiling,
    )
