"""The part of a stock model that has the attention layers."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def decoder_of(model: PreTrainedModel) -> Any:
    """Embedding, layers and final norm of a causal language model, without its output layer."""
    decoder = model.get_decoder()
    return getattr(decoder, "model", decoder)  # transformers 5 returns Llama 4 with its output layer
