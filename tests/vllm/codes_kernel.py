"""Run the GPU's attention over quantized tiles in Triton's interpreter, which TRITON_INTERPRET=1 turns on, and compare
outputs and caches with those of the CPU's, step by step.

Requests come in chunks, one begins with blocks of another, and all decode. What no request owns is NaN.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton.backends import backends

# vLLM's CPU build turns Triton off where it has no backend of the name "cpu"; the interpreter needs none
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

from vllm.config import CUDAGraphMode  # noqa: E402

from kvsurgery.templates.kv_codes import nearest  # noqa: E402
from kvsurgery.templates.kv_layout import TILE, Quantization  # noqa: E402
from kvsurgery.templates.kv_rounding import QueryRounding  # noqa: E402
from kvsurgery.vllm import cpu_codes, triton_codes  # noqa: E402
from kvsurgery.vllm.tiles import Tiling  # noqa: E402

QUERY_HEADS, KV_HEADS, HEAD_DIM, SIZE = 4, 2, 32, 16
ROW, SHARED = 400, 1  # slots of a request; blocks of `TILE` tokens that the third one has from the first


class Case(NamedTuple):
    """A quantization, and how attention scores; rounding by the queries and speculation where `rounded`."""

    quantization: Quantization
    softcap: float | None = None
    learned: bool = False
    rounded: bool = False


CASES = (
    Case(Quantization("k4v3", "per-token", 16, residual=0, sink=0), softcap=20.0, learned=True),
    Case(Quantization(3, residual=5, rotate="both"), rounded=True),
)
# tokens of each request before a step, and after it
STEPS = (((0, 0, 0), (137, 3, 0)), ((137, 3, 128), (139, 4, 135)), ((139, 4, 135), (140, 5, 136)))


def caches(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of newest tokens and of tiles, of the second of three layers."""
    page = case.quantization.tile_bytes(HEAD_DIM, 4)
    newest = torch.full((3 * ROW // SIZE + 1, 3, KV_HEADS, SIZE, 2 * HEAD_DIM), torch.nan)[:, 1]
    return newest, torch.full((3 * ROW // TILE + 2, 3, KV_HEADS, 1, page), 255, dtype=torch.uint8)[:, 1]


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Block tables of both groups, in which the third request shares the first blocks of the first one."""
    generator = torch.Generator().manual_seed(1)
    newest, tiles = (
        torch.randperm(3 * (ROW // size), generator=generator).view(3, -1).int() + 1 for size in (SIZE, TILE)
    )
    newest[2, : SHARED * TILE // SIZE], tiles[2, :SHARED] = newest[0, : SHARED * TILE // SIZE], tiles[0, :SHARED]
    return newest, tiles


def metadata(before: tuple[int, ...], after: tuple[int, ...], table: torch.Tensor, size: int) -> SimpleNamespace:
    """What vLLM tells a builder of a step, for the requests that have new tokens."""
    rows = [row for row in range(3) if after[row] > before[row]]
    lengths = torch.tensor([after[row] for row in rows], dtype=torch.int32)
    counts = torch.tensor([after[row] - before[row] for row in rows])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    slots = []
    for row in rows:
        token = torch.arange(before[row], after[row])
        slots.append(table[row, token // size] * size + token % size)
    return SimpleNamespace(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        block_table_tensor=table[rows],
        slot_mapping=torch.cat([*slots, torch.full((3,), -1)]).long(),  # a batch may be padded
    )


def both_metadata(before: tuple[int, ...], after: tuple[int, ...]) -> list[SimpleNamespace]:
    """What vLLM tells the builders of both groups."""
    return [metadata(before, after, table, size) for table, size in zip(tables(), (SIZE, TILE), strict=True)]


class Attention:
    """A layer's attention by the backends of a module, with the caches of both groups, without an engine."""

    def __init__(
        self, module: Any, case: Case, learned: torch.Tensor | None, mode: CUDAGraphMode = CUDAGraphMode.NONE
    ) -> None:
        torch.manual_seed(3)
        self.module = module
        self.newest_cache, self.tile_cache = caches(case)
        options = {"layer_name": "newest", "num_heads": QUERY_HEADS, "num_kv_heads": KV_HEADS, "head_size": HEAD_DIM}
        tiling, dtype = Tiling.of(case.quantization), self.newest_cache.dtype
        newest = SimpleNamespace(**options, kv_cache=self.newest_cache, kv_cache_torch_dtype=dtype, tiling=tiling)
        round_keys = nearest
        if case.rounded:
            order = torch.stack([torch.randperm(HEAD_DIM) for _ in range(KV_HEADS)])
            round_keys = QueryRounding(order, torch.randn(KV_HEADS, HEAD_DIM, HEAD_DIM).mul(0.1).triu(1))
        self.layer = SimpleNamespace(
            **options, newest=newest, tiling=tiling, quantization=case.quantization, round_keys=round_keys
        )
        self.config = SimpleNamespace(
            compilation_config=SimpleNamespace(
                static_forward_context={"newest": newest, "tiles": self.layer}, cudagraph_mode=mode
            ),
            model_config=SimpleNamespace(dtype=torch.float32),
            speculative_config=object() if case.rounded else None,
        )
        groups = (module.NewestBackend, "newest", SIZE), (module.CodesBackend, "tiles", TILE)
        self.builders = [
            backend.get_builder_cls()(
                SimpleNamespace(block_size=size, lean=False), [name], self.config, torch.device("cpu")
            )
            for backend, name, size in groups
        ]
        self.implementation = object.__new__(module.CodesImpl)  # without an engine
        self.implementation.num_kv_heads, self.implementation.num_queries_per_kv = KV_HEADS, QUERY_HEADS // KV_HEADS
        self.implementation.head_size, self.implementation.scale = HEAD_DIM, HEAD_DIM**-0.5
        self.implementation.logits_soft_cap, self.implementation.sinks = case.softcap, learned

    def build(self, given: list[SimpleNamespace]) -> list[Any]:
        """The step of each cache group, from what vLLM tells its builder."""
        return [builder.build(0, one) for builder, one in zip(self.builders, given, strict=True)]

    def forward(self, steps: list[Any], states: list[torch.Tensor], output: torch.Tensor) -> None:
        """Store keys and values, and write the attention of queries to `output`."""
        context = SimpleNamespace(attn_metadata={"newest": steps[0]})
        self.module.get_forward_context = lambda: context
        self.implementation.forward(self.layer, *states, self.tile_cache, steps[1], output)


def run(module: Any, case: Case, states: list[list[torch.Tensor]], learned: torch.Tensor | None) -> list:
    """Outputs of all steps by the backends of a module, and the caches after them."""
    attention, outputs = Attention(module, case, learned), []
    for (before, after), of_step in zip(STEPS, states, strict=True):
        outputs.append(torch.zeros_like(of_step[0]))
        attention.forward(attention.build(both_metadata(before, after)), of_step, outputs[-1])
    return [*outputs, attention.newest_cache, attention.tile_cache]


def written_by_dummies() -> torch.Tensor:
    """Pages that a step without requests stores to: vLLM gives its tokens slots of -1, and tables of zeros."""
    newest, _ = Attention(triton_codes, CASES[0], None).builders
    given = metadata((0, 0, 0), (3, 1, 1), torch.zeros(3, 4, dtype=torch.int32), SIZE)
    given.slot_mapping.fill_(-1)
    return newest.build(0, given).pages


def compare(case: Case) -> float:
    """The largest error of an output; caches are the same to the bit."""
    torch.manual_seed(0)
    states = []
    for before, after in STEPS:
        count = sum(after) - sum(before) + 3
        heads = QUERY_HEADS, KV_HEADS, KV_HEADS
        states.append([torch.randn(count, number, HEAD_DIM) for number in heads])
    learned = torch.randn(QUERY_HEADS) if case.learned else None
    *expected, newest, tiles = run(cpu_codes, case, states, learned)
    *found, found_newest, found_tiles = run(triton_codes, case, states, learned)
    assert found_tiles.equal(tiles)
    assert found_newest.nan_to_num(1e9).equal(newest.nan_to_num(1e9))
    errors = [(one - other).abs().nan_to_num(float("inf")).max() for one, other in zip(found, expected, strict=True)]
    return max(errors).item()


if __name__ == "__main__":
    triton_codes.programs_of = lambda device: 5
    assert written_by_dummies().unique().tolist() == [0], "only vLLM's block 0 belongs to no request"
    errors = [compare(case) for case in CASES]
    print(errors)
    sys.exit(not max(errors) < 2e-5)
