"""Streaming heads, which keep the first tokens and a recent window, as a model's own sliding windows do."""

import torch

from .kv_columns import Columns
from .kv_kind import Forward, Heads
from .kv_layout import LayerLayout
from .kv_softmax import Read, Scoring, Span, Window
from .kv_storage import Storage


class StreamingHeads(Heads):
    """One layer's heads that see position j from position i when j < sink or i - j < recent."""

    def __init__(self, states: torch.Tensor, layout: LayerLayout, columns: Columns, storage: Storage):
        super().__init__(states, layout, columns, storage)
        self.group = storage.add(states, layout.streaming, layout.quantized_window, layout.sink, layout.recent)
        self.groups = [self.group]
        self.restorable = 0  # the first column that can be taken back

    @staticmethod
    def count(layout: LayerLayout) -> int:
        return layout.streaming

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, forward: Forward, scoring: Scoring
    ) -> tuple[torch.Tensor, Read]:
        read = self._stored(key, value, forward)
        return read(query, scoring), read

    def _stored(self, key: torch.Tensor, value: torch.Tensor, forward: Forward) -> Read:
        """Store columns, to attend from them."""
        group, layout, past, path = self.group, self.layout, forward.past, forward.path
        stop, skipped = past + key.shape[2], group.skipped
        if key.shape[2] == 1 and not forward.snapshot:
            group.store(past, key, value)
            return lambda query, scoring: group.newest(query, stop, layout, scoring)
        window = group.window(past, min(layout.recent - 1, past)) if past else None
        group.store(past, key, value)
        if window is None:
            return lambda query, scoring: path.attend(
                query, key, value, Span(stop - query.shape[2], skipped), scoring, Window.of(layout)
            )
        sinks = [states[:, :, : layout.sink] for states in (group.keys, group.values)]
        if forward.snapshot:
            sinks = [states.clone() for states in sinks]

        def read(query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
            past_states, new_states = window, (key, value)
            if (earlier_tokens := stop - past - query.shape[2]) > 0:
                past_states = tuple(
                    torch.cat([past_part, new_part[:, :, :earlier_tokens]], 2)
                    for past_part, new_part in zip(window, new_states, strict=True)
                )
                new_states = tuple(states[:, :, earlier_tokens:] for states in new_states)
            span = Span(past + earlier_tokens, skipped)
            return path.attend(query, *new_states, span, scoring, Window.of(layout, sinks, past_states))

        return read

    def advance(self, seen: int) -> None:
        # tiles hold a window for whatever may be taken back
        if not self.group.tiled and seen > self.layout.sink + self.group.ring:
            self.restorable = max(self.restorable, seen - self.group.margin - 1)

    def check_crop(self, length: int, seen: int) -> None:
        if length < min(self.restorable, seen):
            raise ValueError(
                f"cannot take the cache back from {seen} to {length} tokens: streaming heads kept only what is "
                f"needed from {self.restorable} on; call activate_past_recording() before what may be taken back"
            )
        super().check_crop(length, seen)
