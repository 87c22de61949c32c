"""Softmax attention over keys and values in plain torch: what runs on a CPU, and the reference of the kernels.

Nothing here knows of caches. Long inputs go through in blocks of queries, so that no mask is larger than one block.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from .kv_layout import LayerLayout, in_window

BLOCK = 256  # queries per block of a streaming group, and of padded rows that are worth a call each
SCORES = 2**24  # elements of the largest mask, or of explicit scores, of a full group's block
LOWEST = -1.0e30  # stands in for the log-sum-exp of nothing, so that differences are no NaN
Skipped = int | torch.Tensor  # columns that every row skips, or that each one does, int64 [batch] on the device
# which keys queries see, as a mask: of queries [1, m, 1] and keys [1, 1, n] by column or slot, bool [1 or batch, m, n]
Visible = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# attention of queries [batch, query_heads, n, head_dim] at the last n columns of a forward, over what was stored of it
Read = Callable[[torch.Tensor, "Scoring"], torch.Tensor]


class Scoring(NamedTuple):
    """How dot products of queries and keys become weights."""

    scale: float  # factor of the scores
    softcap: float | None = None  # bound c of scores, c * tanh(score / c) (Gemma 2)
    dropout: float = 0.0  # of the weights
    sinks: torch.Tensor | None = None  # a logit of each query head that takes weight and has no value (gpt-oss)

    @classmethod
    def of(cls, query: torch.Tensor, scaling: float | None, *options) -> "Scoring":
        """As attention modules of transformers state it: without a scaling, it is head_dim ** -0.5."""
        return cls(query.shape[-1] ** -0.5 if scaling is None else scaling, *options)

    def scores(self, products: torch.Tensor) -> torch.Tensor:
        """Scores of dot products."""
        scores = products * self.scale
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    @property
    def explicit(self) -> bool:
        """Whether fused attention cannot do this."""
        return self.softcap is not None or self.sinks is not None

    def sunk(self, output: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """What sinks leave of attention [batch, query_heads, tokens, head_dim] with this log-sum-exp of its scores."""
        if self.sinks is None:
            return output
        remaining = torch.sigmoid(lse - self.sinks.float()[:, None])
        return (output * remaining[..., None]).to(output.dtype)

    def split(self, query_heads: list[int]) -> "list[Scoring]":
        """How scores of each run of so many query heads are made."""
        if self.sinks is None:
            return [self] * len(query_heads)
        return [self._replace(sinks=part) for part in self.sinks.split(query_heads)]


class Span(NamedTuple):
    """Which columns of a row queries and keys are of.

    Keys are either by column: without a past, or any from column 0 on. Or they are by position, where `first` is None:
    full heads after a past. Or `Window` has the sinks by position, and keys are from column `first` on, at most
    past - recent + 1: streaming heads after a past.
    """

    past: int  # columns before the queries'
    padding: Skipped = 0  # of each row on the left: position = column - padding
    first: int | None = 0  # column of the first key; None: they are at positions 0, 1, ...
    # keys at this position and later are not there: with `first=None` and a past of as much or more, each query sees
    # all `limit` of them, such as a block of the past
    limit: int | None = None


class Window(NamedTuple):
    """What a streaming head sees: its first tokens, and a window or the query's own chunk."""

    sink: int
    recent: int
    # keys and values [batch, kv_heads, min(sink, positions) or more, head_dim] of positions 0, 1, ..., of the input
    # too; None: they are among the keys
    sinks: Sequence[torch.Tensor] | None = None
    before: Sequence[torch.Tensor] | None = None  # keys and values of the last columns before the queries', with sinks
    chunked: bool = False

    @classmethod
    def of(cls, layout: LayerLayout, *states: Sequence[torch.Tensor]) -> "Window":
        """The window of a layer's streaming heads, after a past with its `sinks` and what is `before` the queries."""
        return cls(layout.sink, layout.recent, *states, chunked=layout.chunked)


