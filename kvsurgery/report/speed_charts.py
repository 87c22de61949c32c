"""Charts of a benchmark: time, memory and KV bytes by length, a line for each contender."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kvsurgery.bench.results import PHASES, Bench, Row
from kvsurgery.report.charts import Chart, Panel, bars, byte_axis, curve, looks
from kvsurgery.system.sizes import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = {
    "prefill": "Prefill in one pass",
    "chunked": "Prefill in chunks",
    "first_token": "Time to first token",
    "decode": "One decode step",
}
Points = Mapping[str, Mapping[int, float]]
Look = Mapping[str, Mapping[str, Any]]


def speed(bench: Bench) -> Chart | None:
    """Seconds of each phase, peak memory and KV bytes by length, at the smallest batch that was measured."""
    batch = min((row.batch for row in bench.rows if not row.skipped), default=None)
    rows = [row for row in bench.rows if row.batch == batch and not row.skipped]
    look, panels = looks(bench.contenders), []
    for phase in PHASES:
        points = _points(bench, rows, partial(_seconds, phase))
        if points:
            panels.append(_panel(NAMES[phase], points, look, short_time, "seconds"))
    points = _points(bench, rows, lambda row: row.kv_bytes)
    if points:
        panels.append(_panel("KV cache", points, look, size, "bytes"))
    lengths = {row.tokens for row in rows}
    shape = "Points are medians. Both axes are logarithmic."
    if len(lengths) == 1:
        shape = f"Prompts of {lengths.pop():,} tokens. Bars are medians, and begin at zero."
    note = f"Batch {batch}. {shape}"
    return Chart("bench", tuple(panels), note=note) if panels else None


def short_time(seconds: float) -> str:
    """A time as text: 12.3 ms."""
    for unit, scale in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _seconds(phase: str, row: Row) -> float | None:
    measurement = getattr(row, phase)
    return measurement and measurement.seconds


def _points(bench: Bench, rows: list[Row], value: Callable[[Row], float | None]) -> Points:
    """Values by length of each contender that has any."""
    lines = {
        name: {row.tokens: row_value for row in rows if row.contender == name and (row_value := value(row))}
        for name in bench.contenders
    }
    return {name: points for name, points in lines.items() if points}


def _panel(title: str, points: Points, look: Look, format_value: Callable[[float], str], unit: str) -> Panel:
    summary = "; ".join(
        f"{name}: " + ", ".join(f"{format_value(value)} at {length:,} tokens" for length, value in line.items())
        for name, line in points.items()
    )
    lengths = sorted({length for line in points.values() for length in line})
    if len(lengths) == 1:
        values = {name: value for name, line in points.items() for value in line.values()}
        draw = partial(bars, values=values, look=look, text=format_value)
        height = 0.7 + 0.36 * len(values)
        return Panel(title, f"{title}. {summary}.", draw, height)
    return Panel(title, f"{title} by length. {summary}.", partial(_draw, points, look, unit), height=3.2)


def _draw(points: Points, look: Look, unit: str, axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log", base=2 if unit == "bytes" else 10)
    lengths = sorted({length for line in points.values() for length in line})
    curve(axes, points, lengths, look)
    axes.margins(y=0.15)
    if unit == "bytes":
        byte_axis(axes.yaxis, base=2)
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_time(value)))
        axes.yaxis.set_minor_formatter(NullFormatter())
