"""The models that are compared: the stock one, and converted ones."""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvsurgery.api import convert
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe


def stock(
    source: Path,
    attention: Literal["sdpa", "eager"] = "sdpa",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> PreTrainedModel:
    """A checkpoint's own model. With eager attention its weights can be seen."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation=attention)
    return model.eval().to(device)


def converted(
    source: Path, profile: HeadProfile, recipe: Recipe, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A checkpoint's model after conversion, loaded with transformers alone.

    The converted folder lives as long as the model: caches that round keys by the queries read factors from it.
    """
    scratch = tempfile.TemporaryDirectory()
    folder = Path(scratch.name) / "converted"  # one name: transformers imports the emitted code once
    convert(source, folder, profile, recipe)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype)
    weakref.finalize(model, scratch.cleanup)
    return model.eval().to(device)
