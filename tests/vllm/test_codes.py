"""Heads whose older tokens lie in quantized tiles, in vLLM's pages: the tokens are those of the emitted model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from kvsurgery.templates.kv_layout import TILE
from kvsurgery.vllm import cpu_codes
from kvsurgery.vllm.budgeted_codes import BudgetedCodes
from kvsurgery.vllm.codes import CodesAttention
from kvsurgery.vllm.groups import Groups
from tests.helpers.cases import some
from tests.helpers.families import make
from tests.helpers.loop_in_c import HAVE_COMPILER, counted
from tests.helpers.losses import losses
from tests.helpers.surgery import Converted, random_profile
from tests.vllm.models import MODELS
from tests.vllm.serving import (
    BLOCK,
    BUDGETED,
    LARGE_HEADS,
    Generated,
    assert_equal,
    assert_held_as_forecast,
    block_bytes,
    cached_tokens,
    converted,
    engine,
    fill_caches,
    generate,
    preemptions,
    prompts,
    reference,
    reference_by_token,
    rejected_drafts,
)
from tests.vllm.substitutes import substitute

# a state on the border of two codes may get either, as sums of another order, by processor, differ in their last bits
TOLERANCE = 1e-1
# the emitted model reads codes where it decodes; prompts within a tile are none
SHORT = prompts(lengths=(45, 100))[:2]
NEW = 220
CACHES: dict[str, dict[str, Any]] = {
    # blocks of tiles are no whole number of tokens of 96 channels
    "kivi-4": {"kv_bits": 4, "sparsity": 0.0, "model": {"head_dim": 96}},
    "streaming-2": {"kv_bits": 2, "sparsity": 0.5, "kv_residual": 32},
    "per-token-4": {"kv_bits": 4, "sparsity": 0.0, "kv_scheme": "per-token"},
    "groups-3": {"kv_bits": 3, "sparsity": 0.5, "kv_group_size": 32, "kv_residual": 0, "kv_rotate": "both"},
    "windows-8": {"kv_bits": 8, "sparsity": 0.5, "kv_residual": 0, "kv_streaming": True, "recent": 300},
}


def codes(llm: Any) -> list[CodesAttention | BudgetedCodes]:
    """The attentions of an engine over tiles."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if isinstance(layer, CodesAttention | BudgetedCodes)]


WIDTHS: dict[str, dict[str, Any]] = {
    "8 bits": {"kv_bits": 8, "sparsity": 0.0},
    "k3v2": {"kv_bits": "k3v2", "sparsity": 0.0, "kv_residual": 32},
    "k4v2 per token": {"kv_bits": "k4v2", "sparsity": 0.5, "kv_scheme": "per-token"},
    "budgets": {**BUDGETED, "kv_bits": 4},
    "budgets k3v2": {**BUDGETED, "kv_bits": "k3v2", "sparsity": 1, "kv_residual": 0, "select": "value-norm"},
    "by layer": {"kv_bits": 4, "sparsity": 0.5, "kv_residual": 32},
    "some layers": {"kv_bits": 4, "sparsity": 0.3, "kv_residual": 32},
    "budgets in some layers": {**BUDGETED, "kv_bits": 4, "kv_residual": 32},
    "by the queries": {"kv_bits": 3, "sparsity": 0.5, "kv_residual": 32, "kv_rounding": "queries"},
    "windows by the queries": {**CACHES["windows-8"], "kv_bits": 3, "kv_rounding": "queries"},
    "budgets by the queries": {**BUDGETED, "kv_bits": 3, "kv_rounding": "queries"},
}
BY_LAYER: dict[str, dict[str, list]] = {
    # as `--kv-bits auto` has them: the first layer has no full heads
    "by layer": {"bits": [None, 8, 3, "k3v2"], "clip": [None, False, True, True]},
    "some layers": {"bits": [None, None, 8, 4]},
    "budgets in some layers": {"bits": [None, 8, 4, None]},
}


