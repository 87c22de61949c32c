"""What the bundled model keeps of its recall when some heads stay full: what `gates.py` and `ablate.py` share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from ablation import restricted
from task import Prompts, exact_match, prompts

from kvsurgery.display import console
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.profile.full_heads import full_heads
from kvsurgery.profile.head_profile import HeadProfile

HERE = Path(__file__).parent
PROFILE = HERE / "profile.safetensors"
SINK, RECENT = 4, 32
QUESTIONS_SEED, LENGTH = 2, 1024  # of what is asked, here and in no training
FULL = (2, 4, 6)  # of 12 KV heads, that stay full
CRITICAL = ((1, 1), (1, 3))  # (layer, KV head) of the heads that recall, as ablation finds them


def load() -> MeasuredModel:
    """The bundled model, by the name that its profile has."""
    return replace(MeasuredModel.load(str(HERE / "model"), device="cpu"), name="tiny-recall")


def best(profile: HeadProfile, count: int) -> np.ndarray:
    """bool [layers, kv_heads]: as many heads, by a profile."""
    return full_heads(profile, 1 - count / profile.head_scores.size)


def random_choice(profile: HeadProfile, count: int, seed: int) -> np.ndarray:
    """The same by chance."""
    chosen = np.zeros(profile.head_scores.size, dtype=bool)
    chosen[np.random.default_rng(seed).choice(chosen.size, count, replace=False)] = True
    return chosen.reshape(profile.head_scores.shape)


def kept_recall(measured: MeasuredModel, full: np.ndarray, questions: Prompts) -> float:
    """Exact match with some heads full, bool [layers, kv_heads], and the others streaming, by dense masks."""
    with restricted(measured.model, torch.from_numpy(~full), sink=SINK, recent=RECENT):
        return exact_match(measured.model, questions)


def show_scores(title: str, scores: np.ndarray) -> None:
    """A table of layers by KV heads."""
    rows = [[f"layer {layer}", *(f"{score:.4f}" for score in row)] for layer, row in enumerate(scores)]
    console.stdout.print(console.table(title, ["", *(f"head {head}" for head in range(scores.shape[1]))], rows))


def show_recall(measured: MeasuredModel, profile: HeadProfile) -> None:
    """A table of the recall with the profile's best heads full: 200 queries."""
    questions = prompts(QUESTIONS_SEED, 200, LENGTH)
    rows: list[tuple[str | int, str]] = [("all", f"{exact_match(measured.model, questions):.3f}")]
    rows += [(count, f"{kept_recall(measured, best(profile, count), questions):.3f}") for count in (*FULL[::-1], 0)]
    title = f"Recall over {LENGTH:,} tokens by full heads, as the {profile.method} profile has them"
    console.stdout.print(console.table(title, ["full heads", "exact match"], rows))


def show_random_recall(measured: MeasuredModel, profile: HeadProfile) -> None:
    """A table of the recall with random heads full: ten choices, 40 queries each."""
    questions = prompts(QUESTIONS_SEED, 40, LENGTH)
    rows = []
    for count in FULL:
        choices = [random_choice(profile, count, seed) for seed in range(10)]
        kept = [kept_recall(measured, choice, questions) for choice in choices]
        lucky = [all(choice[head] for head in CRITICAL) for choice in choices]
        others = [recall for recall, both in zip(kept, lucky, strict=True) if not both]
        rows.append((count, f"{np.mean(kept):.3f}", sum(lucky), f"{max(others):.3f}"))
    columns = ["full heads", "mean", "with both critical heads", "best of the others"]
    console.stdout.print(console.table("The same by ten random choices", columns, rows))
