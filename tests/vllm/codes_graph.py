"""Replay decode steps over quantized tiles from a stand-in for CUDA graphs, in Triton's interpreter, which
TRITON_INTERPRET=1 turns on, and compare outputs and caches with those of steps without a graph.

What vLLM keeps in place stays in place here, and batches are padded as its model runners pad them. What no request owns
is NaN.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from triton.backends import backends

# vLLM's CPU build turns Triton off where it has no backend of the name "cpu"; the interpreter needs none
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode  # noqa: E402
from vllm.v1.worker.gpu.attn_utils import get_attn_cg_support  # noqa: E402
from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: E402

from kvsurgery.templates.kv_layout import TILE, Quantization  # noqa: E402
from kvsurgery.vllm import cpu_codes, paged_codes, paged_pack, triton_codes  # noqa: E402
from kvsurgery.vllm.triton_budgets import BudgetedBackend  # noqa: E402
from tests.helpers.cases import some  # noqa: E402
from tests.helpers.tape import Tape, noted  # noqa: E402
from tests.vllm.codes_kernel import (  # noqa: E402
    CASES,
    HEAD_DIM,
    KV_HEADS,
    QUERY_HEADS,
    SHARED,
    Attention,
    Case,
    both_metadata,
    tables,
)

FULL = CUDAGraphMode.FULL_AND_PIECEWISE
REPLAYED = CASES[0], Case(Quantization(3, residual=5, rotate="both"))
ROOM = 4  # requests of the largest graph
SIZES = ROOM, 2  # of all graphs
# new tokens of each request, and the size of the graph, with padding; one step of several tokens has none
STEPS = ((1, 1, 1), 4), ((1, 0, 1), 2), ((2, 0, 1), None), ((1, 1, 1), 4), ((0, 1, 0), 2), ((1, 0, 1), 4)


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    kernel[grid](**arguments)


class Noted:
    """A kernel whose launches a tape notes."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(noted(launch), self.kernel, grid)


class Listing(Tape):
    """Notes operations, without what kernels do."""

    def note(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if function is not launch:
            return super().note(function, args, kwargs)
        self.calls.append((function, args, kwargs, None))
        return None

    @property
    def kernels(self) -> list[Any]:
        """The kernels that it notes, in order."""
        return [args[0] for function, args, _, _ in self.calls if function is launch]


def held(tape: Tape) -> list:
    """What a graph holds of noted operations: grids, scalars, shapes and addresses, in memory of its own by number."""
    own: dict[int, int] = {}

    def described(value: Any) -> Any:
        if not torch.is_tensor(value):
            return value
        start = value.untyped_storage().data_ptr()
        place = ("own", own[start], value.storage_offset()) if start in own else ("kept", value.data_ptr())
        return *place, value.shape, value.stride(), value.dtype

    operations = []
    for function, args, kwargs, result in tape.calls:
        given = tree_leaves((args, kwargs))
        operations.append((function, sorted(kwargs), *map(described, given)))
        known = {value.untyped_storage().data_ptr() for value in given if torch.is_tensor(value)}
        for value in tree_leaves(result):
            if torch.is_tensor(value) and (start := value.untyped_storage().data_ptr()) not in known:
                own[start] = len(own)
    return operations


class Inputs:
    """What vLLM keeps in place: numbers of tokens, tables and slots of each cache group, states and output."""

    def __init__(self) -> None:
        self.starts, self.lengths = torch.zeros(ROOM + 1, dtype=torch.int32), torch.zeros(ROOM, dtype=torch.int32)
        self.tables = [torch.zeros(ROOM, table.shape[1], dtype=torch.int32) for table in tables()]
        self.slots = [torch.zeros(ROOM, dtype=torch.int64) for _ in self.tables]
        self.states = [torch.zeros(ROOM, heads, HEAD_DIM) for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)]
        self.output = torch.zeros(ROOM, QUERY_HEADS, HEAD_DIM)

    def fill_for_capture(self) -> None:
        """The batch that vLLM captures with: requests of one token that own nothing."""
        self.starts.copy_(torch.arange(ROOM + 1))
        self.lengths.fill_(1)
        for table, slots in zip(self.tables, self.slots, strict=True):
            table.zero_()
            slots.fill_(-1)

    def fill(self, before: tuple[int, ...], after: tuple[int, ...]) -> int:
        """A batch with padding after its requests; returns their number."""
        given = both_metadata(before, after)
        requests = len(given[0].seq_lens)
        self.starts[: requests + 1] = given[0].query_start_loc
        self.starts[requests + 1 :] = requests
        self.lengths.zero_()[:requests] = given[0].seq_lens
        for one, table, slots in zip(given, self.tables, self.slots, strict=True):
            table.zero_()[:requests] = one.block_table_tensor
            slots.fill_(-1)[:requests] = one.slot_mapping[:requests]
        return requests

    def metadata(self, size: int) -> list[SimpleNamespace]:
        """What vLLM tells the builder of each group, of a batch that is padded to this size."""
        return [
            SimpleNamespace(
                query_start_loc=self.starts[: size + 1],
                query_start_loc_cpu=self.starts[: size + 1],
                seq_lens=self.lengths[:size],
                seq_lens_cpu_upper_bound=self.lengths[:size],
                block_table_tensor=table[:size],
                slot_mapping=slots[:size],
            )
            for table, slots in zip(self.tables, self.slots, strict=True)
        ]

    def forward(self, attention: Attention, steps: list[Any], size: int) -> None:
        attention.forward(steps, [part[:size] for part in self.states], self.output[:size])


