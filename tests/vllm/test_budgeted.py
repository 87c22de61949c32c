"""Budgeted heads in vLLM's pages give the tokens of the emitted model, and hold what is forecast."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import BeamSearchParams

from kvsurgery.vllm.budgeted import BudgetedGroups
from tests.helpers.surgery import Converted
from tests.vllm.serving import (
    BLOCK,
    BUDGETED,
    Generated,
    assert_equal,
    assert_held_as_forecast,
    cached_tokens,
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
        # each sample selects by itself
        parameters = SamplingParams(n=3, temperature=1, top_k=1, max_tokens=24, ignore_eos=True)
        (result,) = llm.generate([{"prompt_token_ids": ROWS[3]}], parameters, use_tqdm=False)
        assert {tuple(output.token_ids) for output in result.outputs} == {tuple(wanted[3][0])}
        with pytest.raises(VLLMValidationError, match="beams are not served"):
            llm.beam_search([{"prompt_token_ids": ROWS[3]}], BeamSearchParams(beam_width=2, max_tokens=2))
        assert_held_as_forecast(llm, llama.policy.layout, ROWS[4])
        assert pool(llm).get_num_free_blocks() == free


@pytest.mark.parametrize("cached", [True, False])
def test_preempted_requests_go_on_with_the_same_tokens(llama: Converted, cached: bool) -> None:
    rows = prompts(lengths=(60, 61, 62, 63, 64))
    options = {"num_gpu_blocks_override": 60, "max_num_batched_tokens": 48, "enable_prefix_caching": cached}
    with engine(llama.folder, **options) as llm:
        assert_equal(generate(llm, rows, 200), reference(llama.model, rows, 200))
        assert preemptions(llm) > 0


CHUNKS: dict[str, dict[str, int]] = {
    "at once": {},
    # several prompts at a time, and the last tokens of each in several chunks
    "in chunks": {"long_prefill_token_threshold": 4, "max_num_batched_tokens": 16},
}


@pytest.mark.parametrize("chunks", CHUNKS)
def test_prompts_that_begin_alike_share_blocks_before_what_is_kept(llama: Converted, chunks: str) -> None:
    first, other = prompts(lengths=(323, 195))[:2]
    second = first[:160] + other
    alone = reference(llama.model, [first, second])
    with engine(llama.folder, **CHUNKS[chunks]) as llm:
        fill_caches(llm, 1e6)
        found = []
        for index in (0, 1, 0, 1):
            before = cached_tokens(llm)
            assert_equal(generate(llm, [first, second][index : index + 1]), alone[index : index + 1])
            found.append(cached_tokens(llm) - before)
        before_kept = [(len(row) // BLOCK * BLOCK - kept(llama)) // BLOCK * BLOCK for row in (first, second)]
        assert found == [0, 160, *before_kept]
        assert min(before_kept) > 160
        # several requests and samples at a time read the same blocks, and each selects in its own
        before = cached_tokens(llm)
        assert_equal(generate(llm, [first, second, first, second]), alone * 2)
        parameters = SamplingParams(n=3, temperature=1, top_k=1, max_tokens=24, ignore_eos=True)
        (result,) = llm.generate([{"prompt_token_ids": second}], parameters, use_tqdm=False)
        assert {tuple(output.token_ids) for output in result.outputs} == {tuple(alone[1][0])}
        assert cached_tokens(llm) - before == 2 * before_kept[0] + 5 * before_kept[1]
        assert llm.reset_prefix_cache()
        assert_equal(generate(llm, [first]), alone[:1])


def test_answers_are_not_shared_with_prompts_that_repeat_them(llama: Converted) -> None:
    """Their keys and values depend on what heads had dropped: later turns, and requests that go on, read them anew."""
    row, question = prompts(lengths=(130, 120))[:2]
    [wanted] = reference(llama.model, [row], 230)
    turn = [*row, *wanted[0][:200], *question]
    [answered] = reference(llama.model, [turn])
    with engine(llama.folder) as llm:
        assert_equal(generate(llm, [row], 200), [(wanted[0][:200], wanted[1][:200])])
        for _ in range(2):
            before = cached_tokens(llm)
            assert_equal(generate(llm, [turn]), [answered])
        assert cached_tokens(llm) - before == (len(turn) // BLOCK * BLOCK - kept(llama)) // BLOCK * BLOCK > len(row)
        parameters = SamplingParams(temperature=0, max_tokens=230, ignore_eos=True)
        llm.llm_engine.add_request("preempted", {"prompt_token_ids": row}, parameters)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        tokens: list[int] = []
        while len(tokens) < 230:
            for output in llm.llm_engine.step():
                tokens = [*output.outputs[0].token_ids]
            if len(tokens) == 200 and not preemptions(llm):
                scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
        assert preemptions(llm) == 1
        assert tokens == wanted[0]


def kept(checkpoint: Converted) -> int:
    """Most tokens of a prompt that a head keeps."""
    return max(bin.kept for bin in BudgetedGroups(checkpoint.policy.layout, BLOCK).bins.values())


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
