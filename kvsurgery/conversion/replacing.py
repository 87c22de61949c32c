"""Making room for a conversion where an earlier one is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvsurgery.checkpoint.journal import JOURNAL, PART, recorded_fingerprint
from kvsurgery.checkpoint.provenance import PROVENANCE, Provenance
from kvsurgery.checkpoint.side_files import walk
from kvsurgery.checkpoint.source import ADAPTER_CONFIG, CONFIG
from kvsurgery.errors import OutputError

LISTED = 5  # files that a refusal names


def remove_conversion(folder: Path, fingerprint: Mapping[str, str]) -> None:
    """Remove an earlier conversion from a folder, finished or not. A run with the same fingerprint stays, to go on.

    The folder is `reserved`.

    Raises:
        OutputError: there are files that no conversion wrote; then nothing is removed.
        CheckpointError: the provenance of what is there is damaged.
    """
    if recorded_fingerprint(folder) == fingerprint:
        return
    names = removable_names(folder)
    try:
        _remove(folder, names)
    except OSError as error:
        raise OutputError(f"cannot remove what is in {folder}: {error.strerror}") from error


def _remove(folder: Path, names: Sequence[str]) -> None:
    # without its config no half of it loads; what tells whose files these are goes last
    for name in sorted(
        names, key=lambda name: (name not in (CONFIG, ADAPTER_CONFIG), name == PROVENANCE, name == JOURNAL)
    ):
        os.unlink(folder / name)
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir()


def removable_names(folder: Path) -> list[str]:
    """The files of a folder, all of which a conversion wrote, finished or not; empty without a folder.

    Raises:
        OutputError: there are other files.
        CheckpointError: the provenance of what is there is damaged.
    """
    names = [*walk(folder)] if folder.is_dir() else []
    if not names:
        return []
    if PROVENANCE in names:
        provenance = Provenance.read(folder)
        written_names = {PROVENANCE, JOURNAL, *provenance.emitted, *provenance.copied, *provenance.headers}
    elif JOURNAL in names:  # a run without provenance began in an empty folder
        written_names = {name for name in names if not name.endswith("/")}
    else:
        raise OutputError(f"{folder} was not written by kvsurgery, so it is not overwritten; choose another folder")
    others = [name for name in names if name not in written_names and not name.endswith(PART)]
    if others:
        more = f" and {len(others) - LISTED} more" if len(others) > LISTED else ""
        raise OutputError(
            f"{folder} has files that the conversion did not write ({', '.join(others[:LISTED])}{more}), so it is not "
            "overwritten; move them elsewhere, or choose another folder"
        )
    return names
