"""`kvsurgery push`: verify a converted checkpoint, upload it to the Hub and compare checksums."""

from __future__ import annotations

from pathlib import Path

import click

from kvsurgery.cli.help import HelpPage
from kvsurgery.cli.options import LocalPath
from kvsurgery.system.repo_id import is_repo_name


@click.command(cls=HelpPage)
@click.argument("folder", metavar="DIR", type=LocalPath())
@click.argument("repo_id")
@click.option("--private", is_flag=True, help="Create a private repository; an existing public one is refused.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of committing to main.")
@click.option(
    "--delete-others",
    is_flag=True,
    help="Delete files in the repository that DIR lacks and that can change how it loads, such as other weights, "
    "adapters and code; without this option, push refuses them.",
)
@click.option(
    "--report",
    type=LocalPath(),
    help="Upload the page and figures that eval or bench wrote to this folder, and show them in the model card.",
)
def push(folder: Path, repo_id: str, private: bool, create_pr: bool, delete_others: bool, report: Path | None) -> None:
    """Verify a converted checkpoint, upload it to the Hub and compare the Hub's checksums.

    The repository is created if needed. All files appear in a single commit, so nobody downloads an incomplete model.
    If the repository has files that can change how DIR loads, push stops before it uploads anything. After a failure,
    run the same command again: weights that the Hub already has are not sent again.

    With --report, the card on the Hub shows the report's figures and scores; DIR itself is not changed. The page lists
    the commands that reproduce each number, including the names of local folders.

    \b
    kvsurgery push ./llama3-duo you/llama3-duo --private
    kvsurgery push ./llama3-duo you/llama3-duo --report report/
    """
    from kvsurgery import hub
    from kvsurgery.checkpoint.provenance import Provenance
    from kvsurgery.checkpoint.source import weight_bytes
    from kvsurgery.conversion.verify import verify
    from kvsurgery.display import console
    from kvsurgery.errors import CheckpointError

    if not is_repo_name(repo_id):
        raise click.UsageError(f"{repo_id!r} is not a repository name; the Hub's names look like owner/name")
    Provenance.read(folder)
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(f"{folder} has an adapter, which would be loaded with it; move the adapter elsewhere")
    report_files = {}
    if report is not None:
        from kvsurgery.report import card_files

        report_files = card_files(folder, report)
    # hashing takes minutes; check the token and the files on the Hub first
    pushed_names = [*hub.pushed_files(folder), *report_files]
    hub.RemoteFolder.read(repo_id).check(pushed_names, private=private, delete_others=delete_others)
    with console.byte_progress("verifying", weight_bytes(folder)) as advance:
        verification = verify(folder, progress=advance)
    if verification.unrecorded:
        console.stderr.print(
            f"also uploading files that the conversion did not write: {', '.join(verification.unrecorded)}"
        )
    url = hub.push(
        folder,
        repo_id,
        private=private,
        create_pr=create_pr,
        delete_others=delete_others,
        extra_files=report_files,
    )
    console.stderr.print("uploaded; the Hub's checksums match the local files")
    click.echo(url)