@pytest.mark.parametrize("kind", some(WIDTHS, 2))
def test_errors_are_those_of_the_emitted_model(kind: str, tmp_path: Path) -> None:
    """Likelihoods differ by little of what quantization costs: by the codes of a few states on the border of two."""
    options = {}
    if "kv_rounding" in WIDTHS[kind]:
        profile = random_profile(make("llama", tmp_path / "measured", **LARGE_HEADS))
        losses(profile.model, rounded=True).save(tmp_path / "losses.safetensors")
        options = {"kv_measured": str(tmp_path / "losses.safetensors")}
    checkpoint = converted("llama", tmp_path / "quantized", **WIDTHS[kind], **options)
    change_quantization(checkpoint.folder, BY_LAYER.get(kind, {}))
    unquantized = {name: value for name, value in WIDTHS[kind].items() if not name.startswith("kv_")}
    exact = converted("llama", tmp_path / "exact", **unquantized)
    with engine(checkpoint.folder) as llm:
        assert codes(llm)
        generated = generate(llm, SHORT, NEW)
    assert_errors_are_small(SHORT, generated, checkpoint, exact)


def change_quantization(folder: Path, changes: dict[str, list]) -> None:
    """Change how the cache of a converted checkpoint is quantized."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["kv_surgery"]["quantization"] |= changes
    path.write_text(json.dumps(config))


def assert_errors_are_small(
    rows: list[list[int]], generated: Generated, checkpoint: Converted, exact: Converted
) -> None:
    """Likelihoods are those of the emitted model, to a tenth of what it loses by quantization."""
    for row, (tokens, likelihoods) in zip(rows, generated, strict=True):
        found = torch.tensor([step[token] for token, step in zip(tokens, likelihoods, strict=True)])
        emitted = read(checkpoint.model, row, tokens, chunk=1)
        whole = read(exact.model, row, tokens, chunk=len(tokens))
        assert (found - emitted).norm() <= 0.1 * (whole - emitted).norm()


def read(model: torch.nn.Module, row: list[int], new: list[int], chunk: int) -> torch.Tensor:
    """Log probabilities of new tokens, which a model reads in chunks after a prompt."""
    found, cache = [], None
    with torch.inference_mode():
        for part in [row, *(new[start : start + chunk] for start in range(0, len(new) - 1, chunk))]:
            output = model(torch.tensor([part]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            found.append(output.logits[0])
    likelihoods = torch.cat(found)[len(row) - 1 :].float().log_softmax(-1)
    return likelihoods[range(len(new)), new]


@pytest.mark.parametrize("kind", some(CACHES, 2))
def test_tokens_are_those_of_the_emitted_model(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    checkpoint = converted("llama", tmp_path, **CACHES[kind])
    long = prompts(lengths=(430, 5))[0]
    with engine(checkpoint.folder) as llm:
        assert all(layer.kv_cache.dtype == torch.uint8 for layer in codes(llm))
        assert codes(llm)
        found = generate(llm, SHORT, NEW)
        assert bool(calls) == HAVE_COMPILER
        assert_equal(found, reference(checkpoint.model, SHORT, NEW), TOLERANCE)
        assert_equal(generate(llm, [long], 30), [reference_by_token(checkpoint.model, long, 30)], TOLERANCE)


@pytest.mark.parametrize("kind", some(["streaming-2", "windows-8"]))
def test_tokens_are_the_same_without_a_compiler(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain PyTorch attends to codes then."""
    monkeypatch.setattr(cpu_codes, "codes_loop", lambda *_: None)
    calls = counted(monkeypatch)
    checkpoint = converted("llama", tmp_path, **CACHES[kind])
    with engine(checkpoint.folder, max_num_batched_tokens=96) as llm:
        found = generate(llm, SHORT, NEW)
        assert not calls
        assert_equal(found, reference(checkpoint.model, SHORT, NEW), TOLERANCE)


# what lies in vLLM's own dtype beside codes, by the family that has it
BESIDE = {
    "gemma3": "windows of the model's own",
    "gemma4-shared": "queries of later layers",
    "qwen3_next": "states of linear attention",
}


