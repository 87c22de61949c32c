"""`CacheLosses`: measured losses of quantized and streaming caches on one model and text, as a safetensors file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from kvsurgery.errors import ProfileError
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.head_profile import HeadProfile, check_model
from kvsurgery.profile.origin import ModelOrigin
from kvsurgery.profile.query_factors import QueryFactors
from kvsurgery.profile.tensor_file import DTYPES, Kind, TensorFile, read
from kvsurgery.templates.kv_layout import NEAREST, QUERIES, ROTATIONS, ROUNDINGS, Quantization

STREAMING_CACHE = "streaming"
MEASURED_WIDTHS = (8, 4, 3, "k3v2", 2)
ROUNDING = "rounding"  # what names of factors begin with


@dataclass(frozen=True)
class WholeCacheLoss:
    """The loss of a quantized cache of one width with a setting for rotation, clipping and rounding.

    Attributes:
        rotate, clip, rounding: as in `Quantization`.
        loss: the divergence with every head of the model in this cache.
    """

    rotate: str
    clip: bool
    loss: float
    rounding: str = NEAREST

    def quantization(self, bits: int | str) -> Quantization:
        """The cache of a width with this setting."""
        return Quantization(bits, rotate=self.rotate, clip=self.clip, rounding=self.rounding)

    @property
    def facts(self) -> dict[str, Any]:
        """All fields as JSON; rounding to the nearest code goes without saying."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("rounding", NEAREST)}


@dataclass(frozen=True)
class Combination:
    """The loss of several heads changed at once, which shows how well losses of single heads add up, and scales them.

    Attributes:
        name: the change.
        expected: the sum of the losses of the heads, each changed alone.
        measured: the measured divergence.
        streaming: number of heads that stream, those that lose least, if nothing else is changed; else 0.
    """

    name: str
    expected: float
    measured: float
    streaming: int = 0


