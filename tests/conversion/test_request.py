"""What is asked for on the Hub: refused before weights are downloaded, where that can be known."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvsurgery import hub
from kvsurgery.conversion.request import Request
from kvsurgery.errors import OutputError
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe
from tests.helpers.command import MODEL, SCORES


def test_a_disk_that_is_too_small_is_seen_before_the_download(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(source)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=1_000))
    monkeypatch.setattr(hub, "fetch_checkpoint", lambda place, revision, check: check(source) or pytest.fail("fetched"))
    profile = HeadProfile(SCORES, "duo", "kv", "org/model", MODEL)
    request = Request.of("org/model", None, Recipe(), [profile])
    with pytest.raises(OutputError, match=r"out needs .* KiB, but only 1,?000 B"):
        request.prepare(tmp_path / "out")
    assert not (tmp_path / "out").exists()
