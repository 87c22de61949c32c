"""Whole decode steps of a small model through the compiled kernels: what the torch path computes."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from kvsurgery.templates import kv_attention, kv_cuda  # noqa: E402
from tests.helpers.cases import ALL  # noqa: E402
from tests.helpers.emitted import HELD, LOSSLESS, emitted, in_parts  # noqa: E402
from tests.helpers.families import largest, tokens  # noqa: E402
from tests.ptx.launches import install  # noqa: E402

QUANTIZATION = {**LOSSLESS, "scheme": "kivi", "group_size": None, "residual": 128}
STEPS = [
    # heads select again before the second step
    pytest.param(
        {**HELD, "quantization": LOSSLESS},
        [200, 29, 1, 1, 1],
        {"_select_kernel", "_move_codes_kernel"},
        id="held, quantized",
    ),
    # after 4 sinks, a tile of 128 and a residual of 128, the next token packs
    pytest.param({"quantization": QUANTIZATION}, [259, 1, 1, 1], {"_flush_kernel"}, id="quantized"),
    pytest.param({}, [259, 1, 1, 1], set(), id="16 bit"),
]
OLDEST = triton.__version__.startswith("3.6.")


@pytest.mark.parametrize(("section", "sizes", "others"), STEPS if ALL or OLDEST else STEPS[:1])
def test_decode_steps(section: dict, sizes: list[int], others: set[str], monkeypatch, tmp_path) -> None:
    """Each layer appends, packs or selects when that is due, attends, and combines; the next token is torch's."""
    model = emitted("llama", 2, **section)
    ids, mask = tokens(1, sum(sizes)), torch.ones(1, sum(sizes), dtype=torch.long)
    expected = in_parts(model, ids, mask, sizes)
    emulator = install(monkeypatch, str(tmp_path), 80)
    kv_cuda.kv_decode._multiprocessors.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2))
    monkeypatch.setattr(kv_attention, "_path", lambda *states: kv_cuda)
    found = in_parts(model, ids, mask, sizes)
    kv_cuda.kv_decode._multiprocessors.cache_clear()
    assert largest(found - expected, expected) <= 1e-5
    assert found[:, -3:].argmax(-1).equal(expected[:, -3:].argmax(-1))
    for kernel in ("_append_kernel", "_decode_kernel", "_combine_kernel"):
        assert emulator.launches.count(kernel) == 2 * 3
    assert set(emulator.launches) & {"_flush_kernel", "_select_kernel", "_move_codes_kernel"} == others
