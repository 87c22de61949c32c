"""`kvsurgery convert`: the whole surgery, from a checkpoint and a head profile to a checkpoint."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvsurgery.cli.adapter import convert_adapter
from kvsurgery.cli.help import ADAPTERS, CACHE, HEADS, basic, in_group, sets
from kvsurgery.cli.options import Grouped, LocalPath, Size, Tokens
from kvsurgery.cli.recipe_options import (
    check_recipe_file,
    profile_option,
    recipe_of,
    recipe_options,
    reform_options,
    save_recipe_option,
    write_recipe,
)
from kvsurgery.cli.running import (
    chosen_dtype,
    quiet_transformers,
    revision_option,
    trust_remote_code_option,
    typed_command,
)

if TYPE_CHECKING:
    from kvsurgery.conversion.prepared import PreparedConversion
    from kvsurgery.conversion.request import Request
    from kvsurgery.evaluate.cache_check import CheckText
    from kvsurgery.hub.stream import Streamed


@click.command(cls=Grouped)
@click.argument("source", metavar="[SRC]", required=False)
@in_group(HEADS, profile_option)
@basic(click.option("--out", type=LocalPath(), help="Output folder; must be empty or hold an unfinished run."))
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace another conversion in --out; a folder with files that kvsurgery did not write is refused.",
)
@revision_option
@recipe_options
@in_group(
    CACHE,
    basic(
        sets(
            ["fit", "fit.memory"],
            click.option(
                "--fit",
                "fit_memory",
                type=Size(),
                help="Instead of --full-heads, --budget and --kv-bits: choose the least harmful policy whose weights, "
                "KV cache and workspace fit this memory, such as 24GB or 24GiB, of each device. `kvsurgery fit` shows "
                "the choice.",
            ),
        ),
        sets(
            ["fit.context"],
            click.option(
                "--context",
                "fit_context",
                type=Tokens(),
                help="With --fit: tokens of a sequence, prompt and answer; 128K is 131072.",
            ),
        ),
    ),
    sets(
        ["fit.batch"],
        click.option("--batch", "fit_batch", type=int, help="With --fit: number of sequences at a time.  [default: 1]"),
    ),
    click.option(
        "--kv-check",
        metavar="TEXT",
        help="After the conversion, measure on this text how far the next token diverges from the original's (KL, in "
        "nats), and write it to the model card.",
    ),
)
@reform_options
@trust_remote_code_option
@save_recipe_option
@click.option(
    "--stream",
    is_flag=True,
    help="Convert a Hub id while downloading it, without a copy in the Hub's cache.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Number of threads that move bytes, or of connections.  [default: (4, 8 with --stream)]",
)
@basic(
    click.option(
        "--dry-run",
        is_flag=True,
        help="Print the plan and write nothing; for a Hub id, only the headers are downloaded.",
    )
)
@in_group(
    ADAPTERS,
    click.option("--adapter", metavar="ADAPTER", help="A LoRA adapter of the original, a folder or a Hub id."),
    click.option(
        "--for",
        "adapted",
        metavar="CONVERTED",
        help="With --adapter: the converted checkpoint that the adapter will be used with, a folder or a Hub id.",
    ),
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def convert(
    ctx: click.Context,
    source: str | None,
    out: Path | None,
    overwrite: bool,
    revision: str | None,
    save_recipe: Path | None,
    stream: bool,
    jobs: int | None,
    dry_run: bool,
    as_json: bool,
    kv_check: str | None,
    trust_remote_code: bool,
    adapter: str | None,
    adapted: str | None,
    **options: Any,
) -> None:
    """Rewrite the checkpoint SRC according to a head profile.

    SRC is a folder or a Hub id. The default is the model that the profile was measured on. Retrieval heads keep every
    token. The other heads stream, or keep a budget of prompt tokens that their attention selects (HeadKV). The cache
    can be quantized (KIVI), and split across the processes of tensor parallelism. With a reform profile the model also
    reads prompts far beyond its context (REFORM). Without a profile, every head keeps every token and only the cache is
    quantized. The weights keep their bytes in a different order, so `kvsurgery revert` restores the original.

    With --adapter and --for, it rewrites a LoRA adapter of the original for a converted checkpoint.

    To resume an interrupted run, rerun the same command. With --stream it does not fetch finished tensors again.

    \b
    kvsurgery convert ./llama3 --profile duo.safetensors --out ./llama3-duo
    kvsurgery convert ./llama3 --kv-bits 4 --out ./llama3-kv4
    kvsurgery convert ./llama3 --profile hf://owner/profiles/duo.safetensors@v1.0 --out ./llama3-duo
    kvsurgery convert meta-llama/Llama-3.1-70B --stream --profile duo.safetensors --out ./llama3-duo
    kvsurgery convert --profile duo.safetensors --sparsity 0.25 --dry-run
    kvsurgery convert ./llama3 --profile r2.safetensors --budget 120 --out ./llama3-headkv
    kvsurgery convert ./llama3 --budgets-from lu-kv.safetensors --budget 2048 --out ./llama3-lukv
    kvsurgery convert ./llama3 --profile duo.safetensors --kv-bits 4 --kv-check book.txt --out ./llama3-duo-kv4
    kvsurgery convert ./llama3 --profile duo.safetensors --fit 24GB --context 128K --batch 4 --out ./llama3-24gb
    kvsurgery convert ./llama3 --profile duo.safetensors --tp 4 --out ./llama3-tp4
    kvsurgery convert ./llama3-70b --profile duo.safetensors --fit 80GB --context 128K --tp 8 --out ./llama3-70b-tp8
    kvsurgery convert ./qwen --profile reform.safetensors --profile duo.safetensors --out ./qwen-long
    kvsurgery convert ./llama3 --recipe duo.toml --sparsity 0.25 --out ./llama3-duo
    kvsurgery convert --adapter ./llama3-lora --for ./llama3-duo --out ./llama3-duo-lora
    """
    from kvsurgery.cli import plan
    from kvsurgery.cli.source import request_of
    from kvsurgery.conversion.output import check_no_other, check_outside
    from kvsurgery.conversion.replacing import removable_names
    from kvsurgery.display import console
    from kvsurgery.emit.card import UNCHECKED
    from kvsurgery.emit.loading import loading_lines
    from kvsurgery.system.files import check_folder

    if adapter is not None or adapted is not None:
        convert_adapter(ctx, adapter, adapted, out, overwrite, as_json)
        return
    recipe = recipe_of(options)
    if save_recipe is not None:
        check_recipe_file(save_recipe)
    if kv_check is not None:
        from kvsurgery.text.haystack import check_text

        if dry_run:
            raise click.UsageError("--kv-check measures what was converted; leave it or --dry-run out")
        check_text(kv_check)
    elif trust_remote_code:
        raise click.UsageError("--trust-remote-code requires --kv-check: nothing else runs code of SRC; leave it out")
    if out is not None:
        check_folder(out)
        if overwrite:
            removable_names(out)
    elif not dry_run:
        raise click.UsageError("--out is missing; give the folder to write, or --dry-run to see the plan")
    request = request_of(source, revision, recipe)
    if stream and request.folder is not None:
        raise click.UsageError(f"--stream requires a Hub id, but {request.place} is a folder")
    evidence = request.evidence
    if options["method"] == "reform" and (evidence.scores is not None or evidence.embedding is None):
        raise click.UsageError("--method reform takes a reform profile alone; to add scores, leave --method out")
    if dry_run or out is None:
        if out is not None:
            check_no_other(out)
            if request.folder is not None:
                check_outside(out, request.folder)
        prepared = request.prepare()
        _note(prepared, request)
        facts = plan.plan_facts(prepared)
        if as_json:
            click.echo(json.dumps(facts, indent=2))
        else:
            plan.print_plan(facts)
            out_words = ["--out", f"{Path(prepared.checkpoint.name).name}-converted"] if out is None else []
            console.stderr.print(f"Next: {typed_command(without='--dry-run', more=out_words)}")
        write_recipe(prepared.policy.recipe, save_recipe)
        return

    if stream:
        with request.streamed() as (prepared, remote):
            _note(prepared, request)
            result = _convert(prepared, out, jobs, kv_check, trust_remote_code, overwrite, remote)
    else:
        prepared = request.prepare(out)
        _note(prepared, request)
        result = _convert(prepared, out, jobs, kv_check, trust_remote_code, overwrite)
    facts = plan.plan_facts(prepared)
    if as_json:
        click.echo(json.dumps({**facts, **result}, indent=2))
    else:
        plan.print_policy(facts)
        plan.print_kv_bytes(facts)
        plan.print_result(result)
        if result["kv_check"]:
            console.stdout.print(result["kv_check"]["line"])
        elif prepared.policy.quantization is not None:
            console.stdout.print(UNCHECKED)
            console.stderr.print(f"Measure it: {typed_command(more=['--kv-check', 'TEXT'])}")
    write_recipe(prepared.policy.recipe, save_recipe)
    if result["left_out"]:
        console.stderr.print(f"not copied, and not restored by revert: {', '.join(result['left_out'])}")
    for line in loading_lines(prepared.emitted.config, out):
        console.stderr.print(line)
    console.stderr.print(f"Next: kvsurgery verify {shlex.quote(str(out))}")


def _note(prepared: PreparedConversion, request: Request) -> None:
    """Print what is not checked, what a fit leaves out, what bits may lose, and what vLLM does not do."""
    from kvsurgery.cli.source import warn_about_memory, warn_about_serving, warn_about_towers, warn_about_widths

    warn_about_towers(prepared)
    warn_about_memory(prepared, request)
    warn_about_widths(prepared, request)
    warn_about_serving(prepared)


def _convert(
    prepared: PreparedConversion,
    out: Path,
    jobs: int | None,
    kv_check: str | None,
    trust_remote_code: bool,
    overwrite: bool,
    remote: Streamed | None = None,
) -> dict[str, Any]:
    """Convert, check the cache if a text is given, and say what was done."""
    from kvsurgery.conversion.convert import convert
    from kvsurgery.conversion.engine import JOBS
    from kvsurgery.display import console
    from kvsurgery.errors import Interrupted
    from kvsurgery.system.memory import peak_memory

    text = None if kv_check is None else _check_text(kv_check, prepared, trust_remote_code)
    if jobs is None:
        jobs = JOBS if remote is None else remote.connections
    try:
        with console.byte_progress("converting", prepared.checkpoint.size) as advance:
            report = convert(
                prepared.checkpoint,
                prepared.plan,
                out,
                prepared.emitted.files,
                overwrite=overwrite,
                jobs=jobs,
                progress=advance,
            )
    except KeyboardInterrupt:
        raise Interrupted(f"continue with: {typed_command()}") from None
    return {
        "out": str(out),
        "bytes": report.size,
        "resumed": report.resumed,
        **({} if remote is None else {"fetched": remote.fetched, "requests": remote.requests}),
        "seconds": report.seconds,
        "peak_memory": peak_memory(),
        "left_out": report.left_out,
        "already_done": report.already_done,
        "updated": report.updated,
        "kv_check": None if text is None else _check(out, text),
    }


def _check_text(source: str, prepared: PreparedConversion, trust_remote_code: bool) -> CheckText:
    """The text of a check, which is read before the conversion."""
    from kvsurgery.evaluate.cache_check import CheckText

    quiet_transformers()
    return CheckText.read(source, prepared.checkpoint.folder, trust_remote_code)


def _check(out: Path, text: CheckText) -> dict[str, Any]:
    """Measure a converted checkpoint's divergence, and write it to the model card."""
    from kvsurgery.display import console
    from kvsurgery.emit.card import CHECK, with_section
    from kvsurgery.evaluate.cache_check import check_cache
    from kvsurgery.system.files import write_whole

    console.stderr.print(f"measuring what the quantized cache of {out} loses on the text")
    check, card = check_cache(out, text, dtype=chosen_dtype("auto", out, None)), out / "README.md"
    write_whole(card, with_section(card.read_text(encoding="utf-8"), str(check), CHECK))
    return {**asdict(check), "line": str(check)}
