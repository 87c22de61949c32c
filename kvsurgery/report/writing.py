"""Write a report: a self-contained `index.html`, and a PNG of each chart."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jinja2 import TemplateError

from kvsurgery.bench.results import Bench
from kvsurgery.display.progress import Progress, silent
from kvsurgery.errors import KVSurgeryError
from kvsurgery.evaluate.results import Results
from kvsurgery.report import findings, headlines
from kvsurgery.report.charts import Chart
from kvsurgery.report.folder import PAGE, checkpoint_of, read
from kvsurgery.report.rendering import render
from kvsurgery.report.score_charts import length_curves, needle_maps, task_scores
from kvsurgery.report.speed_charts import speed
from kvsurgery.report.surgery_charts import head_map, kv_memory
from kvsurgery.system.files import write_whole

EVALUATION = (
    "Evaluation",
    "This command computes all scores on this page. In the same folder, samples.jsonl contains the prompts, and "
    "answers-original.jsonl and answers-converted.jsonl contain the answers.",
)
BENCHMARK = (
    "Benchmark",
    "This command measures all times and peaks on this page. bench.csv contains the same numbers.",
)


def write_report(folder: Path, progress: Progress = silent) -> Path:
    """Write the page and pictures for the results in a folder: `results.json`, `bench.json` or both.

    Returns:
        The page.

    Raises:
        KVSurgeryError: there are no results, or they are from another version.
        OutputError: a file cannot be written.
    """
    results, bench = read(folder)
    with showable(folder):
        page_charts = charts(results, bench)
        progress(0, len(page_charts), "page")
        save_page(folder, _page(results, bench, page_charts), page_charts, progress)
    return folder / PAGE


@contextmanager
def showable(*folders: Path) -> Generator[None]:
    """Turn errors about malformed results into an error that names their folders.

    Raises:
        KVSurgeryError: a value in the results is malformed.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError) as error:
        folders_text = ", ".join(map(str, folders))
        raise KVSurgeryError(
            f"the results in {folders_text} cannot be shown: {error!r}; run the command again"
        ) from error


def save_page(folder: Path, page: str, page_charts: Sequence[Chart], progress: Progress = silent) -> None:
    """Write a page as `index.html`, after the pictures of its charts.

    Raises:
        OutputError: a file cannot be written.
    """
    for number, chart in enumerate(page_charts, 1):
        chart.save(folder)
        progress(number, len(page_charts), f"{chart.name}.png")
    write_whole(folder / PAGE, page)


def charts(results: Results | None, bench: Bench | None) -> tuple[Chart, ...]:
    """The charts for which there is data, in the order of the page."""
    surgery = checkpoint_of(results, bench)["surgery"]
    candidates: list[Chart | None] = [head_map(surgery), kv_memory(surgery)] if surgery else []
    if results is not None:
        candidates += [task_scores(results), needle_maps(results), length_curves(results)]
    if bench is not None:
        candidates.append(speed(bench))
    return tuple(chart for chart in candidates if chart is not None)


def _page(results: Results | None, bench: Bench | None, page_charts: tuple[Chart, ...]) -> str:
    """The HTML of the page; names and texts are escaped."""
    runs = [run for run in ((*EVALUATION, results), (*BENCHMARK, bench)) if run[-1] is not None]
    checkpoint = checkpoint_of(results, bench)
    surgery = checkpoint["surgery"]
    return render(
        "page.html.jinja",
        charts={chart.name: chart for chart in page_charts},
        title=short_name(checkpoint["name"]),
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
        skipped=[*_skipped(results)] if results else [],
        bench=bench,
        runs=runs,
    )


def short_name(source: str) -> str:
    """The last part of a folder or a Hub id; of a folder such as `.`, its own name."""
    path = Path(source)
    return (path if path.name not in ("", "..") else path.resolve()).name or source


def _skipped(results: Results) -> Iterator[tuple[str, str, int]]:
    """Skipped samples: task, reason and number, once for a task with several metrics."""
    for task, counts in {task.task: task.skipped for task in results.tasks}.items():
        for reason, count in counts.items():
            yield task, reason, count
