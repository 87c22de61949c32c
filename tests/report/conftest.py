from __future__ import annotations

import math
from pathlib import Path

import pytest

from kvsurgery.display import console
from tests.report import builders


@pytest.fixture(autouse=True)
def _no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether drawing shows its progress would depend on the load of the machine."""
    monkeypatch.setattr(console, "GRACE", math.inf)


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of all that an evaluation and a benchmark find; tests must not change it."""
    from kvsurgery.report import write_report

    folder = tmp_path_factory.mktemp("report")
    builders.results().save(folder)
    builders.bench().save(folder)
    write_report(folder)
    return folder


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The comparison of three evaluations, one of them with a benchmark, and a sweep; tests must not change it."""
    from kvsurgery.report import write_comparison

    place = tmp_path_factory.mktemp("compared")
    half = builders.needles("llama3-duo-50", 0.965, 0.51)
    folders = [
        builders.saved(place / "half", half, builders.bench(checkpoint=half.checkpoint)),
        builders.saved(place / "quarter", builders.needles("llama3-duo-25", 0.91, 0.26, full=64)),
        builders.saved(place / "four-bits", builders.needles("llama3-duo-50-kv4", 0.96, 0.14, bits=4)),
        builders.saved(place / "budgets", builders.sweep()),
    ]
    write_comparison(folders, place / "page")
    return place / "page"
