"""The kernels over vLLM's pages compiled for A100 and H100 without one: resources, and instructions of their loops.

Registers spill in the loop over tiles only where a request has several new tokens, `PROGRAMS` blocks share a
multiprocessor, and units of both loops come by asynchronous copies although a table says where they lie.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from kvsurgery.templates.kv_decode import PROGRAMS, STAGES  # noqa: E402
from kvsurgery.templates.kv_layout import TILE, Quantization  # noqa: E402
from kvsurgery.templates.kv_softmax import Scoring  # noqa: E402
from kvsurgery.vllm import paged_budgets  # noqa: E402
from kvsurgery.vllm.paged_codes import Pages, QueryBlocks, attend, block_size, lines  # noqa: E402
from kvsurgery.vllm.paged_pack import pack  # noqa: E402
from kvsurgery.vllm.pages import from_page  # noqa: E402
from kvsurgery.vllm.tiles import Tiling  # noqa: E402
from tests.templates.test_kernel_instructions import loops, machine_code, named  # noqa: E402
from tests.templates.test_kernel_resources import OLDEST, PACK_STACK, STACK, check, compiled  # noqa: E402, F401

HEADS, SIZE = 8, 32
# quantization, new tokens of a request, and the most instructions that a warp may execute for a unit of tiles and for
# one of 32 unpacked tokens, on A100 and H100; 4 query heads for each KV head, head_dim 128, bfloat16
CEILINGS = [
    (Quantization(4), 1, {80: (540, 335), 90: (530, 335)}),
    (Quantization(2), 1, {80: (485, 335), 90: (490, 335)}),
    (Quantization(4), 64, {80: (845, 335), 90: (805, 335)}),
]
SPILLED = 200  # bytes of stack where a request has several new tokens, so that a dot has 16 queries
# quantization, head_dim, query heads of a KV head, new tokens: ways through the kernel that leave the least room
OTHERS = [
    (Quantization(3), 128, 4, 1),
    (Quantization(4, group_size=32), 128, 8, 1),
    (Quantization(4, "per-token", clip=True), 256, 1, 64),
]


def compile_step(quantization: Quantization, head_dim: int, group: int, new: int) -> None:
    """What a step of one request launches, for `compiled`."""
    dtype = torch.bfloat16
    newest = torch.zeros(4, HEADS, SIZE, 2 * head_dim, dtype=dtype)
    pages = torch.zeros(4, HEADS, quantization.tile_bytes(head_dim), dtype=torch.uint8)
    table, tiles = torch.zeros(1, 8, dtype=torch.int32), from_page(pages, head_dim, dtype, quantization)
    starts, lengths = torch.tensor([0, new], dtype=torch.int32), torch.tensor([500 + new], dtype=torch.int32)
    blocks = QueryBlocks.of(starts, lengths, [new], block_size(group, new), Tiling.of(quantization))
    query = torch.zeros(new, HEADS * group, head_dim, dtype=dtype)
    in_lines = lines(blocks, HEADS, group, head_dim, dtype, programs=8)
    caches = Pages(tiles, table, newest, table)
    attend(query, caches, blocks, in_lines, Scoring(0.1), quantization, torch.empty_like(query))
    tokens = torch.zeros(1, TILE, dtype=torch.int64)
    pack(newest, tokens, tokens, tokens[0, :1], tiles, quantization)


def test_documented_instructions() -> None:
    page = (Path(__file__).parents[2] / "docs/kernels.md").read_text()
    for quantization, new, ceilings in CEILINGS:
        assert f"| {named(quantization)} | {new} | {ceilings[90][0]} | {ceilings[80][0]} |" in page


@pytest.mark.skipif(not OLDEST, reason="the ceilings are those of the oldest Triton's code")
@pytest.mark.parametrize(("compiled", "target"), [(80, 80), (90, 90)], indirect=["compiled"])
def test_instructions_of_a_unit(compiled: dict, target: int, tmp_path: Path) -> None:  # noqa: F811
    binary = tmp_path / "kernel.cubin"
    found = []
    for quantization, new, ceilings in CEILINGS:
        compile_step(quantization, 128, 4, new)
        kernel = compiled["_attend_kernel"]
        check(kernel, tmp_path, PROGRAMS, STACK if new == 1 else SPILLED)
        binary.write_bytes(kernel.asm["cubin"])
        code = machine_code(binary)
        bodies = [[text for _, text in code[loop]] for loop in loops(code)]
        print(f"sm_{target}, {named(quantization)}, {new} new: {[*map(len, bodies)]} instructions of tiles, tokens")
        assert new > 1 or not [text for text in bodies[0] if re.search(r"\b(LDL|STL)\b", text)]
        found.append(([*map(len, bodies)], ceilings[target]))
    assert all(count <= most for counts, ceilings in found for count, most in zip(counts, ceilings, strict=True))


@pytest.mark.parametrize(
    ("compiled", "quantization", "head_dim", "group", "new"),
    [(80, *case) for case in (OTHERS if OLDEST else OTHERS[:1])],
    indirect=["compiled"],
)
def test_resources(
    compiled: dict,  # noqa: F811
    quantization: Quantization,
    head_dim: int,
    group: int,
    new: int,
    tmp_path: Path,
) -> None:
    compile_step(quantization, head_dim, group, new)
    kernel = compiled["_attend_kernel"]
    assert kernel.asm["ttgir"].count("async_copy_global_to_local") >= 6 * STAGES
    check(kernel, tmp_path, PROGRAMS, STACK)
    check(compiled["_combine_kernel"], tmp_path, 1)
    check(compiled["_pack_due_kernel"], tmp_path, 1, PACK_STACK)


# head_dim, query heads of a KV head, new tokens
KEPT = [(128, 4, 1), (128, 4, 64), (256, 8, 1), (256, 1, 64), (64, 8, 64)]


@pytest.mark.parametrize(
    ("compiled", "head_dim", "group", "new"),
    [(target, *case) for target, few in ((80, not OLDEST), (90, OLDEST)) for case in KEPT[: 2 if few else None]],
    indirect=["compiled"],
)
def test_resources_of_budgeted_heads(compiled: dict, head_dim: int, group: int, new: int, tmp_path: Path) -> None:  # noqa: F811
    dtype = torch.bfloat16
    cache, query = torch.zeros(4, 1, SIZE, 2 * head_dim, dtype=dtype), torch.zeros(new, group, head_dim, dtype=dtype)
    first, count, past = (torch.tensor([number], dtype=torch.int32) for number in (0, new, 500))
    size = paged_budgets.block_size(group, new, head_dim, dtype)
    blocks = paged_budgets.Blocks.of(first, count, past, past, [new], size, programs=8)
    table = torch.zeros(1, 8, dtype=torch.int32)
    paged_budgets.attend(query, cache, table, blocks, 90, Scoring(0.1), torch.empty_like(query))
    kernel = compiled["_attend_pages_kernel"]
    assert kernel.asm["ttgir"].count("async_copy_global_to_local") >= 2 * STAGES
    check(kernel, tmp_path, PROGRAMS)
    assert ("_combine_kernel" in compiled) == (new == 1)
