"""`kvsurgery revert`: restore the original checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kvsurgery.cli.help import HelpPage
from kvsurgery.cli.options import LocalPath
from kvsurgery.cli.running import typed_command


@click.command(cls=HelpPage)
@click.argument("folder", metavar="DIR", type=LocalPath())
@click.option(
    "--out",
    required=True,
    type=LocalPath(),
    help="Output folder; must be empty or hold an unfinished run.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Number of threads that move bytes.  [default: 4]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def revert(folder: Path, out: Path, jobs: int | None, as_json: bool) -> None:
    """Restore the original of the converted checkpoint or adapter DIR, byte for byte.

    The source is not needed. Every restored tensor and file must match the hash that the conversion recorded. To
    resume an interrupted run, rerun the same command.

    \b
    kvsurgery revert ./llama3-duo --out ./llama3
    """
    from kvsurgery.checkpoint.source import weight_bytes
    from kvsurgery.conversion.engine import JOBS
    from kvsurgery.conversion.revert import revert
    from kvsurgery.display import console
    from kvsurgery.errors import Interrupted

    try:
        with console.byte_progress("reverting", weight_bytes(folder)) as advance:
            report = revert(folder, out, jobs=jobs or JOBS, progress=advance)
    except KeyboardInterrupt:
        raise Interrupted(f"continue with: {typed_command()}") from None
    if as_json:
        facts = {**vars(report), "out": str(report.out)}
        click.echo(json.dumps(facts, indent=2))
        return
    if report.already_done:
        console.stdout.print(f"{out} is the original already; nothing to do")
        return
    console.stdout.print(
        f"wrote {out}: {report.source} as it was, {report.tensors} tensors and {report.files} files, "
        f"{console.size(report.size)} in {report.seconds:.1f} s"
    )
    if report.left_out:
        console.stderr.print(f"not kept by the conversion: {', '.join(report.left_out)}")
