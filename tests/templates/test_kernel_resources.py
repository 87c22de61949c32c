"""The kernels compiled for A100 and H100 without one, as a batch of one row launches them.

No stack, but for decoding over tiles and packing clipped tokens; room for the blocks that should share a
multiprocessor; and the shared memory of a block of some cases. `make test-ptx-all` compiles every case in 16 and in 32
bit, and all for stack and registers.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia import compiler  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from kvsurgery.templates import kv_compact, kv_decode, kv_kernels, kv_move, kv_pack, kv_packed, kv_reselect, kv_store  # noqa: E402
from kvsurgery.templates.kv_codes import empty_tiles, rotation  # noqa: E402
from kvsurgery.templates.kv_hold import HeldHeads  # noqa: E402
from kvsurgery.templates.kv_layout import Quantization, Selection  # noqa: E402
from kvsurgery.templates.kv_prefill import prefill, prefill_with_lse  # noqa: E402
from kvsurgery.templates.kv_softmax import Scoring, Span, Window  # noqa: E402
from kvsurgery.templates.kv_storage import HeadTable  # noqa: E402
from tests.helpers import kernel_cases  # noqa: E402
from tests.helpers.cases import ALL, some  # noqa: E402

SHARED = {80: 164 * 1024, 90: 228 * 1024}  # bytes of a multiprocessor, of which each block costs one kilobyte more
COMBINE_BLOCKS, APPEND_BLOCKS = 2, 12
LIMITS = {80: 99 * 1024, 90: 227 * 1024}  # of a block; RTX 30 and 40, which have the least, run the code that A100 does
TILES_SHARED = 64 * 1024  # bytes of a block that decodes over tiles of 16 bits, which AMD's devices have too
REGISTERS = 64 * 1024  # of a multiprocessor
STACK = 32  # bytes: a few words that a decode program keeps from row to row; test_kernel_instructions.py has its loops
PACK_STACK = 64  # bytes: what a program that packs clipped tokens keeps, once in 128 tokens
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
OLDEST = triton.__version__.startswith("3.6.")  # that pyproject.toml allows


class Device:
    """Enough of a Triton driver to compile for a GPU that is not there."""

    def __init__(self, capability: int, number: int = 0):
        self.target, self.number = GPUTarget("cuda", capability, 32), number

    def get_current_device(self) -> int:  # Triton keeps what it has compiled for each device
        return self.target.arch + self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@pytest.fixture
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    """What the wrappers would launch, by kernel: launches compile only."""
    kernels, run = {}, JITFunction.run

    def compile_only(self, *args, warmup, **kwargs):
        kernels[self.__name__] = run(self, *args, warmup=True, **kwargs)

    monkeypatch.setattr(JITFunction, "run", compile_only)
    active = driver._active
    driver.set_active(Device(request.param))
    yield kernels
    driver.set_active(active)


@pytest.fixture
def allocated(compiled: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict:
    """As `compiled`, only as far as shared memory is allocated: there is no machine code."""

    def allocate(self, source, metadata, options, capability) -> str:
        passes = compiler.passes
        manager = compiler.ir.pass_manager(source.context)
        passes.ttgpuir.add_combine_tensor_select_and_if(manager)
        passes.ttgpuir.add_allocate_warp_groups(manager)
        passes.convert.add_scf_to_cf(manager)
        passes.gluon.add_inliner(manager)
        version = compiler.get_ptx_version_from_options(options, capability)
        compiler.nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, version)
        manager.run(source, "allocate")
        metadata |= {"name": "kernel", "shared": source.get_int_attr("ttg.shared")}
        return ""

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler.CUDABackend, "make_llir", allocate)
    monkeypatch.setattr(compiler.CUDABackend, "make_ptx", lambda *args: "")
    monkeypatch.setattr(compiler.CUDABackend, "make_cubin", lambda *args: b"")
    driver.set_active(Device(driver.active.target.arch, number=1000))
    return compiled


def cases(names: str, nearest: list[tuple], *others: tuple) -> pytest.MarkDecorator:
    """Parametrize a test by target and case.

    The oldest Triton compiles them for A100, which together leave the least room: the cases nearest to a limit, one of
    each way through a kernel, and every sixth of the others. The newest one compiles some of the nearest for H100.
    """
    every = [(80, case) for case in [*nearest, *some(others, 6)]] if OLDEST else []
    every += [(90, case) for case in some(nearest, 4)] if ALL or not OLDEST else []
    given = [pytest.param(target, *case, id=f"sm{target}-{'-'.join(map(str, case))}") for target, case in every]
    return pytest.mark.parametrize(f"compiled, {names}", given, indirect=["compiled"])


def check(kernel, folder: Path, blocks: int, most: int = 0) -> None:
    """`most` bytes of stack, and `blocks` of the kernel's blocks fit on a multiprocessor; one where memory is less."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    report = subprocess.run([CUOBJDUMP, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", report)[1]) for name in ("REG", "STACK"))
    shared, threads, capability = kernel.metadata.shared, 32 * kernel.metadata.num_warps, kernel.metadata.target.arch
    used = f"{registers} registers x {threads}, {shared} bytes shared, {stack} of stack"
    print(f"sm_{capability} {kernel.metadata.name}: {used}")
    assert stack <= most
    assert blocks * registers * threads <= REGISTERS
    assert shared <= LIMITS[capability]
    assert blocks * (shared + 1024) <= SHARED[capability]


