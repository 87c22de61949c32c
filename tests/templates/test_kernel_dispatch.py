"""A decode step through the kernels, in Triton's interpreter, equals the torch path: `make test-kernels`."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in Triton's interpreter: make test-kernels", allow_module_level=True)

from kvsurgery.templates import kv_attention, kv_compact, kv_cuda, kv_softmax, kv_torch
from kvsurgery.templates.kv_layout import VALUE_NORM
from kvsurgery.templates.kv_softmax import Scoring, Span
from tests.helpers.emitted import BUDGETED, HELD, LOSSLESS, WINDOWS, emitted, emitted_class, in_parts
from tests.helpers.families import FAMILIES, largest, stock, tokens
from tests.helpers.kernel_reference import softmax


def held(select: str) -> dict:
    """A section with rolling budgets, whose heads select so."""
    return {**HELD, "selection": {**HELD["selection"], "select": select}}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch):
    """Turns the kernels on, with 5 programs; returns the list that every launch is noted in."""
    calls = []
    decode = kv_cuda.kv_decode.decode

    def turn_on() -> list[int]:
        monkeypatch.setattr(kv_attention, "_path", lambda *states: kv_cuda)
        monkeypatch.setattr(kv_cuda.kv_decode, "decode", lambda *args: calls.append(1) or decode(*args, programs=5))
        return calls

    return turn_on


@pytest.mark.parametrize(
    ("family", "padded"),
    [("llama", False), ("gemma2", True), ("gpt_oss", True)],
    ids=["llama", "gemma2, padded", "gpt-oss, padded"],
)
def test_decode_steps(family: str, padded: bool, kernels) -> None:
    model, ids = emitted(family, 2), tokens(2, 12)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :9] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": [0, 2], "output_logits": True}
    options |= {"return_dict_in_generate": True, "attention_mask": mask}
    expected = model.generate(ids * mask, **options)
    calls = kernels()
    found = model.generate(ids * mask, **options)
    assert len(calls) == 3 * 2  # every layer of every step but the prefill
    assert found.sequences.equal(expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert largest(one - other, other) <= 1e-5


def check(model, ids, mask, sizes: list[int], kernels, launches: int | None = None) -> None:
    """Tokens that come in parts have the logits that torch gives, with so many launches of kernels."""
    expected = in_parts(model, ids, mask, sizes)
    calls = kernels()
    found = in_parts(model, ids, mask, sizes)
    assert launches is None or len(calls) == launches
    assert largest((found - expected) * mask[:, :, None], expected) <= 1e-5


@pytest.mark.skipif("gemma4-shared" not in FAMILIES, reason="no such family in this version of transformers")
def test_layers_that_share_a_cache(kernels) -> None:
    window, mixed = {"blocks": [[0, 4]], "sink": 0, "recent": 9, "native": True}, {"sink": 3, "recent": 5}
    layers = [window, {"blocks": [[2, 2]], "head_dim": 32, **mixed}, window]
    original = stock("gemma4-shared")
    original.config.kv_surgery = {
        "version": 2,
        "head_dim": 16,
        "layers": [*layers, *({"blocks": [], "source": source} for source in (1, 2, 1))],
    }
    model = emitted_class("gemma4_text")(original.config).eval()
    model.load_state_dict(original.state_dict())
    ids, mask = tokens(2, 34), torch.ones(2, 34, dtype=torch.long)
    mask[1, :9] = 0

    @torch.no_grad()
    def read() -> torch.Tensor:
        past, parts = None, []
        for start, stop in [(0, 20), (20, 32), (32, 33), (33, 34)]:
            output = model(
                (ids * mask)[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, start:stop],
                past_key_values=past,
            )
            past = output.past_key_values
            parts.append(output.logits)
        return torch.cat(parts, 1)[:, 9:]

    expected = read()
    calls = kernels()
    found = read()
    assert len(calls) == 2 * 6
    assert largest(found - expected, expected) <= 1e-5


def test_a_draft_takes_back_what_kernels_stored(kernels) -> None:
    model, draft, ids = emitted("llama", 2), emitted("llama", 2), tokens(1, 20)
    draft.load_state_dict({name: weight + 0.02 for name, weight in draft.state_dict().items()})
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.assistant_confidence_threshold = 0.0
    options = {"max_new_tokens": 8, "do_sample": False, "suppress_tokens": [0, 2]}
    expected = model.generate(ids, **options)
    calls = kernels()
    assert model.generate(ids, **options, assistant_model=draft).equal(expected)
    assert len(calls) >= 2 * 2


@pytest.mark.parametrize(
    ("family", "padded"),
    [("llama", True), ("gemma2", False), ("gpt_oss", True)],
    ids=["llama, padded", "gemma2", "gpt-oss, padded"],
)
def test_prefill_in_chunks(family: str, padded: bool, kernels) -> None:
    model, ids, mask = emitted(family, 2), tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    if padded:
        mask[1, :11] = 0
    check(model, ids, mask, [17, 2, 11], kernels)


@pytest.mark.parametrize(
    ("section", "quantization", "padded"),
    [
        ({}, LOSSLESS, True),
        (BUDGETED, None, True),
        (HELD, None, False),
        (held(VALUE_NORM), LOSSLESS, False),
        ({}, {**LOSSLESS, "scheme": "kivi", "group_size": None}, False),
        (WINDOWS, {**LOSSLESS, "residual": 0, "streaming": True}, False),
    ],
    ids=[
        "quantized, padded",
        "budgeted, padded",
        "held",
        VALUE_NORM,
        "kivi",
        "quantized windows",
    ],
)
def test_chunks_and_steps_over_tiles_and_budgets(
    section: dict, quantization: dict | None, padded: bool, kernels
) -> None:
    """Prompt, chunks that read tiles, and steps that pack some, or select: what torch does, kernels do."""
    model = emitted("llama", 2, **section, **({"quantization": quantization} if quantization else {}))
    # a tile that goes round its ring is packed in a step
    sizes = [200, 186, 1, 1] if section is WINDOWS else [200, 57, 3, 1, 1]
    ids = tokens(1 + padded, sum(sizes))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :127] = 0
    check(model, ids, mask, sizes, kernels, launches=2 * 2)


def test_blocks_of_heads(kernels) -> None:
    """Full heads in several places, as one process has them of a model for several."""
    layers = [
        {"blocks": [[1, 1], [1, 1]], "sink": 3, "recent": 5},
        {"blocks": [[1, 1], [0, 2]], "budgets": [9, 4, 12]},
    ]
    model = emitted("llama", 2, layers=layers, selection=BUDGETED["selection"])
    sizes = [20, 9, 1, 1]
    ids, mask = tokens(2, sum(sizes)), torch.ones(2, sum(sizes), dtype=torch.long)
    mask[1, :9] = 0
    check(model, ids, mask, sizes, kernels, launches=2 * 2)


def test_a_prompt_is_compacted_in_one_launch_a_layer(kernels, monkeypatch):
    """Of a padded prompt that waits in chunks, the last of which goes on after it."""
    model = emitted("llama", 2, **BUDGETED, quantization=LOSSLESS)
    sizes, prompt, launched = [200, 240, 1], 301, []  # enough later tokens for a tile that the prompt may not have
    ids, mask = tokens(2, sum(sizes)), torch.ones(2, sum(sizes), dtype=torch.long)
    mask[1, :299] = 0
    expected = in_parts(model, ids, mask, sizes, prompt)
    kernels()
    compact = kv_compact.compact
    monkeypatch.setattr(kv_compact, "compact", lambda *args: launched.append(1) or compact(*args))
    found = in_parts(model, ids, mask, sizes, prompt)
    assert len(launched) == 2
    assert largest((found - expected) * mask[:, :, None], expected) <= 1e-5


def flash_attention(query, keys, values, softmax_scale, causal, softcap=0.0):
    """What flash-attn computes: [batch, tokens, heads, head_dim], causal from the lower right corner."""
    assert causal
    query, keys, values = (states.transpose(1, 2) for states in (query, keys, values))
    keys, values = (states.repeat_interleave(query.shape[1] // keys.shape[1], 1) for states in (keys, values))
    allowed = torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - query.shape[2])
    return softmax(query, keys, values, allowed, Scoring(softmax_scale, softcap or None)).transpose(1, 2)


@pytest.mark.parametrize("past", [0, 37])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_full_heads_get_the_same_whatever_is_fastest(past: int, softcap: float | None, monkeypatch) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 20, 16, dtype=torch.float16)
    keys, values = torch.randn(2, 2, 2, past + 20, 16, dtype=torch.float16)
    scoring = Scoring(0.3, softcap)
    launched = []
    prefill = kv_cuda.prefill
    monkeypatch.setattr(kv_cuda, "prefill", lambda *args, **options: launched.append(1) or prefill(*args, **options))
    exact = flash_attention(*(part.transpose(1, 2).double() for part in (query, keys, values)), 0.3, True, softcap)
    found = [kv_cuda.attend(query, keys, values, Span(past), scoring)]  # SDPA, which has no soft cap
    assert len(launched) == (softcap is not None)
    found.append(kv_cuda.attend(query, keys, values, Span(past, torch.zeros(2, dtype=torch.long)), scoring))
    assert len(launched) == 1 + (softcap is not None)
    monkeypatch.setattr(kv_cuda, "flash_attn_func", flash_attention)
    found.append(kv_cuda.attend(query, keys, values, Span(past), scoring))
    assert len(launched) == 1 + (softcap is not None)
    for output in found:
        assert largest(output.double() - exact.transpose(1, 2), exact) <= 2e-3


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("flash", [False, True], ids=["SDPA", "flash attention"])
def test_long_padded_rows_go_to_fused_attention_one_by_one(flash: bool, softcap: float | None, monkeypatch) -> None:
    torch.manual_seed(0)
    query = torch.randn(3, 4, 20, 16, dtype=torch.float16)
    keys, values = torch.randn(2, 3, 2, 20, 16, dtype=torch.float16)
    padding, scoring, launched = torch.tensor([0, 7, 20]), Scoring(0.3, softcap), []
    prefill = kv_cuda.prefill
    monkeypatch.setattr(kv_cuda, "prefill", lambda *args, **options: launched.append(1) or prefill(*args, **options))
    if flash:
        monkeypatch.setattr(kv_cuda, "flash_attn_func", flash_attention)
    short = kv_cuda.attend(query, keys, values, Span(0, padding), scoring)
    assert len(launched) == 1
    monkeypatch.setattr(kv_cuda, "LONG", 20)
    long = kv_cuda.attend(query, keys, values, Span(0, padding), scoring)
    assert len(launched) == (1 if flash or softcap is None else 2)
    exact = kv_softmax.causal(query.double(), keys.double(), values.double(), padding, scoring)
    own = torch.arange(20) >= padding[:, None, None, None]  # what padding sees does not matter
    for output in (short, long):
        assert largest((output.double() - exact) * own.mT, exact) <= 2e-3


@pytest.mark.parametrize("flash", [False, True], ids=["SDPA", "flash attention"])
@pytest.mark.parametrize("case", ["past", "by position", "float32", "sinks"])
def test_other_long_padded_rows_are_left_to_the_kernel(case: str, flash: bool, monkeypatch) -> None:
    torch.manual_seed(0)
    past, dtype = 37 if case in ("past", "by position") else 0, torch.float32 if case == "float32" else torch.float16
    query = torch.randn(2, 4, 20, 16, dtype=dtype)
    keys, values = torch.randn(2, 2, 2, past + 20, 16, dtype=dtype)
    scoring = Scoring(0.3, sinks=torch.tensor([-3.0, 0.0, 2.0, 5.0]) if case == "sinks" else None)
    span = Span(past, torch.tensor([0, 7]), None if case == "by position" else 0)
    monkeypatch.setattr(kv_cuda, "LONG", 20)
    if flash:
        monkeypatch.setattr(kv_cuda, "flash_attn_func", flash_attention)
    launched = []
    prefill = kv_cuda.prefill
    monkeypatch.setattr(kv_cuda, "prefill", lambda *args, **options: launched.append(1) or prefill(*args, **options))
    found = kv_cuda.attend(query, keys, values, span, scoring)
    assert launched == [1]
    exact = kv_torch.attend(query.double(), keys.double(), values.double(), span, scoring)
    own = torch.arange(past, past + 20) >= span.padding[:, None, None, None]
    assert largest((found.double() - exact) * own.mT, exact) <= 2e-3


@pytest.mark.parametrize("past", [0, 37])
def test_learned_sinks_are_left_to_the_kernel(past: int, monkeypatch) -> None:
    """SDPA and flash attention have none."""
    torch.manual_seed(0)
    query = torch.randn(2, 4, 20, 16, dtype=torch.float16)
    keys, values = torch.randn(2, 2, 2, past + 20, 16, dtype=torch.float16)
    scoring = Scoring(0.3, sinks=torch.tensor([-3.0, 0.0, 2.0, 5.0]))
    exact = kv_softmax.causal(query.double(), keys.double(), values.double(), 0, scoring)
    monkeypatch.setattr(kv_cuda, "flash_attn_func", flash_attention)
    assert largest(kv_cuda.attend(query, keys, values, Span(past), scoring).double() - exact, exact) <= 2e-3
