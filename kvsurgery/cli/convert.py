"""`kvsurgery convert`: the whole surgery, from a checkpoint and a head profile to a checkpoint."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from kvsurgery.operation import Operation
    from kvsurgery.score.profile import HeadProfile


@click.command()
@click.argument("source", metavar="[SRC]", required=False)
@click.option("--profile", "profile_path", required=True, type=click.Path(path_type=Path), help="The head profile.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder to write; must be empty, or an unfinished run's.")
@click.option("--revision", help="Branch, tag or commit of a Hub id.")
@click.option(
    "--method",
    type=click.Choice(["duo", "headkv"]),
    help="Short for --rest streaming, and --rest budgeted.  [default: what the profile was measured for]",
)
@click.option("--sparsity", type=float, help="Share of heads that are not full.  [default: 0.5 with GQA, 0.75 without]")
@click.option("--threshold", type=float, help="Instead: heads with this score or more stay full.")
@click.option("--full-heads", type=int, help="Instead: so many KV heads over the whole model stay full.")
@click.option(
    "--rest", type=click.Choice(["streaming", "budgeted"]), help="What the other heads are.  [default: as --method]"
)
@click.option("--sink", type=int, default=64, show_default=True, help="First tokens that a streaming head keeps.")
@click.option("--recent", type=int, default=256, show_default=True, help="Latest tokens that a streaming head keeps.")
@click.option(
    "--budget",
    type=int,
    help="Tokens that a budgeted head keeps of a prompt, on average; the observation window comes on top, so a "
    'published "KV = 128" is --budget 120 --window 8.',
)
@click.option(
    "--beta",
    type=float,
    default=1.2,
    show_default=True,
    help="Budgets are B - B/beta each, and a pool of B/beta per head that follows the scores: a larger beta means a "
    "smaller pool and more even budgets.",
)
@click.option("--window", type=int, default=8, show_default=True, help="Last tokens of a prompt, which choose.")
@click.option("--kernel-size", type=int, default=7, show_default=True, help="Neighbours that attention is pooled over.")
@click.option("--pool", type=click.Choice(["max", "avg"]), default="max", show_default=True, help="How it is pooled.")
@click.option(
    "--kv-bits",
    type=click.Choice(["8", "4", "2"]),
    help="Store full and budgeted heads in so many bits, but for their newest tokens.  [default: the model's dtype]",
)
@click.option(
    "--kv-scheme",
    type=click.Choice(["kivi", "per-token"]),
    help="What a scale is for: kivi, a channel of keys and a token of values; per-token, a token.  [default: kivi]",
)
@click.option(
    "--kv-group-size",
    type=int,
    help="States that share a scale.  [default: a tile of 128 tokens, or all channels of a head]",
)
@click.option("--kv-residual", type=int, help="Newest tokens that stay as they are, at least.  [default: 128]")
@click.option(
    "--group-reduce",
    type=click.Choice(["mean", "max"]),
    default="mean",
    show_default=True,
    help="How scores of the query heads of a group become their KV head's.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Threads that move bytes.  [default: 4]")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing; of a Hub id only headers are read.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan, or the result, as JSON.")
def convert(
    source: str | None,
    profile_path: Path,
    out: Path | None,
    revision: str | None,
    jobs: int | None,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Rewrite the checkpoint SRC after a head profile.

    SRC is a folder or a Hub id; without it, the model that the profile was measured on. Retrieval heads keep every
    token; the others stream, or keep a budget of the prompt that their attention chooses (HeadKV). What is kept can be
    quantised (KIVI). Weights keep their bytes, in another order: `kvsurgery revert` restores the original.

    A killed run continues when the same command is given again.

    \b
    kvsurgery convert ./llama3 --profile duo.safetensors --out ./llama3-duo
    kvsurgery convert --profile duo.safetensors --sparsity 0.25 --dry-run
    kvsurgery convert ./llama3 --profile r2.safetensors --budget 120 --out ./llama3-headkv
    kvsurgery convert ./llama3 --profile duo.safetensors --kv-bits 4 --out ./llama3-duo-kv4
    """
    from kvsurgery import console
    from kvsurgery.cli import report
    from kvsurgery.score.profile import HeadProfile

    options = _decide_options(**options)
    if out is None and not dry_run:
        raise click.UsageError("--out is missing; give the folder to write, or --dry-run to see the plan")
    profile = HeadProfile.load(profile_path)
    if source is None:
        source, revision = profile.base_model, revision or profile.base_revision
    elif revision is not None and Path(source).is_dir():
        raise click.UsageError(f"--revision goes with a Hub id, and {source} is a folder")
    if dry_run:
        facts = report.plan_facts(_prepare(source, revision, profile, options, weights=False), profile)
        if as_json:
            click.echo(json.dumps(facts, indent=2))
        else:
            report.print_plan(facts)
            console.stderr.print("next: the same with --out DIR in place of --dry-run")
        return

    operation = _prepare(source, revision, profile, options, weights=True)
    result = _convert(operation, out, jobs)
    facts = report.plan_facts(operation, profile)
    if as_json:
        click.echo(json.dumps({**facts, **result}, indent=2))
    else:
        report.print_policy(facts)
        report.print_kv_bytes(facts["kv_bytes"])
        report.print_result(result)
    if result["left_out"]:
        console.stderr.print(f"not copied, and not restored by revert: {', '.join(result['left_out'])}", markup=False)
    loads = f"AutoModelForCausalLM.from_pretrained({json.dumps(str(out))}, trust_remote_code=True)"
    console.stderr.print(f"it loads with {loads}", markup=False)
    console.stderr.print(f"next: kvsurgery verify {shlex.quote(str(out))}", markup=False)


