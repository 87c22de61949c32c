"""`kvsurgery eval`: what a converted checkpoint keeps of the original's answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvsurgery.cli.help import basic
from kvsurgery.cli.options import Grouped, LocalPath
from kvsurgery.cli.running import POSITIVE, quiet_transformers, typed_command
from kvsurgery.cli.tasks import out_option, run_options, task_options, tasks_of
from kvsurgery.errors import KVSurgeryError

if TYPE_CHECKING:
    from kvsurgery.evaluate.results import Interval, Results, TaskResult


@click.command("eval", cls=Grouped)
@click.argument("folder", metavar="DIR", type=LocalPath())
@basic(click.option("--source", metavar="SRC", help="The original to compare with: a folder or a Hub id."))
@out_option("report")
@task_options
@click.option(
    "--tp",
    type=POSITIVE,
    default=1,
    show_default=True,
    help="Number of processes that share the models: all of them, or 1.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def evaluate(
    ctx: click.Context, folder: Path, source: str | None, out: Path, tp: int, as_json: bool, **options: Any
) -> None:
    """Ask the converted checkpoint DIR and the original the same questions, and compare the answers.

    Each prompt is prefilled into the KV cache. Where answers are short, the last 50 tokens of the prompt are decoded
    one at a time. Perplexity is measured token by token through the cache.

    OUT holds the prompts (samples.jsonl), the answers of each model, results.json and a report page. To continue an
    interrupted run, give the same command again. The code in DIR is executed: verify it first.

    The tasks needle, passkey, perplexity, cloze and ruler are generated, in words that the tokenizer must know. The
    tasks babilong, infinitebench, longbench, longbench_v2, loogle and scbench read the published data, from files or
    from the Hub; repoeval and mm_niah read files. scbench reads a context and asks several questions,
    each on a copy of its cache. mm_niah is for models that read images. mt_bench has no score: the answers of each
    model are written for a judge. Processes started by torchrun share the samples. With --tp they share the model,
    which must have been converted for that many processes.

    \b
    kvsurgery eval ./llama3-duo --source ./llama3
    kvsurgery eval ./llama3-duo --source ./llama3 --tasks ruler --lengths 4K
    kvsurgery eval ./llama3-duo --source ./llama3 --tasks needle,perplexity --text book.txt --lengths 4K,16K,64K
    kvsurgery eval ./llama3-duo --source ./llama3 --tasks longbench --longbench ./LongBench/data --batch 4
    torchrun --nproc-per-node 8 -m kvsurgery eval ./llama3-duo --source ./llama3 --tasks ruler --lengths 128K
    torchrun --nproc-per-node 8 -m kvsurgery eval ./llama3-70b-tp8 --tasks ruler --lengths 128K --tp 8
    """
    from kvsurgery.bench import results as benchmark
    from kvsurgery.cli.recipe_options import in_flags
    from kvsurgery.cli.source import source_folder
    from kvsurgery.display import console
    from kvsurgery.evaluate.checkpoint import check_original, is_converted
    from kvsurgery.evaluate.results import CONVERTED, ORIGINAL
    from kvsurgery.evaluate.runner import evaluate
    from kvsurgery.evaluate.tasks.ruler.task import RulerTask
    from kvsurgery.report import write_report
    from kvsurgery.report.folder import check_neighbor, check_new, check_output
    from kvsurgery.system.processes import is_first

    quiet_transformers()
    check_output(out)
    check_new(out)
    tasks = tasks_of(ctx)
    if is_converted(folder):
        models = {CONVERTED: folder}
        if source is not None:
            original = source_folder(source, folder)
            check_original(original, folder)
            models = {ORIGINAL: original, **models}
    elif source is None:
        models = {ORIGINAL: folder}
    else:
        raise click.UsageError(f"{folder} is not a converted checkpoint, so there is nothing to compare with {source}")
    check_neighbor(out, folder, benchmark.FILE)
    run = replace(run_options(ctx, folder), tp=tp)
    with console.step_progress("evaluating") as advance:
        results = evaluate(
            models,
            tasks,
            out,
            run,
            device=options["device"],
            command=typed_command(),
            progress=advance,
            note=console.stderr.print,
        )
    if not is_first():
        return
    ruler = tasks.get("ruler")
    if isinstance(ruler, RulerTask) and ruler.tasks is None:
        for name, reason in ruler.left_out.items():
            console.stderr.print(f"ruler/{name} is left out: {in_flags(reason)}")
    page = write_report(out)
    console.stderr.print(f"wrote {page}, and results.json beside it")
    if as_json:
        click.echo(json.dumps(results.to_json(), indent=2))
    else:
        _show(results)
    check_measured(results.tasks, sum(results.judged.values()))


def check_measured(tasks: Sequence[TaskResult], judged: int = 0) -> None:
    """Check that some model answered a sample.

    Args:
        judged: answered samples of tasks without a score, which have no result.

    Raises:
        KVSurgeryError: all samples were left out, of every model.
    """
    if not judged and not any(cell.scores for task in tasks for cell in task.cells):
        raise KVSurgeryError("nothing was measured: every sample is left out")


def _show(results: Results) -> None:
    """The scores as a table, and what was left out."""
    from kvsurgery.display import console

    names = [*results.models]
    columns = ["task", "metric", "samples", *names, *(["difference [95%]"] if len(names) == 2 else [])]
    rows = [(task.task, task.metric, task.count, *cells(task, names)) for task in results.tasks]
    console.stdout.print(console.table("Scores", columns, rows, left=2))
    for task in {task.task: task for task in results.tasks}.values():
        for reason, count in task.skipped.items():
            console.stderr.print(f"{task.task}: {count} sample{'s' * (count != 1)} left out, {reason}")


def cells(task: TaskResult, names: list[str]) -> Iterator[str]:
    """Scores, shares as percentages, and of two models their difference, as points of these."""
    factor, digits, unit = (1, 3, "") if task.metric == "perplexity" else (100, 1, "%")
    for name in names:
        yield f"{factor * task.scores[name].mean:.{digits}f}{unit}" if name in task.scores else "-"
    if len(names) == 2:
        yield _signed(task.difference, factor, digits) if task.difference else "-"


def _signed(difference: Interval, factor: int, digits: int) -> str:
    mean, low, high = (f"{factor * value:+z.{digits}f}" for value in (difference.mean, difference.low, difference.high))
    return f"{mean} [{low}, {high}]"
