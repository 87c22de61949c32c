"""`kvsurgery push`: verify a converted checkpoint, upload it, compare checksums."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("repo_id")
@click.option("--private", is_flag=True, help="Create the repository private; a public one is refused.")
@click.option("--create-pr", is_flag=True, help="Open a pull request and leave main as it is.")
def push(folder: Path, repo_id: str, private: bool, create_pr: bool) -> None:
    """Verify a converted checkpoint, upload it to the Hub and compare the Hub's checksums.

    The repository is created if needed. All files appear in one commit, so nobody ever downloads half a model. After a
    failure run the same command again: weights that the Hub has are not sent again.

    \b
    kvsurgery push ./llama3-duo you/llama3-duo --private
    """
    from kvsurgery import console, hub
    from kvsurgery.emit.provenance import Provenance
    from kvsurgery.verify import verify

    Provenance.read(folder)
    # hashing takes minutes; a missing token should not wait for it
    hub.check_login(repo_id)
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with console.byte_progress("verifying", total) as advance:
        report = verify(folder, progress=advance)
    if report.unrecorded:
        console.stderr.print(
            f"also uploading what the conversion did not write: {', '.join(report.unrecorded)}", markup=False
        )
    url = hub.push(folder, repo_id, private=private, create_pr=create_pr)
    console.stderr.print("uploaded; the Hub's checksums are those of the local files")
    click.echo(url)
