"""What a limit on the samples of a task does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest import mock

from kvsurgery.evaluate.sample import Reader, Sample, Task
from kvsurgery.report.findings import LENGTHS
from kvsurgery.setting import settings_of


def check_limits(task: Task, reader: Reader, spare: int = 0) -> None:
    """Each `Sample.task` has its first samples up to the limit; no more than `spare` others of it are made. A number of
    samples, as `--samples` gives it, is that of each task and length."""
    everything = list(task.samples(reader))
    whole = Counter(sample.task for sample in everything)
    assert max(whole.values()) > 3 + spare
    for limit in (1, 3):
        counts, expected = Counter(), []
        for sample in everything:
            if counts[sample.task] < limit:
                counts[sample.task] += 1
                expected.append(sample)
        with mock.patch.object(Sample, "__init__", autospec=True, side_effect=Sample.__init__) as made:
            limited = list(task.samples(reader, limit))
        assert [sample.key for sample in limited] == [sample.key for sample in expected]
        assert all((one.tokens == other.tokens).all() for one, other in zip(limited, expected, strict=True))
        assert made.call_count <= len(expected) + spare * len(whole)
    [field] = [name for name, setting in settings_of(type(task)).items() if setting.option == "samples"]
    for count in (1, 3):
        counts = Counter(_part(sample, task) for sample in replace(task, **{field: count}).samples(reader))
        assert {*counts} == {_part(sample, task) for sample in everything}
        assert max(counts.values()) == count


def _part(sample: Sample, task: Task) -> tuple[str, object]:
    """What a number of samples is of: a task, and its length where lengths can be chosen."""
    has_lengths = hasattr(task, "lengths")
    return sample.task, next((sample.facts[name] for name in LENGTHS if has_lengths and name in sample.facts), None)