@pytest.mark.parametrize("family", some(BESIDE, 2), ids=BESIDE.get)
def test_codes_beside(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    substitute(monkeypatch)
    checkpoint = converted(family, tmp_path, model=MODELS[family], kv_bits=4, kv_residual=32)
    long = prompts(lengths=(430, 5))[0]
    with engine(checkpoint.folder, max_num_batched_tokens=96) as llm:
        assert codes(llm)
        assert block_bytes(llm) == Groups(checkpoint.policy.layout, BLOCK, 4, True, state_bytes(llm)).block_bytes
        fill_caches(llm, float("nan"))  # what a block held before is not read
        assert_equal(generate(llm, SHORT, NEW), reference(checkpoint.model, SHORT, NEW), TOLERANCE)
        wanted = [reference_by_token(checkpoint.model, long, 30)]
        for _ in range(2):
            assert_equal(generate(llm, [long], 30), wanted, TOLERANCE)
        assert cached_tokens(llm) >= 256


def state_bytes(llm: Any) -> int:
    """Bytes of the states of linear attention in a layer, as vLLM pads them."""
    groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    specs = (group.kv_cache_spec for group in groups)
    return max((spec.page_size_bytes for spec in specs if isinstance(spec, MambaSpec)), default=0)


def test_tokens_do_not_depend_on_chunks_hits_preemption_or_company(tmp_path: Path) -> None:
    checkpoint = converted("llama", tmp_path, **CACHES["windows-8"])
    growing, long = prompts(lengths=(100, 101, 102))[:3], prompts(lengths=(380, 5))[0]
    with engine(checkpoint.folder, enable_prefix_caching=False) as llm:
        alone = [generate(llm, [row], 120)[0] for row in growing]
        whole = generate(llm, [long], 30)
    for cached in (True, False):
        options = {"num_gpu_blocks_override": 42, "enable_prefix_caching": cached}
        with engine(checkpoint.folder, max_num_batched_tokens=96, **options) as llm:
            fill_caches(llm, float("nan"))
            assert_equal(generate(llm, growing, 120), alone, TOLERANCE)
            assert preemptions(llm) > 0
            for _ in range(2):
                assert_equal(generate(llm, [long], 30), whole, TOLERANCE)
            assert cached_tokens(llm) >= 256 * cached


@pytest.mark.parametrize("cached", [True, False])
def test_tiles_with_rejected_drafts_are_packed_again(cached: bool, tmp_path: Path) -> None:
    checkpoint = converted("llama", tmp_path, **{**CACHES["streaming-2"], "kv_residual": 0})
    rows = [row * 40 for row in prompts(lengths=(2, 3))[:2]]  # which n-grams find drafts in
    speculative = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with engine(checkpoint.folder) as llm:
        wanted = generate(llm, rows, 200)
    with engine(checkpoint.folder, speculative_config=speculative, enable_prefix_caching=cached) as llm:
        assert_equal(generate(llm, rows, 200), wanted, TOLERANCE)
        assert rejected_drafts(llm) > 100


def test_budgeted_heads_read_prompts_as_they_are_in_any_chunks_and_company(tmp_path: Path) -> None:
    """The emitted model reads a prompt of any length so too, each request alone."""
    budgets = {**BUDGETED, "sparsity": 1, "budget": 120}
    checkpoint = converted("llama", tmp_path / "quantized", **budgets, kv_bits=4, kv_residual=32)
    exact = converted("llama", tmp_path / "exact", **budgets)
    rows = prompts(lengths=(60, 61, 130, 300))[:4]
    with engine(checkpoint.folder, max_num_batched_tokens=96, num_gpu_blocks_override=320) as llm:
        assert {layer.kv_cache.dtype for layer in codes(llm)} == {torch.uint8}
        fill_caches(llm, 77)  # slots and tiles that no request has written
        assert_held_as_forecast(llm, checkpoint.policy.layout, rows[3], quantized=True)
        generated = generate(llm, rows, 150)
        assert preemptions(llm) > 0
    assert_errors_are_small(rows, generated, checkpoint, exact)


@pytest.mark.parametrize(("sparsity", "budget"), some([(0.5, 20), (1, 40)]))
def test_prompts_share_blocks_before_what_budgeted_heads_keep(sparsity: float, budget: int, tmp_path: Path) -> None:
    """Later turns too, of which an answer is a part: it is read anew."""
    options = {"sparsity": sparsity, "budget": budget, "kv_bits": 4, "kv_residual": 0}
    checkpoint = converted("llama", tmp_path, **{**BUDGETED, **options})
    first, other = prompts(lengths=(270, 140), seed=1)[:2]
    with engine(checkpoint.folder, enable_prefix_caching=False) as llm:
        [answer] = generate(llm, [first], 130)
        rows = [first, first[:260] + other, [*first, *answer[0], *other[:100]]]
        alone = [answer, *(generate(llm, [row], 8)[0] for row in rows[1:])]
    with engine(checkpoint.folder, max_num_batched_tokens=96) as llm:
        fill_caches(llm, 77)
        found = []
        for index in (0, 2, 2, 1, 0):
            before = cached_tokens(llm)
            assert_equal(generate(llm, [rows[index]], len(alone[index][0])), [alone[index]], TOLERANCE)
            found.append(cached_tokens(llm) - before)
    assert found == [0, TILE, 3 * TILE, 2 * TILE, TILE]
