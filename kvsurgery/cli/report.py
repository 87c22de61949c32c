"""`kvsurgery report`: write a page of results, or compare several checkpoints on one page."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from kvsurgery.cli.help import HelpPage
from kvsurgery.cli.options import LocalPath
from kvsurgery.cli.running import reserve


@click.command(cls=HelpPage)
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=LocalPath())
@click.option(
    "--out",
    type=LocalPath(),
    default="comparison",
    show_default=True,
    help="Output folder of a comparison.",
)
@click.pass_context
def report(ctx: click.Context, folders: tuple[Path, ...], out: Path) -> None:
    """Write a page of results, or of several checkpoints and sweeps side by side.

    Each DIR is a folder that eval, bench or sweep wrote. For a single DIR, its page is written there again. For
    several, OUT gets a page with a table of the checkpoints, the settings of each sweep, and a chart of quality against
    the bytes of the KV cache.

    All results must belong to the same original and the same samples; otherwise the command stops. Differences in
    settings, versions or devices are listed on the page.

    \b
    kvsurgery report report/
    kvsurgery report report-50 report-25 report-kv4 --out comparison
    kvsurgery report report-50 sweep/
    """
    from kvsurgery.display import console
    from kvsurgery.report import write_comparison, write_report, write_sweep
    from kvsurgery.report.folder import is_sweep
    from kvsurgery.report.writing import PAGE
    from kvsurgery.system.locks import reserved_folder

    is_typed = ctx.get_parameter_source("out") is ParameterSource.COMMANDLINE
    is_one, notices, verb = len(folders) == 1, (), "wrote"
    is_one_sweep = is_one and is_sweep(folders[0])
    if is_one and is_typed and not is_one_sweep:
        raise click.UsageError("--out is for a comparison; the page of a single DIR is written there, leave it out")
    is_own_page = is_one and not is_typed
    reserve(reserved_folder(folders[0] if is_own_page else out))
    with console.drawing_progress() as advance:
        if is_own_page:
            page = (write_sweep if is_one_sweep else write_report)(folders[0], advance)
        else:
            verb = "replaced" if (out / PAGE).exists() else "wrote"
            page, comparison = write_comparison(folders, out, advance)
            notices = comparison.notices
    for notice in notices:
        console.stderr.print(notice)
    console.stderr.print(f"{verb} {page}")
