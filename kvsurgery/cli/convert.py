"""`kvsurgery convert`: the whole surgery, from a checkpoint and a head profile to a checkpoint."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvsurgery.cli.options import REFORM_SIZES, Size, Tokens, decided, policy_options, reform_options
from kvsurgery.cli.running import revision_option

if TYPE_CHECKING:
    from kvsurgery.hub.stream import Streamed
    from kvsurgery.operation import Operation
    from kvsurgery.score.profile import HeadProfile


@click.command()
@click.argument("source", metavar="[SRC]", required=False)
@click.option(
    "--profile",
    "profile_paths",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    help="The head profile. A reform profile can be given beside one with scores.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder to write; must be empty, or an unfinished run's.")
@revision_option
@click.option("--sparsity", type=float, help="Share of heads that are not full.  [default: 0.5 with GQA, 0.75 without]")
@click.option("--threshold", type=float, help="Instead: heads with this score or more stay full.")
@click.option("--full-heads", type=int, help="Instead: so many KV heads over the whole model stay full.")
@click.option(
    "--budget",
    type=int,
    help="Tokens that a budgeted head keeps of a prompt, on average; the observation window comes on top, so a "
    'published "KV = 128" is --budget 120 --window 8.',
)
@click.option(
    "--kv-bits",
    type=click.Choice(["8", "4", "2"]),
    help="Store full and budgeted heads in so many bits, but for their newest tokens.  [default: the model's dtype]",
)
@click.option(
    "--fit",
    "memory",
    type=Size(),
    help="Instead of these: take the least harmful policy with which weights, KV cache and workspace fit, such as 24GB "
    "or 24GiB; with --tp, on each device. `kvsurgery fit` shows the choice.",
)
@click.option("--context", type=Tokens(), help="With --fit: tokens of a sequence, prompt and answer; 128K is 131072.")
@click.option("--batch", type=int, help="With --fit: sequences at a time.  [default: 1]")
@policy_options
@reform_options
@click.option(
    "--stream",
    is_flag=True,
    help="Convert a Hub id while its weights are fetched, without a copy of them in the Hub's cache.",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Threads that move bytes, or connections.  [default: 4, 8 with --stream]"
)
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing; of a Hub id only headers are read.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan, or the result, as JSON.")
def convert(
    source: str | None,
    profile_paths: tuple[Path, ...],
    out: Path | None,
    revision: str | None,
    method: str | None,
    memory: int | None,
    context: int | None,
    batch: int | None,
    stream: bool,
    jobs: int | None,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Rewrite the checkpoint SRC after a head profile.

    SRC is a folder or a Hub id; without it, the model that the profile was measured on. Retrieval heads keep every
    token; the others stream, or keep a budget of the prompt that their attention chooses (HeadKV). What is kept can be
    quantised (KIVI), and shared by the processes of tensor parallelism. With a reform profile, prompts far beyond the
    context are read too (REFORM). Weights keep their bytes, in another order: `kvsurgery revert` restores the original.

    A killed run continues when the same command is given again. With --stream it fetches no finished tensor twice.

    \b
    kvsurgery convert ./llama3 --profile duo.safetensors --out ./llama3-duo
    kvsurgery convert meta-llama/Llama-3.1-70B --stream --profile duo.safetensors --out ./llama3-duo
    kvsurgery convert --profile duo.safetensors --sparsity 0.25 --dry-run
    kvsurgery convert ./llama3 --profile r2.safetensors --budget 120 --out ./llama3-headkv
    kvsurgery convert ./llama3 --profile duo.safetensors --kv-bits 4 --out ./llama3-duo-kv4
    kvsurgery convert ./llama3 --profile duo.safetensors --fit 24GB --context 128K --batch 4 --out ./llama3-24gb
    kvsurgery convert ./llama3 --profile duo.safetensors --tp 4 --out ./llama3-tp4
    kvsurgery convert ./llama3-70b --profile duo.safetensors --fit 80GB --context 128K --tp 8 --out ./llama3-70b-tp8
    kvsurgery convert ./qwen --profile reform.safetensors --profile duo.safetensors --out ./qwen-long
    """
    from kvsurgery import console
    from kvsurgery.cli import plan
    from kvsurgery.cli.source import prepare, streamed
    from kvsurgery.emit.config import auto_class

    options = _options(memory, context, batch, method=method, **options)
    if out is None and not dry_run:
        raise click.UsageError("--out is missing; give the folder to write, or --dry-run to see the plan")
    profile, options = _profiles(profile_paths, method, options)
    if dry_run:
        facts = plan.plan_facts(prepare(source, revision, profile, options, weights=False), profile)
        if as_json:
            click.echo(json.dumps(facts, indent=2))
        else:
            plan.print_plan(facts)
            console.stderr.print("next: the same with --out DIR in place of --dry-run")
        return

    if stream:
        with streamed(source, revision, profile, options) as (operation, remote):
            result = _convert(operation, out, jobs, remote)
    else:
        operation = prepare(source, revision, profile, options, weights=True)
        result = _convert(operation, out, jobs)
    facts = plan.plan_facts(operation, profile)
    if as_json:
        click.echo(json.dumps({**facts, **result}, indent=2))
    else:
        plan.print_policy(facts)
        plan.print_kv_bytes(facts["kv_bytes"])
        plan.print_ranks(facts["ranks"], facts["replicated"] and facts["family"])
        plan.print_result(result)
    if result["left_out"]:
        console.stderr.print(f"not copied, and not restored by revert: {', '.join(result['left_out'])}", markup=False)
    auto = auto_class(json.loads(operation.files["config.json"]))
    loads = f"{auto}.from_pretrained({json.dumps(str(out))}, trust_remote_code=True)"
    console.stderr.print(f"it loads with {loads}", markup=False)
    console.stderr.print(f"next: kvsurgery verify {shlex.quote(str(out))}", markup=False)


