from __future__ import annotations

from pathlib import Path

import pytest

from tests.report import builders


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of all that an evaluation and a benchmark find; tests must not change it."""
    from kvsurgery.report import write_report

    folder = tmp_path_factory.mktemp("report")
    builders.results().save(folder)
    builders.bench().save(folder)
    write_report(folder)
    return folder
