"""The kernels as Triton compiles them for A100 and H100, executed without a GPU: right results, and no fault.

`make test-ptx` runs a part: on the oldest Triton every third case, in the dtype and for the target of its turn, and
`ALWAYS` besides; on the newest every 72nd of each dtype and target.
`make test-ptx-all` runs all of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from kvsurgery.templates.kv_codes import nearest  # noqa: E402
from tests.helpers import kernel_cases  # noqa: E402
from tests.helpers.cases import ALL  # noqa: E402
from tests.helpers.kernel_cases import FULL, TURNS, Decode, Packed  # noqa: E402
from tests.helpers.paged_cases import KEPT, PACK, PAGED, Kept, Paged, check_kept, check_pack, check_paged  # noqa: E402
from tests.ptx.launches import Emulator, install  # noqa: E402

OLDEST = triton.__version__.startswith("3.6.")
# lanes that share an element must round it alike: a product fused with a sum over lanes did not
ALWAYS = "sm90-fp32-packed-2kivi3s4r128+1-g4-d128-n700.300-p5"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.fixture
def emulator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory) -> Iterator[Emulator]:
    """Launches are compiled for a target and executed; memory that nothing has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    folder = tmp_path_factory.getbasetemp() / "triton"
    yield install(monkeypatch, str(folder), request.param)
    torch.use_deterministic_algorithms(False)


def chosen() -> Iterator:
    """Cases of every target and dtype, or those that should show most."""
    for at, (target, name) in enumerate((target, name) for target in (80, 90) for name in DTYPES):
        for number, (check, case) in enumerate(kernel_cases.COMPARISONS):
            label = f"sm{target}-{name}-{check.__name__.removeprefix('check_')}-{'-'.join(map(str, case))}"
            own_turn = number % 3 == 1 and TURNS[number // 3 % len(TURNS)] == (target, name)
            if ALL or (own_turn or label == ALWAYS if OLDEST else (number + at) % 72 == 0):
                yield pytest.param(target, check, (*case, DTYPES[name]), id=label)


@pytest.mark.parametrize(("emulator", "check", "case"), [*chosen()], indirect=["emulator"])
def test_kernels(emulator: Emulator, check: Callable, case: tuple) -> None:
    check(*case, "cpu")
    assert emulator.launches


# targets by turns with a dtype
APPENDED = [(80, torch.bfloat16), (90, torch.float32), *([(80, torch.float32), (90, torch.bfloat16)] if ALL else [])]


@pytest.mark.parametrize(("emulator", "dtype"), APPENDED if ALL or OLDEST else APPENDED[:1], indirect=["emulator"])
@pytest.mark.parametrize("rotated", kernel_cases.ROTATED if ALL or OLDEST else kernel_cases.ROTATED[-1:])
def test_append(rotated: tuple[int, int], dtype: torch.dtype, emulator: Emulator) -> None:
    kernel_cases.check_append(*rotated, dtype, "cpu")
    assert {"_append_kernel", "_decode_kernel", "_combine_kernel"} <= set(emulator.launches)


LENGTHS = [[0], [1], [127], [128], [129], [5000]] if ALL else []
LENGTHS += [[129, 0, 1, 128, 127, 300, 2, 64]]
# more rows than a warp counts, and with tiles more than a program has threads
LENGTHS += [[129, 0, 3, 40] * 18] if ALL or OLDEST else []


@pytest.mark.parametrize("emulator", [80, *([90] if ALL else [])], indirect=True)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: ".".join(map(str, lengths[:8])))
def test_what_production_launches(emulator: Emulator, lengths: list[int]) -> None:
    """One row and several, with tiles and without."""
    kinds = [FULL, (4, 128, 128)]
    kernel_cases.check_decode(Decode(kinds, 4, 128, lengths, 8), torch.bfloat16, "cpu")
    packed = Packed(kernel_cases.Quantization(4), 2, kinds[1:], 4, 128, lengths, 8)
    kernel_cases.check_packed(packed, torch.bfloat16, "cpu")
    assert emulator.launches


@pytest.mark.parametrize("emulator", [80, *([90] if ALL else [])], indirect=True)
def test_planning_in_a_launch(emulator: Emulator) -> None:
    """With one row more than decode programs plan for; over tiles too."""
    slots, tiles = kernel_cases.row_cases(129)
    kernel_cases.check_decode(slots, torch.bfloat16, "cpu")
    kernel_cases.check_packed(tiles, torch.bfloat16, "cpu")
    assert emulator.launches.count("_plan_kernel") == 2


# over vLLM's pages: decoding with whole tiles, three bits and groups, several new tokens, and a head that has dropped
# some, in the dtype of its turn
IN_PAGES = [(80, PAGED[0], "bf16"), (90, PAGED[3], "fp16"), (80, PAGED[6], "bf16"), (80, PAGED[7], "bf16")]
IN_PAGES += [(90, PAGED[11], "bf16")]
IN_PAGES += [(target, case, name) for target in (80, 90) for case in PAGED for name in DTYPES] if ALL else []


@pytest.mark.parametrize(("emulator", "case", "name"), IN_PAGES if OLDEST else IN_PAGES[:1], indirect=["emulator"])
def test_attention_over_pages(emulator: Emulator, case: Paged, name: str) -> None:
    check_paged(case, DTYPES[name], "cpu")
    assert "_attend_kernel" in emulator.launches


# decoding by several programs for each query, and prompts that are read beside
BUDGETED = [(80, KEPT[0], "bf16"), (90, KEPT[3], "fp16"), (80, KEPT[4], "bf16")]
BUDGETED += [(target, case, name) for target in (80, 90) for case in KEPT for name in DTYPES] if ALL else []


@pytest.mark.parametrize(("emulator", "case", "name"), BUDGETED if OLDEST else BUDGETED[:1], indirect=["emulator"])
def test_what_budgeted_heads_keep_in_pages(emulator: Emulator, case: Kept, name: str) -> None:
    check_kept(case, DTYPES[name], "cpu")
    assert "_attend_pages_kernel" in emulator.launches


@pytest.mark.parametrize("emulator", [80], indirect=True)
@pytest.mark.parametrize(("how", "head_dim"), PACK if ALL else PACK[1:3] if OLDEST else PACK[:1])
def test_packing_into_pages(emulator: Emulator, how: kernel_cases.Quantization, head_dim: int) -> None:
    check_pack(how, head_dim, torch.bfloat16, "cpu", nearest)
    assert emulator.launches == ["_pack_due_kernel"]
