"""Budgeted heads in vLLM's pages give the tokens of the emitted model, and hold what is forecast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import BeamSearchParams

from tests.helpers.surgery import Converted
from tests.vllm.serving import (
    BUDGETED,
    Generated,
    assert_equal,
    assert_held_as_forecast,
    converted,
    engine,
    fill_caches,
    generate,
    pool,
    preemptions,
    prompts,
    reference,
)

ROWS = prompts(lengths=(3, 31, 33, 130, 300))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return converted("llama", tmp_path_factory.mktemp("budgeted"), **BUDGETED)


@pytest.fixture(scope="module")
def wanted(llama: Converted) -> Generated:
    return reference(llama.model, ROWS)


@pytest.mark.parametrize("chunk", [512, 48])
def test_every_prompt_alone_together_and_in_chunks(llama: Converted, wanted: Generated, chunk: int) -> None:
    with engine(llama.folder, max_num_batched_tokens=chunk) as llm:
        free = pool(llm).get_num_free_blocks()
        fill_caches(llm, 1e6)  # slots that no request has written; vLLM's own kernel multiplies theirs by 0
        assert_equal(generate(llm, ROWS), wanted)
        assert_equal(generate(llm, ROWS[4:]), wanted[4:])
        # each sample reads the prompt by itself
        parameters = SamplingParams(n=3, temperature=1, top_k=1, max_tokens=24, ignore_eos=True)
        (result,) = llm.generate([{"prompt_token_ids": ROWS[3]}], parameters, use_tqdm=False)
        assert {tuple(output.token_ids) for output in result.outputs} == {tuple(wanted[3][0])}
        with pytest.raises(VLLMValidationError, match="beams are not served"):
            llm.beam_search([{"prompt_token_ids": ROWS[3]}], BeamSearchParams(beam_width=2, max_tokens=2))
        assert_held_as_forecast(llm, llama.policy.layout, ROWS[4])
        assert pool(llm).get_num_free_blocks() == free


def test_preempted_requests_go_on_with_the_same_tokens(llama: Converted) -> None:
    rows = prompts(lengths=(60, 61, 62, 63, 64))
    with engine(llama.folder, num_gpu_blocks_override=60, max_num_batched_tokens=48) as llm:
        assert_equal(generate(llm, rows, 200), reference(llama.model, rows, 200))
        assert preemptions(llm) > 0


SELECTIONS = {
    "all heads": {"sparsity": 1},
    "values and means": {"select": "value-norm", "pool": "avg", "window": 4, "kernel_size": 3},
}


@pytest.mark.parametrize("options", SELECTIONS.values(), ids=SELECTIONS)
def test_ways_to_select(options: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = converted("llama", tmp_path, **BUDGETED, **options)
    with engine(checkpoint.folder) as llm:
        assert_equal(generate(llm, ROWS), reference(checkpoint.model, ROWS))
        assert_held_as_forecast(llm, checkpoint.policy.layout, ROWS[4])
        # each sample is what its seed, the next of the request's, gives alone
        parameters = SamplingParams(n=3, temperature=1, seed=5, max_tokens=24, ignore_eos=True)
        (result,) = llm.generate([{"prompt_token_ids": ROWS[3]}], parameters, use_tqdm=False)
        alone = [generate(llm, ROWS[3:4], temperature=1, seed=5 + index)[0][0] for index in range(3)]
        assert [[*output.token_ids] for output in result.outputs] == alone
