"""Attention mass against softmax weights written out, and where a head is known to look."""

import gc
import weakref

import numpy as np
import pytest
import torch

from kvsurgery.errors import ProfileError, UnsupportedModel
from kvsurgery.measure.attention import attention_mass, attention_profile
from kvsurgery.measure.attention_hooks import intercepted
from tests.helpers.families import LAYER_HEADS, SHARED_CACHE, WITH_STATES, stock, tokens
from tests.helpers.measured_models import measured_model
from tests.helpers.reference import softmax, visible

TOKENS = tokens(2, 40)
PASSKEYS = torch.zeros_like(TOKENS)
TARGETS = torch.zeros_like(PASSKEYS, dtype=torch.bool)
# two passkeys in the first row, one in the second: hidden at, recalled at, tokens
for row, number, hidden, recalled, size in ((0, 1, 4, 34, 5), (0, 2, 15, 27, 4), (1, 1, 20, 36, 3)):
    TOKENS[row, recalled : recalled + size] = TOKENS[row, hidden : hidden + size]
    PASSKEYS[row, hidden : hidden + size] = PASSKEYS[row, recalled : recalled + size] = number
    TARGETS[row, recalled : recalled + size] = True


def mass_by_hand(measured):
    """float64 [layers, kv_heads]."""
    result = np.zeros((measured.dimensions.layers, measured.dimensions.kv_heads))

    def attend(stock, module, query, key, value, attention_mask, scaling, softcap=None, s_aux=None, **options):
        group, window = query.shape[1] // key.shape[1], measured.windows[module.layer_idx]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = query @ key.mT * scaling
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        seen = visible(query.shape[2], 0, None if window is None else 0, window or 1)
        weights = softmax(scores.masked_fill(~seen, float("-inf")), s_aux)
        if window is None:
            masses = []
            for row, at in TARGETS.nonzero().tolist():
                source = (PASSKEYS[row] == PASSKEYS[row, at]) & ~TARGETS[row]
                masses.append(weights[row, :, at - 1, source].sum(-1))
            result[module.layer_idx] = torch.stack(masses).mean(0).view(-1, group).mean(1).numpy()
        return (weights @ value).transpose(1, 2).contiguous(), None

    with intercepted(measured.model, attend, masks=False), torch.no_grad():
        measured.model.model(TOKENS, use_cache=False)
    return result


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "gemma2", "gemma3", "gpt_oss", *LAYER_HEADS, *SHARED_CACHE, *WITH_STATES]
)
def test_mass_by_hand(family):
    measured = measured_model(stock(family))
    expected = mass_by_hand(measured)
    np.testing.assert_allclose(attention_mass(measured, TOKENS, TARGETS, PASSKEYS), expected, atol=1e-5)
    assert 0.05 < expected.max() < 1


def test_a_measured_model_is_freed():
    measured = measured_model(stock("llama"))
    mass_by_hand(measured)
    model = weakref.ref(measured.model)
    del measured
    gc.collect()
    assert model() is None


def test_a_profile_is_the_mean_over_prompts():
    measured = measured_model(stock("qwen2"))
    seen, prompts = [], {0: (TOKENS[:1], TARGETS[:1], PASSKEYS[:1]), 1: (TOKENS[1:], TARGETS[1:], PASSKEYS[1:])}
    profile = attention_profile(
        measured,
        lambda step, place: prompts[step],
        2,
        data={"prompts": "two"},
        progress=lambda *done: seen.append(done),
    )
    one, two = (attention_mass(measured, *prompt).numpy() for prompt in prompts.values())
    np.testing.assert_allclose(profile.scores, (one + two) / 2, rtol=1e-5)
    assert (profile.method, profile.granularity) == ("attention", "kv")
    assert (profile.scores[3] == 0).all(), "a layer with a window of its own"
    assert profile.provenance["data"] == {"prompts": "two"}
    assert seen == [(1, 2), (2, 2)]


def test_refusals():
    measured = measured_model(stock("llama"))
    nothing = torch.zeros_like(TARGETS)
    with pytest.raises(ProfileError, match="without an answer"):
        attention_mass(measured, TOKENS, nothing, PASSKEYS)
    with pytest.raises(ProfileError, match="the answer at token 34 recalls nothing that the text has hidden"):
        attention_mass(measured, TOKENS, TARGETS, PASSKEYS.masked_fill(~TARGETS, 0))
    with pytest.raises(ProfileError, match="1 prompt or more"):
        attention_profile(measured, lambda step, place: None, 0, data={})
    with pytest.raises(UnsupportedModel, match="no layer"):
        attention_profile(measured_model(stock("qwen2", max_window_layers=0)), lambda step, place: None, data={})
