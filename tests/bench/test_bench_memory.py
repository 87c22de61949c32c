"""The most that tensors hold, against tensors whose lives are known."""

from __future__ import annotations

import torch

from kvsurgery.bench.memory import LiveBytes


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