def capture(attention: Attention, inputs: Inputs, size: int, tape: Tape) -> Tape:
    """Note a decode step of this size, after one that warms up."""
    inputs.fill_for_capture()
    given = inputs.metadata(size)
    inputs.forward(attention, attention.build(given), size)
    steps = [builder.build_for_cudagraph_capture(one) for builder, one in zip(attention.builders, given, strict=True)]
    with tape:
        inputs.forward(attention, steps, size)
    return tape


def random_states(count: int) -> list[torch.Tensor]:
    return [torch.randn(count, heads, HEAD_DIM) for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)]


def learned_sinks(case: Case) -> torch.Tensor | None:
    return torch.randn(QUERY_HEADS) if case.learned else None


def read_prompts(case: Case, lengths: tuple[int, ...]) -> Attention:
    """The CPU's attention, with caches of prompts of which the last one shares the first one's first block."""
    attention = Attention(cpu_codes, case, None)
    first, second, third = lengths
    for before, after in (((0, 0, 0), (first, second, 0)), ((first, second, SHARED * TILE), (first, second, third))):
        states = random_states(sum(after) - sum(before))
        attention.forward(attention.build(both_metadata(before, after)), states, torch.zeros_like(states[0]))
    return attention


def check_replays(case: Case) -> None:
    """Steps from graphs give what steps without one give, codes to the bit, and padding attends to nothing."""
    torch.manual_seed(0)
    learned = learned_sinks(case)
    eager, graphed = Attention(triton_codes, case, learned), Attention(triton_codes, case, learned, FULL)
    inputs = Inputs()
    tapes = {size: capture(graphed, inputs, size, Tape()) for size in SIZES}
    # the first two requests complete tiles in the first step, and the third one in the fourth
    sink = case.quantization.sink
    lengths = sink + 2 * TILE - 1, sink + TILE - 1, sink + 2 * TILE - 4
    prompts = read_prompts(case, lengths)
    for attention in (eager, graphed):
        attention.newest_cache.copy_(prompts.newest_cache)
        attention.tile_cache.copy_(prompts.tile_cache)
    for new, size in STEPS:
        after = tuple(length + count for length, count in zip(lengths, new, strict=True))
        given, states = both_metadata(lengths, after), random_states(sum(new))
        expected = torch.zeros_like(states[0])
        eager.forward(eager.build(given), states, expected)
        if size is None:
            found = torch.zeros_like(expected)
            graphed.forward(graphed.build(given), states, found)
        else:
            requests = inputs.fill(lengths, after)
            for kept, part in zip(inputs.states, states, strict=True):
                kept.fill_(torch.nan)[:requests] = part
            inputs.output.fill_(torch.nan)
            graphed.newest_cache[0] = torch.nan  # where padding is stored
            graphed.build(inputs.metadata(size))
            tapes[size].replay()
            found = inputs.output[:requests]
            assert not inputs.output[requests:size].any(), "padding attends"
        # on some processors, products of a padded batch are rounded in another way
        assert torch.allclose(found, expected, rtol=0, atol=1e-5), (new, size)
        assert torch.allclose(
            *(attention.newest_cache[1:].nan_to_num(1e9) for attention in (graphed, eager)), atol=1e-5
        )
        assert graphed.tile_cache.equal(eager.tile_cache)
        lengths = after


def noted_step(attention: Attention, inputs: Inputs, after: tuple[int, ...], size: int) -> Listing:
    """What a step launches in which these requests decode; those of no tokens do not."""
    inputs.fill(tuple(max(length - 1, 0) for length in after), after)
    steps = attention.build(inputs.metadata(size))
    with Listing() as tape:
        inputs.forward(attention, steps, size)
    return tape


