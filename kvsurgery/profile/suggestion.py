"""Suggest published profiles for a model, by family, dimensions, and the models from which it was made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.quantization import KEY as QUANTIZATION_CONFIG
from kvsurgery.checkpoint.source import read_config
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.published import Published, ancestors, normal, published, unquantized
from kvsurgery.templates.kv_layout import text_config

Fit = Literal["measured", "related", "shape", "no"]
# the best first
FITS: dict[Fit, str] = {
    "measured": "measured on this model",
    "related": "measured on a relative: evaluate after conversion",
    "shape": "same family and dimensions, but other weights: a guess; measuring is better",
    "no": "cannot be used",
}


@dataclass(frozen=True)
class ModelIdentity:
    """A model that needs a profile.

    Attributes:
        name: its folder or Hub id.
        names: its normalized names.
        parents: normalized names of the models from which it was made: those in its card and, for quantized weights,
            its own names without the quantization.
        family: `model_type` of the language model.
        dimensions: of attention.
    """

    name: str
    names: frozenset[str]
    parents: frozenset[str]
    family: str
    dimensions: ModelDimensions

    @classmethod
    def read(cls, folder: Path, name: str) -> ModelIdentity:
        """Read the identity of the model in a folder from its config, and its card if there is one.

        Raises:
            CheckpointError: there is no config.
            UnsupportedModel: a family without a patch.
        """
        config = read_config(folder)
        saved_as = config.get("_name_or_path")
        names = {name, saved_as} if isinstance(saved_as, str) and saved_as else {name}
        card = folder / "README.md"
        parents = _base_models(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else ()
        own_names = frozenset(map(normal, names))
        parent_names = frozenset(map(normal, parents))
        if config.get(QUANTIZATION_CONFIG):
            parent_names |= frozenset(map(unquantized, own_names))
        return cls(
            name,
            own_names,
            parent_names - own_names,
            str(text_config(config).get("model_type", config["model_type"])),
            Model.of(config).dimensions,
        )

    @cached_property
    def ancestors(self) -> frozenset[str]:
        """Normalized names of all models from which it is known to be made."""
        return self.parents | ancestors(self.names | self.parents)


@dataclass(frozen=True)
class Suggestion:
    """A published profile, and why it fits or does not."""

    published: Published
    fit: Fit
    reason: str

    def to_json(self, model: str, revision: str | None = None) -> dict[str, Any]:
        """Plain JSON values."""
        entry = self.published
        return {
            "fit": self.fit,
            "reason": self.reason,
            "format": entry.format,
            "measured_on": entry.model,
            "repository": entry.repository,
            "path": entry.path,
            "note": entry.note,
            "commands": list(entry.commands(model, revision)),
        }


def suggestions(model: ModelIdentity) -> list[Suggestion]:
    """All published profiles, the best fit first."""
    results = [_suggestion_of(entry, model) for entry in published()]
    return sorted(results, key=lambda suggestion: list(FITS).index(suggestion.fit))


def _suggestion_of(entry: Published, model: ModelIdentity) -> Suggestion:
    measured_name = normal(entry.model)
    origin_names = ancestors([entry.model])
    if entry.dimensions != model.dimensions:
        return Suggestion(entry, "no", f"{entry.model} has {entry.dimensions}")
    if entry.family != model.family:
        return Suggestion(entry, "no", f"{entry.model} is a {entry.family} model, and this is a {model.family} model")
    if measured_name in model.names:
        return Suggestion(entry, "measured", f"measured on {entry.model}")
    if measured_name in model.ancestors:
        return Suggestion(entry, "related", f"measured on {entry.model}, which this model was made from")
    if model.names & origin_names:
        return Suggestion(entry, "related", f"measured on {entry.model}, which was made from this model")
    if shared_ancestors := model.ancestors & origin_names:
        return Suggestion(entry, "related", f"measured on {entry.model}; both were made from {min(shared_ancestors)}")
    return Suggestion(entry, "shape", f"measured on {entry.model}, which is not known to be related")


def _base_models(card: str) -> list[str]:
    """The models in `base_model` of a card's front matter, which is a name or a list of names."""
    front_match = re.match(r"---\r?\n(.*?)\r?\n---", card, re.DOTALL)
    base_match = re.search(r"^base_model:(.*(?:\n[ -].*)*)", front_match[1], re.MULTILINE) if front_match else None
    return re.findall(r"[\w.-]*\w/\w[\w.-]*", base_match[1]) if base_match else []
