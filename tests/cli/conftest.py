from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.command import save_profile
from tests.helpers.shards import llama_checkpoint


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the checkpoint `llama`, in three shards, and its profile."""
    llama_checkpoint(tmp_path / "llama", shards=3)
    monkeypatch.chdir(tmp_path)
    save_profile()
    return tmp_path
