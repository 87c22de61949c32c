"""Needle sets in the bundled model's words, in place of those that ship."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.helpers.json_lines import write_json_lines
from tests.helpers.tiny_recall import task

WORDS = task.vocabulary()
SETS = ("phrase", "fact", "word", "reasoning", "choice")
COUNT = 10


def write_sets(folder: Path, answered: tuple[str, ...]) -> None:
    """Write every set; of those in `answered` the right answers are what the model says, of the others they are not."""
    folder.mkdir(exist_ok=True)
    for name in SETS:
        kind = "reasoning" if name in ("reasoning", "choice") else "retrieval"
        needles = []
        for key, *values in task.facts(np.random.default_rng(SETS.index(name)), COUNT, 1)[:, 0].tolist():
            right = " ".join(WORDS[token] for token in values)
            asked = {"needle": f"remember {WORDS[key]} {right} .", "question": f"recall {WORDS[key]}", "kind": kind}
            said = right if name in answered else f"remember {WORDS[key]}"
            needles.append({**asked, "real_needle": said, "answer": said})
        write_json_lines(folder / f"{name}.jsonl", needles)
