"""The quick check of a converted checkpoint: a few needles, in text a little longer than what its heads hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvsurgery.checkpoint.source import read_config
from kvsurgery.evaluate.checkpoint import read_text_config
from kvsurgery.templates.kv_layout import KVLayout
from kvsurgery.text.lengths import ROOM

PROMPTS = 8  # the fewest that give a verdict
BATCH = 2  # so that progress shows every few seconds
SHORTEST = 512  # tokens
TIMES = 2  # as long as what a head keeps


def quick_options(folder: Path) -> Mapping[str, Any]:
    """The values of the options of `eval` for a quick check of a checkpoint.

    Raises:
        CheckpointError: its config.json cannot be used.
    """
    longest = max(read_text_config(folder).max_position_embeddings - ROOM, 1)
    length = min(max(SHORTEST, TIMES * max(_kept_tokens(folder), default=0)), longest)
    return {"tasks": ("needle",), "needles": "word", "lengths": (length,), "samples": PROMPTS, "batch": BATCH}


def _kept_tokens(folder: Path) -> Iterator[int]:
    """How many tokens the heads of each layer keep that do not keep all, but for windows of the model's own."""
    config = read_config(folder)
    layers = KVLayout.from_config(config).layers if "kv_surgery" in config else ()
    for layer in layers:
        if not layer.native:
            yield max((layer.sink + layer.recent, *layer.budgets))
