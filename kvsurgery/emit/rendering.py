"""The jinja templates of a checkpoint's files."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kvsurgery.emit.cache_description import describe_bits
from kvsurgery.system.resources import TEMPLATES
from kvsurgery.system.sizes import size


@cache
def template_environment() -> Environment:
    """An environment that finds the templates of emitted code and of the model card, and refuses unknown names."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"bits": describe_bits, "size": size, "thousands": "{:,}".format}
    return environment
