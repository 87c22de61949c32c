"""The list of published head scores: their places and the models that were measured (`published.toml`)."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.importers.reform import HEADS

QUANTIZED = re.compile(
    r"([-_.](quantized|fp8|nvfp4|mxfp4|fp4|nf4|awq|gptq|bnb|hqq|modelopt|torchao|dynamic|block|unsloth|w\d+a\d+(fp8)?|int[2348]|[2348]bit|g\d+))+$"
)
LIST = Path(__file__).with_name("published.toml")


@dataclass(frozen=True)
class Published:
    """The published scores of one model.

    Attributes:
        format: the subcommand of `profile import` that reads them.
        model, family, dimensions: name, `model_type` and dimensions of the measured model.
        repository, path: the place of the file on GitHub; None for scores that are included in this package.
        options: options of the subcommand.
        note: a remark about other files.
    """

    format: str
    model: str
    family: str
    dimensions: ModelDimensions
    repository: str | None = None
    path: str | None = None
    options: tuple[str, ...] = ()
    note: str = ""

    def commands(self, model: str, revision: str | None = None) -> tuple[str, ...]:
        """The commands that import the scores for a model, a path or a Hub id and its revision."""
        file = f"{self.format}.safetensors"
        if self.repository is None or self.path is None:
            return (shlex.join(["kvsurgery", "profile", "import", self.format, self.model, "-o", file]),)
        path = f"{self.repository.partition('/')[2]}/{self.path}"
        words = ["kvsurgery", "profile", "import", self.format, path, *self.options, "--model", model]
        words += [*(["--revision", revision] if revision else []), "-o", file]
        return f"git clone https://github.com/{self.repository}", shlex.join(words)


@cache
def published() -> tuple[Published, ...]:
    """All known profiles, in the order of the list; those included in this package come last."""
    content = _content()

    def to_published(entry: Mapping[str, Any]) -> Published:
        model = content["models"][entry["model"]]
        fields: dict[str, Any] = {**entry, "options": tuple(entry.get("options", ()))}
        return Published(family=model["type"], dimensions=ModelDimensions(*model["shape"]), **fields)

    shipped_entries = [{"format": "reform", "model": name} for name in tomllib.loads(HEADS.read_text(encoding="utf-8"))]
    return tuple(to_published(entry) for entry in (*content["profiles"], *shipped_entries))


def normal(name: str) -> str:
    """A model's normalized name, without parts that differ between copies: owner, folder, "Meta-", "-hf", case."""
    return name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-").removesuffix("-hf")


def unquantized(name: str) -> str:
    """A normalized name without the suffix of quantized weights, such as "-fp8", "-gptq-int4" or "-quantized.w4a16"."""
    return QUANTIZED.sub("", name)


def ancestors(names: Iterable[str]) -> frozenset[str]:
    """Normalized names of the models from which models with these names were made, without the names themselves."""
    bases = {normal(name): normal(base) for name, base in _content()["bases"].items()}
    ancestor_names: set[str] = set()
    for name in map(normal, names):
        while (name := bases.get(name, "")) and name not in ancestor_names:
            ancestor_names.add(name)
    return frozenset(ancestor_names)


@cache
def _content() -> dict[str, Any]:
    return tomllib.loads(LIST.read_text(encoding="utf-8"))
