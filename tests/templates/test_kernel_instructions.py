"""Instructions of the kernels' loops, counted in the machine code: ceilings, and what they predict.

The decode kernel reads packed tiles so fast that the instructions of a warp bound it, rather than the memory. In the
prefill kernel the matrix units do, as long as other instructions issue meanwhile.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from kvsurgery.templates.kv_codes import empty_tiles  # noqa: E402
from kvsurgery.templates.kv_decode import ALONE, decode  # noqa: E402
from kvsurgery.templates.kv_layout import TILE, Quantization  # noqa: E402
from kvsurgery.templates.kv_prefill import prefill  # noqa: E402
from kvsurgery.templates.kv_softmax import Scoring, Span, Window  # noqa: E402
from kvsurgery.templates.kv_storage import HeadTable  # noqa: E402
from tests.templates.test_kernel_resources import CUOBJDUMP, OLDEST, check, compiled  # noqa: E402, F401

LONGER = 80  # instructions than any loop has but those over units of tokens

# quantization, tokens of a unit, and the most instructions that a warp may execute for one on A100 and H100
CEILINGS = [
    (None, 32, {80: 226, 90: 250}),
    (Quantization(8), 64, {80: 393, 90: 375}),
    (Quantization(4), 128, {80: 506, 90: 494}),
    (Quantization(2), 128, {80: 457, 90: 458}),
    (Quantization(4, group_size=32), 128, {80: 599, 90: 573}),
    (Quantization(4, group_size=64), 128, {80: 541, 90: 519}),
    (Quantization(4, "per-token", 32), 128, {80: 587, 90: 584}),
    (Quantization(4, "per-token"), 128, {80: 449, 90: 447}),
]
# the same with 8 query heads for each KV head, so that the 8 columns of a dot have none left for other groups
EIGHT = [
    (Quantization(4), 128, {80: 506, 90: 494}),
    (Quantization(4, group_size=32), 128, {80: 669, 90: 657}),
    (Quantization(4, "per-token"), 128, {80: 449, 90: 447}),
    (Quantization(4, "per-token", 32), 128, {80: 666, 90: 665}),
    (Quantization(8, group_size=32), 64, {80: 458, 90: 440}),
]

# By their data sheets: bytes of memory a second; multiprocessors; and the clock at which their lanes of two operations
# have 19.5 and 67 TFLOPS. Each of the four schedulers of a multiprocessor issues an instruction of a warp a cycle
DEVICES = {80: (2.039e12, 108, 1.41e9), 90: (3.35e12, 132, 1.98e9)}  # A100 of 80 GB and H100, both SXM
HEAD_DIM = 128


def named(quantization: Quantization | None) -> str:
    """A width in a table."""
    name = "16 bit" if quantization is None else f"{quantization.bits} bit {quantization.scheme}"
    return name + (f", groups of {quantization.group_size}" if quantization and quantization.group_size else "")


def predicted(target: int, quantization: Quantization | None, tokens: int, instructions: int) -> tuple[float, float]:
    """Shares of the bandwidth if a unit's instructions issue before or after its bytes arrive, or all meanwhile.

    One program has a warp for each scheduler, so that a unit's instructions of a warp are as many cycles.
    """
    size = 4 * HEAD_DIM * TILE if quantization is None else quantization.tile_bytes(HEAD_DIM)
    bandwidth, multiprocessors, clock = DEVICES[target]
    arriving = size * tokens / TILE / (bandwidth / multiprocessors / clock)
    return arriving / (arriving + instructions), min(arriving / instructions, 1.0)


def test_documented_predictions() -> None:
    """The tables in docs/kernels.md are what the model gives for the ceilings."""
    page = (Path(__file__).parents[2] / "docs/kernels.md").read_text()
    for quantization, tokens, ceilings in [*CEILINGS, *EIGHT]:
        line = f"| {named(quantization)} | {tokens} |"
        for target in (90, 80):
            apart, meanwhile = predicted(target, quantization, tokens, ceilings[target])
            line += f" {ceilings[target]} | {apart:.0%} | {meanwhile:.0%} |"
        assert line in page


@pytest.mark.parametrize("widths", [CEILINGS, EIGHT])
def test_groups_cost_little_more_than_whole_tiles(widths: list) -> None:
    """A token of 4 bits takes at most 1.5 times as many instructions."""
    four = [(how, tokens, ceilings) for how, tokens, ceilings in widths if how and how.bits == 4]
    whole = {how.scheme: (tokens, ceilings) for how, tokens, ceilings in four if how.group_size is None}
    for how, tokens, ceilings in four:
        for target, count in ceilings.items():
            of_whole = whole[how.scheme][1][target] / whole[how.scheme][0]
            assert count / tokens <= 1.5 * of_whole, named(how)


def machine_code(binary: Path) -> list[tuple[int, str]]:
    """Addresses and instructions of a kernel."""
    code = subprocess.run([CUOBJDUMP, "-sass", binary], capture_output=True, text=True, check=True).stdout
    return [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)]


def target_of(text: str) -> int | None:
    """The address that an instruction may go to."""
    target = re.search(r"\bBRA\S*\s.*?0x([0-9a-f]+)", text)
    return int(target[1], 16) if target else None


def loops(code: list[tuple[int, str]]) -> list[slice]:
    """Where the innermost loops over units are, in their order."""
    number = {at: place for place, (at, _) in enumerate(code)}
    ranges = []
    for place, (at, text) in enumerate(code):
        target = target_of(text)
        if target is not None and target < at:
            ranges.append((number[target], place))
    inner = [own for own in ranges if not any(own[0] <= of[0] and of[1] <= own[1] for of in ranges if of != own)]
    return [slice(first, last + 1) for first, last in sorted(inner) if last - first > LONGER]


def without_longest_skip(body: list[tuple[int, str]]) -> list[str]:
    """The instructions of a loop, less those that its longest branch forward passes over."""
    number = {at: place for place, (at, _) in enumerate(body)}
    skips = [(place, number.get(target_of(text), 0)) for place, (_, text) in enumerate(body)]
    first, last = max(skips, key=lambda skip: skip[1] - skip[0])
    return [text for _, text in [*body[: first + 1], *body[last:]]]


def launched(compiled: dict, batch: int, quantization: Quantization | None, binary: Path, group: int = 4):  # noqa: F811
    """The decode kernel of a batch of 8 KV heads with a group of query heads each, head_dim 128, bfloat16; the
    instructions of its first loop, which is over tiles, if there are any; and how many come before.
    """
    heads = 8
    each, row = torch.zeros(heads, dtype=torch.int32), torch.zeros(batch, heads, dtype=torch.int32)
    states = torch.zeros(2, batch, 64, HEAD_DIM, dtype=torch.bfloat16)
    table = HeadTable(*states, each, each, each, each, row)
    if quantization:
        tiles = empty_tiles(states[0], 8, quantization)
        table = table._replace(tiles=tiles, first_tiles=each, packed=row, quantization=quantization)
    query = torch.zeros(batch, heads * group, HEAD_DIM, dtype=torch.bfloat16)
    decode(query, table, torch.zeros(1, 1, dtype=torch.int32), Scoring(0.1), programs=8)
    binary.write_bytes(compiled["_decode_kernel"].asm["cubin"])
    code = machine_code(binary)
    first = loops(code)[0]
    return compiled["_decode_kernel"], [text for _, text in code[first]], first.start


@pytest.mark.skipif(not OLDEST, reason="the ceilings are those of the oldest Triton's code")
@pytest.mark.parametrize(("compiled", "target"), [(80, 80), (90, 90)], indirect=["compiled"])
def test_instructions_of_a_unit(compiled: dict, target: int, tmp_path: Path) -> None:  # noqa: F811
    """As a batch of one row launches it; nothing spills there."""
    found = []
    print(f"\n{f'decode kernel, sm_{target}':<37}{'tokens':>8}{'instructions':>14}{'per token':>11}{'ceiling':>9}")
    for group, (quantization, tokens, ceilings) in [*((4, each) for each in CEILINGS), *((8, each) for each in EIGHT)]:
        _, body, _ = launched(compiled, 1, quantization, tmp_path / "kernel.cubin", group)
        name = f"{named(quantization)}, {group} queries"
        print(f"{name:<37}{tokens:>8}{len(body):>14}{len(body) / tokens:>11.1f}{ceilings[target]:>9}")
        assert not [text for text in body if re.search(r"\b(LDL|STL)\b", text)], name
        found.append((len(body), ceilings[target]))
    assert all(count <= ceiling for count, ceiling in found)


# rows of a batch, and the most instructions before the loop over its units: of slots alone, and with tiles of 4 bits
BEFORE = {8: (610, 725), 64: (655, 890), 128: (655, 890), 136: (530, 620), 512: (530, 620), 4096: (530, 620)}


@pytest.mark.skipif(not OLDEST, reason="the ceilings are those of the oldest Triton's code")
@pytest.mark.parametrize(("compiled", "target"), [(80, 80), (90, 90)], indirect=["compiled"])
def test_instructions_before_the_first_unit(compiled: dict, target: int, tmp_path: Path) -> None:  # noqa: F811
    """A batch has one of three kernels; large ones have one more launch, which plans."""
    for place, quantization in enumerate((None, Quantization(4))):
        kernels = set()
        for rows, most in BEFORE.items():
            compiled.pop("_plan_kernel", None)
            kernel, body, before = launched(compiled, rows // 8, quantization, tmp_path / "kernel.cubin")
            print(
                f"sm_{target}, {named(quantization)}, {rows} rows: {before} instructions before {len(body)} of a unit"
            )
            assert before <= most[place]
            assert ("_plan_kernel" in compiled) == (rows > ALONE)
            kernels.add(kernel.hash)
        assert len(kernels) == 3
        check(compiled["_plan_kernel"], tmp_path, 1)


# of the prefill kernel, for full and for streaming heads: the most instructions that one of its 8 warps may execute for
# a tile of 64 keys and 128 queries that sees all of them
PREFILL = {None: {80: 622, 90: 405}, Window(16, 64): {80: 626, 90: 411}}
# of these instructions, those for the matrix units: of a warp, products of 16 x 8 x 16; of four warps together, 8
# products of 64 x 64 x 16 and 4 of 64 x 128 x 16. Both come to the 4 * 128 * 64 * 128 operations of a tile
PRODUCTS = {80: 128, 90: 12}
# by their data sheets, 312 and 989 TFLOPS: operations of a multiprocessor's matrix units in a cycle
MATRIX_OPERATIONS = {80: 2048, 90: 4096}


def predicted_prefill(target: int, instructions: int) -> tuple[float, float]:
    """Shares of the matrix units' rate if they wait while a tile's instructions issue, or work meanwhile."""
    multiplying = 4 * 128 * 64 * HEAD_DIM / MATRIX_OPERATIONS[target]
    issuing = 2 * instructions  # 8 warps on four schedulers
    return multiplying / (multiplying + issuing), min(multiplying / issuing, 1.0)


def test_documented_predictions_of_prefill() -> None:
    page = (Path(__file__).parents[2] / "docs/kernels.md").read_text()
    for window, ceilings in PREFILL.items():
        line = f"| {'streaming' if window else 'full'} |"
        for target in (90, 80):
            apart, meanwhile = predicted_prefill(target, ceilings[target])
            line += f" {ceilings[target]} | {apart:.0%} | {meanwhile:.0%} |"
        assert line in page


@pytest.mark.skipif(not OLDEST, reason="the ceilings are those of the oldest Triton's code")
@pytest.mark.parametrize(("compiled", "target"), [(80, 80), (90, 90)], indirect=["compiled"])
def test_instructions_of_a_tile_of_prefill(compiled: dict, target: int, tmp_path: Path) -> None:  # noqa: F811
    """Of tiles that nothing masks, which most are in a long prompt; nothing spills there."""
    query, keys = (torch.zeros(1, heads, 512, HEAD_DIM, dtype=torch.bfloat16) for heads in (32, 8))
    for window, ceilings in PREFILL.items():
        prefill(query, keys, keys, Span(0), Scoring(0.1), window)
        binary = tmp_path / "kernel.cubin"
        binary.write_bytes(compiled["_prefill_kernel"].asm["cubin"])
        code = machine_code(binary)
        [loop] = loops(code)
        body = without_longest_skip(code[loop])
        products = [text for text in body if re.search(r"\bHG?MMA\b", text)]
        heads = "streaming" if window else "full"
        print(f"\nprefill kernel, sm_{target}, {heads}: {len(body)} instructions, {len(products)} for the matrix units")
        assert len(products) == PRODUCTS[target]
        assert not [text for text in body if re.search(r"\b(LDL|STL)\b", text)]
        assert len(body) <= ceilings[target]
