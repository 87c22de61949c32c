"""Run the GPU's attention of budgeted heads in Triton's interpreter, which TRITON_INTERPRET=1 turns on, and compare
outputs and caches with those of the CPU's, step by step.

Prompts come in chunks, one ends in a step with tokens after it, and all decode. What no request owns is NaN.
"""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends import backends

# vLLM's CPU build turns Triton off where it has no backend of the name "cpu"; the interpreter needs none
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

from vllm.v1.attention.backend import AttentionCGSupport  # noqa: E402

from kvsurgery.templates.kv_layout import Selection  # noqa: E402
from kvsurgery.vllm import budgeted_cpu, triton_budgets  # noqa: E402
from kvsurgery.vllm.budgeted_attention import BudgetedAttention  # noqa: E402

GROUP, HEAD_DIM, SIZE, WINDOW = 2, 32, 16, 16
BUDGETS, PROMPTS = (20, 37), (150, 3, 90, 40)
ROW = 192  # slots of a request
# tokens of each request before a step, and after it: the first chunk of one prompt ends amid its last tokens, another
# prompt is read again with what came after it, and tokens after a third come together
STEPS = (
    ((0, 0, 0, 0), (100, 3, 90, 30)),
    ((100, 3, 90, 30), (170, 4, 95, 40)),
    ((170, 4, 95, 40), (171, 5, 96, 41)),
    ((171, 5, 96, 41), (172, 5, 97, 41)),
)


class OnDevice(torch.Tensor):
    """A tensor that the host would have to wait for."""

    waiting = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__index__")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.__name__ not in cls.waiting, f"{function.__name__} waits for the device"
        return super().__torch_function__(function, types, args, kwargs or {})


