"""Random requests that come, go and are cancelled, in a cache that is too small for them."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.helpers.cases import some
from tests.vllm.serving import (
    BUDGETED,
    assert_equal,
    converted,
    engine,
    preemptions,
    prompts,
    reference,
    reference_by_token,
)
from tests.vllm.test_codes import TOLERANCE

REQUESTS, NEW = int(os.environ.get("LOAD_REQUESTS", "100")), 24
CODES = {"kv_bits": 2, "kv_residual": 0}
LATEST = 20  # requests, of which one is cancelled at times


LOADS = {
    "streaming": ({}, 40, True, 1e-3),
    "lean": ({}, 34, False, 1e-3),
    "quantized budgets": ({**BUDGETED, **CODES, "sparsity": 1}, 600, True, TOLERANCE),
    "quantized": (CODES, 90, True, TOLERANCE),
    "budgeted": (BUDGETED, 40, True, 1e-3),
    "budgeted, none shared": (BUDGETED, 40, False, 1e-3),
    "quantized and lean": (CODES, 60, False, TOLERANCE),
}


@pytest.mark.parametrize("load", some(LOADS, 2))
def test_no_block_is_lost_and_no_token_is_wrong(load: str, tmp_path: Path) -> None:
    cache, blocks, cached, tolerance = LOADS[load]
    checkpoint = converted("llama", tmp_path, **cache)
    draw = random.Random(0)
    rows = prompts(lengths=(3, 31, 33, 64, 65, 100, 170, 260, 330))
    if "kv_bits" in cache and "budget" not in cache:
        wanted = [reference_by_token(checkpoint.model, row, NEW) for row in rows]
    else:
        wanted = reference(checkpoint.model, rows, NEW)

    def check(output: Any, row: int, new: int) -> None:
        tokens, likelihoods = wanted[row]
        if output.finish_reason != "abort":
            found = [{token: entry.logprob for token, entry in step.items()} for step in output.logprobs]
            assert_equal([([*output.token_ids], found)], [(tokens[:new], likelihoods[:new])], tolerance)

    asked, finished, cancelled = {}, set(), set()
    options = {"num_gpu_blocks_override": blocks, "max_num_batched_tokens": 96, "enable_prefix_caching": cached}
    with engine(checkpoint.folder, **options) as llm:
        served = llm.llm_engine
        pool = served.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        while len(asked) < REQUESTS or served.has_unfinished_requests():
            if len(asked) < REQUESTS and draw.random() < 0.7:
                name, row = str(len(asked)), draw.randrange(len(rows))
                asked[name] = row, draw.randrange(1, NEW + 1)
                parameters = SamplingParams(temperature=0, max_tokens=asked[name][1], ignore_eos=True, logprobs=0)
                served.add_request(name, {"prompt_token_ids": rows[row]}, parameters)
            if asked and draw.random() < 0.05:
                name = str(draw.randrange(max(len(asked) - LATEST, 0), len(asked)))
                if name not in finished:
                    served.abort_request([name])
                    cancelled.add(name)
            for output in served.step():
                if output.finished:
                    finished.add(output.request_id)
                    check(output.outputs[0], *asked[output.request_id])
        assert pool.get_num_free_blocks() == free
        assert preemptions(llm) > 0
    assert len(cancelled) > REQUESTS / 20
    assert len(finished | cancelled) == REQUESTS
