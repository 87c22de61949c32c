"""Softmax attention over keys and values in plain torch: what runs on a CPU, and the reference of the kernels.

Nothing here knows of caches. Long inputs go through in blocks of queries, so that no mask is larger than one block.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .kv_layout import LayerLayout

BLOCK = 256  # queries per block of a streaming group
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
        """The same of runs of this many query heads."""
        if self.sinks is None:
            return [self] * len(query_heads)
        return [self._replace(sinks=part) for part in self.sinks.split(query_heads)]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    allowed: torch.Tensor | None,
    scoring: Scoring,
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
    """The same by explicit scores, and their log-sum-exp, to `merge` with other keys; a query may see nothing. Sinks
    are left out: they come once, after all keys.

    Returns:
        As `attend`; and float32 [batch, kv_heads * group, tokens].
    """
    folded_query, mask = folded(query, keys, allowed)
    scores = scoring.scores((folded_query @ keys.mT).float())
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
    first, second = (output.float() * (part_lse - lse).exp()[..., None] for output, part_lse in (one, other))
    return first + second, lse


def causal(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, skipped: Skipped, scoring: Scoring
) -> torch.Tensor:
    """Queries of the last columns that keys are of: every earlier token of the row is visible.

    Args:
        query: [batch, query_heads, tokens, head_dim].
        keys, values: [batch, kv_heads, past + tokens, head_dim], by column.
    """
    past, padded = keys.shape[2] - query.shape[2], torch.is_tensor(skipped) or skipped
    if past or padded or scoring.explicit:
        return blocks(query, keys, values, past, by_column(skipped), scoring)
    return F.scaled_dot_product_attention(
        query, keys, values, dropout_p=scoring.dropout, is_causal=True, scale=scoring.scale, enable_gqa=True
    )


def over_columns(keys: torch.Tensor, values: torch.Tensor, skipped: Skipped, path: Any) -> Read:
    """Queries of the last columns over keys and values by column, computed by `path`."""
    return lambda query, scoring: path.causal(query, keys, values, skipped, scoring)


def causal_with_lse(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, skipped: Skipped, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `causal`, with the log-sum-exp of the scores beside it, as from `attend_with_lse`."""
    past = keys.shape[2] - query.shape[2]
    parts = _masked_blocks(query, keys, values, past, by_column(skipped), explicit=True)
    outputs, sums = zip(*(attend_with_lse(*part, scoring) for part in parts), strict=True)
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def by_column(skipped: Skipped) -> Visible:
    """What queries see of keys that lie by column: all that is earlier in their row."""
    start = skipped[:, None, None] if torch.is_tensor(skipped) else skipped

    def allowed(queries: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return (columns <= queries) & (columns >= start) | (columns == queries)  # padding sees itself: no empty softmax

    return allowed


def after_past(query: torch.Tensor, group: Any, past: int, scoring: Scoring) -> torch.Tensor:
    """Queries at columns from `past` on, of heads that store every position in its slot, their own tokens' too."""
    stop = past + query.shape[2]
    skip = group.skipped[:, None, None] if torch.is_tensor(group.skipped) else group.skipped

    def allowed(queries: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return slots <= (queries - skip).clamp(min=0)

    return blocks(query, group.keys[:, :, :stop], group.values[:, :, :stop], past, allowed, scoring)


def over_block(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, counts: list[int] | None, scoring: Scoring
) -> Iterator[tuple[tuple[slice, ...], tuple[torch.Tensor, torch.Tensor]]]:
    """Attention of queries over a block of earlier tokens, as `QuantizedGroup.blocks` has it, part by part.

    Yields:
        An index of rows and queries; their output and the log-sum-exp of their scores.
    """
    block_mask = first_tokens(counts, keys)
    for queries in query_blocks(query, keys.shape[2], explicit=True, kv_heads=keys.shape[1]):
        part = slice(None), slice(None), queries
        yield part, attend_with_lse(query[part], keys, values, block_mask, scoring)


def first_tokens(counts: list[int] | None, keys: torch.Tensor) -> torch.Tensor | None:
    """The first `counts` keys of each row, as a mask over keys [batch, kv_heads, n, head_dim]: bool [batch, 1, n]."""
    if counts is None:
        return None
    return torch.arange(keys.shape[2], device=keys.device) < torch.tensor(counts, device=keys.device)[:, None, None]


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
    parts = _masked_blocks(query, keys, values, past, visible, scoring.explicit)
    return torch.cat([attend(*part, scoring) for part in parts], 2)


def _masked_blocks(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: int, visible: Visible, explicit: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A block of queries at a time, the keys and values up to its last column, and its mask."""
    for rows in query_blocks(query, past + query.shape[2], explicit, keys.shape[1]):
        queries = torch.arange(past + rows.start, past + rows.stop, device=query.device)[None, :, None]
        columns = torch.arange(min(past + rows.stop, keys.shape[2]), device=query.device)[None, None]
        key_slice = slice(past + rows.stop)
        yield query[:, :, rows], keys[:, :, key_slice], values[:, :, key_slice], visible(queries, columns)


def streaming_from_start(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    skipped: Skipped,
    layout: LayerLayout,
    scoring: Scoring,
) -> torch.Tensor:
    """Queries of streaming heads at the last of the columns that keys are of, nothing before them."""
    tokens, past = keys.shape[2], keys.shape[2] - query.shape[2]
    if tokens <= layout.sink + layout.recent:  # nothing has left the window yet
        return causal(query, keys, values, skipped, scoring)
    sinks = first_positions(keys, values, skipped, layout.sink)
    past_states, new_states = (
        [states[:, :, part] for states in (keys, values)] for part in (slice(past), slice(past, None))
    )
    return streaming(query, sinks, past_states, new_states, past, skipped, layout, scoring)


def first_positions(keys: torch.Tensor, values: torch.Tensor, skipped: Skipped, count: int) -> tuple[torch.Tensor, ...]:
    """Copies of keys and values by column at the first `count` positions of each row, of which there may be fewer."""
    if not torch.is_tensor(skipped):
        skipped = torch.full((1,), skipped, device=keys.device)
    columns = skipped[:, None] + torch.arange(count, device=keys.device)
    index = columns.clamp(max=keys.shape[2] - 1)[:, None, :, None]
    return tuple(
        states.gather(2, index.expand(len(states), states.shape[1], -1, states.shape[3])) for states in (keys, values)
    )


def streaming(
    query: torch.Tensor,
    sinks: Sequence[torch.Tensor],
    window: Sequence[torch.Tensor],
    new_states: Sequence[torch.Tensor],
    past: int,
    skipped: Skipped,
    layout: LayerLayout,
    scoring: Scoring,
) -> torch.Tensor:
    """Queries of streaming heads over sinks and window, in blocks; time and memory linear in the tokens.

    Args:
        query: [batch, query_heads, tokens, head_dim], at columns past, past + 1, ...
        sinks: keys and values [batch, kv_heads, <= sink, head_dim] of positions 0, 1, ..., of this input too.
        window: those of the last columns before `past`.
        new_states: those of the queries' own columns.
    """
    pad = skipped[:, None, None] if torch.is_tensor(skipped) else skipped
    window_columns, tokens = window[0].shape[2], query.shape[2]
    sink_positions = torch.arange(sinks[0].shape[2], device=query.device)[None, None]
    outputs = []
    for start in range(0, tokens, BLOCK):
        stop = min(start + BLOCK, tokens)
        first = max(start - layout.recent + 1, -window_columns)
        keys, values = (
            torch.cat(
                [
                    sink_part,
                    window_part[:, :, window_columns + first :] if first < 0 else window_part[:, :, :0],
                    new_part[:, :, max(first, 0) : stop],
                ],
                2,
            )
            for sink_part, window_part, new_part in zip(sinks, window, new_states, strict=True)
        )
        position = torch.arange(past + start, past + stop, device=query.device)[None, :, None] - pad
        window_positions = torch.arange(past + first, past + stop, device=query.device)[None, None] - pad
        in_window = (
            (window_positions >= layout.sink)
            & (window_positions <= position)
            & layout.in_window(position, window_positions)
        )
        in_window |= (window_positions == position) & (position < 0)  # padding sees itself: no empty softmax
        allowed = torch.cat([(sink_positions <= position).expand(len(in_window), -1, -1), in_window], 2)
        outputs.append(attend(query[:, :, start:stop], keys, values, allowed, scoring))
    return torch.cat(outputs, 2)
