"""Serve budgeted heads by the GPU's attention in Triton's interpreter, which TRITON_INTERPRET=1 turns on.

The engine has the model runner that vLLM has on a GPU, reads prompts in chunks, and preempts a request. The tokens are
those of the emitted model.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

from triton.backends import backends

from tests.vllm.conftest import SETTINGS

# vLLM's CPU build turns Triton off where it has no backend of the name "cpu"; the interpreter needs none
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
os.environ |= {**SETTINGS, "VLLM_USE_V2_MODEL_RUNNER": "1"}

from vllm.v1.worker.gpu.model_runner import GPUModelRunner  # noqa: E402

from kvsurgery.vllm import budgeted_attention, triton_budgets  # noqa: E402
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

if __name__ == "__main__":
    budgeted_attention.budgeted_backend = lambda: triton_budgets.BudgetedBackend
    triton_budgets.programs_of = lambda device: 9
    rows = prompts(lengths=(60, 61))
    with tempfile.TemporaryDirectory() as folder:
        llama = converted("llama", Path(folder), **BUDGETED)
        with engine(llama.folder, max_model_len=160, num_gpu_blocks_override=20, max_num_batched_tokens=48) as llm:
            runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
            assert isinstance(runner, GPUModelRunner)
            fill_caches(llm, 1e6)
            assert_equal(generate(llm, rows, NEW), reference(llama.model, rows, NEW))
            assert preemptions(llm) > 0
