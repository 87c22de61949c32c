"""The Triton kernels in Triton's interpreter, which must be on before they are imported: `make test-kernels`."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in Triton's interpreter: make test-kernels", allow_module_level=True)

from tests.helpers import kernel_cases as cases

# Triton 3.6 with a newer numpy
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

# arithmetic in bfloat16 is wrong in the interpreter
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])


@pytest.fixture(autouse=True)
def _poison():
    """Memory that nothing has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@DTYPES
@pytest.mark.parametrize("case", cases.DECODE, ids=str)
def test_decode(case: cases.Decode, dtype: torch.dtype) -> None:
    cases.check_decode(case, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize("case", cases.PACKED, ids=str)
def test_decode_of_tiles(case: cases.Packed, dtype: torch.dtype) -> None:
    cases.check_packed(case, dtype, "cpu")


def test_append() -> None:
    cases.check_append("cpu")


@DTYPES
@pytest.mark.parametrize(("quantization", "head_dim"), cases.FLUSH, ids=str)
def test_flush(quantization: cases.Quantization, head_dim: int, dtype: torch.dtype) -> None:
    cases.check_flush(quantization, head_dim, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize("case", cases.COMPACT, ids=str)
def test_compact(case: cases.Compact, dtype: torch.dtype) -> None:
    cases.check_compact(case, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize("case", cases.PREFILL, ids=str)
def test_prefill(case: cases.Prefill, dtype: torch.dtype) -> None:
    cases.check_prefill(case, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize("padding", [None, [0, 140, 60, 190]], ids=["", "padded"])
def test_prefill_blocks(padding: list[int] | None, dtype: torch.dtype) -> None:
    cases.check_prefill_blocks(padding, dtype, "cpu")
