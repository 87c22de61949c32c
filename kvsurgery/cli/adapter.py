"""`kvsurgery convert --adapter`: convert a LoRA adapter of the original for the converted checkpoint."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click
from click.core import ParameterSource

from kvsurgery.system.repo_id import checkpoint_folder

# parameters of `convert` that apply to adapters
USED = ("adapter", "adapted", "out", "overwrite", "as_json")


def convert_adapter(
    ctx: click.Context, adapter: str | None, adapted: str | None, out: Path | None, overwrite: bool, as_json: bool
) -> None:
    """Convert an adapter with the parameters of `convert`, and print the result.

    Raises:
        UsageError: a parameter is missing, or applies to checkpoints only.
    """
    from kvsurgery import hub
    from kvsurgery.checkpoint.adapter import read_adapter_config
    from kvsurgery.checkpoint.provenance import PROVENANCE
    from kvsurgery.conversion.adapter import convert_adapter
    from kvsurgery.conversion.converted import read_provenance
    from kvsurgery.display import console
    from kvsurgery.system.files import check_folder

    for param in ctx.command.params:
        if param.name not in USED and ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{_typed_name(param)} does not apply to adapters; leave it or --adapter out")
    if adapter is None or adapted is None:
        raise click.UsageError("--adapter requires --for, the converted checkpoint, and --for requires --adapter")
    if out is None:
        raise click.UsageError("--out is missing; give the folder to write")
    check_folder(out)
    base = None
    converted = checkpoint_folder(adapted)
    if converted is None:
        base = adapted
        converted = hub.fetch_config(adapted, name=PROVENANCE)[0]
    folder = checkpoint_folder(adapter) or hub.fetch_adapter(adapter)
    report = convert_adapter(folder, converted, out, base, overwrite=overwrite)
    if as_json:
        click.echo(json.dumps({**vars(report), "out": str(out)}, indent=2))
        return
    if report.already_done:
        console.stdout.print(f"{out} is converted already; nothing to do")
        return
    console.stdout.print(
        f"wrote {out}: {report.moved} of {report.tensors} tensors reordered for {adapted}, {console.size(report.size)}"
    )
    if report.left_out:
        console.stderr.print(f"not copied, and not restored by revert: {', '.join(report.left_out)}")
    trained_on = read_adapter_config(folder).get("base_model_name_or_path")
    source = read_provenance(converted).source
    if Path(str(trained_on)).name != Path(source).name:
        console.stderr.print(
            f"the adapter names {trained_on} as its base model, but {adapted} was converted from {source}"
        )
    console.stderr.print(f"Load it with: PeftModel.from_pretrained(model, {json.dumps(str(out))})")
    console.stderr.print(f"Next: kvsurgery verify {shlex.quote(str(out))}")


def _typed_name(param: click.Parameter) -> str:
    """The name of a parameter as typed on the command line."""
    return param.opts[-1] if isinstance(param, click.Option) else param.make_metavar(click.get_current_context())
