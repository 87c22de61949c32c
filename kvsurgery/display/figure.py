"""Matplotlib figures of commands and reports, as files and as SVG inside a page."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from kvsurgery.errors import OutputError
from kvsurgery.system.files import check_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of a size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def check_picture(path: Path) -> None:
    """Check that a picture can be written, before the work whose result it will show.

    Raises:
        OutputError: it cannot be written, or its suffix is not a picture format.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    check_file(path)
    picture_formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in picture_formats:
        raise OutputError(f"cannot write {path}: {path.suffix} is not a picture format; end it in .png, .svg or .pdf")


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure in the format of the path's suffix.

    Raises:
        OutputError: the file cannot be written, or its suffix is not a picture format.
    """
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write {path}: {error}") from error


def inline_svg(figure: Figure, name: str, alt: str, colors: Mapping[str, str]) -> str:
    """The figure as an SVG element of a page, whose style sheet decides font and colors.

    Args:
        figure: the figure; its text stays text.
        name: the prefix of its ids, which must be unique in a page.
        alt: a description for screen readers.
        colors: from colors of the figure, as #rrggbb, to the CSS variables that replace them.
    """
    import matplotlib

    file = io.BytesIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(file.getvalue())
    # rules for every element of the page
    if (rules := root.find(f"{{{SVG}}}defs/{{{SVG}}}style/..")) is not None:
        root.remove(rules)
    for element in root.iter():
        for key, value in element.attrib.items():
            if key == "id":
                value = f"{name}-{value}"
            value = re.sub("(^|url\\()#(?=[a-z])", rf"\1#{name}-", value)
            if key == "style":
                for color, variable in colors.items():
                    value = value.replace(color, f"var({variable})")
            element.set(key, value)
    for size in ("width", "height", "version"):
        del root.attrib[size]
    root.set("role", "img")
    root.set("aria-label", alt)
    return ElementTree.tostring(root, encoding="unicode")
