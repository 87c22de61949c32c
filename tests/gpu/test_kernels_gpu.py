"""The Triton kernels on a GPU; the cases of the interpreter's tests, with bfloat16 too."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from templates import kv_decode
from templates.kv_kernels import EVERY
from tests import kernel_cases as cases

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])


@pytest.fixture(autouse=True)
def _poison():
    """Memory that nothing has written holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@DTYPES
@pytest.mark.parametrize("case", cases.DECODE, ids=str)
def test_decode(case: cases.Decode, dtype: torch.dtype) -> None:
    cases.check_decode(case, dtype, "cuda")
    cases.check_decode(case._replace(programs=None), dtype, "cuda")


def test_append() -> None:
    cases.check_append("cuda")


@DTYPES
@pytest.mark.parametrize("case", cases.PREFILL, ids=str)
def test_prefill(case: cases.Prefill, dtype: torch.dtype) -> None:
    cases.check_prefill(case, dtype, "cuda")


def test_a_graph_decodes_what_has_grown_since_its_capture() -> None:
    """Nothing of a decode step depends on lengths that the host knows."""
    torch.manual_seed(0)
    heads, head_dim, slots = 2, 128, 3000
    query = torch.randn(1, heads * 4, head_dim, device="cuda", dtype=torch.bfloat16)
    keys, values = torch.randn(2, 1, heads * slots, head_dim, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([[100, 100]], device="cuda")
    sinks, rings, recents = torch.tensor([[EVERY, 4], [1, 256], [1, 256]], dtype=torch.int32, device="cuda")
    layout = torch.tensor([0, slots], device="cuda"), lengths, sinks, rings, recents
    kv_decode.decode(query, keys, values, *layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kv_decode.decode(query, keys, values, *layout)
    for length in (100, 2900, 7):
        lengths.fill_(length)
        graph.replay()
        cases.check(out, kv_decode.decode_reference, [query, keys, values], *layout)
