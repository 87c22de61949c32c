"""The cache of a layer with a recurrence beside its attention."""

from typing import Any

import torch
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer


class StatefulLayer(LinearAttentionAndFullAttentionLayer):
    """One layer: the states of its recurrence, and the cache of its KV heads, which answers for keys and values."""

    def __init__(self, attention: Any):
        super().__init__()
        self.attention = attention

    @property
    def seen(self) -> int:
        """Columns that the layer has seen, padding included."""
        return self.attention.seen

    def update(self, *args, **kwargs) -> Any:
        return self.attention.update(*args, **kwargs)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.attention.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self.seen

    def reset(self) -> None:
        self.attention.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the states; the cache of the model reorders the heads."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # ty: ignore[invalid-argument-type]
