"""Make the bundled head profile: `OMP_NUM_THREADS=1 python examples/tiny-recall/ablate.py`, minutes on one core.

Every KV head in turn is restricted to sink and recent tokens; its score is the rise of the recall cross-entropy. Then
the profile is tried, by dense masks on the stock model: how many heads have to stay full to keep the recall, against
random profiles with as many.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from task import Prompts, answered, exact_match, prompts
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvsurgery import __version__
from kvsurgery.decide.policy import decide
from kvsurgery.dimensions import ModelDimensions
from kvsurgery.score.ablation import ablation_scores, restricted
from kvsurgery.score.profile import HeadProfile

HERE = Path(__file__).parent
SINK, RECENT = 4, 32
SEED, LENGTH, COUNT, BATCH = 1, 1024, 64, 4


def measure(model: PreTrainedModel) -> HeadProfile:
    """Ablation scores over `COUNT` prompts of `LENGTH` tokens."""
    tokens, targets = answered(prompts(SEED, COUNT, LENGTH))
    batches = list(zip(tokens.split(BATCH), targets.split(BATCH), strict=True))
    config = model.config
    return HeadProfile(
        scores=ablation_scores(model, batches, sink=SINK, recent=RECENT),
        method="ablation",
        granularity="kv",
        base_model="tiny-recall",
        model=ModelDimensions(
            config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        ),
        sink=SINK,
        recent=RECENT,
        provenance={"data": "recall task", "prompts": COUNT, "tokens": LENGTH, "seed": SEED, "tool": __version__},
    )


def kept_recall(model: PreTrainedModel, profile: HeadProfile, questions: Prompts, full_heads: int) -> float:
    """Exact match with the profile's best heads full and the others streaming."""
    policy = decide(profile, [None] * profile.model.layers, full_heads=full_heads, sink=SINK, recent=RECENT)
    streaming = torch.ones(profile.scores.shape, dtype=torch.bool)
    for row, layer in zip(streaming, policy.layers, strict=True):
        row[list(layer.order[: layer.full])] = False
    with restricted(model, streaming, sink=SINK, recent=RECENT):
        return exact_match(model, questions)


def random_profile(profile: HeadProfile, seed: int) -> HeadProfile:
    """The same model with scores that mean nothing."""
    scores = np.random.default_rng(seed).random(profile.scores.shape)
    return HeadProfile(scores, profile.method, profile.granularity, profile.base_model, profile.model)


def main() -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(HERE / "model").eval()
    profile = measure(model)
    profile.save(HERE / "profile.safetensors")
    print("rise of the recall cross-entropy, layers by KV heads:")
    for row in profile.scores:
        print("".join(f"{score:9.4f}" for score in row))

    questions = prompts(SEED + 1, 200, LENGTH)
    print(f"exact match over {len(questions.tokens)} queries at {LENGTH} tokens: {exact_match(model, questions):.3f}")
    print(f"all streaming: {kept_recall(model, profile, questions, 0):.3f}")
    print("full heads   by profile   by random profiles 0, 1, 2")
    randoms = [random_profile(profile, seed) for seed in range(3)]
    for full in (2, 4, 6):
        kept = [kept_recall(model, each, questions, full) for each in (profile, *randoms)]
        print(f"{full:10}   {kept[0]:10.3f}   {'  '.join(f'{value:.3f}' for value in kept[1:])}", flush=True)


if __name__ == "__main__":
    main()
