"""Images whose tokens see each other in both directions, as in Gemma 3 and the larger models of Gemma 4.

Where a layer's mask says so, a token of an image sees the later tokens of its image in addition to what its head sees
of the earlier ones. Only forwards that read such an image come here; they run in plain torch, with a mask.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from . import kv_softmax, kv_torch
from .kv_cache import CACHE, HandingLayer, KVLayerCache
from .kv_inputs import input_shape
from .kv_layout import in_window
from .kv_softmax import Scoring, Span, Window, query_blocks


class Blocks:
    """An `AttentionPath` of a forward in which tokens see later ones."""

    KERNELS = False
    decode = staticmethod(kv_torch.decode)
    decode_stored = staticmethod(kv_torch.decode_stored)

    def __init__(self, mask: torch.Tensor, layer: HandingLayer | None):
        """Read a mask of `later_tokens`, for a layer of a cache if there is one.

        Raises:
            ValueError: budgeted heads would read images in parts, since they select within the forward or may do so.
        """
        self.padding = mask[:, :, :1, :1].long()  # of each row on the left, [batch, 1, 1, 1]
        self.ahead = mask[:, 0, :, 1]  # how many later tokens each one sees, [batch, tokens]
        if isinstance(layer, KVLayerCache) and layer.layout.budgets:
            columns = layer.columns
            if columns.expected > columns.prompt and (layer.layout.holds or layer.seen < columns.prompt):
                raise ValueError(
                    "budgeted heads would select between tokens of an image that see each other; give all images in "
                    "the first prompt, without drafts, or convert the original model without budgets"
                )

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        span: Span,
        scoring: Scoring,
        window: Window | None = None,
    ) -> torch.Tensor:
        """Attend as `kv_torch.attend` does, and to later tokens of the query's image."""
        parts = self._parts(query, keys, values, span, window, scoring.explicit)
        return torch.cat([kv_softmax.attend(*part, scoring) for part in parts], 2)

    def attend_with_lse(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend as `kv_torch.attend_with_lse` does, and to later tokens of the query's image."""
        if span.limit is not None:  # a block of the past
            return kv_torch.attend_with_lse(query, keys, values, span, scoring)
        parts = self._parts(query, keys, values, span, None, explicit=True)
        outputs, sums = zip(*(kv_softmax.attend_with_lse(*part, scoring) for part in parts), strict=True)
        return torch.cat(outputs, 2), torch.cat(sums, 2)

    def _parts(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        span: Span,
        window: Window | None,
        explicit: bool,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """A block of queries at a time, the keys and values that some of them see, and their mask."""
        tokens, device = query.shape[2], query.device
        padding = span.padding[:, None] if torch.is_tensor(span.padding) else span.padding
        columns = torch.arange(span.past, span.past + tokens, device=device)
        new_positions = columns[None] - padding  # [1 or batch, tokens], of queries
        if window is not None and window.sinks is not None and window.before is not None:
            states = zip(window.sinks, window.before, (keys, values), strict=True)
            keys, values = (torch.cat(parts, 2) for parts in states)
            earlier = torch.arange(-window.before[0].shape[2], 0, device=device) + new_positions[:, :1]
            sinks = torch.arange(window.sinks[0].shape[2], device=device).expand(len(new_positions), -1)
            positions = torch.cat([earlier, new_positions], 1)
            positions = torch.cat([sinks, positions.where(positions >= window.sink, -1)], 1)
        else:
            positions = torch.arange(keys.shape[2], device=device)[None] - (0 if span.first is None else padding)
        ahead = self.ahead[:, -tokens:].to(device)
        for rows in query_blocks(query, keys.shape[2], explicit, keys.shape[1]):
            queries = new_positions[:, rows, None]
            allowed = (positions[:, None] >= 0) & (positions[:, None] <= queries + ahead[:, rows, None])
            if window is not None:
                in_reach = in_window(queries, positions[:, None], window.recent, window.chunked)
                allowed &= (positions[:, None] < window.sink) | in_reach
            allowed |= queries < 0  # what padding sees does not matter, but an empty softmax would
            used = allowed.flatten(0, 1).any(0)
            yield query[:, :, rows], keys[:, :, used], values[:, :, used], allowed[..., used]


def later_tokens(
    sees_next: torch.Tensor, tokens: int, padding: torch.Tensor | None, starts: torch.Tensor | None
) -> torch.Tensor:
    """Make a mask of which tokens see the next one: what it sees of later ones is all tokens up to one that does not.

    Args:
        sees_next: bool [batch, tokens - 1], of the input; one more comes first if a cache holds the token before it.
        padding: of each row on the left, int64 [batch, 1, 1, 1]; None: none.
        starts: where texts of rows begin; None: one text a row.

    Returns:
        int32 [batch, 1, tokens, 2]: padding of the row, and how many later tokens each token sees.

    Raises:
        ValueError: the cache ends within an image, or rows have several texts.
    """
    if starts is not None:
        raise ValueError("packed texts cannot have images whose tokens see each other; pass one text a row, padded")
    if sees_next.shape[1] == tokens and sees_next[:, 0].any():
        raise ValueError(
            "an image lies on both sides of a border between the cache and the input, so that its first tokens did not "
            "see its last ones; read each image in one forward, after at least one token of text"
        )
    columns = torch.arange(tokens, device=sees_next.device)
    linked = F.pad(sees_next[:, 1 - tokens :], (0, 1))
    ends = columns.where(~linked, tokens).flip(1).cummin(1).values.flip(1)
    ahead = (ends - columns)[:, None, :, None]
    padding = torch.zeros_like(ahead) if padding is None else padding.expand_as(ahead)
    return torch.cat([padding, ahead], 3).int()


def with_blocks(forward: Callable, types_name: str) -> Callable:
    """Wrap a stock `forward` for which a cache has been prepared: types of tokens may be those of the input alone.

    Stock code needs types from the first token in the cache on. Callers, and `generate` of some versions, give less.
    """

    @functools.wraps(forward)
    def wrapper(self, **arguments: Any) -> Any:
        types = arguments.get(types_name)
        cache = arguments.get(CACHE)
        shape = input_shape(arguments)
        assert shape is not None  # as `with_kv_cache` has checked
        past = 0 if cache is None else cache.get_seq_length()
        columns = past + shape[1]
        if types is not None and types.shape[1] < columns:
            # an image that begins the input counts as one that began in the cache, which is refused
            types = torch.cat([types[:, :1].expand(-1, past), types], 1)
            arguments[types_name] = F.pad(types, (0, columns - types.shape[1]))
        return forward(self, **arguments)

    return wrapper
