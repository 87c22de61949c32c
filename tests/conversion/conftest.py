from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.shards import convert_llama, llama_checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Llama in three shards, with side files."""
    return llama_checkpoint(tmp_path / "source", shards=3)


@pytest.fixture
def converted(source: Path, tmp_path: Path) -> Path:
    """The same, converted."""
    convert_llama(source, tmp_path / "converted")
    return tmp_path / "converted"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder to fill, which is not there yet."""
    return tmp_path / "out"
