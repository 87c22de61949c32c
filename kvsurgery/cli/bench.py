"""`kvsurgery bench`: compare time and memory of a converted checkpoint with the original's."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvsurgery.bench.workload import WARM
from kvsurgery.cli.help import HelpPage, basic
from kvsurgery.cli.options import LocalPath, Several, Tokens
from kvsurgery.cli.running import (
    POSITIVE,
    chosen_dtype,
    device_option,
    dtype_option,
    quiet_transformers,
    reserve,
    trust_remote_code_option,
    typed_command,
)
from kvsurgery.setting import CHUNK_HELP

if TYPE_CHECKING:
    from kvsurgery.bench.results import Bench, Phase, Row

    Columns = dict[str, Callable[[Row], str]]  # title of a column -> text of a row's cell

NOTHING = "-"  # the cell of a value that was not measured


@click.command(cls=HelpPage)
@click.argument("folder", metavar="DIR", type=LocalPath())
@basic(
    click.option(
        "--source",
        metavar="SRC",
        help="The original: a folder or a Hub id.  [default: (the stock class, loaded with DIR's weights)]",
    )
)
@basic(device_option)
@dtype_option
@trust_remote_code_option
@basic(
    click.option(
        "--lengths",
        type=Several(Tokens(1)),
        help="Prompt lengths in tokens.  [default: (512,1K,2K,4K on a CPU, 4K,16K,64K on a GPU, up to the context)]",
    ),
    click.option("--batches", type=Several(POSITIVE), default="1", show_default=True, help="Batch sizes."),
)
@click.option(
    "--new-tokens",
    "new",
    type=Tokens(WARM + 1),
    default=48,
    show_default=True,
    help="Number of decode steps after each prompt; with fewer than 12, no CUDA graph is used.",
)
@click.option(
    "--chunk",
    type=Tokens(1),
    help=f"{CHUNK_HELP.capitalize()}.  [default: (512 on a CPU, 2K on a GPU)]",
)
@click.option("--rounds", type=POSITIVE, default=3, show_default=True, help="Number of rounds, after a warm-up.")
@basic(click.option("--out", type=LocalPath(), help="Folder for bench.json, bench.csv, bench.png and a report page."))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(
    folder: Path,
    source: str | None,
    device: str | None,
    dtype: str,
    trust_remote_code: bool,
    lengths: tuple[int, ...] | None,
    batches: tuple[int, ...],
    new: int,
    chunk: int | None,
    rounds: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Compare time, memory and KV bytes of the converted checkpoint DIR with the original's.

    The contenders are the converted model, the original with SDPA (eager attention if it has soft caps) and a
    DynamicCache, and the original with each installed backend of transformers' QuantizedCache (quanto, hqq). They take
    turns on prompts of random tokens.

    All times are medians. For a decode step, the table also shows the first and third quartile, and the speed relative
    to the original. The floor is the time to read the weights and all keys and values
    once, at the bandwidth measured by summing a large tensor. Memory is the peak of tensors besides the weights.

    Processes started by torchrun share both models by tensor parallelism; DIR must have been converted for this number
    of processes (--tp). Times are those of the first process, and memory is the largest of all processes.

    If DIR has a reform profile, prompts beyond its recompute budget go through `generate`, and only their time to the
    first token is measured.

    The code in DIR is executed: verify it first.

    \b
    kvsurgery bench ./llama3-duo
    kvsurgery bench ./llama3-duo --lengths 4K,16K --out report/
    kvsurgery bench ./llama3-duo --device cuda --lengths 16K,64K,128K --batches 1,4 --out report/
    torchrun --nproc-per-node 4 -m kvsurgery bench ./llama3-tp4 --out report/
    """
    from kvsurgery.report.folder import check_neighbor, check_new, check_output
    from kvsurgery.system.locks import reserved_folder

    if out is not None:
        check_output(out)
        check_new(out)
        reserve(reserved_folder(out))
    quiet_transformers()

    from kvsurgery.bench.benchmark import benchmark, default_workload
    from kvsurgery.cli.source import source_folder
    from kvsurgery.display import console
    from kvsurgery.errors import Interrupted
    from kvsurgery.evaluate import results as evaluation
    from kvsurgery.evaluate.checkpoint import check_original
    from kvsurgery.report import write_report
    from kvsurgery.system.processes import is_first

    original = None if source is None else source_folder(source, folder)
    if original is not None:
        check_original(original, folder)
    dtype = chosen_dtype(dtype, folder, device)
    defaults = default_workload(folder, device, new, trust_remote_code)
    workload = replace(
        defaults,
        lengths=lengths or defaults.lengths,
        batches=batches,
        chunk=defaults.chunk if chunk is None else chunk,
        rounds=rounds,
    )
    if out is not None:
        check_neighbor(out, folder, evaluation.FILE)
    kept = "nothing is kept"

    def keep(results: Bench) -> None:
        nonlocal kept
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            results.save(out)
            kept = f"{out} has what was measured before; look at it with: kvsurgery report {shlex.quote(str(out))}"

    try:
        with console.step_progress("measuring") as advance:
            results = benchmark(
                folder,
                original,
                workload,
                device=device,
                dtype=dtype,
                command=typed_command(),
                progress=advance,
                keep=keep,
                trust_remote_code=trust_remote_code,
            )
    except KeyboardInterrupt:
        raise Interrupted(kept) from None
    if not is_first():
        return
    if as_json:
        click.echo(json.dumps(results.to_json(), indent=2))
    else:
        _show(results)
    if out is not None:
        with console.drawing_progress() as advance:
            page = write_report(out, advance)
        console.stderr.print(f"wrote {page}, bench.json and bench.csv")


