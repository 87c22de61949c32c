"""`HeadProfile`: how much each attention head of one model matters, as a safetensors file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from kvsurgery.dimensions import ModelDimensions
from kvsurgery.errors import ProfileError

FORMAT = "kvsurgery.head-profile"
VERSION = "1"

# upper bound of a score by method; None: any finite, non-negative number (copy scores exceed 1)
METHODS: dict[str, float | None] = {
    "duo": 1.0,
    "ablation": None,
    "headkv-r": None,
    "headkv-er": None,
    "headkv-r2": None,
}


@dataclass(frozen=True)
class HeadProfile:
    """Head scores of one model, higher = needs the whole context more.

    Attributes:
        scores: float32 [layers, heads], finite and non-negative.
        method: how they were measured, a key of `METHODS`.
        granularity: whether `heads` counts KV heads or query heads.
        base_model: Hub id or path of the model that was measured.
        model: its attention dimensions.
        base_revision: its commit, where known.
        sink, recent: tokens of the streaming pattern that scores were measured with, where there was one.
        provenance: data, steps, seeds, tool version; free JSON.

    Raises:
        ProfileError: any of them contradicts the rest.
    """

    scores: np.ndarray
    method: str
    granularity: Literal["kv", "query"]
    base_model: str
    model: ModelDimensions
    base_revision: str | None = None
    sink: int | None = None
    recent: int | None = None
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        scores = np.ascontiguousarray(self.scores, dtype=np.float32)
        scores.flags.writeable = False
        object.__setattr__(self, "scores", scores)
        if self.method not in METHODS:
            raise ProfileError(f"unknown profile method {self.method!r}; known: {', '.join(METHODS)}")
        if self.granularity not in ("kv", "query"):
            raise ProfileError(f"profile granularity must be 'kv' or 'query', got {self.granularity!r}")
        if not self.base_model:
            raise ProfileError("a profile names the model it was measured on; base_model is empty")
        heads = self.model.kv_heads if self.granularity == "kv" else self.model.query_heads
        if scores.shape != (self.model.layers, heads):
            raise ProfileError(
                f"profile scores have shape {list(scores.shape)}, but {self.base_model} has {self.model.layers} layers "
                f"of {heads} {self.granularity} heads"
            )
        bad = np.argwhere(~np.isfinite(scores))
        if len(bad):
            layer, head = bad[0]
            raise ProfileError(
                f"profile score of layer {layer}, head {head} is {scores[layer, head]}; measure it again"
            )
        ceiling = METHODS[self.method]
        if scores.min() < 0 or (ceiling is not None and scores.max() > ceiling):
            raise ProfileError(
                f"{self.method} scores lie in [0, {'inf' if ceiling is None else ceiling:g}], "
                f"got {scores.min():.4g}..{scores.max():.4g}"
            )

    @cached_property
    def hash(self) -> str:
        """BLAKE3 of the file that `save` writes."""
        return blake3(self._serialise()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the profile; equal profiles give equal bytes."""
        Path(path).write_bytes(self._serialise())

    @classmethod
    def load(cls, path: str | Path) -> HeadProfile:
        """Read and validate a profile.

        Raises:
            ProfileError: not a head profile, of an unknown version, or inconsistent.
        """
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ProfileError(f"{path} is not a head profile; make one with `kvsurgery profile import`")
                if metadata.get("version") != VERSION:
                    raise ProfileError(
                        f"{path} has profile version {metadata.get('version')}; this tool reads {VERSION}"
                    )
                if "scores" not in file.keys():  # noqa: SIM118  (a safetensors handle, not a dict)
                    raise ProfileError(f"{path} holds no `scores`")
                scores = file.get_tensor("scores")
        except (SafetensorError, OSError) as error:
            raise ProfileError(f"cannot read head profile {path}: {error}") from error
        if scores.dtype != np.float32:
            raise ProfileError(f"{path}: scores are {scores.dtype}, not float32")
        try:
            return cls(
                scores=scores,
                method=metadata["method"],
                granularity=metadata["granularity"],
                base_model=metadata["base_model"],
                base_revision=metadata.get("base_revision"),
                model=ModelDimensions(*(int(metadata[name]) for name in ModelDimensions.__dataclass_fields__)),
                sink=_optional_int(metadata.get("sink")),
                recent=_optional_int(metadata.get("recent")),
                provenance=json.loads(metadata.get("provenance", "{}")),
            )
        except (KeyError, ValueError) as error:
            raise ProfileError(f"{path} has bad metadata: {error}") from error

    def _serialise(self) -> bytes:
        metadata = {
            "format": FORMAT,
            "version": VERSION,
            "method": self.method,
            "granularity": self.granularity,
            "base_model": self.base_model,
            "base_revision": self.base_revision,
            **asdict(self.model),
            "sink": self.sink,
            "recent": self.recent,
            "provenance": json.dumps(self.provenance, sort_keys=True),
        }
        return save({"scores": self.scores}, {key: str(value) for key, value in metadata.items() if value is not None})


def _optional_int(text: str | None) -> int | None:
    return None if text is None else int(text)
