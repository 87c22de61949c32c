"""Serve budgeted heads by the GPU's attention in Triton's interpreter, which TRITON_INTERPRET=1 turns on.

The engine has the model runner that vLLM has on a GPU, reads prompts in chunks, and preempts a request. The tokens are
those of the emitted model, without codes and, with CASES=all, with them.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from triton.backends import backends

from tests.vllm.conftest import SETTINGS

# vLLM's CPU build turns Triton off where it has no backend of the name "cpu"; the interpreter needs none
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
os.environ |= {**SETTINGS, "VLLM_USE_V2_MODEL_RUNNER": "1"}

from vllm.v1.worker.gpu.model_runner import GPUModelRunner  # noqa: E402

from kvsurgery.vllm import budgeted_attention, budgeted_codes, triton_budgeted_codes, triton_budgets  # noqa: E402
from tests.helpers.cases import ALL  # noqa: E402
from tests.vllm.serving import (  # noqa: E402
    BUDGETED,
    assert_equal,
    converted,
    engine,
    fill_caches,
    generate,
    preemptions,
    prompts,
    reference,
)

NEW = 10
TOLERANCE = 1e-1  # of codes: a state on the border of two may get either
CODES: dict[str, Any] = {"sparsity": 1, "budget": 130, "kv_bits": 4, "kv_residual": 0}


def serve(rows: list[list[int]], blocks: int, nothing: float, tolerance: float, **options: Any) -> None:
    """Compare the tokens of prompts, of which an engine with so many blocks preempts one."""
    with tempfile.TemporaryDirectory() as folder:
        llama = converted("llama", Path(folder), **{**BUDGETED, **options})
        settings = {"max_model_len": 160, "num_gpu_blocks_override": blocks, "max_num_batched_tokens": 48}
        with engine(llama.folder, **settings) as llm:
            runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
            assert isinstance(runner, GPUModelRunner)
            fill_caches(llm, nothing)
            assert_equal(generate(llm, rows, NEW), reference(llama.model, rows, NEW), tolerance)
            assert preemptions(llm) > 0


if __name__ == "__main__":
    budgeted_attention.budgeted_backend = lambda: triton_budgets.BudgetedBackend
    budgeted_codes.budgeted_codes_backend = lambda: triton_budgeted_codes.BudgetedCodesBackend
    budgeted_codes.budgeted_newest_backend = lambda: triton_budgeted_codes.BudgetedNewestBackend
    triton_budgets.programs_of = triton_budgeted_codes.programs_of = lambda device: 9
    serve(prompts(lengths=(60, 61)), 20, 1e6, 1e-3)
    if ALL:
        serve(prompts(lengths=(125, 126, 145))[:3], 132, float("nan"), TOLERANCE, **CODES)