def batches(case: Case, size: int) -> list[tuple[int, ...]]:
    """Lengths of decoding requests: short and long ones, with tiles that are due and without, and padding."""
    sink = case.quantization.sink
    chosen = (1, 1, 1), (2, 0, 0), (TILE, 380, 0), (sink + TILE, 5, sink + 2 * TILE), (300, 257, 0), (0, 0, sink + TILE)
    return [after for after in chosen if sum(length > 0 for length in after) <= size]


def check_what_graphs_hold(case: Case) -> None:
    """Steps of a size launch the same, with the same arguments, whatever the lengths."""
    attention, inputs = Attention(triton_codes, case, learned_sinks(case), FULL), Inputs()
    captured = {size: held(capture(attention, inputs, size, Listing())) for size in SIZES}
    for size in SIZES:
        for after in batches(case, size):
            assert held(noted_step(attention, inputs, after, size)) == captured[size], (size, after)


def check_steps_without_graphs(case: Case) -> None:
    """Nothing is launched to pack where no tile is due."""
    attention, inputs = Attention(triton_codes, case, learned_sinks(case)), Inputs()
    tiling = attention.layer.tiling
    for after in batches(case, ROOM):
        total = torch.tensor(after)
        due = tiling.packed(total) > tiling.packed(total - 1)
        packs = [paged_pack._pack_due_kernel.kernel] * int(due.any())
        others = [paged_codes._attend_kernel.kernel, paged_codes._combine_kernel.kernel]
        assert noted_step(attention, inputs, after, ROOM).kernels == packs + others, after


def resolved(backends: list[type], attention: Attention, query_len: int = 1) -> set[CUDAGraphMode]:
    """The mode that each of vLLM's runners resolves, of its default one."""
    modes = set()
    for runner in (_by_first_runner, _by_second_runner):
        compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=FULL)
        compilation.splitting_ops = list(compilation._attention_ops)
        compilation.static_forward_context = attention.config.compilation_config.static_forward_context
        config = SimpleNamespace(compilation_config=compilation)
        runner(backends, config, query_len)
        modes.add(compilation.cudagraph_mode)
    return modes


def _by_first_runner(backends: list[type], config: SimpleNamespace, query_len: int) -> None:
    runner = SimpleNamespace(
        vllm_config=config,
        compilation_config=config.compilation_config,
        uniform_decode_query_len=query_len,
        kv_cache_config=None,
        max_num_reqs=ROOM,
        cudagraph_dispatcher=SimpleNamespace(initialize_cudagraph_keys=lambda mode, query_len: None),
        speculative_config=None,
    )
    groups = [SimpleNamespace(kv_cache_spec=None) for _ in backends]
    GPUModelRunner._check_and_update_cudagraph_mode(runner, [{backend} for backend in backends], groups)


def _by_second_runner(backends: list[type], config: SimpleNamespace, query_len: int) -> None:
    groups = [
        SimpleNamespace(
            backend=backend,
            kv_cache_spec=None,
            get_metadata_builder=lambda number, backend=backend: backend.get_builder_cls(),
        )
        for backend in backends
    ]
    support = get_attn_cg_support([groups], config)
    config.compilation_config.resolve_cudagraph_mode_and_sizes(
        support.min_cg_support, support.min_cg_attn_backend, query_len, use_v2_model_runner=True
    )


def check_modes() -> None:
    """vLLM captures whole decode steps, but not with speculation, rounding by the queries or budgets."""
    plain, rounded = (Attention(triton_codes, case, None) for case in CASES)
    codes = [triton_codes.NewestBackend, triton_codes.CodesBackend]
    assert resolved(codes, plain) == {FULL}
    assert resolved(codes, plain, query_len=2) == {CUDAGraphMode.PIECEWISE}
    assert resolved(codes, rounded) == {CUDAGraphMode.PIECEWISE}
    assert resolved([*codes, BudgetedBackend], plain) == {CUDAGraphMode.PIECEWISE}


if __name__ == "__main__":
    triton_codes.programs_of = lambda device: 5
    for name in ("_attend_kernel", "_combine_kernel"):
        setattr(paged_codes, name, Noted(getattr(paged_codes, name)))
    paged_pack._pack_due_kernel = Noted(paged_pack._pack_due_kernel)
    check_modes()
    for case in some(REPLAYED, 2):
        check_what_graphs_hold(case)
        check_steps_without_graphs(case)
        check_replays(case)
