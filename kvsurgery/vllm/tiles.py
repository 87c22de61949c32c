"""Which tokens of a request lie in packed tiles, which tiles a step packs, and what its new tokens read of both.

Nothing here depends on how a prompt is cut into steps: the token at a position reads the tiles that the emitted model
has packed by then, and all that follows as it came. A tile is packed with its last token, into the page of the block of
that token; so the pages of whole blocks hold all that another request with the same prefix can ask of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from kvsurgery.templates.kv_layout import EVERY, TILE, Quantization

QUERIES = TILE  # new tokens of a request that attend at a time: they differ by one tile at most
GATHERED = 1 << 14  # tokens of a head that are gathered at a time, beside those in tiles


@dataclass(frozen=True)
class Tiling:
    """Where the tokens of a head are: `sink` first ones in no tile, and of the others a window of `recent` is seen.

    `residual` newest tokens, and those that fill no whole tile, are in no tile either.
    """

    sink: int
    residual: int
    recent: int = EVERY

    @classmethod
    def of(cls, quantization: Quantization) -> Tiling:
        """That of full heads."""
        return cls(quantization.sink, quantization.residual)

    @property
    def newest(self) -> int:
        """Newest tokens, at most, that a new one reads as they came or packs, itself included."""
        return self.residual + TILE

    @property
    def late(self) -> int:
        """How many blocks of a tile's size lie before that of the first tile's last token."""
        return -(-self.sink // TILE)

    def read(self, positions: torch.Tensor) -> torch.Tensor:
        """Tiles before the newest tokens of queries at these positions.

        They are all that these queries read, and those that they do not see any more.
        """
        return (positions - self.sink - self.residual).clamp(min=0) // TILE

    def packed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tiles whose tokens are all among this many first ones."""
        return (tokens - self.sink).clamp(min=0) // TILE

    def left(self, positions: torch.Tensor) -> torch.Tensor:
        """First tiles that queries at these positions see nothing of."""
        return (positions - self.sink - self.recent + 1).clamp(min=0) // TILE


@dataclass(frozen=True)
class Due:
    """Tiles that a step packs.

    Attributes:
        rows: [tiles, 1], the requests' rows in block tables.
        tiles: [tiles, 1], the place of each in its request.
        tokens: [tiles, TILE], the positions of their tokens.
    """

    rows: torch.Tensor
    tiles: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class TiledPiece:
    """New tokens of some requests, as many of each, and what they read.

    Attributes:
        batch: the new tokens in the batch, request by request: [requests * new].
        rows: [requests, 1], the requests' rows in block tables.
        positions: [requests, new], of the new tokens.
        keys: [requests, keys], the positions of tokens that are in no tile for one of the queries.
        hidden: [requests, 1, 1, new, keys], whether a query does not see such a key.
        tiles: [requests, tiles], in each row all that one of its queries reads, the last of them repeated.
        counts: [requests, new], the tile at which a query stops.
        tiling: of the heads.
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

    def hidden_in(self, span: slice) -> torch.Tensor:
        """Whether a query does not see a token of some columns of tiles: [requests, 1, 1, new, tiles, TILE or 1]."""
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
    """What a batch does: tiles that are due, and then pieces that attend."""

    due: Due
    pieces: tuple[TiledPiece, ...]


@lru_cache(maxsize=4)
def plan(starts: tuple[int, ...], lengths: tuple[int, ...], tiling: Tiling) -> TiledPlan:
    """The plan of a batch, in positions of its requests.

    Both cache groups of such heads need it in a step, so the last plans are kept. Requests are together where they
    have as many new tokens and at most twice as many tiles.

    Args:
        starts: first new token of each request in the batch, and the end.
        lengths: tokens of each request, new ones included.
    """
    firsts, ends = torch.tensor(starts).unfold(0, 2, 1).T
    totals = torch.tensor(lengths)
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
    return TiledPlan(_due(pasts, totals, tiling), tuple(pieces))


def _repeated(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each index as often as its count says, and how often it came before."""
    index = torch.arange(len(counts)).repeat_interleave(counts)
    return index, torch.arange(len(index)) - (counts.cumsum(0) - counts)[index]


def _due(pasts: torch.Tensor, totals: torch.Tensor, tiling: Tiling) -> Due:
    before = tiling.packed(pasts)
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
    """The piece of `new` tokens of each row, which come first in the batch and after so many others of their request,
    with the first tile that they see and the number of tiles."""
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
        torch.minimum(keys, last),  # a slot after a request's last token is not its own
        ~visible[:, None, None],
        torch.minimum(tiles, (begins + counts - 1)[:, None]),
        read,
        tiling,
    )
