"""Run the GPU's attention of budgeted heads over quantized tiles in Triton's interpreter, which TRITON_INTERPRET=1
turns on, and compare outputs and caches with those of the CPU's, step by step.

Prompts come in chunks and at once, two end in a step with tokens after them, and all decode; tiles are packed at the
end of a prompt and later. What no request owns is NaN, and codes with all bits set.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton.backends import backends

# vLLM's CPU build turns Triton off where it has no backend of the name "cpu"; the interpreter needs none
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

from kvsurgery.templates.kv_codes import nearest  # noqa: E402
from kvsurgery.templates.kv_layout import TILE, Quantization  # noqa: E402
from kvsurgery.templates.kv_rounding import QueryRounding  # noqa: E402
from kvsurgery.vllm import cpu_budgeted_codes, triton_budgeted_codes  # noqa: E402
from kvsurgery.vllm.budgeted import first_block  # noqa: E402
from kvsurgery.vllm.tiles import Tiling  # noqa: E402
from tests.helpers.cases import some  # noqa: E402
from tests.vllm.budgets_kernel import GROUP, HEAD_DIM, SIZE, WINDOW, head, metadata, on_device  # noqa: E402

PROMPTS = 400, 3, 290, 150
MOST = 300  # tokens of the largest budget
ROW = 512  # slots of a request
# tokens of each request before a step, and after it: prompts end with 5 and 3 tokens after them in the same step
STEPS = (
    ((0, 0, 0, 0), (250, 3, 290, 0)),
    ((250, 3, 290, 0), (405, 4, 293, 153)),
    ((405, 4, 293, 153), (406, 5, 298, 153)),
    ((406, 5, 298, 153), (407, 6, 299, 154)),
    ((407, 6, 299, 154), (408, 7, 300, 155)),
)


class Case(NamedTuple):
    """A quantization, how attention scores and heads select, and whether keys are rounded by the queries."""

    quantization: Quantization
    select: str
    softcap: float | None = None
    learned: bool = False
    rounded: bool = False

    @property
    def budgets(self) -> tuple[int, ...]:
        """Of heads that have tiles at the end of a prompt, from the fourth token after it, and not yet."""
        return MOST, self.quantization.sink + TILE - WINDOW - 4, 20


CASES = (
    Case(Quantization("k4v3", "per-token", 16, residual=0, sink=0), "attention", softcap=20.0, learned=True),
    Case(Quantization(3, residual=3, rotate="both"), "value-norm", rounded=True),
    Case(Quantization(2, residual=0, sink=20, rotate="values"), "attention"),
)


def heads_of(case: Case) -> list[Any]:
    """Budgeted heads without an engine; each has a cache of tiles and one of newest tokens, between those of others."""
    torch.manual_seed(3)
    tiling = Tiling.of(case.quantization)
    bin = SimpleNamespace(kept=MOST + WINDOW)
    page = case.quantization.tile_bytes(HEAD_DIM, 4)
    count = len(case.budgets) + 1
    newest = torch.full((len(PROMPTS) * ROW // SIZE + 1, count, 1, SIZE, 2 * HEAD_DIM), torch.nan)
    tiles = torch.full((len(PROMPTS) * ROW // TILE + 1, count, 1, 1, page), 255, dtype=torch.uint8)
    heads = []
    for number, budget in enumerate(case.budgets):
        layer = head(budget, case.select)
        layer.quantization, layer.tiling, layer.bin, layer.round_keys = case.quantization, tiling, bin, nearest
        if case.rounded:
            feedback = torch.randn(1, HEAD_DIM, HEAD_DIM).mul(0.1).triu(1)
            layer.round_keys = QueryRounding(torch.randperm(HEAD_DIM)[None], feedback)
        layer.layer_name, layer.tiles = f"head{number}", tiles[:, number]
        layer.newest = SimpleNamespace(**vars(layer))
        layer.newest.layer_name, layer.newest.kv_cache = f"newest{number}", newest[:, number]
        layer.newest.size = SIZE
        layer.newest.kv_cache_torch_dtype = newest.dtype
        heads.append(layer)
    return heads


def block_table(before: tuple[int, ...], size: int, freed: Any) -> torch.Tensor:
    """Blocks of all requests; where prompts are complete, those in some ranges are freed."""
    table = torch.randperm(len(PROMPTS) * ROW // size, generator=torch.Generator().manual_seed(1)) + 1
    table = table.view(len(PROMPTS), -1).int()
    for row, (past, prompt) in enumerate(zip(before, PROMPTS, strict=True)):
        if past >= prompt:
            for part in freed(past, prompt):
                table[row, part] = 0
    return table


def tables(before: tuple[int, ...], tiling: Tiling) -> tuple[torch.Tensor, torch.Tensor]:
    """Block tables of newest tokens and of tiles."""
    kept = MOST + WINDOW

    def newest(past: int, prompt: int) -> list[slice]:
        first = first_block(prompt, kept, SIZE)
        sinks = first - (-tiling.sink // SIZE)
        return [slice(first), slice(sinks, max((past - tiling.newest + 1) // SIZE, sinks))]

    def tiles(past: int, prompt: int) -> list[slice]:
        return [slice(first_block(prompt, kept, TILE))]

    return block_table(before, SIZE, newest), block_table(before, TILE, tiles)


def config_of(heads: list[Any]) -> Any:
    """vLLM's config of a model with these heads."""
    layers = {layer.layer_name: layer for one in heads for layer in (one, one.newest)}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(dtype=torch.float32, max_model_len=ROW, model_arch_config=SimpleNamespace()),
    )


