"""Families that the plugin serves, served in chunks of 48 tokens, and once more from the prefix cache."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvsurgery.checkpoint.family import load_family, supported
from kvsurgery.vllm.architectures import ARCHITECTURES, DENSE
from tests.helpers.cases import some
from tests.helpers.families import FAMILIES, WITH_STATES
from tests.vllm.models import MODELS, TOLERANCES, WITHOUT_PREFIX_CACHE
from tests.vllm.serving import (
    BLOCK,
    assert_equal,
    cached_tokens,
    converted,
    engine,
    fill_caches,
    generate,
    prompts,
    reference,
)
from tests.vllm.substitutes import substitute


def architectures(model_type: str) -> set[str]:
    """The classes of a family that generate."""
    return {name for name in load_family(model_type).classes.values() if name.endswith(("CausalLM", "Generation"))}


SERVED = [name for name, model in FAMILIES.items() if architectures(model["model_type"]) <= {*ARCHITECTURES}]


@pytest.mark.parametrize("family", some(SERVED, 2))
def test_tokens_are_those_of_the_emitted_model(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    substitute(monkeypatch)
    checkpoint = converted(family, tmp_path, model=MODELS.get(family))
    rows, tolerance = prompts(), TOLERANCES.get(family, 1e-3)
    wanted = reference(checkpoint.model, rows)
    # tokens that are not certain, so that attention counts
    assert all(min(max(place.values()) for place in places) < -0.01 for _, places in wanted)
    options = {"max_num_batched_tokens": 48, "long_prefill_token_threshold": 48}
    options["enable_prefix_caching"] = family not in WITHOUT_PREFIX_CACHE
    with engine(checkpoint.folder, **options) as llm:
        if family in WITH_STATES:  # nothing reads what a block held before
            fill_caches(llm, float("nan"))
        assert_equal(generate(llm, rows), wanted, tolerance)
        before = cached_tokens(llm)
        assert_equal(generate(llm, rows), wanted, tolerance)
        if family in WITHOUT_PREFIX_CACHE:
            return
        assert cached_tokens(llm) - before >= sum((len(row) - 1) // BLOCK * BLOCK for row in rows) - 2 * BLOCK


def test_every_architecture_of_the_converter_is_registered() -> None:
    assert not {*ARCHITECTURES} & {*DENSE}
    assert {*ARCHITECTURES, *DENSE} == set().union(*(architectures(name) for name in supported()))


def test_an_architecture_that_is_not_split_is_served_as_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("vllm.kvsurgery"), "warning", lambda line, *values, **_: lines.append(line % values)
    )
    # vLLM takes the last two layers with a cache of their own for a sliding one and a full one, as in published models
    checkpoint, rows = converted("gemma3n", tmp_path, model={"num_kv_shared_layers": 2}), prompts()
    with engine(tmp_path / "stock") as llm:
        wanted = generate(llm, rows)
    assert lines == []
    with engine(checkpoint.folder) as llm:
        assert_equal(generate(llm, rows), wanted)
    assert len(lines) == 1
    assert "does not know Gemma3nForCausalLM" in lines[0]
