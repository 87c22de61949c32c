"""Budgets that hold: heads that select again whenever a block of tokens has come since they last did.

A head has its budget of selected tokens, the observation window, and a block of recent tokens. When the block is full,
the last `window` queries choose among all tokens before them, as the end of the prompt did (kv_budget.py); these
queries have seen the same tokens, so that their attention is what it was when they were asked. Tokens keep their order.

Heads select before the next column is stored, at columns that follow from the prompt alone: chunks of any size, single
steps and rows of a batch give the same result. A selection among columns that may be taken back (assisted decoding)
keeps what it drops aside until they are confirmed, so that a rejected token leaves no trace.

In quantized heads every token has scales of its own, so that a selection moves codes from tile to tile as they are: no
token is quantized twice while it stays in tiles. These heads select, as they fill tiles, among confirmed columns only:
late where some may be taken back.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .kv_budget import BudgetedHeads, most_important, weighted
from .kv_heads import SELECTING, HeadGroup, Rows, on_device
from .kv_layout import EVERY, TILE, VALUE_NORM, LayerLayout
from .kv_tiles import QuantizedGroup, encoded_tokens, repacked, token_states, unpacked
from .kv_torch import Scoring, attention_received

KEYS, VALUES = 0, 1


class Renewal(NamedTuple):
    """A selection that can be taken back: what it needs to restore the slots as they were."""

    column: int  # before which heads selected
    start: int  # of the heads, before
    dropped: list[list[int]]  # of each group, before
    lengths: list[int]  # of each head, its slots in use before
    order: torch.Tensor  # int64 [batch, heads, n], slots before: those kept, then those dropped, ascending
    kept: torch.Tensor  # int64 [batch, heads, 1], how many are kept
    place: int  # the first of the slots in `spare` for what is dropped
    scores: torch.Tensor  # [batch, heads, n], accumulated before


class HeldHeads(BudgetedHeads):
    """One layer's budgeted heads, which never keep more than budget, observation window and a block."""

    def __init__(self, states: torch.Tensor, layout: LayerLayout, prompt: int):
        super().__init__(states, layout, prompt)
        assert self.selection.hold is not None
        self.hold, self.next = self.selection.hold, prompt + self.selection.hold
        self.quantized = layout.quantized_budgets
        self._limit()
        self.asked: torch.Tensor | None = None  # queries [batch, query_heads, n, head_dim], column c at c % n
        self.scoring: Scoring | None = None
        self.spare = HeadGroup(states, len(self.budgets))  # what selections have dropped that may be taken back
        self.renewals: list[Renewal] = []
        self.counts = [0] * len(self.budgets)  # of each head, slots that have an accumulated score
        self.scores = states.new_zeros(states.shape[0], 0, dtype=torch.float32)  # of all heads, one after the other

    def _limit(self) -> None:
        """Let groups have room for as many tokens as there can be before the next selection."""
        late = self.margin if self.quantized else 0
        for group, budget in zip(self.groups, self.budgets, strict=True):
            group.most = budget + self.selection.window + self.hold + late

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.spare.nbytes + self.scores.nbytes

    def take_rows(self, rows: Rows) -> None:
        super().take_rows(rows)
        self.spare.keys, self.spare.values = rows(self.spare.keys), rows(self.spare.values)
        self.scores = rows(self.scores)
        if self.asked is not None:
            self.asked = rows(self.asked)
        self.renewals = [
            each._replace(
                dropped=[rows.of(of_group) for of_group in each.dropped],
                order=rows(each.order),
                kept=rows(each.kept),
                scores=rows(each.scores),
            )
            for each in self.renewals
        ]

    @torch.inference_mode(False)
    @torch.no_grad()
    def widen(self, margin: int, seen: int, capacity: int) -> None:
        old, slots = self.asked, 0 if self.quantized else self.selection.spare(margin)
        if old is not None:
            self.asked = old.new_zeros(*old.shape[:2], self.selection.window + margin, old.shape[3])
            column = torch.arange(max(seen - old.shape[2], 0), seen, device=old.device)
            self.asked[:, :, column % self.asked.shape[2]] = old[:, :, column % old.shape[2]]
        before, self.margin = (self.spare.keys, self.spare.values), margin
        self._limit()
        after = tuple(states.new_zeros(*states.shape[:2], slots, states.shape[3]) for states in before)
        for states, same in zip(after, before, strict=True):
            states[:, :, : same.shape[2]] = same
        self.spare.keys, self.spare.values = after

    def reserve(self, columns: int) -> None:
        counts = [self.selection.scores(budget, columns) for budget in self.budgets]
        if counts != self.counts:
            before = self._scores(max(self.counts))
            self.counts = counts
            self._score(before)

    def _scores(self, slots: int) -> torch.Tensor:
        """Accumulated scores of the first slots of each head: [batch, heads, slots], 0 where there is none."""
        parts = self.scores.split(self.counts, 1)
        return torch.stack([F.pad(part, (0, slots - part.shape[1])) for part in parts], 1)

    def _score(self, scores: torch.Tensor) -> None:
        """The reverse."""
        parts = zip(scores.unbind(1), self.counts, strict=True)
        self.scores = torch.cat([F.pad(part, (0, count - part.shape[1])) for part, count in parts], 1)

    def select(self, keys, values, pads, scoring: Scoring) -> torch.Tensor:
        self.scoring = scoring if scoring.sinks is None else scoring._replace(sinks=scoring.sinks.detach())
        return super().select(keys, values, pads, scoring)

    def remember(self, importance: torch.Tensor, chosen: torch.Tensor) -> None:
        if self.scores.shape[1]:
            scores = importance.gather(2, chosen.clamp(max=importance.shape[2] - 1))
            self._score(scores.where(chosen < importance.shape[2], 0))

    def _ring(self, query: torch.Tensor) -> torch.Tensor:
        """Where queries like these are remembered."""
        if self.asked is None:
            self.asked = query.new_zeros(*query.shape[:2], self.selection.window + self.margin, query.shape[3])
        return self.asked

    def watch(self, column: int, query: torch.Tensor) -> None:
        first = max(self.next - self.selection.window - column, 0)
        if first < query.shape[2]:  # seldom, and what follows takes longer than this
            self._watch(column + first, query[:, :, first:])

    @torch.inference_mode(False)
    @torch.no_grad()
    def _watch(self, column: int, query: torch.Tensor) -> None:
        ring = self._ring(query)
        for place, states in enumerate(query.unbind(2), column):
            ring[:, :, place % ring.shape[2]] = states

    @torch.inference_mode(False)
    @torch.no_grad()
    def watch_step(self, columns: torch.Tensor, query: torch.Tensor) -> None:
        ring = self._ring(query)
        ring[:, :, (columns[0] - 1) % ring.shape[2]] = query

    def due(self, column: int, settled: int) -> int:
        if not self.quantized:
            return self.next
        late = max(self.next, column)
        return late if late <= settled else EVERY

    @torch.inference_mode(False)
    @torch.no_grad()
    def renew(self, column: int, layer) -> None:
        window, before = self.selection.window, [group.dropped for group in self.groups]
        self.next = column + self.hold
        lengths = [[max(column - skip, 0) for skip in skips] for skips in self._by_row("skips")]
        counts = [
            [max(min(budget, length - window), 0) for budget, length in zip(self.budgets, of_row, strict=True)]
            for of_row in lengths
        ]
        left = [
            [count + min(length, window) for count, length in zip(*pair, strict=True)]
            for pair in zip(counts, lengths, strict=True)
        ]
        there = any(map(any, lengths))
        if left == lengths and not (there and self.scores.shape[1]):  # nothing to drop, nothing to add up
            return
        used = [max(of_head) for of_head in zip(*lengths, strict=True)]
        codes = [TokenCodes(group) for group in self.groups if isinstance(group, QuantizedGroup)]
        keys = self._stored(KEYS, used, codes)
        needed = not codes or self.selection.select == VALUE_NORM  # the values that codes stand for, seldom
        values = self._stored(VALUES, used, codes) if needed else keys[:, :, :0]
        stops, kept = (on_device(each, keys.device)[..., None] for each in (lengths, left))
        importance = self._importance(keys, values, column, stops)
        order = self._order(importance, stops, counts)
        self.renewals = [each for each in self.renewals if each.column > layer.columns.settled]
        if column > layer.columns.settled:  # never of quantized heads
            taken = {each.place for each in self.renewals}
            place = next(first for first in range(0, self.spare.slots, self.hold) if first not in taken)
            scores = self._scores(max(self.counts))
            self.renewals.append(Renewal(column, self.start, before, used, order, kept, place, scores))
            dropped = order.gather(2, (kept + torch.arange(self.hold, device=kept.device)).clamp(max=max(used) - 1))
            self.spare.write(slice(None), place, _taken(keys, dropped), _taken(values, dropped))
        order = order[..., : max(map(max, left))]
        of_heads = [*zip(*left, strict=True)]
        if codes:
            every = zip(codes, order.unbind(1), of_heads, zip(*lengths, strict=True), strict=True)
            for own, slots, remaining, had in every:
                own.keep(slots[:, : max(remaining)], remaining, had)
        else:
            self._write([*map(max, of_heads)], _taken(keys, order), _taken(values, order))
        first = torch.arange(max(map(max, counts)), device=kept.device)
        self.remember(importance, order[..., : len(first)].where(first < kept - window, EVERY))
        self.start = column - window
        dropped = [[column - tokens for tokens in of_head] for of_head in of_heads]
        self._drop(dropped, layer)

    def _importance(self, keys, values, column: int, stops: torch.Tensor) -> torch.Tensor:
        """What stored tokens are worth to the queries before a column: float32 [batch, heads, slots].

        Heads have so many tokens: int64 [batch, heads, 1]. Values are given where heads select by them too.
        """
        assert self.asked is not None
        assert self.scoring is not None
        window, device = self.selection.window, keys.device
        asked = torch.arange(column - window, column, device=device) % self.asked.shape[2]
        nothing = torch.zeros(1, 1, 1, dtype=torch.long, device=device)
        received = attention_received(self.asked[:, :, asked], keys, nothing, self.scoring, stops)
        importance = weighted(received, values, self.selection)
        return importance + self._scores(keys.shape[2]) if self.scores.shape[1] else importance

    def _order(self, importance: torch.Tensor, stops: torch.Tensor, counts: list[list[int]]) -> torch.Tensor:
        """Slots of each head in another order: those that it keeps, the other tokens, empty ones; each ascending."""
        window, device = self.selection.window, importance.device
        nothing = torch.zeros(1, 1, 1, dtype=torch.long, device=device)
        chosen = most_important(importance, nothing, counts, self.selection, stops - window)
        slots = importance.shape[2]
        slot = torch.arange(slots, device=device)
        rank = torch.where(slot >= stops, 2, torch.where(slot >= stops - window, 0, 1))
        rank = torch.cat([rank, rank[..., :1]], 2).scatter(2, chosen.clamp(max=slots), 0)
        return rank[..., :-1].sort(stable=True).indices

    def oldest(self, settled: int) -> int:
        return next((each.start for each in self.renewals if each.column > settled), self.start)

    @torch.inference_mode(False)
    @torch.no_grad()
    def take_back(self, length: int, layer) -> None:
        self.renewals = [each for each in self.renewals if each.column > layer.columns.settled]
        while self.renewals and self.renewals[-1].column > length:
            self._restore(self.renewals.pop(), layer)

    def _restore(self, renewal: Renewal, layer) -> None:
        """Put back what a selection has dropped, in the slots where it was."""
        left = [renewal.column - min(group.skips) for group in self.groups]
        place = torch.arange(renewal.order.shape[2], device=renewal.order.device)
        source = place + (max(left) - renewal.kept) * (place >= renewal.kept)
        parts = []
        spare = self.spare.keys, self.spare.values
        for kind, dropped in zip((KEYS, VALUES), spare, strict=True):
            kept = self._stored(kind, left)
            dropped = dropped[:, :, renewal.place : renewal.place + self.hold]
            states = torch.cat([kept, dropped], 2)
            states = _taken(states, source.clamp(max=states.shape[2] - 1))
            parts.append(torch.empty_like(states).scatter_(2, renewal.order[..., None].expand_as(states), states))
        self._write(renewal.lengths, *parts)
        self._score(renewal.scores)
        self.start, self.next = renewal.start, renewal.column
        self._drop(renewal.dropped, layer)

    def _by_row(self, name: str) -> list[tuple[int, ...]]:
        """What groups know of their rows, row by row."""
        return list(zip(*(getattr(group, name) for group in self.groups), strict=True))

    def _stored(self, kind: int, counts: list[int], codes: Sequence["TokenCodes"] = ()) -> torch.Tensor:
        """Keys or values of the first tokens of each head, so many of it, as [batch, heads, n, head_dim]."""
        place = torch.arange(max(counts), device=self.groups[0].keys.device)[None]
        if codes:
            parts = [own.states(kind, place[:, :count]) for own, count in zip(codes, counts, strict=True)]
        else:
            every = zip(self.groups, counts, strict=True)
            parts = [(group.keys, group.values)[kind][:, :, :count] for group, count in every]
        return torch.cat([F.pad(part, (0, 0, 0, max(counts) - part.shape[2])) for part in parts], 1)

    def _write(self, counts: list[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the first tokens of each head, so many of it."""
        for head, (group, count) in enumerate(zip(self.groups, counts, strict=True)):
            group.write(slice(None), 0, keys[:, head, None, :count], values[:, head, None, :count])

    def _drop(self, dropped: list[list[int]], layer) -> None:
        """Let groups know how many columns each row has dropped, and the kernels, in the tensor that they know."""
        for group, of_rows in zip(self.groups, dropped, strict=True):
            group.dropped = of_rows
            group.align(layer.columns.pads)
        known = {} if layer.table is None else {"skips": layer.table.skipped, "packed": layer.table.packed}
        for name, of_heads in known.items():
            if of_heads is not None:
                of_heads[:, -len(self.groups) :] = on_device(self._by_row(name), of_heads.device, of_heads.dtype)


SELECTING[True] = HeldHeads


def _taken(states: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """Slots of each head: [batch, heads, n, head_dim], int64 [batch, heads, m] -> [batch, heads, m, head_dim]."""
    return states.gather(2, slot[..., None].expand(-1, -1, -1, states.shape[3]))


class TokenCodes:
    """The tokens of a quantized head, as they are before a selection: those in tiles by codes of their own."""

    def __init__(self, group: QuantizedGroup):
        self.group, self.packed = group, group.packed
        self.tokens = unpacked(group.tiles, group.quantization.bits)

    def states(self, kind: int, position: torch.Tensor) -> torch.Tensor:
        """Keys or values at positions: int64 [1 or batch, n] -> [batch, 1, n, head_dim]."""
        found = _at((self.group.keys, self.group.values)[kind], self.group.slot(position))
        if not any(self.packed):
            return found
        in_tile, place = self._place(position)
        codes, scales = (_at(part, place) for part in self.tokens[2 * kind : 2 * kind + 2])
        return token_states(codes, scales).where(in_tile, found)

    def _place(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether tokens are in tiles, bool [batch, 1, n, 1], and where there."""
        place = position - self.group.sink
        in_tile = (place >= 0) & (place < on_device(self.packed, place.device)[:, None])
        return in_tile[:, None, :, None], place.clamp(0, max(self.group.count * TILE - 1, 0))

    def keep(self, source: torch.Tensor, counts: Sequence[int], lengths: Sequence[int]) -> None:
        """Let the head's tokens be some of them, those in tiles by the codes that they have.

        Tiles stay as many while there are tokens to fill them, so that none returns to the slots to be quantized again.

        Args:
            source: int64 [batch, n], where the token at each place is, ascending.
            counts, lengths: how many tokens each row keeps, and has.
        """
        group, how, sink = self.group, self.group.quantization, self.group.sink
        group.packed = [
            max(TILE * how.tiles(count + 1 - sink), min(packed, (count - sink) // TILE * TILE))
            for count, packed in zip(counts, self.packed, strict=True)
        ]
        # up to here all are from tiles: those from slots come last, and are no more than there were
        every = zip(counts, lengths, self.packed, strict=True)
        first = max(min(*group.packed, *(count - length + packed for count, length, packed in every)), 0)
        begin, tokens = sink + first, max(group.packed)
        ends = torch.cat([source[:, :sink], source[:, begin:]], 1)
        states = [self.states(kind, ends) for kind in (KEYS, VALUES)]
        sinks, late = ([part[:, :, of] for part in states] for of in (slice(sink), slice(sink, None)))
        if tokens:
            in_tile, place = self._place(source[:, sink : sink + tokens])
            moved = self.tokens.map(lambda part: _at(part, place))
            if first < tokens:
                fresh = encoded_tokens(torch.stack([part[:, :, : tokens - first] for part in late]), how)
                for kind in (KEYS, VALUES):
                    for codes, new in zip(moved[2 * kind : 2 * kind + 2], fresh, strict=True):
                        last = codes[:, :, first:]
                        last.copy_(last.where(in_tile[:, :, first:], new[kind]))
            for stored, part in zip(group.tiles, repacked(moved, how.bits), strict=True):
                stored[:, :, : tokens // TILE] = part
        alike = len({*counts}) == 1
        for row, count in enumerate(counts[:1] if alike else counts):
            rows = slice(None) if alike else slice(row, row + 1)
            for start, parts in ((0, sinks), (begin, late)):
                HeadGroup.write(group, rows, start, *(part[rows, :, : max(count - start, 0)] for part in parts))


def _at(states: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Places of a head: [batch, 1, n, width], int64 [1 or batch, m] -> [batch, 1, m, width]."""
    if len(place) == 1:  # the same of every row: whole tokens at a time
        return states.index_select(2, place[0])
    return states.gather(2, place[:, None, :, None].expand(len(states), -1, -1, states.shape[3]))
