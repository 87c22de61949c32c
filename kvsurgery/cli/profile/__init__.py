"""`kvsurgery profile`: head profiles, one module per command."""

from __future__ import annotations

import click

from kvsurgery.cli.help import HelpGroup
from kvsurgery.cli.profile.compare import compare
from kvsurgery.cli.profile.compute import compute
from kvsurgery.cli.profile.importing import import_group
from kvsurgery.cli.profile.merge import merge
from kvsurgery.cli.profile.show import show
from kvsurgery.cli.profile.suggest import suggest


@click.group(cls=HelpGroup)
def profile() -> None:
    """Measure, import, show, compare and merge head profiles: scores, one per attention head of a model.

    \b
    kvsurgery profile suggest ./llama3
    kvsurgery profile compute ./llama3 --method duo -o duo.safetensors
    kvsurgery profile import duo ./Llama-3-8B-Instruct-Gradient-1048k --model ./llama3 -o duo.safetensors
    kvsurgery profile show duo.safetensors
    """


for command in (compare, compute, import_group, merge, show, suggest):
    profile.add_command(command)
