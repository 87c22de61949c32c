"""Charts of a conversion: the kind of each KV head, and the KV cache before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvsurgery.heads.kinds import BUDGETED, FULL, KINDS, kind_of, kinds_of
from kvsurgery.report.charts import (
    FONT,
    HEIGHT,
    Chart,
    Panel,
    bars,
    byte_axis,
    curve,
    looks,
    names_above,
    plain_size,
    tokens,
)
from kvsurgery.report.colors import LIGHT
from kvsurgery.system.sizes import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# opacity of the least and of the largest budget, and how many levels there are
MIN_OPACITY, MAX_OPACITY, LEVELS = 0.15, 0.75, 8
LOOKS = dict(zip(("before", "after"), looks(("original", "converted")).values(), strict=True))


def head_map(surgery: Mapping[str, Any]) -> Chart:
    """A map of the tokens that each KV head keeps: layers on the x-axis, the original's heads on the y-axis."""
    heads = surgery["heads"]
    counts = kinds_of(heads)
    summary = ", ".join(f"{count} {kind.name}" for kind, count in counts.items())
    alt = f"Map of {len(heads)} layers by {max(map(len, heads))} KV heads: {summary}. See the table of layers."
    height = min(max(0.17 * max(map(len, heads)), 1.0), 4) + 0.7
    order = "the original's order" if surgery["revertible"] else "the converted model's order"
    panel = Panel("KV heads by kind", alt, partial(_draw_heads, heads), height)
    note = f"Columns are layers and rows are KV heads, in {order}."
    if counts[BUDGETED]:
        note += " A stronger blue means a larger budget."
    return Chart("heads", (panel,), note=note)


def _draw_heads(heads: Sequence[Sequence[str | int]], axes: Axes) -> None:
    from matplotlib.patches import Patch, PathPatch
    from matplotlib.path import Path
    from matplotlib.transforms import Affine2D

    budgets = [head for layer in heads for head in layer if isinstance(head, int)]
    min_budget, max_budget = (min(budgets), max(budgets)) if budgets else (0, 0)

    def look(head: str | int) -> dict[str, Any]:
        kind = kind_of(head)
        if kind.own:
            return {"facecolor": "none", "edgecolor": LIGHT["muted"], "lw": 0.6}
        if not isinstance(head, int):
            return {"facecolor": LIGHT["converted" if kind is FULL else "remaining"]}
        # of few levels, so that a page stays small
        level = round((head - min_budget) / max(max_budget - min_budget, 1) * (LEVELS - 1)) / (LEVELS - 1)
        return {"facecolor": LIGHT["converted"], "alpha": MIN_OPACITY + (MAX_OPACITY - MIN_OPACITY) * level}

    cell = Affine2D().scale(0.88, 0.84).translate(-0.44, -0.42)
    square = cell.transform_path(Path.unit_rectangle())
    cells: dict[tuple, list[Path]] = {}
    for column, layer in enumerate(heads):
        for row, head in enumerate(layer):
            place = Affine2D().translate(column, row)
            cells.setdefault(tuple(look(head).items()), []).append(place.transform_path(square))
    for appearance, paths in cells.items():
        axes.add_patch(PathPatch(Path.make_compound_path(*paths), **{"lw": 0, **dict(appearance)}))
    present_kinds = {head for layer in heads for head in layer}
    labels: dict[str | int, str] = {kind.name: kind.label for kind in KINDS if kind.name in present_kinds}
    labels |= {budget: f"budget {budget:,}" for budget in sorted({min_budget, max_budget} if budgets else ())}
    names_above(axes, 4, [Patch(label=label, **look(head)) for head, label in labels.items()])
    axes.set_xlim(-0.6, len(heads) - 0.4)
    axes.set_ylim(max(map(len, heads)) - 0.4, -0.6)
    axes.grid(False)
    axes.set_xlabel("layer")
    axes.set_ylabel("KV head")
    axes.locator_params(integer=True)


def kv_memory(surgery: Mapping[str, Any]) -> Chart:
    """Bytes of one sequence's KV cache by its length, before and after."""
    # files of version 0.1.0 have names of lengths
    rows: list[dict[str, Any]] = [{**row, "tokens": tokens(row["tokens"])} for row in surgery["kv_bytes"]]
    summary = ", ".join(f"{row['tokens']} tokens {size(row['before'])} and {size(row['after'])}" for row in rows)
    draw, height, axis = partial(_draw_memory, rows), HEIGHT, " The vertical axis is logarithmic."
    if len(rows) == 1:
        values = {stage: rows[0][stage] for stage in LOOKS}
        draw, height = partial(bars, values=values, look=LOOKS, text=plain_size), 1.4
        axis = f" Bars begin at zero; {rows[0]['tokens']} tokens."
    panel = Panel("KV cache of one sequence", f"KV cache before and after, at {summary}.", draw, height)
    return Chart(
        "kv-memory",
        (panel,),
        note=f"For a model in {surgery.get('kv_dtype', '16 bit')}.{axis}",
    )


def _draw_memory(rows: Sequence[Mapping[str, Any]], axes: Axes) -> None:
    lines = {stage: {row["tokens"]: row[stage] for row in rows} for stage in LOOKS}
    axes.set_yscale("log", base=2)
    curve(axes, lines, [row["tokens"] for row in rows], LOOKS)
    for stage, place in {"before": ((-3, 5), "right", "bottom"), "after": ((3, -5), "left", "top")}.items():
        (offset, horizontal, vertical), color = place, LOOKS[stage]["color"]
        for point in enumerate(lines[stage].values()):
            annotation = axes.annotate(plain_size(point[1]), point, offset, textcoords="offset points")
            annotation.set(ha=horizontal, va=vertical, fontsize=FONT - 1.5, color=color)
    axes.margins(0.26, 0.15)
    byte_axis(axes.yaxis, base=4)
