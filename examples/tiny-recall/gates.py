"""Make the bundled head profile: `OMP_NUM_THREADS=1 python examples/tiny-recall/gates.py`, minutes on one core.

DuoAttention's gates, trained on the recall task as `kvsurgery profile compute --method duo` trains them on passkeys.
Then the profile is tried, by dense masks on the stock model: how many heads have to stay full to keep the recall,
against random choices of as many.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from measure import PROFILE, RECENT, SINK, load, show_random_recall, show_recall, show_scores
from task import RECALLED, texts

from kvsurgery.measure.model import MeasuredModel
from kvsurgery.measure.training import GateOptions, train_gates
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.plots import plot_training

SEED, SHORTEST, LONGEST, FACTS = 1, 256, 1024, 8
# the mean gate weighs ten times as much as in the paper: a tenth of its steps then tells the heads apart
OPTIONS = GateOptions(steps=200, reg=0.5, sink=SINK, recent=RECENT)


def prompt(step: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Facts in filler, asked for at the end: tokens and the values that have to be recalled, [1, tokens]."""
    rng = np.random.default_rng([SEED, step, place])
    tokens, kind = texts(rng, 1, int(rng.integers(SHORTEST, LONGEST + 1)), FACTS, FACTS, at_end=True)
    return tokens, kind == RECALLED


def measure(measured: MeasuredModel, options: GateOptions = OPTIONS) -> tuple[HeadProfile, np.ndarray]:
    """Gates as scores, and the training's history."""

    def show(step: int, steps: int | None, note: str = "") -> None:
        if step % 20 == 0:
            print(f"step {step:3} of {steps}: {note}", flush=True)

    data = {"prompts": "recall task", "facts": FACTS, "shortest": SHORTEST, "longest": LONGEST, "seed": SEED}
    return train_gates(measured, prompt, options, data=data, progress=show)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PROFILE)
    parser.add_argument("--curve", type=Path, help="a picture of the training")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measured = load()
    profile, history = measure(measured)
    profile.save(arguments.out)
    if arguments.curve:
        plot_training(history, arguments.curve)
    show_scores("Gates", profile.head_scores)
    show_recall(measured, profile)
    show_random_recall(measured, profile)


if __name__ == "__main__":
    main()
