"""Answers without a score, written out for a judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvsurgery.evaluate.sample import Conversation, Sample
from kvsurgery.evaluate.statistics import Records
from kvsurgery.system.files import write_whole
from kvsurgery.system.json_lines import lines


def write_judged(
    folder: Path, samples: Sequence[Sample], answers: Mapping[str, Records], note: Callable[[str], None]
) -> None:
    """Write `TASK-MODEL.jsonl` of every task whose answers have no score.

    A line has the questions, the reference answers, and the model's answers where FastChat's judge looks for them.

    Args:
        answers: records by model and sample.
        note: called with a line on each file.
    """
    judged_samples = [sample for sample in samples if not sample.metrics and sample.conversation]
    for task in dict.fromkeys(sample.task for sample in judged_samples):
        for model, records in answers.items():
            task_samples = [sample for sample in judged_samples if sample.task == task]
            rows = [
                _line(sample, sample.conversation, model, records[sample.key]["turns"])
                for sample in task_samples
                if sample.conversation and "turns" in records[sample.key]
            ]
            path = folder / f"{task.replace('/', '-')}-{model}.jsonl"
            write_whole(path, lines(rows))
            task_records = [records[sample.key] for sample in task_samples]
            reasons = Counter(record["skipped"] for record in task_records if "skipped" in record)
            left_out = "; ".join(f"{count} left out: {reason}" for reason, count in reasons.items())
            note(
                f"{task} has no score: answers of the {model} model for a judge are in {path}"
                + (f" ({left_out})" if left_out else "")
            )


def _line(sample: Sample, conversation: Conversation, model: str, answers: Sequence[str]) -> dict[str, Any]:
    return {
        "question_id": int(sample.name) if sample.name.isdecimal() else sample.name,
        "model_id": model,
        **sample.facts,
        "questions": list(conversation.turns),
        "reference": list(conversation.reference),
        "choices": [{"index": 0, "turns": list(answers)}],
    }
