"""Models to measure, without a folder that they are loaded from."""

from __future__ import annotations

from typing import Any

import torch

from kvsurgery.checkpoint.model import Model
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.templates.kv_reform import Reform


def measured_model(model: torch.nn.Module, tokenizer: Any = None, **facts: Any) -> MeasuredModel:
    """A frozen model to measure; `facts` are what else it has."""
    known = Model.of(model.config.to_dict())
    given = {"name": "random", "revision": None, **facts}
    return MeasuredModel(
        model.requires_grad_(False),
        tokenizer,
        dimensions=known.dimensions,
        layers=known.layers,
        **given,
    )


def recurrence(chunk: int, budget: int, keep: int, window: int) -> Reform:
    """How a long input is read, in tokens, without any embedding heads."""
    return Reform((), chunk, budget, keep=keep, window=window)
