"""The command line as a user has it: what is typed, and what comes back."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from safetensors.numpy import save_file

from kvsurgery.cli import main
from kvsurgery.heads.dimensions import ModelDimensions
from tests.helpers.shards import tree

# what lies in the working directory of the fixture `here`, beside the checkpoint `llama`
PROFILE = "profile.safetensors"
SCORES = np.float32([[0.2, 0.9, 0.4], [0.7, 0.1, 0.8]])
MODEL = ModelDimensions(layers=2, query_heads=6, kv_heads=3, head_dim=4)
CONVERT = ("convert", "llama", "--profile", PROFILE, "--out", "out")
# modules that take long to load
HEAVY = {"huggingface_hub", "numpy", "torch", "transformers"}
# what a progress bar's line begins with
BARS = ("converting", "drawing", "evaluating", "measuring", "reverting", "sweeping", "verifying")


@dataclass(frozen=True)
class Result:
    """Exit code, stdout and stderr of one command."""

    code: int
    out: str
    err: str


def run(*arguments: Any) -> Result:
    """Run `kvsurgery` with these arguments in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    typed = ["kvsurgery", *map(str, arguments)]
    with patch.object(sys, "argv", typed), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    return Result(code, out.getvalue(), err.getvalue())


def done(*arguments: Any) -> Result:
    """Run a command that works."""
    result = run(*arguments)
    assert result.code == 0, result.err
    return result


def refused(*arguments: Any, code: int = 1) -> str:
    """Run a command that fails, and return the line that says why: the only one but for a progress bar's."""
    result = run(*arguments)
    assert result.code == code, result
    assert result.out == ""
    *bars, line = [line for line in result.err.splitlines() if line.strip()]
    assert all(bar.startswith(BARS) for bar in bars), result.err
    assert line.startswith("kvsurgery: "), result.err
    return line


def nothing_happens(here: Path, words: str, *arguments: Any, code: int = 1) -> str:
    """A command is refused with these words, and every file is as it was."""
    before = tree(here)
    line = refused(*arguments, code=code)
    assert re.search(words, line), line
    assert tree(here) == before
    assert not Path("out").exists()
    return line


def save_profile(scores: Any = SCORES, **changes: Any) -> None:
    """Write the profile by hand, since `HeadProfile` would not."""
    names = ("layers", "query_heads", "kv_heads", "head_dim")
    metadata = {"format": "kvsurgery.head-profile", "version": "1", "method": "duo", "granularity": "kv"}
    metadata |= {"base_model": "llama", **{name: str(getattr(MODEL, name)) for name in names}}
    metadata |= {key: value for key, value in changes.items() if value is not ...}
    save_file({"scores": np.float32(scores)}, PROFILE, metadata)
