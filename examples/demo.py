"""Convert the bundled model, prove the result, and measure what it saves and what it keeps.

    python examples/demo.py [FOLDER]

Every number is measured in this run. The model recalls facts that lie up to a thousand tokens back; that takes its
retrieval heads, so a conversion that streams the wrong heads loses it.
"""

from __future__ import annotations

import hashlib
import shlex
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from kvsurgery.cli import cli
from kvsurgery.display import console
from kvsurgery.profile.head_profile import HeadProfile

HERE = Path(__file__).resolve().parent / "tiny-recall"
if HERE.is_relative_to(Path.cwd()):  # then the commands are shown as one would type them
    HERE = HERE.relative_to(Path.cwd())
sys.path.insert(0, str(HERE))
import task  # noqa: E402  (lies beside the model)

QUERIES, LENGTH = 100, 1024
SIZES = ("--sink", "4", "--recent", "32")


def run(*arguments: str | Path) -> None:
    """Run a kvsurgery command, showing it first, in this process: each of its own would import torch again."""
    words = [str(argument) for argument in arguments]
    console.stdout.print(f"\n$ {shlex.join(['kvsurgery', *words])}", style="bold")
    cli(words, standalone_mode=False)


def kv_bytes(model: torch.nn.Module, tokens: torch.Tensor) -> int:
    """Bytes of the KV cache after one prompt: what the cache has allocated."""
    cache = model(tokens).past_key_values
    if hasattr(cache, "allocated_bytes"):
        return cache.allocated_bytes()
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@torch.inference_mode()
def measure(name: str, folder: Path, questions: task.Prompts) -> tuple[str, str, str]:
    """A row of the table: name, exact-match recall, KV bytes."""
    # the original has no remote code to trust
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto").eval()
    recall = task.exact_match(model, questions)
    return name, f"{recall:.1%}", console.size(kv_bytes(model, questions.tokens[:1]))


def sha256(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "demo")
    if out.exists():
        sys.exit(f"{out} exists; remove it, or give another folder")
    out.mkdir(parents=True)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)

    source, profile = HERE / "model", HERE / "profile.safetensors"
    measured = HeadProfile.load(profile)
    scores = np.random.default_rng(1).random(measured.head_scores.shape)
    HeadProfile(scores, "ablation", "kv", "random scores", measured.model).save(out / "random.safetensors")

    run("profile", "show", profile)
    run("convert", source, "--profile", profile, "--out", out / "converted", "--full-heads", "4", *SIZES)
    run("verify", out / "converted", "--source", source, "--logits")
    run("revert", out / "converted", "--out", out / "reverted")
    same = sha256(source) == sha256(out / "reverted")
    console.stdout.print(f"SHA-256 of every reverted file equals the original's: {'yes' if same else 'NO'}")
    run(
        "convert", source, "--profile", out / "random.safetensors", "--out", out / "random", "--full-heads", "4", *SIZES
    )
    run("convert", source, "--profile", profile, "--out", out / "streaming", "--sparsity", "1", *SIZES)
    run(
        *("convert", source, "--profile", profile, "--out", out / "4-bit", "--full-heads", "4", *SIZES),
        *("--kv-bits", "4"),
    )

    console.stdout.print(
        f"\nAsking five checkpoints {QUERIES} questions each; this takes about a minute.", style="bold"
    )
    questions = task.prompts(seed=1234, count=QUERIES, length=LENGTH)
    rows = [
        measure("original", source, questions),
        measure("converted, its profile", out / "converted", questions),
        measure("the same, full heads in 4 bits", out / "4-bit", questions),
        measure("converted, random profile", out / "random", questions),
        measure("all heads streaming", out / "streaming", questions),
    ]
    title = f"Recall of facts in {LENGTH:,} tokens ({QUERIES} queries), KV cache of one prompt"
    console.stdout.print()
    console.stdout.print(console.table(title, ["checkpoint", "exact match", "KV bytes"], rows))
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    main()
