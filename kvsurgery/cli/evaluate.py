"""`kvsurgery eval`: compare a converted checkpoint's answers with the original's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvsurgery.cli.help import TASKS, basic, in_group, in_options
from kvsurgery.cli.options import Grouped, LocalPath
from kvsurgery.cli.running import POSITIVE, quiet_transformers, reserve, typed_command
from kvsurgery.cli.tasks import out_option, run_options, task_options, tasks_of
from kvsurgery.errors import KVSurgeryError
from kvsurgery.evaluate.results import CONVERTED, ORIGINAL, PERPLEXITY

if TYPE_CHECKING:
    from kvsurgery.evaluate.results import Results, TaskResult

NOTHING = "-"  # the cell of a value that was not measured


@click.command("eval", cls=Grouped)
@click.argument("folder", metavar="DIR", type=LocalPath())
@basic(click.option("--source", metavar="SRC", help="The original to compare with: a folder or a Hub id."))
@out_option("report")
@in_group(
    TASKS,
    basic(
        click.option(
            "--quick",
            is_flag=True,
            help="Run a first check with 8 needles, two minutes on one core for a small model. Prompts are twice as "
            "long as the part that a head keeps. Other options change the questions, such as --samples 40.",
        )
    ),
)
@task_options
@click.option(
    "--tp",
    type=POSITIVE,
    default=1,
    show_default=True,
    help="Number of processes that share the models: 1, or all that torchrun started.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def evaluate(
    ctx: click.Context, folder: Path, source: str | None, out: Path, quick: bool, tp: int, as_json: bool, **options: Any
) -> None:
    """Ask the converted checkpoint DIR and the original the same questions, and compare the answers.

    Each prompt is prefilled into the KV cache. Where answers are short, the last 50 tokens of the prompt are decoded
    one at a time. Perplexity is measured token by token through the cache.

    OUT holds the prompts (samples.jsonl), the answers of each model, results.json and a report page. To resume an
    interrupted run, rerun the same command. The code in DIR is executed: verify it first.

    The tasks needle, passkey, perplexity, cloze and ruler are generated, in words that the tokenizer must know. The
    task lm_eval asks tasks of lm-eval that generate answers, such as LongBench and InfiniteBench. scbench reads
    published data, from files or from the Hub, and asks several questions on a context, each on a copy of its cache;
    repoeval and mm_niah read files. mm_niah is for models that read images. With --ask-later, lm_eval and ruler too
    read the context before the question is known, so budgeted heads select without it. Processes started by torchrun
    share the samples. With --tp they share the model, which must have been converted for that many processes.

    \b
    kvsurgery eval ./llama3-duo --source ./llama3 --quick
    kvsurgery eval ./llama3-duo --source ./llama3 --tasks ruler --lengths 4K
    kvsurgery eval ./llama3-duo --source ./llama3 --tasks needle,perplexity --text book.txt --lengths 4K,16K,64K
    kvsurgery eval ./llama3-duo --source ./llama3 --tasks lm_eval --lm-eval longbench_hotpotqa --ask-later
    torchrun --nproc-per-node 8 -m kvsurgery eval ./llama3-duo --source ./llama3 --tasks ruler --lengths 128K
    torchrun --nproc-per-node 8 -m kvsurgery eval ./llama3-70b-tp8 --tasks ruler --lengths 128K --tp 8
    """
    from kvsurgery.report.folder import check_neighbor, check_new, check_output
    from kvsurgery.system.locks import reserved_folder

    check_output(out)
    check_new(out)
    reserve(reserved_folder(out))
    if quick and source is None:
        raise click.UsageError("--quick requires --source, the original to compare with")
    tasks, preset = {}, {}
    if not quick:
        tasks = tasks_of(ctx)
    quiet_transformers()

    from kvsurgery.bench import results as benchmark
    from kvsurgery.cli.source import source_folder
    from kvsurgery.display import console
    from kvsurgery.evaluate.checkpoint import check_original, is_converted
    from kvsurgery.evaluate.quick import quick_options
    from kvsurgery.evaluate.runner import evaluate
    from kvsurgery.evaluate.tasks.ruler.task import RulerTask
    from kvsurgery.report import write_report
    from kvsurgery.system.processes import is_first

    if quick:
        preset = quick_options(folder)
        tasks = tasks_of(ctx, preset)
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
    run = replace(run_options(ctx, folder, preset), tp=tp)
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
            console.stderr.print(f"ruler/{name} is left out: {in_options(reason)}")
    with console.drawing_progress() as advance:
        page = write_report(out, advance)
    console.stderr.print(f"wrote {page}, and results.json beside it")
    if as_json:
        click.echo(json.dumps(results.to_json(), indent=2))
    else:
        _show(results)
    check_measured(results.tasks)


def check_measured(tasks: Sequence[TaskResult]) -> None:
    """Check that at least one sample was answered.

    Raises:
        KVSurgeryError: every model skipped all samples.
    """
    if not any(cell.scores for task in tasks for cell in task.cells):
        raise KVSurgeryError("nothing was measured: every sample is left out")


def _show(results: Results) -> None:
    """Print a table of scores, verdicts and KV bytes, the samples that were skipped, and the conclusion."""
    from kvsurgery.display import console
    from kvsurgery.report.findings import against_original
    from kvsurgery.report.headlines import conclusion

    names = [*results.models]
    verdicts = ["against the original"] if len(names) == 2 else []
    rows = []
    for task in results.tasks:
        finding = against_original(task) if task.scores else NOTHING
        rows.append((task.task, task.metric, f"{task.count:,}", *scores(task, names), *[finding] * len(verdicts)))
    title = "Scores"
    if results.kv_bytes is not None and results.dense_bytes is not None:
        title += f", and the KV cache of one sequence of {results.tokens:,} tokens"
        sizes = {ORIGINAL: results.dense_bytes, CONVERTED: results.kv_bytes}
        share = f"{results.kv_bytes / results.dense_bytes:.1%} of the original's"
        rows.append(("KV cache", "bytes", "", *(console.size(sizes[name]) for name in names), *[share] * len(verdicts)))
    columns = ["task", "metric", "samples", *names, *verdicts]
    console.stdout.print(console.table(title, columns, rows, left=2, notes=len(verdicts)))
    for task in {task.task: task for task in results.tasks}.values():
        for reason, count in task.skipped.items():
            console.stderr.print(f"{task.task}: {count} sample{'s' * (count != 1)} left out, {reason}")
    if sentence := conclusion(results):
        console.stdout.print(in_options(sentence))


def scores(task: TaskResult, names: Sequence[str]) -> Iterator[str]:
    """The scores of some models, shares as percentages."""
    factor, digits, unit = _units(task)
    for name in names:
        yield f"{factor * task.scores[name].mean:.{digits}f}{unit}" if name in task.scores else NOTHING


def signed_difference(task: TaskResult) -> str:
    """The difference of two models with its interval; shares are in percentage points."""
    if task.difference is None:
        return NOTHING
    factor, digits, _ = _units(task)
    values = (task.difference.mean, task.difference.low, task.difference.high)
    mean, low, high = (f"{factor * value:+z.{digits}f}" for value in values)
    return f"{mean} [{low}, {high}]"


def _units(task: TaskResult) -> tuple[int, int, str]:
    """The factor, the number of decimals and the unit in which a score is shown."""
    return (1, 3, "") if task.metric == PERPLEXITY else (100, 1, "%")
