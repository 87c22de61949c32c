"""The most that tensors hold, against tensors whose lives are known, and what there is room for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvsurgery.bench import memory
from kvsurgery.bench.memory import LiveBytes, free_bytes

UNLIMITED = (1 << 63) - 4096


def test_what_was_given_and_what_is_gone_does_not_count() -> None:
    given = torch.ones(1000)
    with LiveBytes() as live:
        first = given + 1
        del first
        second = torch.cat([given, given])
        second[10:20].add_(1)
    assert live.peak == second.nbytes


def test_every_part_of_the_work_has_a_peak_of_its_own() -> None:
    with LiveBytes() as live:
        kept = torch.ones(100)
        gone = torch.ones(900)
        del gone
        assert live.take() == 4 * 1000
        view = kept[:50]
        assert live.take() == 4 * 100  # no more than what is kept
        kept.add_(view.sum())
        more = torch.ones(25)
        assert 4 * 125 <= live.take() < 4 * 130
    assert len(more) == 25


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 3 << 20),
        ({"memory.max": "max", "memory.current": 9 << 20}, 3 << 20),
        ({"memory.max": 8 << 20, "memory.current": 1 << 20}, 3 << 20),
        ({"memory.max": 8 << 20, "memory.current": 7 << 20}, (1 << 20) + 5000),
        ({"memory/memory.limit_in_bytes": UNLIMITED, "memory/memory.usage_in_bytes": 7 << 20}, 3 << 20),
        ({"memory/memory.limit_in_bytes": 8 << 20, "memory/memory.usage_in_bytes": 7 << 20}, (1 << 20) + 5000),
    ],
    ids=["none", "v2-unlimited", "v2-above", "v2", "v1-unlimited", "v1"],
)
def test_a_container_has_no_more_memory_than_its_limit(
    files: dict[str, str | int], free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    memory.MEMINFO.write_text("MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 3072 kB\n")
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
        (tmp_path / name).with_name("memory.stat").write_text("anon 100\nactive_file 4000\ninactive_file 1000\n")
    assert free_bytes(torch.device("cpu")) == free
