"""Emitted models on a GPU, through kernels and graphs, against the same models on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kvsurgery.templates.kv_budget import BudgetedHeads
from kvsurgery.templates.kv_cache import KVSurgeryCache
from tests.helpers.emitted import BUDGETED, HELD, LOSSLESS, emitted, in_parts
from tests.helpers.families import largest, tokens

SECTIONS = {
    "16 bit": {},
    "quantized": {"quantization": LOSSLESS},
    "budgeted": BUDGETED,
    "budgeted, quantized": {**BUDGETED, "quantization": LOSSLESS},
    "held": HELD,
    "held, quantized": {**HELD, "quantization": LOSSLESS},
}
GREEDY = {"do_sample": False, "suppress_tokens": [0, 2], "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture(params=SECTIONS)
def pair(request: pytest.FixtureRequest) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model in float32 on the CPU, and on the GPU."""
    model = emitted("llama", 2, **SECTIONS[request.param])
    return model, copy.deepcopy(model).cuda()


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
def test_prompts_chunks_and_steps(pair: tuple, padded: bool) -> None:
    cpu, gpu = pair
    sizes = [200, 57, 3, *[1] * 20]
    ids, mask = tokens(2, sum(sizes)), torch.ones(2, sum(sizes), dtype=torch.long)
    if padded:
        mask[1, :127] = 0
    expected, found = in_parts(cpu, ids, mask, sizes), in_parts(gpu, ids.cuda(), mask.cuda(), sizes)
    assert largest((found.cpu() - expected) * mask[:, :, None], expected) <= 1e-4


def test_gemma_in_chunks() -> None:
    """Soft caps, and sliding layers of the model's own."""
    cpu = emitted("gemma2")
    ids, mask = tokens(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[1, :11] = 0
    sizes = [30, 9, *[1] * 21]
    expected, found = in_parts(cpu, ids, mask, sizes), in_parts(cpu.cuda(), ids.cuda(), mask.cuda(), sizes)
    assert largest((found.cpu() - expected) * mask[:, :, None], expected) <= 1e-4


def test_steps_from_a_graph(pair: tuple) -> None:
    cpu, gpu = pair
    ids, options = tokens(2, 250), GREEDY | {"max_new_tokens": 60}
    expected, found = cpu.generate(ids, **options), gpu.generate(ids.cuda(), **options)
    cache = found.past_key_values
    assert isinstance(cache, KVSurgeryCache)
    assert cache.graph.graph is not None
    assert found.sequences.cpu().equal(expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert largest(one.cpu() - other, other) <= 1e-4
    assert cache.allocated_bytes() == expected.past_key_values.allocated_bytes()


def test_a_decode_step_does_not_wait_for_the_device(pair: tuple) -> None:
    gpu = pair[1]
    cache = gpu(tokens(2, 250).cuda()).past_key_values
    cache.reserve(300)
    step = tokens(2, 1).cuda()
    with torch.no_grad():
        for _ in range(3):  # compile, allocate
            gpu(step, past_key_values=cache)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(10):
                gpu(step, past_key_values=cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["budgeted", "budgeted, quantized"])
def test_compaction_does_not_wait_for_the_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = emitted("llama", 2, **SECTIONS[kind]).cuda()
    ids, mask = tokens(2, 300).cuda(), torch.ones(2, 300, dtype=torch.long, device="cuda")
    mask[1, :127] = 0
    done = []

    def strict(work):
        def run(*args, **options):
            torch.cuda.set_sync_debug_mode("error")
            try:
                result = work(*args, **options)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            done.append(work)
            return result

        return run

    with torch.no_grad():
        gpu(ids, attention_mask=mask)  # compile
        for name in ("select", "compact"):
            monkeypatch.setattr(BudgetedHeads, name, strict(getattr(BudgetedHeads, name)))
        gpu(ids, attention_mask=mask)
    assert len(done) == 2 * 2