def block_table(before: tuple[int, ...]) -> torch.Tensor:
    """Blocks of all requests; those before what is kept of a complete prompt are freed."""
    table = torch.randperm(len(PROMPTS) * ROW // SIZE, generator=torch.Generator().manual_seed(1)) + 1
    table = table.view(len(PROMPTS), -1).int()
    for row, (past, prompt) in enumerate(zip(before, PROMPTS, strict=True)):
        if past >= prompt:
            table[row, : max(prompt - WINDOW - max(BUDGETS), 0) // SIZE] = 0
    return table


def metadata(
    before: tuple[int, ...],
    after: tuple[int, ...],
    of_prompts: tuple[int, ...],
    table: torch.Tensor,
    size: int,
) -> SimpleNamespace:
    """What vLLM tells a builder of a step, for the requests that have new tokens."""
    rows = [row for row in range(len(of_prompts)) if after[row] > before[row]]
    lengths = torch.tensor([after[row] for row in rows], dtype=torch.int32)
    pasts = torch.tensor([before[row] for row in rows], dtype=torch.int32)
    prompts = torch.tensor([of_prompts[row] for row in rows], dtype=torch.int32)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), (lengths - pasts).cumsum(0))).int()
    table = table[rows]
    slots = []
    for row, begin, end in zip(range(len(rows)), pasts.tolist(), lengths.tolist(), strict=True):
        token = torch.arange(begin, end)
        slots.append(table[row, token // size] * size + token % size)
    return SimpleNamespace(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        rswa_prefix_lens=prompts,
        is_prefilling=pasts < prompts,
        block_table_tensor=table,
        slot_mapping=torch.cat([*slots, torch.full((3,), -1)]).long(),  # a batch may be padded
    )


def on_device(given: SimpleNamespace) -> SimpleNamespace:
    """The same, with tensors that the host would have to wait for where a GPU has them."""
    for name in ("query_start_loc", "seq_lens", "rswa_prefix_lens", "block_table_tensor", "slot_mapping"):
        setattr(given, name, getattr(given, name).clone().as_subclass(OnDevice))
    return given


def config_of(layer: Any) -> Any:
    """vLLM's config of a model with one head."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"head": layer}),
        model_config=SimpleNamespace(dtype=torch.float32, max_model_len=ROW, model_arch_config=SimpleNamespace()),
    )


def head(budget: int, select: str) -> Any:
    """A budgeted head without an engine."""
    layer = SimpleNamespace(num_heads=GROUP, num_kv_heads=1, head_size=HEAD_DIM, budget=budget, waiting={})
    layer.selection = Selection(WINDOW, 3, "max", select=select)
    layer.kept = budget + WINDOW
    layer.selected = partial(BudgetedAttention.selected, layer)
    return layer


def run(module: Any, select: str, softcap: float | None, learned: torch.Tensor | None, states: list) -> list:
    """Outputs of all heads in all steps by the backend of a module, and the caches after them."""
    heads = [head(budget, select) for budget in BUDGETS]
    blocks = len(PROMPTS) * ROW // SIZE + 1
    caches = torch.full((blocks, len(heads) + 1, 1, SIZE, 2 * HEAD_DIM), torch.nan)
    config = config_of(heads[0])
    builder = module.BudgetedBackend.get_builder_cls()(
        SimpleNamespace(block_size=SIZE), ["head"], config, torch.device("cpu")
    )
    assert config.model_config.model_arch_config.rswa_window == ROW
    attention = object.__new__(module.BudgetedImpl)  # without an engine
    attention.num_kv_heads, attention.num_queries_per_kv = 1, GROUP
    attention.head_size, attention.scale = HEAD_DIM, HEAD_DIM**-0.5
    attention.logits_soft_cap, attention.sinks = softcap, learned
    outputs = []
    for (before, after), parts in zip(STEPS, states, strict=True):
        owned = torch.zeros(blocks, dtype=torch.bool)
        owned[block_table(before).long()] = True
        caches[~owned] = torch.nan
        caches[0] = torch.nan
        step = builder.build(0, metadata(before, after, PROMPTS, block_table(before), SIZE))
        for number, layer in enumerate(heads):
            query, key, value = parts[number]
            output = torch.zeros_like(query)
            attention.forward(layer, query, key, value, caches[:, number], step, output)
            outputs.append(output)
    assert not any(layer.waiting for layer in heads)
    return [*outputs, caches]


def build_without_waiting() -> None:
    """A step that only decodes is built although the host may read nothing of the device."""
    builder = triton_budgets.BudgetedBuilder(
        SimpleNamespace(block_size=SIZE), ["head"], config_of(head(8, "attention")), torch.device("cpu")
    )
    given = on_device(metadata(*STEPS[2], PROMPTS, block_table(STEPS[2][0]), SIZE))
    assert not builder.build(0, given).reading
    # a step without requests
    given = metadata((0, 0, 0, 0), (1, 1, 0, 0), PROMPTS, block_table((0, 0, 0, 0)), SIZE)
    given.slot_mapping.fill_(-1)
    given.rswa_prefix_lens, given.is_prefilling = None, torch.zeros(2, dtype=torch.bool)
    assert builder.build(0, given).slots.blocks.unique().tolist() == [0], "only vLLM's block 0 belongs to no request"


def compare(select: str, softcap: float | None, learns: bool) -> float:
    """The largest error of an output; caches are the same to the bit."""
    torch.manual_seed(0)
    states = []
    for before, after in STEPS:
        count = sum(after) - sum(before) + 3
        states.append([[torch.randn(count, number, HEAD_DIM) for number in (GROUP, 1, 1)] for _ in BUDGETS])
    learned = torch.randn(GROUP) if learns else None
    *expected, cache = run(budgeted_cpu, select, softcap, learned, states)
    *found, found_cache = run(triton_budgets, select, softcap, learned, states)
    assert found_cache.nan_to_num(1e9).equal(cache.nan_to_num(1e9))
    errors = [(one - other).abs().nan_to_num(float("inf")).max() for one, other in zip(found, expected, strict=True)]
    return max(errors).item()


if __name__ == "__main__":
    triton_budgets.programs_of = lambda device: 9
    assert triton_budgets.BudgetedBuilder.get_cudagraph_support(None, None) == AttentionCGSupport.NEVER
    build_without_waiting()
    errors = [compare("attention", 20.0, learns=True), compare("value-norm", None, learns=False)]
    print(errors)
    sys.exit(not max(errors) < 2e-5)
