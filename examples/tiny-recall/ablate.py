"""Compare the bundled profile with ablation: `OMP_NUM_THREADS=1 python examples/tiny-recall/ablate.py`, minutes.

Every KV head in turn is restricted to sink and recent tokens; its score is the rise of the recall cross-entropy.
"""

from __future__ import annotations

import torch
from ablation import ablation_scores
from measure import LENGTH, PROFILE, RECENT, SINK, load, show_recall, show_scores
from task import answered, prompts

from kvsurgery import __version__
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.profile.comparison import compare
from kvsurgery.profile.head_profile import HeadProfile

SEED, COUNT, BATCH = 1, 64, 4


def measure(measured: MeasuredModel) -> HeadProfile:
    """Ablation scores over `COUNT` prompts of `LENGTH` tokens."""
    tokens, targets = answered(prompts(SEED, COUNT, LENGTH))
    batches = list(zip(tokens.split(BATCH), targets.split(BATCH), strict=True))
    return measured.profile(
        ablation_scores(measured.model, batches, sink=SINK, recent=RECENT),
        "ablation",
        "kv",
        sink=SINK,
        recent=RECENT,
        provenance={"data": "recall task", "prompts": COUNT, "tokens": LENGTH, "seed": SEED, "tool": __version__},
    )


def main() -> None:
    torch.set_num_threads(1)
    measured = load()
    profile = measure(measured)
    show_scores("Rise of the recall cross-entropy, nats", profile.head_scores)
    comparison = compare(HeadProfile.load(PROFILE), profile)
    print(f"rank correlation (Spearman) with the bundled profile: {comparison.spearman:.3f}\n")
    show_recall(measured, profile)


if __name__ == "__main__":
    main()
