"""The known family that an unknown checkpoint resembles, by the names and shapes of the tensors in its layers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvsurgery.checkpoint.family import Family, load_family, supported
from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.conversion.plan import check_complete, plan_moves
from kvsurgery.errors import KVSurgeryError, UnsupportedModel

LAYER = re.compile(r".*?\blayers\.\d+\.")
NUMBER = re.compile(r"\.\d+\.")
LISTED = 6  # tensors named in a sentence


@dataclass(frozen=True)
class _Comparison:
    """What a family and a checkpoint have in common.

    Attributes:
        family: the family.
        common: names of tensors of a layer that both have, `*` for numbers; `heads` of them have heads.
        unknown: names that only the checkpoint has.
        missing: names with heads that only the family has, and in every layer.
    """

    family: Family
    common: int
    heads: int
    unknown: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def likeness(self) -> int:
        return self.common - len(self.missing)

    @property
    def sentence(self) -> str:
        """The comparison in a sentence."""
        opening = f"its layers resemble {self.family.name} most"
        if not (self.unknown or self.missing):
            return f"{opening}: all {self.common} tensors have the same names"
        parts = (("has", self.unknown), ("lacks", self.missing))
        differences = " and ".join(f"{word} {_list(names)}" for word, names in parts if names)
        return f"{opening}, with {self.common} tensors of the same names; it {differences}"


def resemblance(checkpoint: Checkpoint) -> str | None:
    """The known family that a checkpoint resembles most and what differs, in a line; None if no family has any tensor.

    Of several families with the same names, one whose shapes fit is preferred, and Llama to others.
    """
    layers = [tensor.name for tensor in checkpoint.tensors if LAYER.match(tensor.name)]
    names = sorted({NUMBER.sub(".*.", LAYER.sub("", name)) for name in layers})
    comparisons = [_compare(load_family(name), names) for name in supported()]
    best_likeness = max(comparison.likeness for comparison in comparisons)
    best = [comparison for comparison in comparisons if comparison.likeness == best_likeness and comparison.common]
    best.sort(key=lambda comparison: (-comparison.heads, comparison.family.name != "llama"))
    if not best or best[0].unknown or best[0].missing:
        return best[0].sentence if best else None
    errors = [_misfit(checkpoint, comparison.family) for comparison in best]
    if None in errors:
        return f"{best[errors.index(None)].sentence} and shapes"
    return f"{best[0].sentence}, but {errors[0]}"


def _compare(family: Family, names: list[str]) -> _Comparison:
    unknown = tuple(name for name in names if not _has_tensor(family, name))
    heads = sum(name in family.permute or name in family.optional for name in names)
    missing = tuple(name for name in family.permute if name not in names)
    return _Comparison(family, len(names) - len(unknown), heads, unknown, missing)


def _has_tensor(family: Family, name: str) -> bool:
    try:
        family.role(f"model.layers.0.{name.replace('*', '0')}")
    except UnsupportedModel:
        return False
    return True


def _misfit(checkpoint: Checkpoint, family: Family) -> str | None:
    """Why the checkpoint's shapes do not fit the family; None if they do."""
    try:
        model = Model(family, checkpoint.config)
        moves = plan_moves(checkpoint.tensors, model, model.layer_heads)
        check_complete(checkpoint.name, model, moves)
    except KVSurgeryError as error:
        return str(error)
    return None


def _list(names: tuple[str, ...]) -> str:
    listing = ", ".join(names[:LISTED])
    return f"{listing} and {len(names) - LISTED} more" if len(names) > LISTED else listing
