"""Attention over pages by Triton, in its interpreter (`make test-kernels`) and on a GPU (`make test-gpu`)."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("runs in Triton's interpreter or on a GPU: make test-kernels", allow_module_level=True)

from kvsurgery.templates.kv_codes import nearest
from kvsurgery.templates.kv_layout import Quantization
from kvsurgery.templates.kv_rounding import QueryRounding
from kvsurgery.vllm import paged_codes
from tests.helpers.paged_cases import HEADS, KEPT, PACK, PAGED, Kept, Paged, check_kept, check_pack, check_paged

# Triton 3.6 with a newer numpy
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = [torch.float32, torch.float16]  # arithmetic in bfloat16 is wrong in the interpreter


@pytest.mark.parametrize(("number", "case"), enumerate(PAGED), ids=map(str, PAGED))
def test_attention_is_that_over_what_tiles_stand_for(number: int, case: Paged) -> None:
    if DEVICE == "cuda":
        for dtype in (*DTYPES, torch.bfloat16):
            check_paged(case, dtype, DEVICE)
    else:
        check_paged(case, DTYPES[number % 2], DEVICE)


@pytest.mark.parametrize(("number", "case"), enumerate(KEPT), ids=map(str, KEPT))
def test_budgeted_heads_see_what_they_have_kept_and_all_of_a_prompt_that_is_read(number: int, case: Kept) -> None:
    if DEVICE == "cuda":
        for dtype in (*DTYPES, torch.bfloat16):
            check_kept(case, dtype, DEVICE)
    else:
        check_kept(case, DTYPES[number % 2], DEVICE)


def test_a_long_prompt_is_read_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_codes, "SCRATCH", 0)  # a line has one block, and the last block no tokens
    check_paged(Paged(Quantization(4, residual=0), 4, 32, [(128, 12)], 3), torch.float32, DEVICE)


@pytest.mark.parametrize(("how", "head_dim"), PACK)
def test_tiles_are_those_of_the_reference(how: Quantization, head_dim: int) -> None:
    check_pack(how, head_dim, torch.float16, DEVICE, nearest)


def test_keys_may_be_rounded_by_the_queries() -> None:
    order = torch.stack([torch.randperm(64) for _ in range(HEADS)])
    feedback = torch.randn(HEADS, 64, 64).mul(0.1).triu(1)
    check_pack(Quantization(3), 64, torch.float32, DEVICE, QueryRounding(order, feedback).to(torch.device(DEVICE)))
