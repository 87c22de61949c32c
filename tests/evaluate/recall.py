"""The bundled model's language as a user would give it: texts and needles of its own, and conversions of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvsurgery.evaluate.sample import Task
from kvsurgery.evaluate.tasks.needle import NeedleTask
from kvsurgery.evaluate.tasks.passkey import PasskeyTask
from kvsurgery.evaluate.tasks.perplexity import PerplexityTask
from kvsurgery.profile.head_profile import HeadProfile
from tests.helpers.json_lines import write_json_lines
from tests.helpers.surgery import convert_folder
from tests.helpers.tiny_recall import FOLDER, task

MODEL = FOLDER / "model"
WORDS = task.vocabulary()
PASSKEYS = {"count": 2, "size": 4, "hidden": "remember {key} .", "asked": "recall {cue}"}


def write_language(folder: Path, facts: int = 2) -> None:
    """Write `text.txt`, without a fact, and `needles.jsonl`."""
    rng = np.random.default_rng(3)
    text = task.filler(rng, 1, 4000)[0]
    (folder / "text.txt").write_text(" ".join(WORDS[token] for token in text))
    needles = []
    for key, *values in task.facts(rng, 1, facts)[0].tolist():
        right = " ".join(WORDS[token] for token in values)
        asked = {"needle": f"remember {WORDS[key]} {right} .", "question": f"recall {WORDS[key]}"}
        needles.append({**asked, "real_needle": right, "answer": right})
    write_json_lines(folder / "needles.jsonl", needles)


def tasks(folder: Path, lengths: tuple[int, ...] = (96, 160)) -> dict[str, Task]:
    """One of each kind that the model can do."""
    text = str(folder / "text.txt")
    return {
        "needle": NeedleTask(lengths, (0.0, 0.6), text, str(folder / "needles.jsonl"), count=4),
        "passkey": PasskeyTask(lengths, text=text, questions=4, **PASSKEYS),
        "perplexity": PerplexityTask(lengths, continuation=12, pieces=4, text=text),
    }


def convert(out: Path, **options: Any) -> Path:
    """The bundled model converted by its profile, all heads full by default."""
    profile = HeadProfile.load(FOLDER / "profile.safetensors")
    return convert_folder(MODEL, out, profile, **{"sparsity": 0.0, **options}).folder
