"""`HeadProfile`: scores for the attention heads of one model, as a safetensors file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from kvsurgery.errors import ProfileError
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.embedding_heads import EmbeddingHead, Ranking
from kvsurgery.profile.methods import MAX_BUDGET, REFORM, SCORE_METHODS
from kvsurgery.profile.origin import ModelOrigin
from kvsurgery.profile.tensor_file import Kind, TensorFile, read

Granularity = Literal["kv", "query"]


@dataclass(frozen=True, eq=False)
class HeadProfile(TensorFile):
    """Head scores of one model, higher = needs the whole context more; or, of method "reform", its embedding heads.

    Attributes:
        scores: float32 [layers, heads], finite and non-negative; None in a reform profile.
        method: the method of measurement, a key of `SCORE_METHODS`, or "reform".
        granularity: whether `heads` counts KV heads or query heads; None without scores.
        base_model: Hub id or folder name of the measured model.
        model: its attention dimensions.
        base_revision: its commit, if known.
        sink, recent: tokens of the streaming heads that the scores were measured with, if any.
        embedding_heads: the heads of a reform profile, by layer, state and head; empty in other profiles.
        ranking: the ranks from which they were picked, if measured.
        windows: per layer, the model's own sliding window in tokens, 0 without a KV cache, None for full attention;
            None as a whole if unknown, as in files of version 0.1.
        fingerprint: fingerprint of the measured weights, if known.

    Raises:
        ProfileError: the fields contradict each other.
    """

    KIND = Kind(
        "head profile", "kvsurgery.head-profile", "1", "make one with `kvsurgery profile compute` or `profile import`"
    )

    scores: np.ndarray | None
    method: str
    granularity: Granularity | None
    base_model: str
    model: ModelDimensions
    base_revision: str | None = None
    sink: int | None = None
    recent: int | None = None
    embedding_heads: tuple[EmbeddingHead, ...] = ()
    ranking: Ranking | None = None
    windows: tuple[int | None, ...] | None = None
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        if self.method not in (*SCORE_METHODS, REFORM):
            raise ProfileError(f"unknown profile method {self.method!r}; known: {', '.join((*SCORE_METHODS, REFORM))}")
        check_model(self.KIND.name, self.origin, self.model, self.windows)
        if (self.sink is not None and self.sink < 0) or (self.recent is not None and self.recent < 1):
            raise ProfileError(f"profile sink must be >= 0 and recent >= 1, got {self.sink} and {self.recent}")
        if not isinstance(self.provenance, dict):
            raise ProfileError(f"profile provenance must be a JSON object, got {type(self.provenance).__name__}")
        if self.method == REFORM:
            self._check_embedding_heads()
        else:
            self._check_scores()

    def _check_embedding_heads(self) -> None:
        if self.scores is not None or self.granularity is not None:
            raise ProfileError("a reform profile has embedding heads, and no scores")
        heads = tuple(sorted(self.embedding_heads))
        object.__setattr__(self, "embedding_heads", heads)
        if not heads:
            raise ProfileError("a reform profile names embedding heads; this one has none")
        for head in heads:
            if not head.within(self.model):
                raise ProfileError(f"embedding head {head} does not exist in {self.base_model}, which has {self.model}")
        for head, following in pairwise(heads):
            if head == following:
                raise ProfileError(f"the embedding head {head} is named twice")
        if self.ranking is not None:
            self.ranking.check(self.model)

    def _check_scores(self) -> None:
        if self.embedding_heads or self.ranking is not None:
            raise ProfileError(f"a profile with embedding heads is of method 'reform', not {self.method!r}")
        if self.scores is None:
            raise ProfileError(f'the {self.method} profile holds no "scores"')
        with np.errstate(over="ignore"):  # too large for float32 becomes inf, which is refused below
            scores = np.array(self.scores, dtype=np.float32, order="C")
        scores += 0  # no negative zeros: equal scores are equal bytes
        scores.flags.writeable = False
        object.__setattr__(self, "scores", scores)
        if self.granularity not in ("kv", "query"):
            raise ProfileError(f"profile granularity must be 'kv' or 'query', got {self.granularity!r}")
        heads = self.model.kv_heads if self.granularity == "kv" else self.model.query_heads
        if scores.shape != (self.model.layers, heads):
            raise ProfileError(
                f"profile scores have shape {list(scores.shape)}, but {self.base_model} has {self.model.layers} layers "
                f"of {heads} {self.granularity} heads"
            )
        invalid_places = np.argwhere(~np.isfinite(scores))
        if len(invalid_places):
            layer, head = invalid_places[0]
            raise ProfileError(
                f"profile score of layer {layer}, head {head} is {scores[layer, head]}; measure it again"
            )
        if SCORE_METHODS[self.method].kind == "budget" and ((scores % 1).any() or scores.max() > MAX_BUDGET):
            raise ProfileError(f"budgets are whole numbers of tokens, at most {MAX_BUDGET}; got up to {scores.max():g}")
        ceiling = SCORE_METHODS[self.method].most
        if scores.min() < 0 or (ceiling is not None and scores.max() > ceiling):
            bound = "" if ceiling is None else f" and <= {ceiling:g}"
            raise ProfileError(f"{self.method} scores are >= 0{bound}, got {scores.min():.4g} to {scores.max():.4g}")

    @property
    def head_scores(self) -> np.ndarray:
        """`scores`, in a profile that must have them.

        Raises:
            ProfileError: this is a reform profile.
        """
        if self.scores is None:
            raise ProfileError(f"the {self.method} profile of {self.base_model} has embedding heads and no scores")
        return self.scores

    @property
    def origin(self) -> ModelOrigin:
        """The origin of the measured model."""
        return ModelOrigin(self.base_model, self.base_revision, self.fingerprint)

    @property
    def eligible(self) -> np.ndarray:
        """bool [layers]: whether the heads of a layer may be full: the layers with full attention in the model."""
        return np.array([window is None for window in self.windows or [None] * self.model.layers])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeadProfile) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        metadata, tensors = read(path, cls.KIND)
        reform = metadata.get("method") == REFORM
        if not reform:
            tensors = {name: tensors[name] for name in ("scores",) if name in tensors}
        try:
            return cls(
                scores=tensors.pop("scores", None),
                method=metadata["method"],
                granularity=metadata.get("granularity") if reform else metadata["granularity"],
                base_model=metadata["base_model"],
                base_revision=metadata.get("base_revision"),
                model=ModelDimensions(*(int(metadata[name]) for name in ModelDimensions.__dataclass_fields__)),
                sink=_optional_int(metadata.get("sink")),
                recent=_optional_int(metadata.get("recent")),
                provenance=json.loads(metadata.get("provenance", "{}")),
                embedding_heads=EmbeddingHead.parse(json.loads(metadata.get("embedding_heads", "[]"))),
                ranking=Ranking.from_tensors(tensors) if tensors else None,
                windows=tuple(json.loads(metadata["windows"])) if "windows" in metadata else None,
                fingerprint=metadata.get("fingerprint"),
            )
        except KeyError as error:
            raise ProfileError(f"{path} lacks the metadata {error}") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise ProfileError(f"{path} has bad metadata: {error}") from error
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}") from error

    def content(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        metadata = {
            **self.KIND.metadata,
            "method": self.method,
            "granularity": self.granularity,
            "base_model": self.base_model,
            "base_revision": self.base_revision,
            "fingerprint": self.fingerprint,
            **asdict(self.model),
            "sink": self.sink,
            "recent": self.recent,
            "provenance": json.dumps(self.provenance, sort_keys=True),
            "embedding_heads": json.dumps([astuple(head) for head in self.embedding_heads])
            if self.embedding_heads
            else None,
            "windows": None if self.windows is None else json.dumps(self.windows),
        }
        tensors = {} if self.scores is None else {"scores": self.scores}
        if self.ranking is not None:
            tensors = self.ranking.tensors()
        return metadata, tensors


def check_model(kind: str, origin: ModelOrigin, model: ModelDimensions, windows: Sequence[int | None] | None) -> None:
    """Check the facts about the measured model in a file.

    Args:
        kind: the name of the file in messages.
        origin, model, windows: as in `HeadProfile`.

    Raises:
        ProfileError: a fact has the wrong type, or contradicts the others.
    """
    name, revision, weights = origin.name, origin.revision, origin.fingerprint
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ProfileError(f"a {kind} names the model it was measured on; base_model is {name!r}")
    if revision is not None and not (isinstance(revision, str) and revision.isprintable()):
        raise ProfileError(f"{kind}: base_revision must be one line, got {revision!r}")
    if weights is not None and not (isinstance(weights, str) and re.fullmatch("[0-9a-f]+", weights)):
        raise ProfileError(f"{kind}: the fingerprint must be a hash in hexadecimal, got {weights!r}")
    sizes = asdict(model).values()
    if any(type(size) is not int or size < 1 for size in sizes) or model.query_heads % model.kv_heads:
        raise ProfileError(f"a {kind} cannot be of a model with {model}")
    if windows is not None and not _are_windows(windows, model.layers):
        raise ProfileError(
            f"{kind}: windows must be {model.layers} sizes in tokens, or null for full attention, got {list(windows)}"
        )


def _optional_int(text: str | None) -> int | None:
    return None if text is None else int(text)


def _are_windows(windows: Sequence[int | None], layers: int) -> bool:
    """Whether each layer has an entry: a number of tokens, 0 without a KV cache, or None."""
    return len(windows) == layers and all(size is None or (type(size) is int and size >= 0) for size in windows)