@dataclass(frozen=True, eq=False)
class CacheLosses(TensorFile):
    """The measured losses of caches on one model.

    A loss is the mean Kullback-Leibler divergence, in nats, of the next token's distribution from that with an
    unquantized cache of every token.

    Attributes:
        settings: by bits, the settings that were tried with every head quantized.
        heads: by cache ("8", "4", "3", "k3v2", "2" or "streaming"), float32 [layers, kv_heads]: the loss with only this
            head in it, quantized with the best setting of its width. 0 in layers with a window of the model's own.
        combinations: several heads changed at once.
        quantization: the measured scheme, groups, residual and sinks.
        sink, recent: tokens that streaming heads kept.
        context: number of tokens in the cache.
        base_model, model, base_revision, windows, fingerprint, provenance: as in `HeadProfile`.
        rounding: by what is rotated, how keys are rounded by the queries, where that was measured.

    Raises:
        ProfileError: any of them contradicts the rest.
    """

    KIND = Kind(
        "file of measured cache losses",
        "kvsurgery.cache-losses",
        "1",
        "make one with `kvsurgery profile compute --method kv-bits`",
        (*DTYPES,),
    )

    settings: Mapping[int | str, tuple[WholeCacheLoss, ...]]
    heads: Mapping[str, np.ndarray]
    combinations: tuple[Combination, ...]
    quantization: Quantization
    sink: int
    recent: int
    context: int
    base_model: str
    model: ModelDimensions
    base_revision: str | None = None
    windows: tuple[int | None, ...] | None = None
    fingerprint: str | None = None
    rounding: Mapping[str, QueryFactors] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_model(self.KIND.name, self.origin, self.model, self.windows)
        if not self.settings or not set(self.settings) <= set(MEASURED_WIDTHS) or not all(self.settings.values()):
            raise ProfileError(f"measured cache losses are of 8, 4, 3, k3v2 and 2 bits, got {[*self.settings]}")
        for setting in (entry for entries in self.settings.values() for entry in entries):
            if setting.rotate not in ROTATIONS or type(setting.clip) is not bool or not _is_loss(setting.loss):
                raise ProfileError(f"unknown setting of a quantized cache: {setting}")
            needs_factors = setting.rounding == QUERIES and setting.rotate not in self.rounding
            if setting.rounding not in ROUNDINGS or needs_factors:
                raise ProfileError(f"a setting is rounded in an unknown way, or factors are missing: {setting}")
        for rotate, factors in self.rounding.items():
            if rotate not in ROTATIONS:
                raise ProfileError(f"unknown factors of rounding: {rotate}")
            factors.check(self.model)
        sizes = self.sink, self.recent, self.context
        if any(type(size) is not int or size < 0 for size in sizes) or self.recent < 1:
            raise ProfileError(f'"sink", "recent" and "context" are numbers of tokens, got {sizes}')
        for entry in self.combinations:
            is_count = type(entry.streaming) is int and 0 <= entry.streaming <= self.model.layers * self.model.kv_heads
            if not (isinstance(entry.name, str) and _is_loss(entry.expected) and _is_loss(entry.measured) and is_count):
                raise ProfileError(f"losses of several heads are finite numbers of 0 or more, got {entry}")
        if not isinstance(self.provenance, dict) or not isinstance(self.provenance.get("data", {}), dict):
            raise ProfileError("the provenance of measured cache losses must be a JSON object")
        # in one order, however they come: equal losses are equal bytes
        object.__setattr__(
            self, "settings", {bits: self.settings[bits] for bits in MEASURED_WIDTHS if bits in self.settings}
        )
        names = [*map(str, self.settings), STREAMING_CACHE]
        if set(self.heads) != set(names):
            raise ProfileError(f"measured cache losses are of {', '.join(names)}, got {', '.join(self.heads)}")
        shape = self.model.layers, self.model.kv_heads
        heads = {}
        for name in names:
            losses = np.array(self.heads[name], dtype=np.float32, order="C")
            if losses.shape != shape or not ((losses >= 0) & (losses < np.inf)).all():  # which NaN is not
                raise ProfileError(f"losses of {name} are not {list(shape)} finite numbers of 0 or more")
            losses.flags.writeable = False
            heads[name] = losses
        object.__setattr__(self, "heads", heads)

    @property
    def origin(self) -> ModelOrigin:
        """The origin of the measured model."""
        return ModelOrigin(self.base_model, self.base_revision, self.fingerprint)

    @property
    def text(self) -> str:
        """The name of the text."""
        return str(self.provenance.get("data", {}).get("text", "unknown text"))

    @property
    def head_profile(self) -> HeadProfile:
        """A profile of method "kv-bits": the score of a KV head is its loss when it streams."""
        return HeadProfile(
            self.heads[STREAMING_CACHE],
            "kv-bits",
            "kv",
            self.base_model,
            self.model,
            base_revision=self.base_revision,
            sink=self.sink,
            recent=self.recent,
            provenance=self.provenance,
            windows=self.windows,
            fingerprint=self.fingerprint,
        )

    def best(
        self, bits: int | str, rotate: str | None = None, clip: bool | None = None, rounding: str | None = None
    ) -> WholeCacheLoss:
        """The setting of a width with the least loss; `rotate`, `clip` and `rounding` restrict the choice.

        Raises:
            ProfileError: no such setting was measured.
        """
        if bits not in self.settings:
            raise ProfileError(f"{bits} bits were not measured, only {', '.join(map(str, self.settings))}")
        candidates = [
            setting
            for setting in self.settings[bits]
            if rotate in (None, setting.rotate)
            and clip in (None, setting.clip)
            and rounding in (None, setting.rounding)
        ]
        if not candidates:
            stated = ("rotate", rotate), ("clip", clip), ("rounding", rounding)
            restrictions = ", ".join(f"{name} {value}" for name, value in stated if value)
            raise ProfileError(f"{restrictions} was not measured at {bits} bits; leave it or the measurement out")
        return min(candidates, key=lambda setting: setting.loss)

    def expected(self, cache: str) -> np.ndarray:
        """float64 [layers, kv_heads]: the expected share of each head in the loss of several heads, which is their sum.

        Losses of a width are scaled to sum to the loss that was measured with every head quantized. Losses of streaming
        heads are scaled in parts, so that those of the heads that lose least sum to their loss together.
        """
        losses = self.heads[cache].astype(np.float64)
        if cache != STREAMING_CACHE:
            return losses * (self.best(_bits(cache)).loss / losses.sum()) if losses.any() else losses
        windows = self.windows or [None] * self.model.layers
        eligible = np.repeat([window is None for window in windows], self.model.kv_heads)
        ranking = [place for place in losses.argsort(axis=None, kind="stable") if eligible[place]]
        start, previous_loss = 0, 0.0
        for count, measured_loss in sorted(
            (combination.streaming, combination.measured) for combination in self.combinations if combination.streaming
        ):
            places, start = ranking[start:count], count
            if total := losses.flat[places].sum():
                losses.flat[places] *= max(measured_loss - previous_loss, 0.0) / total
            previous_loss = max(previous_loss, measured_loss)
        return losses

    @classmethod
    def load(cls, path: str | Path) -> Self:
        metadata, tensors = read(path, cls.KIND)
        parts = [name.split(".") for name in tensors if name.startswith(f"{ROUNDING}.")]
        try:
            content = json.loads(metadata["content"])
            return cls(
                settings={
                    _bits(name): tuple(WholeCacheLoss(**entry) for entry in entries)
                    for name, entries in content["settings"].items()
                },
                heads={name: losses for name, losses in tensors.items() if not name.startswith(f"{ROUNDING}.")},
                rounding={
                    rotate: QueryFactors(*(tensors[f"{ROUNDING}.{rotate}.{name}"] for name in ("order", "feedback")))
                    for rotate in sorted({rotate for _, rotate, _ in parts})
                },
                combinations=tuple(Combination(**entry) for entry in content["combinations"]),
                quantization=Quantization(**content["quantization"]),
                model=ModelDimensions(**content["model"]),
                windows=None if content["windows"] is None else tuple(content["windows"]),
                fingerprint=content.get("fingerprint"),
                **{name: content[name] for name in COPIED_FIELDS},
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ProfileError(f"{path} has bad metadata: {error}") from error
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}") from error

    @property
    def facts(self) -> dict[str, Any]:
        """All fields as JSON, except for the losses of single heads."""
        return {
            **{name: getattr(self, name) for name in COPIED_FIELDS},
            "settings": {str(bits): [entry.facts for entry in entries] for bits, entries in self.settings.items()},
            "combinations": [asdict(entry) for entry in self.combinations],
            "quantization": {name: value for name, value in asdict(self.quantization).items() if name != "rounding"},
            "model": asdict(self.model),
            "windows": self.windows,
            **({"fingerprint": self.fingerprint} if self.fingerprint else {}),
        }

    def content(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        tensors = dict(self.heads)
        for rotate, factors in sorted(self.rounding.items()):
            tensors |= {f"{ROUNDING}.{rotate}.{name}": part for name, part in vars(factors).items()}
        return {**self.KIND.metadata, "content": json.dumps(self.facts, sort_keys=True)}, tensors


def _bits(name: str) -> int | str:
    """The bits that have a name in a file."""
    return int(name) if name.isdigit() else name


def _is_loss(value: object) -> bool:
    """Whether a value of a file is a finite number of 0 or more within float64."""
    return isinstance(value, int | float) and 0 <= value <= sys.float_info.max


COPIED_FIELDS = ("sink", "recent", "context", "base_model", "base_revision", "provenance")
