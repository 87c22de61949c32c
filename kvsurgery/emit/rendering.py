"""The jinja templates of a checkpoint's files."""

from __future__ import annotations

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kvsurgery.system.resources import TEMPLATES


def template_environment() -> Environment:
    """An environment that finds the templates of emitted code and of the model card, and refuses unknown names."""
    return Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
