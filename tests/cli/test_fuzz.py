"""Random damage to every file that a command reads."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from tests.helpers.command import PROFILE, done, run
from tests.helpers.shards import tree
from tests.helpers.surgery import random_profile

JUNK = (None, True, -1, 0, 1, 3, 0.5, 10**9, -(10**30), float("nan"), float("inf"), "", "x", "../x", "\0", "\ud800")
JUNK += ([], {}, [None], [[]], {"a": None}, "0" * 64, "sliding_attention", {"full_attention": 3}, {"rope_type": []})


def damaged(content: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A JSON object with one random node removed or replaced, at a random depth."""
    result = json.loads(json.dumps(content))
    place, key = result, rng.choice(list(result))
    while isinstance(place[key], dict | list) and place[key] and rng.random() < 0.7:
        place = place[key]
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
    if rng.random() < 0.3:
        del place[key]
    else:
        place[key] = rng.choice(JUNK)
    return result


def works_or_is_refused(*arguments: Any) -> bool:
    """Run a command that may do either, but nothing else; returns whether it worked."""
    result = run(*arguments)
    lines = [line for line in result.err.splitlines() if line.startswith("kvsurgery: ")]
    assert result.code in (0, 1, 3)
    assert len(lines) == (result.code != 0)
    return result.code == 0


class TestFuzz:
    """Whatever stands in a file, a command works or says in one line why not."""

    @pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
    def test_config(self, checkpoint, tmp_path: Path, family: str) -> None:
        folder = shutil.copytree(checkpoint(family), tmp_path / family)
        random_profile(folder).save(tmp_path / PROFILE)
        config = json.loads((folder / "config.json").read_text())
        worked = 0
        for seed in range(30):
            (folder / "config.json").write_text(json.dumps(damaged(config, random.Random(seed))))
            worked += works_or_is_refused("convert", folder, "--profile", tmp_path / PROFILE, "--dry-run")
            works_or_is_refused("inspect", folder)
        assert 8 < worked < 28

    def test_provenance_that_was_damaged(self, here: Path) -> None:
        done("convert", "llama", "--profile", PROFILE, "--out", "duo")
        path = here / "duo/kvsurgery.json"
        record = json.loads(path.read_text())
        for seed in range(60):
            path.write_text(json.dumps(damaged(record, random.Random(seed))))
            changed = json.dumps(json.loads(path.read_text())) != json.dumps(record)
            assert works_or_is_refused("verify", "duo") is not changed
            assert works_or_is_refused("revert", "duo", "--out", f"out{seed}") is not changed
            assert Path(f"out{seed}").exists() is not changed

    def test_provenance_that_was_forged(self, here: Path) -> None:
        done("convert", "llama", "--profile", PROFILE, "--out", "duo")
        path = here / "duo/kvsurgery.json"
        record = json.loads(path.read_text())
        del record["checksum"]
        before = {name for name in tree(here) if not name.startswith("out")}
        for seed in range(60):
            forged = damaged(record, random.Random(seed))
            checksum = blake3(json.dumps(forged, sort_keys=True).encode()).hexdigest()
            path.write_text(json.dumps({**forged, "checksum": checksum}))
            works_or_is_refused("verify", "duo")
            worked = works_or_is_refused("revert", "duo", "--out", "out")
            assert Path("out").exists() == worked
            shutil.rmtree("out", ignore_errors=True)
            assert tree(here).keys() == before

    def test_profile(self, here: Path) -> None:
        content = Path(PROFILE).read_bytes()
        for seed in range(150):
            rng, flipped = random.Random(seed), bytearray(content)
            for _ in range(rng.choice((1, 1, 2, 5))):
                flipped[rng.randrange(len(content))] = rng.choice((rng.randrange(256), *b'",0{}'))
            Path(PROFILE).write_bytes(flipped)
            works_or_is_refused("convert", "llama", "--profile", PROFILE, "--dry-run")
            works_or_is_refused("profile", "show", PROFILE)
