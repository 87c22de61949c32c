"""What a number of minutes is enough for: prompts as long as can be, and no more time than was given."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.errors import ProfileError, TooLittleTime
from kvsurgery.measure.pace import (
    LEAST_CONTEXT,
    LEAST_STEPS,
    MOST_STEPS,
    PASSKEYS,
    WANTED_STEPS,
    Candidate,
    Lengths,
    TrainingPlan,
    fitted,
    paced,
    step_seconds,
)
from kvsurgery.measure.training import GateOptions
from tests.helpers.families import stock
from tests.helpers.measured_models import measured_model


@given(
    st.floats(0.1, 1e4),
    st.floats(1e-6, 0.1),
    st.floats(0, 1e-6),
    st.integers(2, 200_000),
    st.integers(2, 5000) | st.none(),
    st.integers(0, 2000),
)
def test_a_training_fits_its_time(minutes, linear, square, most, longest, window):
    def seconds(tokens):
        return linear * tokens + square * tokens**2

    asked = Lengths(max_context=longest and min(longest, most))
    try:
        found = paced(minutes, seconds, most, asked, window)
    except ProfileError as error:
        assert 60 * minutes / seconds(asked.max_context or min(max(LEAST_CONTEXT, 2 * window), most)) < 2 * LEAST_STEPS
        enough = float(str(error).split("give ")[1].split(" min")[0])
        assert paced(enough, seconds, most, asked, window).steps >= LEAST_STEPS
        return
    lengths = np.linspace(found.min_context, found.max_context, 9).astype(int)
    assert found.steps * np.mean([seconds(int(length)) for length in lengths]) <= 60 * minutes * (1 + 1e-7)
    assert LEAST_STEPS <= found.steps <= MOST_STEPS
    assert 2 <= found.min_context <= found.max_context <= most
    assert found.min_context > window or found.max_context <= window
    assert found.max_context == (asked.max_context or found.max_context)
    # prompts are only short where longer ones leave too few steps
    if found.steps < WANTED_STEPS:
        assert found.max_context <= max(LEAST_CONTEXT, 2 * window, asked.max_context or 0)


def test_the_longer_the_time_the_longer_the_prompts():
    found = [paced(minutes, lambda tokens: tokens / 60, 32_000) for minutes in (21, 100, 400, 2000, 20_000)]
    assert [each.max_context for each in found] == [768, 1000, 4000, 32_000, 32_000]
    assert [each.min_context for each in found] == [384, 500, 1000, 1000, 1000]
    assert [each.passkeys for each in found] == [3, 5, 10, 10, PASSKEYS]
    assert found[-1].steps == MOST_STEPS
    assert found[0] == TrainingPlan(131, 384, 768, 3)


def test_prompts_are_longer_than_the_window():
    def lengths(minutes, window, most=32_000, longest=None):
        found = paced(minutes, lambda tokens: tokens / 60, most, Lengths(max_context=longest), window)
        return found.min_context, found.max_context

    assert lengths(21, 320) == (384, 768)
    assert lengths(100, 1100) == (1101, 2200)
    assert lengths(100, 1100, 1500) == (1101, 1500)
    assert lengths(100, 320, longest=512) == (321, 512)


def test_what_is_given_is_kept():
    found = paced(100, lambda tokens: tokens / 60, 32_000, Lengths(600, 5000, 7))
    assert (found.min_context, found.max_context, found.passkeys) == (600, 5000, 7)
    with pytest.raises(ProfileError, match="in 2 min there is time for 12 steps with prompts of 384 to 768 tokens"):
        paced(2, lambda tokens: tokens / 60, 32_000)


def test_a_training_to_go_on_with():
    facts = {"steps": 300, "data": {"shortest": 384, "longest": 768, "passkeys": 3}}
    assert TrainingPlan.of(facts) == TrainingPlan(300, 384, 768, 3)
    with pytest.raises(ProfileError, match="the training checkpoint does not record 'shortest'"):
        TrainingPlan.of({"steps": 300, "data": {"prompts": "my own"}})


def test_samples_fit_their_time():
    candidates = [Candidate({"context": length}, length / 100, ahead=10) for length in (4000, 2000, 1000)]
    assert fitted(40, candidates, "samples", 10, 50) == {"context": 4000, "samples": 50}
    assert fitted(20, candidates, "samples", 10, 50) == {"context": 2000, "samples": 50}
    assert fitted(5, candidates, "samples", 10, 50) == {"context": 1000, "samples": 29}
    with pytest.raises(TooLittleTime, match="in 1 min there is time for 5 samples") as refused:
        fitted(1, candidates, "samples", 10, 50)
    assert fitted(refused.value.minutes, candidates, "samples", 10, 50)["samples"] >= 10


def test_longer_steps_take_longer():
    """A step is really timed; what it takes at other lengths follows."""
    measured = measured_model(stock("llama", num_hidden_layers=1, max_position_embeddings=64), name="org/small")
    seconds = step_seconds(measured, GateOptions(sink=2, recent=4))
    assert 0 < seconds(64) < math.inf
    assert 2 * seconds(64) < seconds(128) < 4 * seconds(64)
    assert not any(weight.requires_grad for weight in measured.model.parameters())
    assert torch.is_grad_enabled()
