"""Texts packed into one row, which positions that start again tell apart: each sees itself alone."""

from itertools import accumulate, pairwise

import pytest
import torch
from transformers import AutoModel

from tests.helpers.families import EVERY, FAMILIES, WITH_IMAGES, WITH_STATES, largest, tokens
from tests.helpers.surgery import Converted

LENGTHS = 1, 20, 3, 21
SEPARATE = [name for name in FAMILIES if name not in WITH_STATES]
PACKED = torch.cat([torch.arange(length) for length in LENGTHS])[None]
BOUNDS = list(accumulate(LENGTHS, initial=0))


def logits(model, ids, **options):
    with torch.no_grad():
        return model(ids, use_cache=False, **options).logits


def each_alone(model, ids):
    return torch.cat([logits(model, ids[:, begin:end]) for begin, end in pairwise(BOUNDS)], 1)


@pytest.mark.parametrize("family", SEPARATE)
def test_each_text_is_alone(mixed, family):
    model, ids = mixed(family).model, tokens(2, BOUNDS[-1])
    expected = each_alone(model, ids)
    assert largest(logits(model, ids, position_ids=PACKED) - expected, expected) <= 1e-5
    assert largest(logits(model, ids) - expected, expected) > 1e-2


@pytest.mark.parametrize(
    "family", [name for name in ("llama", "qwen2", "gemma2", "gpt_oss", "olmo3", "gemma3n") if name in FAMILIES]
)
def test_stock_attention_does_the_same(all_full, family):
    converted, ids = all_full(family), tokens(2, BOUNDS[-1])
    expected = logits(converted.stock, ids, position_ids=PACKED)
    assert largest(logits(converted.model, ids, position_ids=PACKED) - expected, expected) <= 1e-5
