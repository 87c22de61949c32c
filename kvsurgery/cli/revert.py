"""`kvsurgery revert`: the way back."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder to write; must be empty, or an unfinished run's.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Threads that move bytes.  [default: 4]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def revert(folder: Path, out: Path, jobs: int | None, as_json: bool) -> None:
    """Give the original of the converted checkpoint DIR back, byte for byte.

    Nothing but DIR is needed. Every tensor and file is compared with the hash that the conversion recorded. A killed
    run continues when the same command is given again.

    \b
    kvsurgery revert ./llama3-duo --out ./llama3
    """
    from kvsurgery import console
    from kvsurgery.conversion.engine import JOBS
    from kvsurgery.conversion.revert import revert
    from kvsurgery.errors import Interrupted

    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    try:
        with console.byte_progress("reverting", total) as advance:
            report = revert(folder, out, jobs=jobs or JOBS, progress=advance)
    except KeyboardInterrupt:
        raise Interrupted from None
    if as_json:
        facts = {**vars(report), "out": str(report.out)}
        click.echo(json.dumps(facts, indent=2))
        return
    if report.already_done:
        console.stdout.print(f"{out} is the original already; nothing to do", markup=False)
        return
    console.stdout.print(
        f"wrote {out}: {report.source} as it was, {report.tensors} tensors and {report.files} files, "
        f"{console.size(report.size)} in {report.seconds:.1f} s",
        markup=False,
    )
    if report.left_out:
        console.stderr.print(f"not kept by the conversion: {', '.join(report.left_out)}", markup=False)
