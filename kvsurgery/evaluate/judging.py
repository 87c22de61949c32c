"""Answers without a score, written out for a judge."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvsurgery.evaluate.records import lines, read_lines
from kvsurgery.evaluate.sample import Conversation, Sample
from kvsurgery.system.files import write_whole


def write_judged(folder: Path, samples: Sequence[Sample], models: Iterable[str], note: Callable[[str], None]) -> None:
    """Write `TASK-MODEL.jsonl` of every task whose answers have no score; `note` is called with a line on each file.

    A line has the questions, the reference answers, and the model's answers where FastChat's judge looks for them.
    """
    judged_samples = [sample for sample in samples if not sample.metrics and sample.conversation]
    for task in dict.fromkeys(sample.task for sample in judged_samples):
        for model in models:
            answer_records = read_lines(folder / f"answers-{model}.jsonl")
            records = {(record["task"], record["sample"]): record for record in answer_records}
            rows = [
                _line(sample, sample.conversation, model, records[sample.key]["turns"])
                for sample in judged_samples
                if sample.task == task and sample.conversation and "turns" in records[sample.key]
            ]
            path = folder / f"{task.replace('/', '-')}-{model}.jsonl"
            write_whole(path, lines(rows))
            note(f"{task} has no score: answers of the {model} model for a judge are in {path}")


def _line(sample: Sample, conversation: Conversation, model: str, answers: Sequence[str]) -> dict[str, Any]:
    return {
        "question_id": int(sample.name) if sample.name.isdecimal() else sample.name,
        "model_id": model,
        **sample.facts,
        "questions": list(conversation.turns),
        "reference": list(conversation.reference),
        "choices": [{"index": 0, "turns": list(answers)}],
    }
