"""Measure a head profile in seconds, and compare it with the bundled one.

python examples/profile_heads.py
"""

from __future__ import annotations

import numpy as np
import torch
from bundled import MODEL, PROFILE, kvsurgery, load, scratch, task
from gates import FACTS, SEED
from measure import RECENT, SINK
from measure import load as load_measured

from kvsurgery.measure.training import GateOptions, train_gates
from kvsurgery.profile.comparison import compare
from kvsurgery.profile.head_profile import HeadProfile

LENGTH = 256
# a strong pull to 0 and large steps: enough to tell the heads of a tiny model apart
OPTIONS = GateOptions(steps=30, lr=0.1, reg=0.5, sink=SINK, recent=RECENT)


def prompt(step: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Facts to recall at the end: tokens, and what the gates must not lose, both [1, tokens]."""
    rng = np.random.default_rng([SEED, step, place])
    tokens, kind = task.texts(rng, 1, LENGTH, FACTS, FACTS, at_end=True)
    return tokens, kind == task.RECALLED


def main() -> None:
    with scratch():
        data = {"prompts": "recall task", "facts": FACTS, "length": LENGTH, "seed": SEED}
        profile, history = train_gates(load_measured(), prompt, OPTIONS, data=data)
        profile.save("quick.safetensors")
        print(f"gates after {len(history)} steps, KV heads of each layer in a row:")
        for layer in profile.head_scores:
            print("  ", *(f"{score:.1f}" for score in layer))

        comparison = compare(profile, HeadProfile.load(PROFILE))  # `kvsurgery profile compare` prints more of it
        print(f"rank correlation with the bundled profile: ≈ {comparison.spearman:.2f}")
        kvsurgery(
            *("convert", MODEL, "--profile", "quick.safetensors", "--full-heads", 2),
            *("--sink", SINK, "--recent", RECENT, "--out", "tiny-quick"),
        )
        questions = task.prompts(seed=2, count=8, length=1024)
        print(f"recall with 2 of 12 heads full: {task.exact_match(load('tiny-quick'), questions):.0%}")


if __name__ == "__main__":
    main()
