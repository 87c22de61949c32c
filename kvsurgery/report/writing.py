"""Writing a report: `index.html`, which needs no other file and no network, and a PNG of each chart."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, TemplateError
from markupsafe import Markup

from kvsurgery import __version__
from kvsurgery.bench import results as benchmark
from kvsurgery.bench.results import Bench, Row
from kvsurgery.console import size
from kvsurgery.errors import KVSurgeryError, OutputError
from kvsurgery.evaluate import results as evaluation
from kvsurgery.evaluate.results import Results
from kvsurgery.files import write_whole
from kvsurgery.report import findings, headlines
from kvsurgery.report.charts import Chart
from kvsurgery.report.colours import DARK, LIGHT
from kvsurgery.report.score_charts import length_curves, needle_maps, task_scores
from kvsurgery.report.speed_charts import duration, speed
from kvsurgery.report.surgery_charts import head_map, kv_memory

PAGE = "index.html"
EVALUATION = (
    "Evaluation",
    "Every score comes from this command. Prompts lie beside this page in samples.jsonl, what each model answered in "
    "answers-original.jsonl and answers-converted.jsonl.",
)
BENCHMARK = (
    "Benchmark",
    "Every time and every byte that was measured comes from this command; bench.csv has them too.",
)


def write_report(folder: Path) -> Path:
    """Write the page of what lies in a folder, `results.json` or `bench.json` or both, and beside it the pictures.

    Returns:
        The page.

    Raises:
        KVSurgeryError: neither is there, or one is not what this version writes.
        OutputError: a file cannot be written.
    """
    results, bench = read(folder)
    try:
        shown = charts(results, bench)
        page = _page(results, bench, shown)
        for chart in shown:
            chart.save(folder)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError) as error:
        raise KVSurgeryError(f"what lies in {folder} cannot be shown: {error!r}; run the command again") from error
    try:
        write_whole(folder / PAGE, page)
    except OSError as error:
        raise OutputError(f"cannot write {folder / PAGE}: {error.strerror}") from error
    return folder / PAGE


def read(folder: Path) -> tuple[Results | None, Bench | None]:
    """What an evaluation and a benchmark left in a folder.

    Raises:
        KVSurgeryError: nothing, or something else.
    """
    results = Results.load(folder) if (folder / evaluation.FILE).exists() else None
    bench = Bench.load(folder) if (folder / benchmark.FILE).exists() else None
    if results is None and bench is None:
        raise KVSurgeryError(
            f"{folder} has neither {evaluation.FILE} nor {benchmark.FILE}: run `kvsurgery eval` or `kvsurgery bench` "
            f"with --out {folder} first"
        )
    if results and bench and not of_one_checkpoint(results.checkpoint, bench.checkpoint):
        raise KVSurgeryError(
            f"{evaluation.FILE} and {benchmark.FILE} in {folder} are of two checkpoints; give each its own folder"
        )
    return results, bench


def checkpoint_of(results: Results | None, bench: Bench | None) -> Mapping[str, Any]:
    """The facts of the checkpoint that was evaluated, measured, or both."""
    return next(run.checkpoint for run in (results, bench) if run is not None)


def of_one_checkpoint(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two facts of a checkpoint tell of the same surgery."""
    told = [facts["surgery"] or {} for facts in (one, other)]
    return all(told[0].get(fact) == told[1].get(fact) for fact in ("base_model", "base_revision", "options", "heads"))


def charts(results: Results | None, bench: Bench | None) -> tuple[Chart, ...]:
    """All that there is something to show on, in the order of the page."""
    surgery = checkpoint_of(results, bench)["surgery"]
    found: list[Chart | None] = [head_map(surgery), kv_memory(surgery)] if surgery else []
    if results is not None:
        found += [task_scores(results), needle_maps(results), length_curves(results)]
    if bench is not None:
        found.append(speed(bench))
    return tuple(chart for chart in found if chart is not None)


def _page(results: Results | None, bench: Bench | None, shown: tuple[Chart, ...]) -> str:
    """The HTML of all of it; names and texts are escaped."""
    runs = [run for run in ((*EVALUATION, results), (*BENCHMARK, bench)) if run[-1] is not None]
    checkpoint = checkpoint_of(results, bench)
    surgery = checkpoint["surgery"]
    environment = Environment(
        autoescape=True,
        loader=PackageLoader("kvsurgery", "report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "breaking": _breaking,
        "change": findings.change,
        "count": lambda number, of: f"{number:,} {of}" + "s" * (number != 1),
        "duration": duration,
        "flat": _flat,
        "peak": _peak,
        "score": findings.score,
        "size": size,
        "span": findings.span,
        "thousands": lambda number: f"{number:,}" if isinstance(number, int) else number,
        "verdict": findings.verdict,
        "zip": zip,
    }
    page = environment.get_template("page.html.jinja").render(
        tool=__version__,
        light=LIGHT,
        dark=DARK,
        charts={chart.name: chart for chart in shown},
        title=Path(checkpoint["name"]).name or checkpoint["name"],
        lead=headlines.lead(checkpoint, results, bench),
        tiles=headlines.tiles(checkpoint, results, bench),
        surgery=surgery,
        conversion=headlines.conversion(checkpoint) if surgery else "",
        layers=headlines.layers(surgery["heads"]) if surgery else [],
        results=results,
        models=findings.models(results) if results else (),
        compared=results is not None and any(task.difference for task in results.tasks),
        grids=findings.grids(results) if results else (),
        curves=findings.curves(results) if results else (),
        skipped=[
            (task.task, reason, count)
            for task in (results.tasks if results else ())
            for reason, count in task.skipped.items()
        ],
        bench=bench,
        runs=runs,
    )
    # a file may hold letters that UTF-8 has not
    return page.encode("utf-8", "replace").decode("utf-8")


def _peak(row: Row) -> str:
    """The most memory of any phase."""
    peaks = [phase.peak_bytes for phase in (row.prefill, row.chunked, row.first_token, row.decode) if phase]
    return size(max(peaks)) if peaks else "–"


def _breaking(name: str) -> Markup:
    """A name that may go on in the next line after a slash, a dot or an underscore."""
    return Markup("<wbr>").join(re.split("(?<=[/_.])", name))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings by their dotted names, as text."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            yield prefix + name, ", ".join(map(str, value))
        else:
            yield prefix + name, "–" if value is None else str(value)