@cases(
    "dtype, head_dim, group",
    [(torch.bfloat16, 128, 4), (torch.bfloat16, 256, 1)],
    *((torch.bfloat16, head_dim, group) for head_dim, group in ((64, 1), (64, 4), (128, 1), (256, 4))),
    *((torch.float16, head_dim, group) for head_dim in (64, 128, 256) for group in (1, 4)),
)
def test_decode(compiled: dict, dtype: torch.dtype, head_dim: int, group: int, tmp_path: Path) -> None:
    batch, heads = 1, 8
    each, row = torch.zeros(heads, dtype=torch.int32), torch.zeros(batch, heads, dtype=torch.int32)
    states, token = torch.zeros(batch, 4096, head_dim, dtype=dtype), torch.zeros(batch, heads, 1, head_dim, dtype=dtype)
    query = torch.zeros(batch, heads * group, head_dim, dtype=dtype)
    table = HeadTable(states, states, each, each, each, each, row)
    learned = torch.zeros(heads * group, dtype=dtype) if head_dim == 64 else None
    columns = torch.zeros(1, 1, dtype=torch.int32)
    kv_store.append(table, columns, query, token, token)
    kv_decode.decode(query, table, columns, Scoring(0.1, 30.0 if group == 1 else None, sinks=learned), programs=8)
    check(compiled["_append_kernel"], tmp_path, 16)
    decode = compiled["_decode_kernel"]
    assert decode.metadata.maxnreg == kv_kernels.REGISTERS
    check(decode, tmp_path, kv_decode.PROGRAMS)
    check(compiled["_combine_kernel"], tmp_path, COMBINE_BLOCKS)


