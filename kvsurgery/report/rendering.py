"""Render the report's pages from their templates, as one self-contained HTML file each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvsurgery.bench.results import Row
from kvsurgery.report import findings
from kvsurgery.report.charts import tokens
from kvsurgery.report.colors import DARK, LIGHT
from kvsurgery.report.speed_charts import short_time
from kvsurgery.system.sizes import size
from kvsurgery.version import __version__


def render(template: str, **values: Any) -> str:
    """A page as HTML; names and texts are escaped."""
    environment = Environment(
        autoescape=True,
        loader=PackageLoader("kvsurgery", "report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "breaking": _with_breaks,
        "change": findings.change,
        "count": lambda number, noun: f"{number:,} {noun}" + "s" * (number != 1),
        "flat": flat_settings,
        "peak": _peak,
        "score": findings.score,
        "short_time": short_time,
        "size": size,
        "span": findings.span,
        "tokens": tokens,
        "thousands": lambda number: f"{number:,}" if isinstance(number, int) else number,
        "verdict": findings.verdict,
        "zip": zip,
    }
    constants = {"tool": __version__, "light": LIGHT, "dark": DARK, "fewest": findings.FEWEST_SAMPLES}
    page = environment.get_template(template).render(**constants, **values)
    # a file may hold letters that UTF-8 has not
    return page.encode("utf-8", "replace").decode("utf-8")


def _peak(row: Row) -> str:
    """The largest memory peak of all phases."""
    peaks = [phase.peak_bytes for phase in (row.prefill, row.chunked, row.first_token, row.decode) if phase]
    return size(max(peaks)) if peaks else "–"


def _with_breaks(name: str) -> Markup:
    """A name in HTML that can break after a slash, a dot or an underscore."""
    return Markup("<wbr>").join(re.split(r"(?<=[/_])|(?<=\.)(?!\d)", name))


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings by their dotted names, as text."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flat_settings(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            yield prefix + name, ", ".join(map(str, value))
        else:
            yield prefix + name, "–" if value is None else str(value)