class AttentionPath(Protocol):
    """Where attention is computed: the modules `kv_torch` and `kv_cuda`, which have these functions."""

    @property
    def KERNELS(self) -> bool: ...  # whether heads select and move tokens by kernels
    def decode(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: Any, scoring: Scoring
    ) -> torch.Tensor: ...
    def decode_stored(self, query: torch.Tensor, layer: Any, scoring: Scoring) -> torch.Tensor: ...
    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        span: Span,
        scoring: Scoring,
        window: Window | None = None,
    ) -> torch.Tensor: ...
    def attend_with_lse(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, allowed: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """Softmax attention with grouped heads, keys and values never repeated.

    Args:
        query: [batch, kv_heads * group, tokens, head_dim].
        keys, values: [batch, kv_heads, n, head_dim].
        allowed: bool [1 or batch, 1 or tokens, n], or None where every query sees every key.

    Returns:
        [batch, kv_heads * group, tokens, head_dim].
    """
    if scoring.explicit:
        return scoring.sunk(*attend_with_lse(query, keys, values, allowed, scoring))
    batch, query_heads, tokens, head_dim = query.shape
    folded_query, mask = folded(query, keys, allowed)
    if mask is not None:
        mask = mask.expand(-1, -1, folded_query.shape[2], -1)
    output = F.scaled_dot_product_attention(folded_query, keys, values, mask, scoring.dropout, scale=scoring.scale)
    # a GPU's attention lays heads behind tokens; sizes one by one are read faster than a shape
    return output.reshape(batch, query_heads, tokens, head_dim)


def attend_with_lse(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, allowed: torch.Tensor | None, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend by explicit scores, with their log-sum-exp, to `merge` with other keys.

    A query may see nothing. Sinks are left out: they come once, after all keys.

    Returns:
        As `attend`; and float32 [batch, kv_heads * group, tokens].
    """
    folded_query, mask = folded(query, keys, allowed)
    scores = scoring.scores(folded_query.float() @ keys.mT.float())  # 16 bits are too few for large products
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    weights = F.dropout((scores - lse.clamp(min=LOWEST)).exp().to(values.dtype), scoring.dropout)
    return (weights @ values).view(query.shape), lse.view(query.shape[:3])


def folded(
    query: torch.Tensor, keys: torch.Tensor, allowed: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A group's query heads as further queries of their KV head, and the mask of these."""
    batch, query_heads, tokens, head_dim = query.shape
    kv_heads = keys.shape[1]
    group = query_heads // kv_heads
    folded_query = query.reshape(batch, kv_heads, group * tokens, head_dim)
    mask = None if allowed is None else allowed[:, None]
    if mask is not None and mask.shape[2] > 1:
        mask = mask.repeat(1, 1, group, 1)
    return folded_query, mask


def merge(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys from that over each: outputs [..., head_dim] and log-sum-exps [...]."""
    lse = torch.logaddexp(one[1], other[1])
    parts = [output.float() * (part_lse - lse).exp()[..., None] for output, part_lse in (one, other)]
    return parts[0] + parts[1], lse


def causal(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, skipped: Skipped, scoring: Scoring
) -> torch.Tensor:
    """Queries of the last columns that keys are of: every earlier token of the row is visible.

    Args:
        query: [batch, query_heads, tokens, head_dim].
        keys, values: [batch, kv_heads, past + tokens, head_dim], by column.
    """
    past, padded = keys.shape[2] - query.shape[2], torch.is_tensor(skipped) or skipped
    is_plain = not past and not scoring.explicit
    if is_plain and torch.is_tensor(skipped) and skipped.device.type == "cpu" and query.shape[2] >= BLOCK:
        return rows_apart(lambda *states: causal(*states, 0, scoring), skipped, query, keys, values)
    if not is_plain or padded:
        return blocks(query, keys, values, past, by_column(skipped), scoring)
    return F.scaled_dot_product_attention(
        query, keys, values, dropout_p=scoring.dropout, is_causal=True, scale=scoring.scale, enable_gqa=True
    )


def rows_apart(attend: Callable, skipped: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
    """Attend row by row over queries, keys and values of the same columns, without padding, which gets zeros."""
    output = torch.zeros_like(states[0])
    for row, skip in enumerate(skipped.tolist()):
        if skip < output.shape[2]:
            output[row : row + 1, :, skip:] = attend(*(part[row : row + 1, :, skip:] for part in states))
    return output


def over_columns(keys: torch.Tensor, values: torch.Tensor, skipped: Skipped, path: AttentionPath) -> Read:
    """Queries of the last columns over keys and values by column, computed by `path`."""
    columns = keys.shape[2]
    return lambda query, scoring: path.attend(query, keys, values, Span(columns - query.shape[2], skipped), scoring)


def by_column(skipped: Skipped) -> Visible:
    """What queries see of keys that lie by column: all that is earlier in their row."""
    start = skipped[:, None, None] if torch.is_tensor(skipped) else skipped

    def allowed(queries: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return (columns <= queries) & (columns >= start) | (columns == queries)  # padding sees itself: no empty softmax

    return allowed


def by_position(skipped: Skipped) -> Visible:
    """What queries see of keys that lie by position, their own tokens' too."""
    skip = skipped[:, None, None] if torch.is_tensor(skipped) else skipped

    def allowed(queries: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return slots <= (queries - skip).clamp(min=0)

    return allowed


def query_blocks(query: torch.Tensor, keys: int, explicit: bool, kv_heads: int) -> list[slice]:
    """Blocks of queries whose mask, or explicit scores, over this many keys are not too large."""
    batch, heads, tokens, _ = query.shape
    per_query = max(batch * (heads if explicit else heads // kv_heads) * keys, 1)
    block = min(max(SCORES // per_query, 16), 1024)
    return [slice(start, min(start + block, tokens)) for start in range(0, tokens, block)]


def blocks(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: int, visible: Visible, scoring: Scoring
) -> torch.Tensor:
    """Attend in blocks of queries at columns from `past` on; no query sees a key beyond its own column."""
    parts = masked_blocks(query, keys, values, past, visible, scoring.explicit)
    return torch.cat([attend(*part, scoring) for part in parts], 2)


def masked_blocks(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: int, visible: Visible, explicit: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A block of queries at a time, the keys and values up to its last column, and its mask."""
    for rows in query_blocks(query, past + query.shape[2], explicit, keys.shape[1]):
        queries = torch.arange(past + rows.start, past + rows.stop, device=query.device)[None, :, None]
        columns = torch.arange(min(past + rows.stop, keys.shape[2]), device=query.device)[None, None]
        key_slice = slice(past + rows.stop)
        yield query[:, :, rows], keys[:, :, key_slice], values[:, :, key_slice], visible(queries, columns)


def streaming(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span, scoring: Scoring, window: Window
) -> torch.Tensor:
    """Queries of streaming heads over sinks and window, in blocks; time and memory linear in the tokens.

    Args:
        query: [batch, query_heads, tokens, head_dim], at columns past, past + 1, ...
        keys, values: [batch, kv_heads, n, head_dim], of the queries' own columns; where the window has no sinks, of all
            columns.
    """
    sinks, before, past = window.sinks, window.before, span.past
    if sinks is None or before is None:
        if keys.shape[2] <= window.sink + window.recent:  # nothing has left the window yet
            return causal(query, keys, values, span.padding, scoring)
        sinks = first_positions(keys, values, span.padding, window.sink)
        before = keys[:, :, :past], values[:, :, :past]
        keys, values = keys[:, :, past:], values[:, :, past:]
    new_states = keys, values
    pad = span.padding[:, None, None] if torch.is_tensor(span.padding) else span.padding
    window_columns, tokens = before[0].shape[2], query.shape[2]
    sink_positions = torch.arange(sinks[0].shape[2], device=query.device)[None, None]
    outputs = []
    for start in range(0, tokens, BLOCK):
        stop = min(start + BLOCK, tokens)
        first = max(start - window.recent + 1, -window_columns)
        block_keys, block_values = (
            torch.cat(
                [
                    sink_part,
                    window_part[:, :, window_columns + first :] if first < 0 else window_part[:, :, :0],
                    new_part[:, :, max(first, 0) : stop],
                ],
                2,
            )
            for sink_part, window_part, new_part in zip(sinks, before, new_states, strict=True)
        )
        position = torch.arange(past + start, past + stop, device=query.device)[None, :, None] - pad
        window_positions = torch.arange(past + first, past + stop, device=query.device)[None, None] - pad
        seen = (
            (window_positions >= window.sink)
            & (window_positions <= position)
            & in_window(position, window_positions, window.recent, window.chunked)
        )
        seen |= (window_positions == position) & (position < 0)  # padding sees itself: no empty softmax
        allowed = torch.cat([(sink_positions <= position).expand(len(seen), -1, -1), seen], 2)
        outputs.append(attend(query[:, :, start:stop], block_keys, block_values, allowed, scoring))
    return torch.cat(outputs, 2)


def first_positions(keys: torch.Tensor, values: torch.Tensor, skipped: Skipped, count: int) -> tuple[torch.Tensor, ...]:
    """Copies of keys and values by column at the first `count` positions of each row, of which there may be fewer."""
    if not torch.is_tensor(skipped):
        skipped = torch.full((1,), skipped, device=keys.device)
    columns = skipped[:, None] + torch.arange(count, device=keys.device)
    index = columns.clamp(max=keys.shape[2] - 1)[:, None, :, None]
    return tuple(
        states.gather(2, index.expand(len(states), states.shape[1], -1, states.shape[3])) for states in (keys, values)
    )
