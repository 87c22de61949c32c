"""How far head profiles of one model agree: a rank correlation, and how many of the full heads two of them share.

python benchmarks/real_model/agreement.py gates.safetensors er.safetensors attention.safetensors
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvsurgery.profile.comparison import compare
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.loading import load_scores

SPARSITY = 0.5  # at which full heads are counted


def table(profiles: dict[str, HeadProfile]) -> list[str]:
    """Lines of a Markdown table: for each pair, the rank correlation of scores and the number of shared full heads."""
    names = [*profiles]
    lines = [f"| | {' | '.join(names[1:])} |", "|---" * len(names) + "|"]
    for row, name in enumerate(names[:-1]):
        cells = [""] * row
        for other in names[row + 1 :]:
            comparison = compare(profiles[name], profiles[other])
            [overlap] = [overlap for overlap in comparison.overlaps if overlap.sparsity == SPARSITY]
            rho = "undefined" if comparison.spearman is None else f"{comparison.spearman:.2f}"
            cells.append(f"{rho}, {overlap.shared}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profile", type=Path, nargs="+", metavar="PROFILE", help="head scores; called by file name")
    arguments = parser.parse_args()
    print("\n".join(table({path.stem: load_scores(path) for path in arguments.profile})))


if __name__ == "__main__":
    main()
