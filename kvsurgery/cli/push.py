"""`kvsurgery push`: verify a converted checkpoint, upload it, compare checksums."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("repo_id")
@click.option("--private", is_flag=True, help="Create the repository private; a public one is refused.")
@click.option("--create-pr", is_flag=True, help="Open a pull request and leave main as it is.")
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    help="Upload the page and pictures of this folder, which eval or bench wrote, and show them in the model card.",
)
def push(folder: Path, repo_id: str, private: bool, create_pr: bool, report: Path | None) -> None:
    """Verify a converted checkpoint, upload it to the Hub and compare the Hub's checksums.

    The repository is created if needed. All files appear in one commit, so nobody ever downloads half a model. After a
    failure run the same command again: weights that the Hub has are not sent again.

    With a report, the card on the Hub gets its pictures and scores, and DIR stays as it is. The page says how to
    reproduce each number, by the command that was typed and the folders in it.

    \b
    kvsurgery push ./llama3-duo you/llama3-duo --private
    kvsurgery push ./llama3-duo you/llama3-duo --report report/
    """
    from kvsurgery import console, hub
    from kvsurgery.checkpoint.provenance import Provenance
    from kvsurgery.conversion.verify import verify

    Provenance.read(folder)
    beside = {}
    if report is not None:
        from kvsurgery.report import card_files

        beside = card_files(folder, report)
    # hashing takes minutes; a missing token should not wait for it
    hub.check_login(repo_id)
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with console.byte_progress("verifying", total) as advance:
        found = verify(folder, progress=advance)
    if found.unrecorded:
        console.stderr.print(
            f"also uploading what the conversion did not write: {', '.join(found.unrecorded)}", markup=False
        )
    url = hub.push(folder, repo_id, private=private, create_pr=create_pr, beside=beside)
    console.stderr.print("uploaded; the Hub's checksums are those of the local files")
    click.echo(url)
