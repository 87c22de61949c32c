"""Methods of measurement as Python callers have them: their defaults, and settings that do not go together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from kvsurgery.errors import ProfileError
from kvsurgery.measure.cache_losses import TrialSizes
from kvsurgery.measure.methods import METHODS
from kvsurgery.measure.methods.duo import Duo
from kvsurgery.measure.methods.kv_bits import KVBits
from kvsurgery.measure.methods.method import Method
from kvsurgery.measure.methods.reform import Reform
from kvsurgery.measure.methods.rlkv_lite import RLKVLite
from kvsurgery.measure.reform import PAPER
from kvsurgery.measure.training import GateOptions
from kvsurgery.profile import methods as scores


def test_profiles_know_the_scores_of_every_method() -> None:
    assert {*METHODS} - {*scores.SCORE_METHODS} == {scores.REFORM}


def test_defaults_are_those_of_the_functions_that_measure() -> None:
    assert Duo().options() == RLKVLite().options() == GateOptions()
    assert KVBits(text="book.txt").sizes == TrialSizes()
    assert Reform().chunk == PAPER.chunk


def test_settings_of_a_training_reach_it() -> None:
    given = {"loss": "lm", "steps": 7, "lr": 0.1, "reg": 0.2, "sink": 3, "recent": 4, "batch": 5, "until_settled": True}
    assert {*given} == {field.name for field in fields(GateOptions)}
    assert Duo(**given).options() == GateOptions(**given)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Duo(resume=True), "`resume` requires `checkpoint`"),
        (lambda: Duo(minutes=1, steps=100), "`minutes` chooses `steps`"),
        (lambda: Duo(minutes=0), "`minutes` must be > 0, got 0"),
        (lambda: RLKVLite(text="book.txt"), "which trains on the model's own answers"),
        (lambda: KVBits(), "`text` is missing"),
        (lambda: Duo(steps=0).check(), "steps must be >= 1, got 0"),
        (lambda: Duo(min_context=512).check(), "give a longer `min_context`"),
        (lambda: Duo(min_context=0).check(), "give a longer `min_context`"),
        (lambda: Reform(chunk=0).check(), "`chunk` must be at least 1 token, got 0"),
    ],
)
def test_settings_that_do_not_go_together(make: Callable[[], Method], words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        make()


def test_passkeys_need_no_room_where_there_are_none_or_the_time_decides() -> None:
    Duo(min_context=512, loss="lm").check()
    Duo(min_context=512, minutes=1).check()


def test_a_training_is_kept_in_its_checkpoint() -> None:
    assert Duo(checkpoint=Path("state")).kept == Path("state")
    assert Reform().kept is None