def builders(module: Any, heads: list[Any]) -> tuple[Any, list[Any]]:
    """Of the newest tokens of all heads, and of the tiles of the first and of the others."""
    config, device = config_of(heads), torch.device("cpu")
    names = [layer.newest.layer_name for layer in heads]
    spec = SimpleNamespace(block_size=SIZE, kept=MOST + WINDOW)
    newest = module.BudgetedNewestBackend.get_builder_cls()(spec, names, config, device)
    kind = module.BudgetedCodesBackend.get_builder_cls()
    parts = [layer.layer_name for layer in heads[:1]], [layer.layer_name for layer in heads[1:]]
    return newest, [kind(SimpleNamespace(block_size=TILE), names, config, device) for names in parts]


def run(module: Any, case: Case, learned: torch.Tensor | None, states: list) -> list:
    """Outputs of all heads in all steps by the backends of a module, and the caches after them."""
    heads = heads_of(case)
    newest_builder, codes_builders = builders(module, heads)
    attention = object.__new__(module.BudgetedCodesImpl)  # without an engine
    attention.num_heads, attention.num_kv_heads, attention.num_queries_per_kv = GROUP, 1, GROUP
    attention.head_size, attention.scale = HEAD_DIM, HEAD_DIM**-0.5
    attention.logits_soft_cap, attention.sinks = case.softcap, learned
    outputs = []
    for (before, after), parts in zip(STEPS, states, strict=True):
        newest_table, tile_table = tables(before, Tiling.of(case.quantization))
        newest = newest_builder.build(0, metadata(before, after, PROMPTS, newest_table, SIZE))
        first, *_, others = (one.build(0, metadata(before, after, PROMPTS, tile_table, TILE)) for one in codes_builders)
        for number, layer in enumerate(heads):
            for cache, table, nothing in (
                (layer.newest.kv_cache, newest_table, torch.nan),
                (layer.tiles, tile_table, 255),
            ):
                owned = torch.zeros(len(cache), dtype=torch.bool)
                owned[table.long()] = True
                owned[0] = False
                cache[~owned] = nothing
            context = SimpleNamespace(attn_metadata={layer.newest.layer_name: newest})
            module.get_forward_context = lambda context=context: context
            query, key, value = parts[number]
            output = torch.zeros_like(query)
            attention.forward(layer, query, key, value, layer.tiles, others if number else first, output)
            outputs.append(output)
    assert not any(layer.waiting for layer in heads)
    return [
        *outputs,
        torch.stack([layer.newest.kv_cache for layer in heads]),
        torch.stack([layer.tiles for layer in heads]),
    ]


def build_without_waiting() -> None:
    """A step that only decodes is built although the host may read nothing of the device."""
    newest, codes = builders(triton_budgeted_codes, heads_of(CASES[0]))
    newest_table, tile_table = tables(STEPS[3][0], Tiling.of(CASES[0].quantization))
    newest.build(0, on_device(metadata(*STEPS[3], PROMPTS, newest_table, SIZE)))
    codes[0].build(0, on_device(metadata(*STEPS[3], PROMPTS, tile_table, TILE)))


def compare(case: Case) -> float:
    """The largest error of an output; caches are the same to the bit."""
    torch.manual_seed(0)
    states = []
    for before, after in STEPS:
        count = sum(after) - sum(before) + 3
        states.append([[torch.randn(count, number, HEAD_DIM) for number in (GROUP, 1, 1)] for _ in case.budgets])
    learned = torch.randn(GROUP) if case.learned else None
    *expected, newest, tiles = run(cpu_budgeted_codes, case, learned, states)
    *found, found_newest, found_tiles = run(triton_budgeted_codes, case, learned, states)
    assert found_tiles.equal(tiles)
    assert found_newest.nan_to_num(1e9).equal(newest.nan_to_num(1e9))
    packed = [(part != 255).any(-1).sum().item() for part in tiles]
    assert packed == [2 + 2 + 1, 3, 0], (
        "two tiles of each long prompt, and one of that of 150 tokens; one of each; none"
    )
    errors = [(one - other).abs().nan_to_num(float("inf")).max() for one, other in zip(found, expected, strict=True)]
    return max(errors).item()


if __name__ == "__main__":
    triton_budgeted_codes.programs_of = lambda device: 5
    build_without_waiting()
    errors = [compare(case) for case in some(CASES, 2)]
    print(errors)
    sys.exit(not max(errors) < 2e-5)
