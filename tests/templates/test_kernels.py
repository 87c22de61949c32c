"""The Triton kernels, in Triton's interpreter (`make test-kernels`) and on a GPU (`make test-gpu`).

The interpreter must be on before kernels are imported. It runs every third case, by turns in two dtypes. The emulator
runs every third case too (`make test-ptx`), and like a GPU all of them in every dtype (`make test-ptx-all`).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("runs in Triton's interpreter or on a GPU: make test-kernels", allow_module_level=True)

from tests.helpers import kernel_cases as cases

# Triton 3.6 with a newer numpy
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
if DEVICE == "cuda":  # arithmetic in bfloat16 is wrong in the interpreter
    DTYPES["bf16"] = torch.bfloat16


def by_turns(cases: Iterable, kind: Callable = lambda case: None) -> pytest.MarkDecorator:
    """Every third case of a kind, by turns in one dtype and in the other; on a GPU every case in every dtype."""
    kinds, given = defaultdict(list), []
    for case in cases:
        kinds[kind(case)].append(case)
    for own in kinds.values():
        for number, case in enumerate(own):
            for turn, (name, dtype) in enumerate(DTYPES.items()):
                if DEVICE == "cuda" or number % 6 == 3 * turn:
                    label = "-".join(map(str, case)) if type(case) is tuple else str(case)
                    given.append(pytest.param(case, dtype, id=f"{label}-{name}"))
    return pytest.mark.parametrize(("case", "dtype"), given)


@pytest.fixture(autouse=True)
def _poison():
    """Memory that nothing has written holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=DEVICE == "cuda")
    yield
    torch.use_deterministic_algorithms(False)


@by_turns(cases.DECODE)
def test_decode(case: cases.Decode, dtype: torch.dtype) -> None:
    cases.check_decode(case, dtype, DEVICE)
    if DEVICE == "cuda":  # which says how many programs there are
        cases.check_decode(case._replace(programs=None), dtype, DEVICE)


@by_turns(cases.PACKED, lambda case: (case.quantization.bits, case.quantization.scheme))
def test_decode_of_tiles(case: cases.Packed, dtype: torch.dtype) -> None:
    cases.check_packed(case, dtype, DEVICE)
    if DEVICE == "cuda":
        cases.check_packed(case._replace(programs=None), dtype, DEVICE)


# the last rows that decode programs plan for; on a GPU those that a launch plans for, too, which the emulator runs
@pytest.mark.parametrize("rows", [1, 8, 127, 128, 129, 512, 4096] if DEVICE == "cuda" else [1, 128])
def test_decode_of_rows(rows: int) -> None:
    for check, case in zip((cases.check_decode, cases.check_packed), cases.row_cases(rows), strict=True):
        check(case, torch.float32, DEVICE)


@pytest.mark.parametrize("rotated", cases.ROTATED)
def test_append(rotated: tuple[int, int]) -> None:
    cases.check_append(*rotated, torch.float32, DEVICE)


@by_turns(cases.FLUSH, lambda case: case[0].bits)
def test_flush(case: tuple[cases.Quantization, int], dtype: torch.dtype) -> None:
    cases.check_flush(*case, dtype, DEVICE)


@by_turns(cases.COMPACT, lambda case: case.quantization and case.quantization.bits)
def test_compact(case: cases.Compact, dtype: torch.dtype) -> None:
    cases.check_compact(case, dtype, DEVICE)


@by_turns(cases.RENEW, lambda case: (case.selection.select, case.quantization is None))
def test_renew(case: cases.Renew, dtype: torch.dtype) -> None:
    cases.check_renew(case, dtype, DEVICE)


@by_turns(cases.PREFILL, lambda case: case.recent is None)
def test_prefill(case: cases.Prefill, dtype: torch.dtype) -> None:
    cases.check_prefill(case, dtype, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("padding", [None, [0, 140, 60, 190]], ids=["", "padded"])
def test_prefill_blocks(padding: list[int] | None, dtype: torch.dtype) -> None:
    cases.check_prefill_blocks(padding, dtype, DEVICE)
