"""Whether the loop in C over the codes of tiles is used."""

import shutil

import pytest
import torch

from kvsurgery.templates.kv_cpu import CodesLoop

HAVE_COMPILER = shutil.which("gcc") is not None
needs_compiler = pytest.mark.skipif(not HAVE_COMPILER, reason="needs gcc")


def counted(patch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtype of queries of each call of the loop from here on."""
    found, attend = [], CodesLoop.__call__

    def call(self, query, *options):
        found.append(query.dtype)
        return attend(self, query, *options)

    patch.setattr(CodesLoop, "__call__", call)
    return found