@cases(
    "bits, scheme, size, dtype, head_dim, group, windows",
    [
        (4, "kivi", None, torch.bfloat16, 128, 4, False),
        (4, "kivi", None, torch.float16, 256, 4, False),
        (2, "kivi", None, torch.float16, 128, 1, False),
        (4, "per-token", 64, torch.float16, 128, 4, False),
        (4, "kivi", 32, torch.bfloat16, 128, 4, False),
        (4, "kivi", 32, torch.bfloat16, 128, 8, False),
        (2, "per-token", 32, torch.bfloat16, 128, 8, False),
        *((bits, "kivi", None, torch.bfloat16, 128, 4, True) for bits in (8, 3, 2)),
        ("k3v2", "kivi", None, torch.bfloat16, 128, 4, False),
        ("k2v8", "per-token", None, torch.bfloat16, 128, 4, False),
    ],
    *((bits, "kivi", None, torch.bfloat16, 64, 4, False) for bits in (8, 4, 2)),
    *((bits, "kivi", None, torch.bfloat16, 128, 4, False) for bits in (8, 2)),
    (4, "kivi", None, torch.float16, 128, 1, False),
    (8, "kivi", 16, torch.bfloat16, 64, 7, False),
    (4, "kivi", 64, torch.bfloat16, 128, 4, False),
    (4, "kivi", None, torch.bfloat16, 80, 1, False),
    (4, "per-token", None, torch.bfloat16, 128, 4, False),
    (4, "kivi", None, torch.bfloat16, 128, 4, True),
    (4, "per-token", None, torch.bfloat16, 64, 1, True),
)
def test_decode_of_tiles(
    compiled: dict, bits, scheme, size, dtype, head_dim: int, group: int, windows: bool, tmp_path: Path
) -> None:
    batch, heads, quantization = 1, 8, Quantization(bits, scheme, size)
    each, row = torch.zeros(heads, dtype=torch.int32), torch.zeros(batch, heads, dtype=torch.int32)
    states, packed = torch.zeros(batch, 4096, head_dim, dtype=dtype), torch.zeros_like(row)
    query, tiles = torch.zeros(batch, heads * group, head_dim, dtype=dtype), empty_tiles(states, 64, quantization)
    stored = tiles, each, packed, each if windows else None, quantization, heads, heads
    table = HeadTable(states, states, each, each, each, each, row, *stored)
    columns, token = torch.zeros(1, 1, dtype=torch.int32), states[:, :heads, None]
    kv_store.append(table, columns, query, token, token)
    check(compiled["_append_kernel"], tmp_path, APPEND_BLOCKS)
    kv_decode.decode(query, table, columns, Scoring(0.1, 30.0 if group == 1 else None), programs=8)
    decode = compiled["_decode_kernel"]
    assert decode.metadata.shared <= TILES_SHARED
    check(decode, tmp_path, kv_decode.PROGRAMS, STACK)
    options = kv_packed.options(head_dim, 1 << (group - 1).bit_length(), quantization)
    parts = options["K_PARTS"], options["V_PARTS"]
    words = sum(count * (1 + (width == 3)) for count, width in zip(parts, quantization.widths, strict=True))
    of_token = max(quantization.value_groups(head_dim)[1] // 2, 1)  # a load has the scales of two groups
    loads = words + (1 if scheme == "kivi" else of_token) + of_token, 2  # of packed units, of slots
    # the compiler may copy a few scales once for each of two uses
    assert decode.asm["ttgir"].count("async_copy_global_to_local") >= sum(loads) * kv_decode.STAGES
    check(compiled["_combine_kernel"], tmp_path, COMBINE_BLOCKS)
    kv_pack.flush(table, row)
    check(compiled["_flush_kernel"], tmp_path, 1, PACK_STACK if scheme == "per-token" else 0)


@pytest.mark.parametrize("compiled", [80, 90], indirect=True)
def test_decode_of_many_rows(compiled: dict, tmp_path: Path) -> None:
    """Where a launch plans, units still come by asynchronous copies."""
    batch, heads, quantization = 17, 8, Quantization(4)
    each, row = torch.zeros(heads, dtype=torch.int32), torch.zeros(batch, heads, dtype=torch.int32)
    states = torch.zeros(batch, 64, 128, dtype=torch.bfloat16)
    stored = empty_tiles(states, 8, quantization), each, row, None, quantization
    table = HeadTable(states, states, each, each, each, each, row, *stored)
    query = torch.zeros(batch, heads * 4, 128, dtype=torch.bfloat16)
    kv_decode.decode(query, table, torch.zeros(1, 1, dtype=torch.int32), Scoring(0.1), programs=8)
    decode = compiled["_decode_kernel"]
    assert decode.asm["ttgir"].count("async_copy_global_to_local") == 6 * kv_decode.STAGES
    check(decode, tmp_path, kv_decode.PROGRAMS, STACK)
    check(compiled["_plan_kernel"], tmp_path, 1)


@cases(
    "quantization, dtype, head_dim",
    [(None, torch.bfloat16, 80), (Quantization(8), torch.bfloat16, 128), (Quantization(4), torch.bfloat16, 256)],
    *((None, torch.bfloat16, head_dim) for head_dim in (64, 128, 256)),
    *((None, torch.float32, head_dim) for head_dim in (64, 80, 128, 256)),
    *((Quantization(bits), torch.bfloat16, 128) for bits in (4, 3, 2)),
    (Quantization(8, "kivi", 16), torch.float16, 80),
    (Quantization(4, "per-token"), torch.float16, 128),
    (Quantization(2, "per-token", 64), torch.bfloat16, 256),
)
def test_compact(compiled: dict, quantization, dtype: torch.dtype, head_dim: int, tmp_path: Path) -> None:
    batch, heads, prompt = 1, 8, 1000
    each, row = torch.zeros(heads, dtype=torch.int32), torch.zeros(batch, heads, dtype=torch.int32)
    states, kept = torch.zeros(batch, 4096, head_dim, dtype=dtype), torch.zeros(batch, heads, 300, dtype=torch.int64)
    keys = torch.zeros(batch, prompt, heads, head_dim, dtype=dtype).transpose(1, 2)
    table = HeadTable(states, states, each, each, each, each, row)
    if quantization:
        tiles = empty_tiles(states, 64, quantization)
        table = table._replace(tiles=tiles, first_tiles=each, packed=row, quantization=quantization)
    kv_compact.compact(table, keys, keys, kept)
    check(compiled["_compact_kernel"], tmp_path, 1 if quantization else 8)


@cases(
    "quantization, dtype, head_dim, group, select",
    [
        (None, torch.bfloat16, 128, 4, "attention"),
        (None, torch.bfloat16, 256, 8, "value-norm"),
        (None, torch.float32, 128, 4, "attention"),
        (Quantization(4, "per-token"), torch.bfloat16, 128, 4, "attention"),
        (Quantization(3, "per-token", 64), torch.float16, 256, 8, "value-norm"),
        (Quantization("k3v2", "per-token"), torch.bfloat16, 128, 4, "attention"),
    ],
    *((None, torch.bfloat16, 64, group, "attention") for group in (1, 7)),
    (None, torch.float16, 80, 4, "value-norm"),
    (None, torch.float32, 256, 1, "value-norm"),
    *((Quantization(bits, "per-token", 32), torch.bfloat16, 128, 1, "attention") for bits in (8, 2)),
    (Quantization(8, "per-token"), torch.bfloat16, 256, 4, "attention"),
)
def test_renew(
    compiled: dict, quantization, dtype: torch.dtype, head_dim: int, group: int, select: str, tmp_path: Path
) -> None:
    batch, heads = 1, 8
    each, row = torch.zeros(heads, dtype=torch.int32), torch.zeros(batch, heads, dtype=torch.int32)
    states, asked = torch.zeros(batch, 4096, head_dim, dtype=dtype), torch.zeros(batch, heads * group, 8, head_dim)
    table, selection = HeadTable(states, states, each, each, each, each, row), Selection(8, 7, "max", 32, select)
    if quantization:
        stored = empty_tiles(states, 64, quantization), each, torch.zeros_like(row), None, quantization
        table = HeadTable(states, states, each, each, each, each, row, *stored)
    scoring = Scoring(0.1, 30.0 if group == 1 else None, sinks=torch.zeros(heads * group) if group == 8 else None)
    kept = kv_reselect.select(table, each, asked.to(dtype), 1000, 300, selection, scoring)
    kv_move.move(table, kept, 1000)
    # without matrix units, dot products in float32 spill; heads select once for many tokens
    spilled = 0 if dtype != torch.float32 else 192 if head_dim == 128 else 1280
    check(compiled["_select_kernel"], tmp_path, 1, spilled)
    check(compiled["_move_codes_kernel" if quantization else "_move_kernel"], tmp_path, 1)


@pytest.mark.parametrize(("bits", "dtype"), [(bits, dtype) for bits in (8, 4, 2) for dtype in ("bf16", "fp16")])
def test_unpacking(bits: int, dtype: str) -> None:
    """What the assembly does to two words, in torch, for every word in the low half."""
    low = torch.arange(2**16)
    high = low.flip(0) * 40503 % 2**16
    words, kind = high << 16 | low, {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    for plane in range(16 // bits):
        shift, mask, exponent, added_mask, added = kv_packed._unpacking(plane, bits, 7 if dtype == "bf16" else 10)
        shifted = words >> shift
        terms = shifted & mask * 0x10001 | exponent * 0x10001, shifted & added_mask * 0x10001 ^ added * 0x10001
        for place, of_half in ((0, low), (16, high)):
            first, second = ((term >> place).to(torch.uint16).view(kind) for term in terms)
            codes = (of_half >> plane * bits & 2**bits - 1) - 2 ** (bits - 1)
            assert torch.equal((first + second).long(), codes)


@pytest.mark.parametrize(("bits", "kind"), [(bits, kind) for bits in (8, 4, 2) for kind in ("bf16", "fp16")])
def test_raw_codes(bits: int, kind: str) -> None:
    """The same without an exponent: a code is its float times a power of two, and 2 ** place times as much."""
    dtype, exponent = {"bf16": (torch.bfloat16, 133), "fp16": (torch.float16, 24)}[kind]
    low = torch.arange(2**16)
    high = low.flip(0) * 40503 % 2**16
    words = high << 16 | low
    for plane in range(16 // bits):
        asm = kv_packed._raw_asm(plane, bits)
        if "prmt" in asm:
            assert "0x4341" in asm  # bytes 1 and 3 with bytes of zero above them
            found = words >> 8 & 0xFF00FF
        else:
            shift, mask = (int(number) for number in re.findall(r"(?:\$1|word), (\d+);", asm))
            found = words >> shift & mask
        for place, of_half in ((0, low), (16, high)):
            floats = (found >> place & 0xFFFF).to(torch.uint16).view(dtype).double()
            codes = of_half >> plane * bits & 2**bits - 1
            assert torch.equal(floats * 2.0 ** (exponent - kv_packed._raw_place(plane, bits, True)), codes.double())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_unpacking_of_three_bits(dtype: str) -> None:
    """What the assembly does to two words and their third bits, in torch, for many of them."""
    low, kind = torch.arange(2**16), {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    high, mantissa = low.flip(0) * 40503 % 2**16, 7 if dtype == "bf16" else 10
    thirds = [part * 2654435761 % 2**32 >> 24 for part in (low, high)]
    words, third = high << 16 | low, thirds[1] << 16 | thirds[0]
    exponent, added = {"bf16": (0x4300, 0xC304), "fp16": (0x6400, 0xE404)}[dtype]
    for plane in range(8):
        asm = kv_packed._unpacking_third_asm(plane, mantissa, False)
        assert f"mov.b32 b, {added * 0x10001};" in asm
        assert f"lop3.b32 a, word, {3 * 0x10001}, {exponent * 0x10001}, 0xea;" in asm
        [(to, by)] = re.findall(r"(shl|shr).b32 word, \$2, (\d+);", asm)
        shifted = third << int(by) if to == "shl" else third >> int(by)
        found = words >> 2 * plane & 3 * 0x10001 | exponent * 0x10001 | shifted & 4 * 0x10001
        for place, of_half, of_third in ((0, low, thirds[0]), (16, high, thirds[1])):
            floats = (found >> place & 0xFFFF).to(torch.uint16).view(kind).float()
            codes = (of_half >> 2 * plane & 3) + 4 * (of_third >> plane & 1) - 4
            assert torch.equal((floats - 2**mantissa - 4).long(), codes)


KINDS = "full", "streaming", "few tokens"


@cases(
    "dtype, head_dim, group, kind",
    [(torch.bfloat16, head_dim, 4, kind) for head_dim in (128, 256) for kind in KINDS],
    *((torch.bfloat16, 64, 4, kind) for kind in KINDS),
    *((torch.bfloat16, head_dim, 1, kind) for head_dim in (64, 128, 256) for kind in KINDS),
    *((torch.float16, 128, 4, kind) for kind in KINDS),
)
def test_prefill(compiled: dict, dtype: torch.dtype, head_dim: int, group: int, kind: str, tmp_path: Path) -> None:
    batch, heads, past, tokens = 1, 8, 500, 4 if kind == "few tokens" else 1000
    query = torch.zeros(batch, tokens, heads * group, head_dim, dtype=dtype).transpose(1, 2)
    states = torch.zeros(batch, heads, past + tokens, head_dim, dtype=dtype)
    padding = torch.zeros(batch, dtype=torch.int64)
    if kind == "streaming":
        window = states[:, :, past - 255 :]
        sinks = states[:, :, :64], states[:, :, :64]
        scoring = Scoring(0.1, sinks=torch.zeros(heads * group, dtype=dtype) if head_dim == 64 else None)
        prefill(query, window, window, Span(past, padding, past - 255), scoring, Window(64, 256, sinks))
    else:
        span = Span(past, padding, first=None, limit=400 if group == 4 else None)
        prefill_with_lse(query, states, states, span, Scoring(0.1, 30.0))
    check(compiled["_prefill_kernel"], tmp_path, 1)


@pytest.mark.parametrize("compiled", [80], indirect=True)
def test_arguments_of_one_compile(compiled: dict) -> None:
    """Triton takes an integer argument of 1 for a constant, which has other types than a variable."""
    one, row = torch.ones(1, dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32)
    states, query = torch.zeros(1, 1, 2, 6, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 6, dtype=torch.bfloat16)
    table, quantization, scoring = (
        HeadTable(states[0], states[0], one, one, one, one, row),
        Quantization(8),
        Scoring(1.0),
    )
    tiles = empty_tiles(states[0], 1, quantization)
    packed = table._replace(tiles=tiles, first_tiles=one, packed=row, quantization=quantization)
    matrix = rotation(6, torch.float32, states.device)
    packed = packed._replace(rotated_keys=1, rotated_values=1, matrix=matrix)
    prompt = states[:, :, 1:]
    kv_pack.flush(packed, row)
    for each in (table, packed):
        kv_store.append(each, row, query[0], query, query)
        kv_decode.decode(query[0], each, row, scoring, programs=1)
        kv_compact.compact(each, prompt, prompt, row[None])
    many = states[0].expand(kv_decode.ALONE + 1, -1, -1)  # more rows than are launched without a plan
    of_many = table._replace(keys=many, values=many, skipped=row.expand(len(many), 1))
    kv_decode.decode(query[0].expand(len(many), -1, -1), of_many, row, scoring, programs=1)
    by_token = Quantization(8, "per-token", residual=1)
    moved = packed._replace(tiles=empty_tiles(states[0], 1, by_token), quantization=by_token)
    for each in (table, moved):
        kept = kv_reselect.select(each, one, query, 1, 1, Selection(1, 1, "max", 1), scoring)
        kv_move.move(each, kept, 1)
    prefill(query, prompt, prompt, Span(1, first=1), scoring, Window(1, 1, (states, states)))
    assert len(compiled) == 10


@pytest.mark.parametrize("rows", [1, kv_decode.ALONE, kv_decode.ALONE + 1])
def test_launches_of_a_decode_step(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three per layer: append, decode and combine. Batches of more than `ALONE` rows add a launch that plans."""
    launched = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **kwargs: launched.append(kernel.__name__))
    one, row = torch.ones(1, dtype=torch.int32), torch.ones(rows, 1, dtype=torch.int32)
    states, query = torch.zeros(rows, 2, 8, dtype=torch.bfloat16), torch.zeros(rows, 1, 1, 8, dtype=torch.bfloat16)
    table = HeadTable(states, states, one, one, one, one, row)
    asking = kv_store.append(table, row[:1], query[:, 0], query, query)
    kv_decode.decode(asking, table, row[:1], Scoring(1.0), programs=1)
    planned = ["_plan_kernel"] if rows > kv_decode.ALONE else []
    assert launched == ["_append_kernel", *planned, "_decode_kernel", "_combine_kernel"]


class Operations(TorchDispatchMode):
    """Notes what torch computes: views and new memory are nothing."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func.overloadpacket.__name__ not in ("empty", "new_empty"):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", [0, 5, -1])
def test_launches_of_a_selection(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two per layer, also where codes move, and torch does nothing besides."""
    case, launched, operations = kernel_cases.RENEW[number], [], Operations()
    renew = HeldHeads.renew

    def watched(heads: HeldHeads, column: int, kernels: bool = False) -> None:
        with operations if kernels else nullcontext():
            renew(heads, column, kernels)

    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **kwargs: launched.append(kernel.__name__))
    monkeypatch.setattr(HeldHeads, "renew", watched)
    with suppress(AssertionError):  # nothing is computed
        kernel_cases.check_renew(case, torch.bfloat16, "cpu")
    assert launched == ["_select_kernel", "_move_codes_kernel" if case.quantization else "_move_kernel"]
    assert operations.names == []


# A100 has the least room, and H100 instructions of its own only where 64 rows and more of 16 bits are multiplied, in
# prefill. What counts is an element's size
CASES = [
    *((80, *case, dtype) for case in kernel_cases.COMPARISONS for dtype in (torch.float32, torch.bfloat16)),
    *((90, kernel_cases.check_prefill, (case,), torch.bfloat16) for case in kernel_cases.PREFILL),
]


@pytest.mark.skipif(not OLDEST, reason="the oldest Triton compiles these cases")
@pytest.mark.parametrize(
    ("compiled", "compare", "case", "dtype"),
    [
        pytest.param(
            target, compare, case, dtype, id=f"sm{target}-{compare.__name__}-{'-'.join(map(str, case))}-{dtype}"
        )
        for target, compare, case, dtype in some(CASES, 13)
    ],
    indirect=["compiled"],
)
def test_shared_memory(allocated: dict, compare, case: tuple, dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(kernel_cases, "check", lambda *args, **options: None)
    with suppress(AssertionError):  # nothing is computed
        compare(*case, dtype, "cpu")
    assert allocated
    for kernel in allocated.values():
        assert kernel.metadata.shared <= LIMITS[kernel.metadata.target.arch]
