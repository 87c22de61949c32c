"""Files of an evaluation: they survive a kill, and record the settings that they belong to."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from blake3 import blake3
from transformers import PreTrainedTokenizerBase

from kvsurgery.errors import OutputError, cut, short
from kvsurgery.evaluate.options import Options
from kvsurgery.evaluate.results import SETTINGS, read_settings
from kvsurgery.evaluate.sample import Sample, Task
from kvsurgery.evaluate.tasks import task_classes
from kvsurgery.setting import settings_of
from kvsurgery.system.files import differences, write_whole
from kvsurgery.system.json_lines import damaged, read_lines
from kvsurgery.version import __version__


def read_answers(path: Path, samples: Iterable[Sample]) -> dict[tuple[str, str], dict[str, Any]]:
    """The records of a file of answers by the keys of samples, none of an absent file. A loss that is null is NaN.

    Raises:
        KVSurgeryError: as `read_lines`, or a line is no answer to one of the samples that says all that is measured.
    """
    samples_by_key = {sample.key: sample for sample in samples}
    records_by_key = {}
    for number, record in enumerate(read_lines(path), 1):
        key = record.get("task"), record.get("sample")
        sample = samples_by_key.get(key) if all(isinstance(name, str) for name in key) else None
        if sample is None:
            raise damaged(path, number, f'"task" and "sample" are those of no sample: {short(key)}')
        if missing := _missing_field(record, sample):
            raise damaged(path, number, f'"{missing}" is missing, or of another type')
        if "nll" in record and record["nll"] is None:
            record["nll"] = math.nan
        records_by_key[sample.key] = record
    return records_by_key


def _missing_field(record: Mapping[str, Any], sample: Sample) -> str | None:
    """The first field that the record of an answer lacks; one that was skipped says why, and no more."""
    if "skipped" in record:
        is_reason = isinstance(record["skipped"], str) and record["skipped"]
        return None if is_reason else "skipped"
    if sample.continuation:
        return None if "nll" in record and (record["nll"] is None or _is_number(record["nll"])) else "nll"
    scores = record.get("scores")
    if not isinstance(scores, dict) or not all(map(_is_number, scores.values())) or {*sample.metrics} - {*scores}:
        return "scores"
    return None


def _is_number(value: object) -> bool:
    """Whether a value can be a score, which no integer beyond float64 can."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 53)


def prompt_record(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A sample as `samples.jsonl` has it: prompt and right answers, and the number and the hash of its token ids."""
    tokens = np.ascontiguousarray(sample.tokens, dtype=np.int64)
    answer_fields = {} if sample.answer_tokens is None else {"answer_tokens": sample.answer_tokens.tolist()}
    return {
        "task": sample.task,
        "sample": sample.name,
        "facts": dict(sample.facts),
        "metrics": list(sample.metrics),
        "answers": list(sample.answers),
        **answer_fields,
        "limit": sample.limit,
        "continuation": sample.continuation,
        **({"context": sample.context} if sample.context else {}),
        "stops": list(sample.stops),
        "tokens": len(tokens),
        "tokens_hash": blake3(tokens.tobytes()).hexdigest()[:32],
        **_prompt_fields(sample, tokens, tokenizer),
    }


def _prompt_fields(sample: Sample, tokens: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    if sample.images:  # a placeholder for each, not for each of their tokens
        return {"prompt": sample.images.text, "images": [str(path) for path in sample.images.paths]}
    return {"prompt": tokenizer.decode(tokens, clean_up_tokenization_spaces=False)}


def versions(device: str) -> dict[str, str]:
    """Versions of the software, and the device, that answers depend on."""
    kind = torch.device(device).type
    return {
        "kvsurgery": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "device": torch.cuda.get_device_name(device) if kind == "cuda" else kind,
    }


def recorded_tasks(tasks: Mapping[str, Task]) -> dict[str, Any]:
    """The settings of tasks by name, in plain JSON values."""
    return {name: json.loads(json.dumps(asdict(task), default=str)) for name, task in tasks.items()}


def run_settings(tasks: Mapping[str, Any], options: Options, device: str) -> dict[str, Any]:
    """What an evaluation's `settings.json` says of it, besides its samples and models.

    Args:
        tasks: as `recorded_tasks` gives them.
    """
    return {"tasks": tasks, "options": options.settings, "versions": versions(device)}


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write `settings.json`."""
    write_whole(folder / SETTINGS, json.dumps(settings, indent=1) + "\n")


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Check that a folder holds an evaluation with these settings; its models and the kind of results are left aside.

    Raises:
        OutputError: it does not; the line names what differs.
    """
    recorded_settings = {name: value for name, value in read_settings(folder).items() if name in settings}
    for keys, old, new in differences(recorded_settings, settings):
        if keys == ("samples",):
            raise OutputError(
                f"{folder} holds an evaluation with the same settings but other samples: the tokenizer, or a file that "
                "samples are made from, has changed; give another folder"
            )
        if keys[0] == "tasks" and len(keys) == 2:  # only one of them has this task
            old = list(recorded_settings["tasks"])
            new = list(settings["tasks"])
        raise OutputError(
            f"{folder} holds an evaluation with other settings: {_setting_name(keys)} is {_setting_value(old)} there "
            f"and {_setting_value(new)} here; give another folder, or the same settings"
        )


def _setting_name(keys: tuple[str, ...]) -> str:
    """What a command calls an entry of `settings.json`: options in backticks."""
    match keys:
        case ("options", name):
            return f"`{name}`"
        case ("tasks", task, field, *_):
            kind = task_classes().get(task)
            setting = settings_of(kind).get(field) if kind else None
            return f"`{setting.option if setting else field}` of {task}"
        case ("versions", name):
            return "the device" if name == "device" else f"the version of {name}"
    return f"`{keys[0]}`"


def _setting_value(value: Any) -> str:
    """A value as it is typed."""
    if value is None:
        return "not given"
    if isinstance(value, list):
        return cut(",".join(map(str, value)))
    return cut(value if isinstance(value, str) else json.dumps(value))
