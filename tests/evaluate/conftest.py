from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluate.recall import convert, write_language


@pytest.fixture(scope="session")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and needles that the bundled model knows the words of."""
    folder = tmp_path_factory.mktemp("language")
    write_language(folder)
    return folder


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model converted with every head full."""
    return convert(tmp_path_factory.mktemp("recall") / "recall-full")


@pytest.fixture(scope="session")
def budgeted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with 16 tokens a head by score, which is enough where the question chooses them."""
    return convert(tmp_path_factory.mktemp("recall") / "recall-budgeted", sparsity=None, rest="budgeted", budget=16)
