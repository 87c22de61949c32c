"""The command line of benchmarks that compare caches on pieces of texts, and go on from their JSON file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers.utils import logging


def run(
    description: str,
    measure: Callable[[argparse.Namespace, dict[str, Any]], None],
    table: Callable[[Mapping[str, Any]], list[str]],
    new: int,
    pieces: int,
) -> None:
    """Read the command line; then measure what is missing in a JSON file, or print what it holds.

    Args:
        measure: adds what is missing to the results, and writes them after each cache.
        table: lines of a Markdown table of the results.
        new, pieces: by default, the tokens that follow a prompt, and the pieces of each text.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL", help="folder of a stock checkpoint")
    parser.add_argument("texts", type=Path, nargs="*", metavar="TEXT", help="UTF-8 texts")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=new, help="tokens that follow it")
    parser.add_argument("--pieces", type=int, default=pieces, help="of each text")
    parser.add_argument("--json", type=Path, help="results; those there are not computed again")
    parser.add_argument("--show", type=Path, metavar="JSON", help="print these results as a table, and measure nothing")
    arguments = parser.parse_args()
    if arguments.show:
        print("\n".join(table(json.loads(arguments.show.read_text()))))
        return
    if not (arguments.model and arguments.texts and arguments.json):
        parser.error("give MODEL, TEXT and --json, or --show")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    report = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    settings = {name: getattr(arguments, name) for name in ("prompt", "new", "pieces")}
    settings["texts"] = [text.name for text in arguments.texts]
    if report.setdefault("settings", settings) != settings:
        parser.error(f"{arguments.json} was measured with {report['settings']}; give it another name")
    measure(arguments, report)