def _decide_options(
    method: str | None, rest: str | None, window: int, kernel_size: int, pool: str, **options: Any
) -> dict[str, Any]:
    """The options as `decide` takes them."""
    from kvsurgery.decide.policy import Quantisation, Selection

    implied = {"duo": "streaming", "headkv": "budgeted", None: None}[method]
    if rest and implied and rest != implied:
        raise click.UsageError(f"--method {method} means --rest {implied}; leave one of them out")
    names = ("scheme", "group_size", "residual")
    given = {name: value for name in names if (value := options.pop(f"kv_{name}")) is not None}
    bits = options.pop("kv_bits")
    if given and bits is None:
        flags = " and ".join(f"--kv-{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"{flags} goes with --kv-bits; add that, or leave it out")
    options["quantisation"] = None if bits is None else Quantisation(int(bits), **given)
    return {**options, "rest": rest or implied, "selection": Selection(window, kernel_size, pool)}


def _prepare(
    source: str, revision: str | None, profile: HeadProfile, options: dict[str, Any], weights: bool
) -> Operation:
    """Prepare a folder or a Hub id, whose weights are downloaded only if asked for, and only after its headers."""
    from kvsurgery.operation import Operation

    if Path(source).is_dir():
        return Operation.prepare(Path(source), profile, **options)
    from kvsurgery import hub
    from kvsurgery.errors import CheckpointError, HubError

    if not hub.is_repo_id(source):
        raise CheckpointError(f"{source} is no folder and no Hub id; give the checkpoint as the first argument")
    if Path(source).exists():
        raise CheckpointError(f"{source} is a file; give the folder of the checkpoint")

    def prepare(folder: Path, commit: str | None = None) -> Operation:
        return Operation.prepare(folder, profile, name=source, revision=commit, **options)

    try:
        if weights:
            return prepare(*hub.fetch_checkpoint(source, revision, check=prepare))
        with hub.headers(source, revision) as remote:
            return prepare(remote.folder, remote.commit)
    except HubError as error:
        # a mistyped path looks like a Hub id
        hint = f" (no folder {source} is here)" if Path(source).parent.is_dir() else ""
        raise HubError(f"{error}{hint}") from error


def _convert(operation: Operation, out: Path, jobs: int | None) -> dict[str, Any]:
    from kvsurgery import console
    from kvsurgery.convert.convert import convert
    from kvsurgery.convert.engine import JOBS
    from kvsurgery.errors import Interrupted
    from kvsurgery.memory import peak_memory

    try:
        with console.byte_progress("converting", operation.checkpoint.size) as advance:
            report = convert(
                operation.checkpoint, operation.plan, out, operation.files, jobs=jobs or JOBS, progress=advance
            )
    except KeyboardInterrupt:
        raise Interrupted from None
    return {
        "out": str(out),
        "bytes": report.size,
        "resumed": report.resumed,
        "seconds": report.seconds,
        "peak_memory": peak_memory(),
        "left_out": report.left_out,
        "already_done": report.already_done,
    }
