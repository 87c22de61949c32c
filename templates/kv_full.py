"""Full heads, which keep every token."""

import torch

from .kv_columns import Columns
from .kv_heads import HeadGroup
from .kv_kind import Forward, Heads
from .kv_layout import LayerLayout
from .kv_softmax import Read, Scoring, Span, over_columns
from .kv_storage import Storage


class FullHeads(Heads):
    """One layer's heads that see every earlier token of their row."""

    def __init__(self, states: torch.Tensor, layout: LayerLayout, columns: Columns, storage: Storage):
        super().__init__(states, layout, columns, storage)
        self.groups = [storage.add(states, layout.full, quantized=True)]

    @staticmethod
    def count(layout: LayerLayout) -> int:
        return layout.full

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, forward: Forward, scoring: Scoring
    ) -> tuple[torch.Tensor, Read]:
        read = stored(self.groups[0], key, value, self.layout, forward)
        return read(query, scoring), read


def stored(group: HeadGroup, key: torch.Tensor, value: torch.Tensor, layout: LayerLayout, forward: Forward) -> Read:
    """Store columns of heads that see all that they store, to attend from them.

    The result reads the group as it is until that changes; with `forward.snapshot`, as it was.
    """
    past, path, stop = forward.past, forward.path, forward.past + key.shape[2]
    if key.shape[2] == 1 and not forward.snapshot:
        group.store(past, key, value)
        return lambda query, scoring: group.newest(query, stop, layout, scoring)
    if past and not forward.snapshot and not group.tiled:
        group.store(past, key, value)
        return lambda query, scoring: path.attend(
            query,
            group.keys[:, :, :stop],
            group.values[:, :, :stop],
            Span(stop - query.shape[2], group.skipped, first=None),
            scoring,
        )
    if past:
        read = group.over_past(key, value, past, path, forward.snapshot)
    else:
        read = over_columns(key, value, group.skipped, path)
    group.store(past, key, value)
    return read
