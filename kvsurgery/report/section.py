"""The section of a model card about a report: its pictures, the table of scores, and the files to upload."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from html import escape
from pathlib import Path

from kvsurgery.emit.card import with_section
from kvsurgery.errors import KVSurgeryError
from kvsurgery.evaluate.results import Results
from kvsurgery.report.findings import change, models, score, span, verdict
from kvsurgery.report.folder import checkpoint_of, facts_of, is_same_checkpoint, read
from kvsurgery.report.writing import PAGE, charts

FOLDER = "report"  # in the repository


def card_files(checkpoint: Path, report: Path) -> dict[str, bytes | Path]:
    """The files that `push` uploads for a report, by name in the repository: page, pictures and model card.

    Args:
        checkpoint: the folder of a converted checkpoint.
        report: the folder that `kvsurgery eval` or `kvsurgery bench` wrote.

    Raises:
        KVSurgeryError: there is no report, or it belongs to another checkpoint.
    """
    results, bench = read(report)
    page = report / PAGE
    if not page.is_file():
        raise KVSurgeryError(
            f"{report} has no {PAGE}: run `kvsurgery report {shlex.quote(str(report))}`, which writes it"
        )
    if not is_same_checkpoint(facts_of(checkpoint), checkpoint_of(results, bench)):
        raise KVSurgeryError(f"the report in {report} is of another checkpoint than {checkpoint}; evaluate this one")
    shown_charts = [chart for chart in charts(results, bench) if (report / f"{chart.name}.png").is_file()]
    pictures = [
        f'<img src="{FOLDER}/{chart.name}.png" alt="{_line(escape(chart.alt))}" width="100%">' for chart in shown_charts
    ]
    parts = ["## Evaluation", *([_table(results)] if results else []), *pictures, _report_link(results is not None)]
    card = checkpoint / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    return {
        "README.md": with_section(text, "\n\n".join(parts)).encode("utf-8", "replace"),
        f"{FOLDER}/{PAGE}": page,
        **{f"{FOLDER}/{chart.name}.png": report / f"{chart.name}.png" for chart in shown_charts},
    }


def _report_link(has_scores: bool) -> str:
    intervals = "Intervals are 95% bootstrap intervals. " if has_scores else ""
    page = f"Download and open the [full report]({FOLDER}/{PAGE})"
    return f"{intervals}{page} for more figures and the commands that reproduce them."


def _table(results: Results) -> str:
    """Scores by task, with intervals."""
    names = models(results)
    header = ["task", "metric", "samples", *map(_cell, names), *(["difference"] if len(names) == 2 else [])]
    return "\n".join(
        f"| {' | '.join(row)} |" for row in [header, ["---"] * 3 + ["---:"] * (len(header) - 3), *_rows(results, names)]
    )


def _rows(results: Results, names: tuple[str, ...]) -> Iterator[list[str]]:
    for task in results.tasks:
        scores = [
            f"{score(task.scores[name].mean, task.metric)} ({span(task.scores[name], task.metric)})"
            if name in task.scores
            else "–"
            for name in names
        ]
        row = [_cell(task.task), _cell(task.metric), f"{task.count:,}", *scores]
        if len(names) == 2:
            difference = task.difference
            row.append(f"{change(difference.mean, task.metric)}, {verdict(task)}" if difference else "–")
        yield row


def _cell(text: str) -> str:
    """A name as text of a Markdown table, whatever it holds."""
    return re.sub(r"[\\`*\[\]<>|&~]", r"\\\g<0>", _line(text))


def _line(text: str) -> str:
    return " ".join(text.split())
