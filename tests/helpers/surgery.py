"""Conversions for tests: a stock checkpoint, a profile of random scores, and what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.source import read_config
from kvsurgery.conversion.convert import convert
from kvsurgery.conversion.prepared import PreparedConversion
from kvsurgery.emit.config import auto_class
from kvsurgery.heads.kinds import full_heads
from kvsurgery.policy.evidence import Evidence
from kvsurgery.policy.policy import Policy
from kvsurgery.profile.embedding_heads import EmbeddingHead
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.loading import load_losses
from kvsurgery.recipe import Budgeted, Recipe, ReformSizes
from kvsurgery.templates.kv_layout import Quantization, Selection

SINK, RECENT = 3, 5


def random_profile(folder: Path, seed: int = 0) -> HeadProfile:
    """A DuoAttention-like profile of random scores for the model in a folder.

    Where only some layers can have full heads, each of these gets high and low scores, so that heads move within it.
    """
    known = Model.of(read_config(folder))
    model, draw = known.dimensions, np.random.default_rng(seed)
    scores = draw.random((model.layers, model.kv_heads), dtype=np.float32)
    if any(known.windows):
        scores = draw.permuted(np.sort(scores) / 2 + np.linspace(0, 0.5, model.kv_heads, dtype=np.float32), axis=1)
    return HeadProfile(scores, "duo", "kv", str(folder), model)


def reform_profile(folder: Path) -> HeadProfile:
    """REFORM's profile of three embedding heads for the model in a folder."""
    heads = (EmbeddingHead(0, "q", 5), EmbeddingHead(1, "k", 2), EmbeddingHead(1, "v", 0))
    return HeadProfile(
        None, "reform", None, str(folder), Model.of(read_config(folder)).dimensions, embedding_heads=heads
    )


@dataclass(frozen=True)
class Converted:
    """A checkpoint before and after surgery."""

    source: Path
    folder: Path
    policy: Policy

    @property
    def auto(self) -> type:
        """The auto class that loads it with its output layer."""
        return getattr(transformers, auto_class(read_config(self.folder)))

    @cached_property
    def stock(self) -> torch.nn.Module:
        """The original model; eager, since stock SDPA leaves soft caps out."""
        return self.auto.from_pretrained(self.source, dtype=torch.float32, attn_implementation="eager").eval()

    @cached_property
    def model(self) -> torch.nn.Module:
        """The emitted model; tests must not change it."""
        return self.load()

    def load(self, auto: type | None = None, **options: Any) -> torch.nn.Module:
        """A fresh emitted model."""
        options = {"dtype": torch.float32, **options}
        return (auto or self.auto).from_pretrained(self.folder, trust_remote_code=True, **options).eval()

    @property
    def full(self) -> list[list[bool]]:
        """[layer][source KV head]: whether it keeps every token."""
        layers = self.policy.layout.attended
        return [[head in full_heads(layer) for head in range(len(layer.order))] for layer in layers]


def recipe_of(
    quantization: Quantization | None = None,
    selection: Selection | None = None,
    sizes: Mapping[str, Any] | None = None,
    **options: Any,
) -> Recipe:
    """A recipe of fields, some of them given as what the emitted code makes of them."""
    if quantization:
        options |= {f"kv_{name}": value for name, value in vars(quantization).items()}
    if selection:
        options |= vars(selection)
    return Recipe.of(**options, reform=ReformSizes(**sizes or {}))


def _sizes(options: Mapping[str, Any]) -> dict[str, int]:
    """Small sizes of streaming heads, unless the other heads have budgets."""
    budgeted = ["selection", *(field.name for field in fields(Budgeted))]
    if options.get("rest") == "budgeted" or any(options.get(name) is not None for name in budgeted):
        return {}
    return {"sink": SINK, "recent": RECENT}


def convert_folder(source: Path, out: Path, profile: HeadProfile | None = None, **options: Any) -> Converted:
    """Convert a folder after a profile, by default a random one, with small sinks and windows.

    Args:
        options: fields of a recipe, as `recipe_of` takes them, and `reform`, a profile of embedding heads.
    """
    embedding = options.pop("reform", None)
    recipe = recipe_of(**{**_sizes(options), **options})
    losses = None if recipe.measured is None else load_losses(recipe.measured)
    evidence = Evidence(profile or random_profile(source), embedding=embedding, losses=losses)
    prepared = PreparedConversion.prepare(source, recipe, evidence)
    convert(prepared.checkpoint, prepared.plan, out, prepared.emitted.files)
    return Converted(source, out, prepared.policy)