def _show(results: Bench) -> None:
    """Print tables of time and memory, the contenders that were not measured, and options that measure more."""
    from kvsurgery.display import console

    times: Columns = {
        "prefill": lambda row: _milliseconds(row.prefill),
        "in chunks": lambda row: _milliseconds(row.chunked),
        "first token": lambda row: _milliseconds(row.first_token),
        "a step": lambda row: _milliseconds(row.decode),
        "quartiles": lambda row: f"{1e3 * row.decode.low:.1f}–{1e3 * row.decode.high:.1f}" if row.decode else NOTHING,
        "x original": lambda row: _times_faster(results, row),
        "of floor": lambda row: f"{row.share:.1%}" if row.share else NOTHING,
    }
    bandwidth = console.size(results.bandwidth)
    weights = console.size(results.weights)
    _print(results, f"Milliseconds on {results.versions['device']}, which reads {bandwidth} a second", times)
    memory: Columns = {
        "KV bytes": lambda row: console.size(row.kv_bytes) if row.kv_bytes else NOTHING,
        "predicted": lambda row: console.size(row.predicted) if row.predicted else NOTHING,
        "prefill": lambda row: _peak(row.prefill),
        "in chunks": lambda row: _peak(row.chunked),
        "first token": lambda row: _peak(row.first_token),
        "decode": lambda row: _peak(row.decode),
    }
    _print(results, f"KV cache, and peak memory beside {weights} of {results.settings['dtype']} weights", memory)
    for line in _notes(results):
        console.stderr.print(line)


def _print(results: Bench, title: str, columns: Columns) -> None:
    """Print a table of the measured rows, without empty columns."""
    from kvsurgery.display import console

    measured_rows = [row for row in results.rows if not row.skipped]
    columns = {name: cell for name, cell in columns.items() if any(cell(row) != NOTHING for row in measured_rows)}
    batches = len(results.settings["batches"]) > 1
    lines, last_group = [], None
    for row in measured_rows:
        group = (*[f"{row.batch}"] * batches, f"{row.tokens:,}")
        group_cells = [""] * len(group) if group == last_group else group
        lines.append((*group_cells, row.contender, *(cell(row) for cell in columns.values())))
        last_group = group
    names = [*["batch"] * batches, "tokens", "contender", *columns]
    console.stdout.print(console.table(title, names, lines, left=2 + batches))


def _notes(results: Bench) -> Iterator[str]:
    """Lines about contenders and rows that were not measured, and about options that measure more."""
    for name, reason in results.left_out.items():
        yield f"left out: {name}: {reason}"
    for row in results.rows:
        if row.skipped:
            yield f"not measured: {row.contender} at {row.batch} x {row.tokens:,} tokens: {row.skipped}"
    if (count := results.settings["processes"]) > 1:
        yield f"{count} processes share the models: times are those of the first, memory is the largest of all"
    rounds, chunk = results.settings["rounds"], results.settings["chunk"]
    rounds_text = "one round" if rounds == 1 else f"{rounds} rounds"
    yield f"medians of {rounds_text}, chunks of {chunk:,} tokens; --lengths, --batches and --rounds measure more"


def _times_faster(results: Bench, row: Row) -> str:
    """The speed of a decode step relative to the original."""
    from kvsurgery.evaluate.results import ORIGINAL

    [original] = (
        other_row.decode
        for other_row in results.rows
        if (other_row.contender, other_row.tokens, other_row.batch) == (ORIGINAL, row.tokens, row.batch)
    )
    return f"{original.seconds / row.decode.seconds:.2f}" if original and row.decode else NOTHING


def _milliseconds(phase: Phase | None) -> str:
    return f"{1e3 * phase.seconds:,.1f}" if phase else NOTHING


def _peak(phase: Phase | None) -> str:
    from kvsurgery.display import console

    return console.size(phase.peak_bytes) if phase else NOTHING
