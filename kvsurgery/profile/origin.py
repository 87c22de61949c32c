"""`ModelOrigin`: the measured model, named without paths to share files, and found again on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from kvsurgery.checkpoint.fingerprint import DIGITS, fingerprint
from kvsurgery.checkpoint.source import CONFIG, read_config, read_weights
from kvsurgery.errors import CheckpointError, KVSurgeryError
from kvsurgery.system.files import write_whole
from kvsurgery.system.repo_id import cached_origin

# folders beside a profile whose weights are looked at
MAX_NEIGHBORS = 200


@dataclass(frozen=True)
class ModelOrigin:
    """The origin of a measured model in a file of scores. It never holds a path.

    Attributes:
        name: Hub id, or the name of a folder.
        revision: commit on the Hub, if known.
        fingerprint: of the weights in a folder, or of its config if there were no weights; None for a Hub id.
    """

    name: str
    revision: str | None = None
    fingerprint: str | None = None

    @classmethod
    def of_folder(cls, folder: Path) -> ModelOrigin:
        """The model in a folder; a folder of the Hub's cache has the name of the Hub."""
        # a root folder has no name
        name, revision = cached_origin(folder) or (Path(os.path.abspath(folder)).name or "model", None)
        return cls(name, revision, _fingerprint(folder))

    def place(self, beside: Iterable[Path]) -> tuple[str, str | None]:
        """Find the model: a folder on this machine, or a Hub id with its commit if known.

        Args:
            beside: files of scores, whose folders are searched too.

        Raises:
            CheckpointError: the model was in a folder that cannot be found again.
        """
        folder = None if self.fingerprint is None else self._find(beside, self.fingerprint)
        if folder is not None:
            return str(folder), None
        if self.fingerprint is None or self.revision is not None:
            return self.name, self.revision
        raise CheckpointError(
            f"the profile was measured on a folder called {self.name}, which is not found again: neither where it was, "
            "nor beside the profile or in the working directory; give the folder as SRC"
        )

    def remember(self, folder: Path) -> None:
        """Record the folder of the model on this machine; errors of writing this note are ignored."""
        if self.fingerprint is not None:
            note = notes_folder() / self.fingerprint
            with suppress(OSError, KVSurgeryError):
                note.parent.mkdir(parents=True, exist_ok=True)
                write_whole(note, f"{os.path.abspath(folder)}\n")

    def _find(self, beside: Iterable[Path], weights: str) -> Path | None:
        candidates: list[Path] = []
        with suppress(OSError, ValueError):
            candidates = [Path((notes_folder() / weights).read_text(encoding="utf-8").rstrip("\n"))]
        folders = dict.fromkeys([*(path.parent for path in beside), Path()])
        neighbors = [path for folder in folders for path in (folder, *_checkpoints_in(folder))]
        # those of the same name first
        candidates += sorted(neighbors, key=lambda path: path.name != self.name)
        return next((path for path in candidates if self._is_in(path)), None)

    def _is_in(self, folder: Path) -> bool:
        try:
            # where no head was moved, a converted checkpoint has the same weights
            return "kv_surgery" not in read_config(folder) and _fingerprint(folder) == self.fingerprint
        except (OSError, ValueError, KVSurgeryError):
            return False


def _fingerprint(folder: Path) -> str | None:
    """The fingerprint of the weights in a folder, or of its config if weights are missing."""
    try:
        return fingerprint(read_weights(folder)[0])
    except KVSurgeryError:
        with suppress(OSError):
            return blake3((folder / CONFIG).read_bytes()).hexdigest()[:DIGITS]
    return None


def _checkpoints_in(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        paths = sorted(path for path in folder.iterdir() if (path / CONFIG).is_file())
        yield from paths[:MAX_NEIGHBORS]


def notes_folder() -> Path:
    """The folder of notes, with a file for each fingerprint that holds the folder of this model.

    It is in the cache directory of the XDG base directory specification.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "kvsurgery" / "models"
