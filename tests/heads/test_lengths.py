"""The lengths that KV bytes are given for."""

from types import SimpleNamespace

import pytest

from kvsurgery.heads.lengths import length_name, lengths_of


@pytest.mark.parametrize(
    ("positions", "names"),
    [
        (4_096, ["512", "2k", "4k"]),
        (8_192, ["512", "2k", "8k"]),
        (40_960, ["2k", "8k", "32k", "40k"]),
        (131_072, ["2k", "8k", "32k", "128k"]),
        (1_048_576, ["32k", "128k", "512k", "1M"]),
        (1_010_000, ["32k", "128k", "512k", "1,010,000"]),
        (300, ["300"]),
    ],
)
def test_lengths_end_with_the_models_own_maximum(positions: int, names: list[str]) -> None:
    config = {"max_position_embeddings": positions}
    assert [length_name(length) for length in lengths_of(config)] == names
    assert lengths_of({"text_config": config}) == lengths_of(SimpleNamespace(**config)) == lengths_of(config)


@pytest.mark.parametrize("config", [{}, {"max_position_embeddings": None}, {"max_position_embeddings": "many"}])
def test_without_a_maximum(config: dict) -> None:
    assert lengths_of(config) == (8_192, 32_768, 131_072)
