"""`kvsurgery verify`: check a converted checkpoint against its recorded hashes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kvsurgery.cli.help import HelpPage
from kvsurgery.cli.options import LocalPath
from kvsurgery.cli.running import chosen_dtype, dtype_option


@click.command(cls=HelpPage)
@click.argument("folder", metavar="DIR", type=LocalPath())
@click.option("--source", metavar="SRC", help="Also compare with the original: a folder or a Hub id.")
@click.option(
    "--logits", is_flag=True, help="Also compare the logits of the stock model and the emitted one with all heads full."
)
@click.option("--hashes", is_flag=True, help="Print the SHA-256 of each emitted .py file, as the model card does.")
@dtype_option
@click.option("--jobs", type=click.IntRange(min=1), help="Number of hashing threads.  [default: 4]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def verify(
    ctx: click.Context,
    folder: Path,
    source: str | None,
    logits: bool,
    hashes: bool,
    dtype: str,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Check the converted checkpoint or adapter DIR against the hashes that its conversion recorded.

    Emitted code, configs and copied files must match their hashes. Every tensor is put back into its original order and
    must match the hash of the original. On a mismatch, the exit code is 3, and the error names the file or tensor; with
    --json, the field "mismatch" has the same message.

    \b
    kvsurgery verify ./llama3-duo
    kvsurgery verify ./llama3-duo --source ./llama3 --logits
    kvsurgery verify ./llama3-duo --hashes
    """
    from kvsurgery.checkpoint.quantization import check_known
    from kvsurgery.checkpoint.source import ADAPTER_CONFIG, read_config, weight_bytes
    from kvsurgery.cli.source import source_folder
    from kvsurgery.conversion.engine import JOBS
    from kvsurgery.conversion.verify import verify
    from kvsurgery.display import console
    from kvsurgery.errors import Mismatch

    if not logits and ctx.get_parameter_source("dtype") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--dtype requires --logits")
    if logits and (folder / ADAPTER_CONFIG).exists():
        raise click.UsageError(f"--logits compares models, and {folder} is an adapter; leave it out")
    if logits:
        check_known(read_config(folder), folder)
    original = None if source is None else source_folder(source, folder)
    folders = [folder] if original is None else [folder, original]
    try:
        with console.byte_progress("verifying", weight_bytes(*folders)) as advance:
            report = verify(folder, original, jobs=jobs or JOBS, progress=advance)
        comparison = _compare_logits(folder, chosen_dtype(dtype, folder, "cpu")) if logits else None
    except Mismatch as error:
        if as_json:
            click.echo(json.dumps({"mismatch": str(error)}, indent=2))
        raise
    if as_json:
        facts = {
            "source": report.provenance.source,
            "revision": report.provenance.revision,
            "tool": report.provenance.tool,
            "tensors": report.tensors,
            "files": report.files,
            "bytes": report.size,
            "unrecorded": report.unrecorded,
            "compared_with_source": source is not None,
            "seconds": report.seconds,
            "logits": comparison,
            "hashes": report.hashes,
        }
        click.echo(json.dumps(facts, indent=2))
        return
    reference = "their hashes" if source is None else "their hashes and the source"
    console.stdout.print(
        f"OK: {folder} was converted from {report.provenance.source}; {report.tensors} tensors and {report.files} "
        f"files match {reference}"
    )
    if comparison:
        console.stdout.print(
            f"The logits of the emitted model with all heads full differ from the stock model's by "
            f"{comparison['difference']:.1e} of the largest, within {comparison['bound']:g} for {comparison['dtype']}"
        )
    if hashes:
        click.echo("\n".join(f"{digest}  {name}" for name, digest in report.hashes.items()))
    if report.unrecorded:
        console.stderr.print(f"Files that the conversion did not write: {', '.join(report.unrecorded)}")


def _compare_logits(folder: Path, dtype: str) -> dict[str, Any]:
    from dataclasses import asdict

    from transformers.utils import logging

    from kvsurgery.conversion.logits import compare_logits
    from kvsurgery.display import console

    logging.disable_progress_bar()
    with console.stderr.status("running the stock and the emitted model"):
        return asdict(compare_logits(folder, dtype))
