"""What the examples share: the bundled model, its kind of text, and a place for what they write.

Run them from the repository's root: `python examples/generate.py`. Each writes to a folder that is removed at the end.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
MODEL, PROFILE = HERE / "tiny-recall" / "model", HERE / "tiny-recall" / "profile.safetensors"
sys.path.insert(0, str(HERE / "tiny-recall"))
import task  # noqa: E402, F401  (lies beside the model)

# the two heads that recall stay full, and two more; the others keep 4 first and 32 latest tokens
DUO = ("--profile", PROFILE, "--full-heads", 4, "--sink", 4, "--recent", 32)


@contextmanager
def scratch() -> Generator[None]:
    """Work in a folder of its own, on one thread, without the progress bars of transformers."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        yield


def kvsurgery(*arguments: Any) -> None:
    """Run a command as a user would, and print it; what it says of itself goes unseen."""
    words = [str(argument) for argument in arguments]
    print("$ kvsurgery", *(word.replace(str(HERE), "examples") for word in words), flush=True)
    subprocess.run([sys.executable, "-m", "kvsurgery", *words], stdout=subprocess.DEVNULL, check=True)


def load(folder: str | Path, **options: Any) -> PreTrainedModel:
    """The model in a folder, with the code that lies there; the original has none."""
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto", **options).eval()


def kv_bytes(cache: Any) -> int:
    """Bytes of a KV cache: a converted model's knows what it has allocated, of the stock one tensors are counted."""
    if hasattr(cache, "allocated_bytes"):
        return cache.allocated_bytes()
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
