"""`kvsurgery fit`: what to convert so that a model, its cache and its workspace fit a memory."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvsurgery.cli.help import CACHE, HEADS, basic, in_group, sets
from kvsurgery.cli.options import Grouped, LocalPath, Size, Tokens
from kvsurgery.cli.recipe_options import (
    check_recipe_file,
    fit_options,
    flags_of,
    profile_option,
    recipe_of,
    save_recipe_option,
    write_recipe,
)
from kvsurgery.cli.running import revision_option
from kvsurgery.recipe import Demand

if TYPE_CHECKING:
    from kvsurgery.policy.fit import Fit
    from kvsurgery.policy.prices import Candidate

# of the candidates that nothing beats, how many are shown
ROWS = 12
# of the best candidates of other widths, how many
ALTERNATIVES = 3


@click.command(cls=Grouped)
@click.argument("source", metavar="[SRC]", required=False)
@in_group(HEADS, profile_option)
@revision_option
@in_group(
    CACHE,
    basic(
        sets(
            ["fit.memory"],
            click.option(
                "--memory",
                type=Size(),
                required=True,
                help="Memory of a device: 24GB is 24 x 10^9 bytes, 24GiB is 24 x 2^30.",
            ),
        ),
        sets(
            ["fit.context"],
            click.option(
                "--context",
                type=Tokens(),
                required=True,
                help="Tokens of a sequence, prompt and answer; 128K is 131072.",
            ),
        ),
        sets(
            ["fit.batch"],
            click.option("--batch", type=int, default=1, show_default=True, help="Number of sequences at a time."),
        ),
    ),
    sets(
        ["fit.new_tokens"],
        click.option(
            "--new-tokens",
            type=Tokens(),
            default=0,
            show_default=True,
            help="Number of generated tokens in the context; budgeted heads keep all of them, unless --hold is given.",
        ),
    ),
    sets(
        ["fit.chunk"],
        click.option(
            "--chunk",
            type=Tokens(),
            default=2048,
            show_default=True,
            help="Tokens of a prompt that are read at once: the prefill_chunk_size of `generate`. With budgeted heads, "
            "the whole prompt is read at once if that takes less memory.",
        ),
    ),
)
@fit_options
@save_recipe_option
@click.option("--plot", "picture", type=LocalPath(), help="Plot score against memory as a PNG.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def fit(
    source: str | None,
    revision: str | None,
    memory: int,
    context: int,
    batch: int,
    new_tokens: int,
    chunk: int,
    save_recipe: Path | None,
    picture: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the least harmful policy whose weights, KV cache and workspace fit a memory budget.

    SRC is a folder or a Hub id, of which only the headers are read. The default is the model that the profile was
    measured on. The command chooses the number of full heads, the mean budget of the other heads if they have budgets,
    and the bits of the cache. The table lists the policies that no other policy beats, followed by the command that
    converts.

    With --kv-measured, the choice has the least expected divergence of the next token: the sum of the losses that were
    measured for each head that streams or is quantized. Without it the choice is a guess: it keeps the largest sum,
    over heads, of the score times the share of the context that the head keeps times a factor for its bits. For a
    budgeted head the share is the attention that its tokens would hold if attention followed Zipf's law.

    The memory is for the model alone, so leave room for the CUDA context and other programs. With --tp it is the memory
    of one device, and the output describes the process that holds most. `convert --fit` chooses and converts in one
    step.

    \b
    kvsurgery fit ./llama3 --profile P.safetensors --memory 24GB --context 128K
    kvsurgery fit --profile P.safetensors --memory 24GB --context 128K --batch 4
    kvsurgery fit ./llama3 --profile duo.safetensors --kv-measured losses.safetensors --memory 24GB --context 128K
    kvsurgery fit ./llama3 --profile r2.safetensors --memory 20GiB --context 32K --new-tokens 1K --plot fit.png
    kvsurgery fit ./llama3-70b --profile duo.safetensors --memory 80GB --context 128K --batch 4 --tp 8
    """
    from kvsurgery.cli import plan
    from kvsurgery.cli.source import request_of, warn_about_memory, warn_about_serving
    from kvsurgery.display import console
    from kvsurgery.display.figure import check_picture

    if options["method"] == "reform":
        raise click.UsageError("--method reform keeps every head full, so there is nothing to choose; leave it out")
    if picture is not None:
        check_picture(picture)
    if save_recipe is not None:
        check_recipe_file(save_recipe)
    request = request_of(source, revision, recipe_of(options, fit=Demand(memory, context, batch, new_tokens, chunk)))
    prepared = request.prepare()
    warn_about_memory(prepared, request)
    warn_about_serving(prepared)
    name, recipe, fit_result = prepared.checkpoint.name, prepared.policy.recipe, prepared.decision.fit
    assert fit_result is not None  # as the recipe has a demand
    if picture is not None:
        _plot(fit_result, name, picture)
        console.stderr.print(f"wrote {picture}")
    write_recipe(recipe, save_recipe)
    source_words = [*([source] if source else []), *(["--revision", revision] if revision else [])]
    profiles = [word for path in recipe.profiles for word in ("--profile", path)]
    words = [*source_words, *profiles, *flags_of(recipe), "--out", f"{Path(name).name}-fit"]
    command = shlex.join(["kvsurgery", "convert", *words])
    facts = plan.plan_facts(prepared)
    if as_json:
        pareto = [plan.candidate_facts(candidate, fit_result) for candidate in fit_result.pareto]
        click.echo(json.dumps({**facts, "pareto": pareto, "command": command}, indent=2))
        return
    plan.print_policy(facts)
    _print_table(fit_result)
    console.stdout.print(command)


