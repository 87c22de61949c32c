from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from kvsurgery.text.needle_sets import read_set
from tests.helpers.vocabularies import tokenizer


@pytest.fixture(scope="package")
def words() -> PreTrainedTokenizerFast:
    """A tokenizer that spells the needles which hide words."""
    return tokenizer("bytes", [needle.needle for needle in read_set("word")], size=400)
