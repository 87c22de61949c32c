"""The pictures that `--plot` writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvsurgery.errors import KVSurgeryError, OutputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches.

    Raises:
        KVSurgeryError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KVSurgeryError("--plot needs matplotlib: pip install 'kvsurgery[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write it in the format of the path's ending.

    Raises:
        OutputError: the file cannot be written, or its ending is no picture format.
    """
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write {path}: {error}") from error