def _print_table(fit_result: Fit) -> None:
    """Some of the candidates that nothing beats, the choice, and the best of other widths."""
    from kvsurgery.display import console

    best, next_best = fit_result.pareto, fit_result.alternatives[:ALTERNATIVES]
    spread = [best[round(row * (len(best) - 1) / (ROWS - 1))] for row in range(ROWS)]
    shown_candidates = dict.fromkeys([*spread, fit_result.choice, *next_best])
    budgets = any(candidate.budget for candidate in shown_candidates)
    rows: list[tuple[Any, ...]] = []
    for candidate in sorted(shown_candidates, key=lambda candidate: candidate.total):
        mark = "" if candidate.total <= fit_result.demand.memory else "too large"
        mark = f"next best {next_best.index(candidate) + 1}" if candidate in next_best else mark
        loss = f"{1 - candidate.loss:.2%}" if fit_result.losses is None else f"{candidate.loss:.2g}"
        rows.append(
            (
                "chosen" if candidate == fit_result.choice else mark,
                candidate.full_heads,
                *[candidate.budget or ""] * budgets,
                candidate.quantization.bits if candidate.quantization else "unquantized",
                console.size(candidate.kv_bytes),
                console.size(candidate.total),
                loss,
            )
        )
    quality = "score kept" if fit_result.losses is None else "divergence"
    title = f"Some of the {len(best)} Pareto-optimal policies in memory and {quality}, and the best of other widths"
    columns = ["", "full heads", *["budget"] * budgets, "bits", "KV cache", "total", quality]
    console.stdout.print(console.table(title, columns, rows, keys=2))


def _plot(fit_result: Fit, name: str, path: Path) -> None:
    """Write a picture of what policies keep or lose in a memory, by bits, with what there is and what was chosen.

    Raises:
        OutputError: the file cannot be written, or its ending is not a picture format.
    """
    from kvsurgery.cli.plan import loss_facts
    from kvsurgery.display.figure import new_figure, save_figure
    from kvsurgery.policy.fit import pareto

    def quality(candidate: Candidate) -> float:
        [value] = loss_facts(candidate, fit_result).values()
        return value

    demand, gib = fit_result.demand, 1 << 30
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot()
    by_bits: dict[str, list[Candidate]] = {}
    for candidate in fit_result.candidates:
        bits = f"{candidate.quantization.bits} bits" if candidate.quantization else "unquantized"
        by_bits.setdefault(bits, []).append(candidate)
    for bits, candidates in by_bits.items():
        best = pareto(candidates)
        points = [point.total / gib for point in best], [quality(point) for point in best]
        axes.plot(*points, marker="." if len(best) == 1 else "", label=bits)
    axes.axvline(demand.memory / gib, color="black", linestyle="dashed", linewidth=1, label="memory")
    axes.plot(fit_result.choice.total / gib, quality(fit_result.choice), "k*", markersize=12, label="chosen")
    axes.set_title(f"{name}\n{demand.batch} x {demand.context:,} tokens", fontsize="medium", parse_math=False)
    axes.set_xlabel("weights, KV cache and workspace (GiB)")
    if fit_result.losses is None:
        axes.set_ylabel("score kept")
        axes.set_ylim(0, 1.03)
    else:
        axes.set_ylabel("expected divergence (nats)")
        axes.set_yscale("symlog", linthresh=1e-4)  # nothing is lost where everything fits
    axes.legend(loc="best")
    save_figure(figure, path)
