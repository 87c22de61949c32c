"""`ProfiledModel`: the facts about a model that its profile records, read from the model's config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.source import read_config
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.head_profile import Granularity, HeadProfile
from kvsurgery.profile.origin import ModelOrigin
from kvsurgery.system.repo_id import checkpoint_folder


@dataclass(frozen=True)
class ProfiledModel:
    """The model that was measured.

    Attributes:
        name, revision: Hub id or the folder's name, and the commit where known.
        dimensions: of attention.
        windows: per layer, its own sliding window in tokens, 0 without a KV cache, None for full; None as a
            whole if unknown.
        fingerprint: of the weights, if there are any.
    """

    name: str
    dimensions: ModelDimensions
    revision: str | None = None
    windows: tuple[int | None, ...] | None = None
    fingerprint: str | None = None

    def profile(
        self,
        scores: np.ndarray,
        method: str,
        provenance: dict[str, Any],
        *,
        granularity: Granularity = "kv",
        sink: int | None = None,
        recent: int | None = None,
    ) -> HeadProfile:
        """A profile of this model; the arguments are the fields of `HeadProfile`.

        Raises:
            ProfileError: they contradict the model or each other.
        """
        return HeadProfile(
            scores,
            method,
            granularity,
            base_model=self.name,
            model=self.dimensions,
            base_revision=self.revision,
            sink=sink,
            recent=recent,
            provenance=provenance,
            windows=self.windows,
            fingerprint=self.fingerprint,
        )

    @classmethod
    def read(cls, source: str, revision: str | None = None) -> ProfiledModel:
        """Read the model of a folder, a config.json or a Hub id, whose config is downloaded.

        Raises:
            CheckpointError: there is no model.
            UnsupportedModel: a family without a patch.
        """
        folder = local_folder(source)
        if folder is None:
            from kvsurgery import hub

            folder, revision = hub.fetch_config(source, revision)
            origin = ModelOrigin(source, revision)
        else:
            origin = ModelOrigin.of_folder(folder)
        model = Model.of(read_config(folder))
        return cls(origin.name, model.dimensions, revision or origin.revision, model.windows, origin.fingerprint)


def local_folder(source: str) -> Path | None:
    """The folder of a model from its path or that of its config.json; None for a Hub id.

    Raises:
        CheckpointError: the source is none of these.
    """
    path = Path(source)
    if path.name == "config.json" and path.is_file():
        return path.parent
    return checkpoint_folder(source)
