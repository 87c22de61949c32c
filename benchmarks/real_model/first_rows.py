"""Measure the first rows of the tables on a real language model again, and compare them with the committed results.

    python benchmarks/real_model/first_rows.py TEXTS

TEXTS is a folder with `wikitext-2.test.raw`, the test set of WikiText-2, and `pride_and_prejudice.txt`, the novel of
Project Gutenberg. The exit code is 1 where a row differs by more than another processor or version of torch explains.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
RESULTS, EXAMPLE = HERE.parent / "results", HERE.parents[1] / "examples" / "smollm2"
NOVEL, ENCYCLOPEDIA = "pride_and_prejudice.txt", "wikitext-2.test.raw"
FACTS, DIVERGENCE = 0.03, 0.1  # how far a share of facts may be off, and a divergence as a part of itself


@dataclass(frozen=True)
class Table:
    """Rows of one script that are measured again.

    Attributes:
        script: of this folder.
        results: the committed file.
        options: of the script, beside MODEL and `--json`.
        rows: names of its results.
    """

    script: str
    results: str
    options: tuple[str | Path, ...]
    rows: tuple[str, ...]


def tables(texts: Path) -> list[Table]:
    """What is measured: which heads, and which cache."""
    heads, cache = "gates, 50% full, 16+64", "kvsurgery, all heads full, 4 bits"
    gates, er, losses = (EXAMPLE / f"{name}.safetensors" for name in ("gates", "er", "losses"))
    novel, encyclopedia = texts / NOVEL, texts / ENCYCLOPEDIA
    text_options = ("--facts-in", encyclopedia, "--text", encyclopedia, "--text", argparse.__file__)
    cache_options = ("--measured", losses, "--profile", er, "--text", novel, "--facts", "12", "--prompts", "9")
    return [
        Table(
            "which_heads.py",
            "which-heads.json",
            ("--profile", gates, *text_options, "--only", heads),
            ("original", heads),
        ),
        Table("which_cache.py", "which-cache.json", (*cache_options, "--only", cache), ("original", cache)),
    ]


def differences(row: str, repeated: dict[str, Any], committed: dict[str, Any]) -> list[str]:
    """What differs by too much, a line each."""
    messages = []
    recall = [float(np.mean(results["right"])) for results in (repeated, committed)]
    if abs(recall[0] - recall[1]) > FACTS:
        messages.append(f"{row}: {recall[0]:.0%} of the facts, and {recall[1]:.0%} in the committed results")
    kl = [float(np.mean(results["kl"])) for results in (repeated, committed)]
    if abs(kl[0] - kl[1]) > DIVERGENCE * kl[1] + 1e-6:
        messages.append(f"{row}: KL {kl[0]:.4f}, and {kl[1]:.4f} in the committed results")
    return messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", type=Path, metavar="TEXTS", help="folder of the two texts")
    parser.add_argument("--model", type=Path, default=EXAMPLE / "model", help="that examples/smollm2/make.py writes")
    arguments = parser.parse_args()
    for name in (NOVEL, ENCYCLOPEDIA):
        if not (arguments.texts / name).is_file():
            parser.error(f"{arguments.texts / name} is missing")
    if not arguments.model.is_dir():
        parser.error(f"{arguments.model} is missing; run examples/smollm2/make.py")
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        for table in tables(arguments.texts):
            results_path = Path(folder) / table.results
            command = [HERE / table.script, arguments.model, *table.options, "--json", results_path]
            subprocess.run([sys.executable, "-W", "ignore", *map(str, command)], check=True)
            repeated, committed = (
                json.loads(path.read_text())["results"] for path in (results_path, RESULTS / table.results)
            )
            for row in table.rows:
                messages = differences(row, repeated[row], committed[row])
                print("\n".join(messages or [f"{row}: as in {table.results}"]), flush=True)
                failures += messages
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
