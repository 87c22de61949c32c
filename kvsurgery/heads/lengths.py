"""The context lengths for which KV bytes are shown, and their names."""

from __future__ import annotations

from typing import Any

from kvsurgery.templates.kv_layout import setting, text_config

LADDER = (512, 2_048, 8_192, 32_768, 131_072, 524_288)
UNKNOWN = (8_192, 32_768, 131_072)  # for a config without a maximum
MOST = 1 << 40  # tokens; a larger maximum is a placeholder
BELOW = 3  # steps of the ladder that are shown below the maximum
UNITS = {"M": 1 << 20, "k": 1 << 10}


def lengths_of(config: Any) -> tuple[int, ...]:
    """The numbers of tokens for which to show KV bytes, ascending; the last one is the model's own maximum.

    Args:
        config: a transformers config, or the dict of a config.json.
    """
    positions = setting(text_config(config), "max_position_embeddings")
    if not isinstance(positions, int) or not 1 <= positions <= MOST:
        return UNKNOWN
    return (*[length for length in LADDER if length < positions][-BELOW:], positions)


def length_name(tokens: int) -> str:
    """A number of tokens as text: "500", "40k", "1M", "32,000"."""
    for name, unit in UNITS.items():
        if tokens >= unit and tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return f"{tokens:,}"
