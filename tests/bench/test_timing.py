"""Medians and bandwidth, from a clock that says what is expected."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvsurgery.bench import timing
from kvsurgery.bench.timing import Stopwatch, quartiles, read_bandwidth

CPU = torch.device("cpu")


def test_quartiles_by_hand() -> None:
    assert quartiles([5.0, 1.0, 4.0, 2.0, 3.0]) == (3.0, 2.0, 4.0)
    assert quartiles([1.0, 2.0]) == (1.5, 1.25, 1.75)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)


def test_spans_between_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([10.0, 11.5, 15.0])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    watch = Stopwatch(CPU)
    watch.mark()
    watch.mark()
    assert watch.spans() == [1.5, 3.5]


def test_bandwidth_is_bytes_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of twenty sums, of which one met something else; the first is not counted."""
    readings = iter([0.0, 9.0, *(9.0 + 0.5 * index for index in range(1, timing.REPEATS))])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    monkeypatch.setitem(timing.READ, "cpu", 4000)
    assert read_bandwidth(CPU) == 4000 / 0.5
