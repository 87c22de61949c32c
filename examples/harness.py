"""Converted checkpoints in the lm-evaluation-harness: a task that generates, and one that scores answers.

python examples/harness.py    # pip install lm-eval
"""

from __future__ import annotations

import json
from pathlib import Path

from bundled import DUO, HERE, MODEL, PROFILE, kvsurgery, scratch, task
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

QUESTIONS, LENGTH = 16, 256
CHOICES = 4
GENERATED, PREFILL_ONLY = "tiny_recall", "tiny_recall_prefill_only"

# the heads that recall; a budget too small for an answer; no head that sees far
CONVERSIONS = {
    "tiny-duo": DUO,
    "tiny-budgets": (
        "--profile",
        PROFILE,
        "--rest",
        "budgeted",
        "--full-heads",
        0,
        "--budget",
        1,
        "--beta",
        10,
        "--window",
        1,
    ),
    "tiny-streaming": ("--profile", PROFILE, "--full-heads", 0, "--sink", 4, "--recent", 32),
}


def write_questions(path: Path) -> None:
    """A line of JSON for each: a text that ends in a question, its answer, and answers to other questions."""
    tokenizer, questions = AutoTokenizer.from_pretrained(MODEL), task.prompts(6, QUESTIONS, LENGTH)
    texts, answers = ([tokenizer.decode(row) for row in part] for part in (questions.tokens[:, 1:], questions.answers))
    lines = []
    for place, (text, answer) in enumerate(zip(texts, answers, strict=True)):
        choices = sorted(answers[(place + step) % QUESTIONS] for step in range(CHOICES))
        lines.append({"text": text, "answer": answer, "choices": choices, "right": choices.index(answer)})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def share(part: float) -> str:
    """A percentage; what lies between none and all can differ by an answer from machine to machine."""
    return f"{part:.0%}" if part in (0, 1) else f"≈ {part:.0%}"


def main() -> None:
    with scratch():
        write_questions(Path("recall.jsonl"))
        for name, options in CONVERSIONS.items():
            kvsurgery("convert", MODEL, *options, "--out", name)
        print(f"\n{'':16} {'generated':>10} {'prefill only':>13}")
        for name, folder in {"original": MODEL, **{name: name for name in CONVERSIONS}}.items():
            found = simple_evaluate(
                model="hf",
                model_args=f"pretrained={folder},trust_remote_code=True,add_bos_token=True",
                tasks=[GENERATED, PREFILL_ONLY],
                task_manager=TaskManager(include_path=str(HERE / "harness"), include_defaults=False),
                batch_size=8,
                device="cpu",
                bootstrap_iters=0,
            )["results"]
            generated, scored = share(found[GENERATED]["exact_match,stripped"]), share(found[PREFILL_ONLY]["acc,none"])
            print(f"{name:16} {generated:>10} {scored:>13}")


if __name__ == "__main__":
    main()
