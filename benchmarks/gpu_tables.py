"""Show what gpu.py measured as tables in Markdown.

python benchmarks/gpu_tables.py benchmarks/results/gpu-nvidia-h100-80gb-hbm3.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Column(NamedTuple):
    """A column of a table: its name, the figure that it shows, and how."""

    name: str
    figure: str
    spec: str = ""


class Table(NamedTuple):
    """Rows of a section of gpu.py."""

    section: str
    columns: tuple[Column, ...]

    def lines(self, rows: list[dict[str, Any]]) -> list[str]:
        """Lines in Markdown; a figure that was not measured is left empty."""
        cells = [[column.name for column in self.columns], ["---"] * len(self.columns)]
        for row in rows:
            if row["section"] == self.section:
                cells.append([_text(row.get(column.figure), column.spec) for column in self.columns])
        return [f"| {' | '.join(line)} |" for line in cells]


SHARES = {0.25: "25% full", 0.5: "50% full", 1.0: "100% full"}
TABLES = (
    Table(
        "generate",
        (
            Column("cache", "variant"),
            Column("CUDA graph", "graph"),
            Column("ms a token", "ms a token", ".1f"),
            Column("× stock", "x stock", ".2f"),
        ),
    ),
    Table(
        "graphs",
        (
            Column("layers", "layers"),
            Column("bits", "bits"),
            Column("launches", "launches", ","),
            Column("eager step, ms", "eager ms", ".1f"),
            Column("capture, ms", "capture ms", ".1f"),
            Column("replay, ms", "replay ms", ".2f"),
            Column("pays after, steps", "pays after"),
        ),
    ),
    Table(
        "decode",
        (
            Column("model", "model"),
            Column("tokens", "tokens", ","),
            Column("cache", "variant"),
            Column("GB", "cache GB", ".1f"),
            Column("a step, ms", "ms", ".1f"),
            Column("its kernels, ms", "kernels ms", ".1f"),
            Column("a replay, ms", "graph ms", ".1f"),
            Column("× stock, kernels", "x stock, kernels", ".2f"),
        ),
    ),
    Table(
        "prefill in chunks",
        (
            Column("cache", "variant"),
            Column("seconds", "seconds", ".1f"),
            Column("× all full", "x all full", ".2f"),
            Column("peak, GB", "peak GB", ".1f"),
        ),
    ),
    Table(
        "prefill",
        (
            Column("heads", "kind"),
            Column("past", "past", ","),
            Column("ms", "ms", ".1f"),
            Column("TFLOP/s", "TFLOP/s", ".0f"),
            Column("SDPA, ms", "SDPA ms", ".1f"),
        ),
    ),
)


def kernels_table(rows: list[dict[str, Any]], tokens: int) -> list[str]:
    """Decode at a length: microseconds a layer, and the share of the read bandwidth, by the share of full heads."""
    lines = [f"| batch | bits | {' | '.join(SHARES.values())} |", "|---" * (2 + len(SHARES)) + "|"]
    cells: dict[tuple[int, int], dict[float, str]] = {}
    for row in rows:
        if row["section"] == "kernels" and row["tokens"] == tokens:
            of_bits = cells.setdefault((row["batch"], row["bits"]), {})
            of_bits[row["full"]] = f"{row['us']:,.0f} µs, {row['share']:.0%}"
    for (batch, bits), of_share in cells.items():
        lines.append(f"| {batch} | {bits} | {' | '.join(of_share.get(share, '') for share in SHARES)} |")
    return lines


def tables(report: Mapping[str, Any]) -> dict[str, list[str]]:
    """All tables by section."""
    rows = report["rows"]
    lengths = sorted({row["tokens"] for row in rows if row["section"] == "kernels"})
    of_kernels = {f"kernels at {tokens:,} tokens": kernels_table(rows, tokens) for tokens in lengths}
    return of_kernels | {table.section: table.lines(rows) for table in TABLES}


def _text(figure: Any, spec: str) -> str:
    return "" if figure is None else format(figure, spec)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, metavar="JSON", help="what gpu.py wrote")
    for section, lines in tables(json.loads(parser.parse_args().report.read_text())).items():
        print("\n".join([f"\n{section}\n", *lines]))


if __name__ == "__main__":
    main()