def _options(memory: int | None, context: int | None, batch: int | None, **options: Any) -> dict[str, Any]:
    """The options as `Operation.prepare` takes them."""
    sizes = {name: options.pop(f"reform_{name}") for name in REFORM_SIZES}
    options |= {"sizes": {name: value for name, value in sizes.items() if value is not None}}
    given = {name: options.pop(name) for name in ("sparsity", "threshold", "full_heads", "budget", "kv_bits")}
    given = {name: value for name, value in given.items() if value is not None}
    if memory is None:
        if context is not None or batch is not None:
            flag = "--batch" if context is None else "--context"
            raise click.UsageError(f"{flag} goes with --fit; add that, or leave it out")
        bits = given.pop("kv_bits", None)
        return {**given, **decided(bits=bits and int(bits), **options)}
    if given:
        flags = " and ".join("--" + name.replace("_", "-") for name in given)
        raise click.UsageError(f"--fit decides {flags}; leave one of them out")
    if context is None:
        raise click.UsageError("--context is missing: tokens of a sequence, which --fit makes room for")
    from kvsurgery.decide.fit import Demand

    return {"demand": Demand(memory, context, 1 if batch is None else batch), **decided(bits=8, **options)}


def _profiles(
    paths: tuple[Path, ...], method: str | None, options: dict[str, Any]
) -> tuple[HeadProfile, dict[str, Any]]:
    """The profile that decides the heads, and the options with that of embedding heads, if there is one."""
    from kvsurgery.score.profile import HeadProfile

    profiles = [HeadProfile.load(path) for path in paths]
    scored = [profile for profile in profiles if profile.scores is not None]
    reform = [profile for profile in profiles if profile.scores is None]
    if len(scored) > 1 or len(reform) > 1:
        raise click.UsageError(
            "--profile is given twice for the same; `kvsurgery profile merge` makes one profile of several"
        )
    if method == "reform" and (scored or not reform):
        raise click.UsageError("--method reform takes a reform profile alone; leave it out to give one with scores too")
    if not reform:
        if options["sizes"]:
            flags = " and ".join(f"--reform-{name.replace('_', '-')}" for name in options["sizes"])
            raise click.UsageError(f"{flags} goes with a reform profile; add --profile, or leave it out")
        return scored[0], options
    if "demand" in options:
        raise click.UsageError("--fit makes no room for reading long prompts; leave it or the reform profile out")
    return (scored or reform)[0], {**options, "reform": reform[0]}


def _convert(operation: Operation, out: Path, jobs: int | None, remote: Streamed | None = None) -> dict[str, Any]:
    from kvsurgery import console
    from kvsurgery.convert.convert import convert
    from kvsurgery.convert.engine import JOBS
    from kvsurgery.errors import Interrupted
    from kvsurgery.memory import peak_memory

    if jobs is None:
        jobs = JOBS if remote is None else remote.connections
    try:
        with console.byte_progress("converting", operation.checkpoint.size) as advance:
            report = convert(operation.checkpoint, operation.plan, out, operation.files, jobs=jobs, progress=advance)
    except KeyboardInterrupt:
        raise Interrupted from None
    return {
        "out": str(out),
        "bytes": report.size,
        "resumed": report.resumed,
        **({} if remote is None else {"fetched": remote.fetched, "requests": remote.requests}),
        "seconds": report.seconds,
        "peak_memory": peak_memory(),
        "left_out": report.left_out,
        "already_done": report.already_done,
    }
