"""Run by an interpreter that has the wheel installed: convert outside of the checkout, then load without kvsurgery.

python tests/wheel.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny-recall"
LOAD = """
import importlib.util, sys
assert importlib.util.find_spec("kvsurgery") is None, "kvsurgery is still installed"
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("converted", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("converted")
inputs = tokenizer("remember dofi doge nedi fibu . recall dofi", return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
answer = tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1]:])
assert answer.split() == ["doge", "nedi", "fibu", "."], answer
assert type(output.past_key_values).__name__ == "KVSurgeryCache"
assert not any(name.split(".")[0] == "kvsurgery" for name in sys.modules)
print(f"without kvsurgery: recall dofi -> {answer}")
"""


def main() -> None:
    tool = Path(sys.executable).parent / "kvsurgery"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*command: str | Path) -> None:
        subprocess.run([str(word) for word in command], check=True, cwd=folder, env=environment)

    with tempfile.TemporaryDirectory() as folder:
        run(tool, "--version")
        profile = EXAMPLE / "profile.safetensors"
        run(
            tool,
            "convert",
            EXAMPLE / "model",
            "--profile",
            profile,
            "--out",
            "converted",
            "--sink",
            "4",
            "--recent",
            "32",
        )
        run(tool, "verify", "converted")
        run(sys.executable, "-m", "pip", "uninstall", "-q", "-y", "kvsurgery")
        run(sys.executable, "-c", LOAD)
    print("1 passed, 0 failed")


if __name__ == "__main__":
    main()
