"""Decode steps from a CUDA graph, with a stand-in for the graph that runs on a CPU: `make test-kernels`."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch.nn.modules import module as torch_module

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in Triton's interpreter: make test-kernels", allow_module_level=True)

from kvsurgery.templates import kv_attention, kv_budget, kv_cuda, kv_graph, kv_hold, kv_pack
from tests.helpers.emitted import LOSSLESS, emitted
from tests.helpers.families import largest, tokens
from tests.helpers.kernel_reference import append_reference, decode_reference, flush_reference
from tests.helpers.tape import Tape, noted

GREEDY = {"do_sample": False, "suppress_tokens": [0, 2], "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch):
    """Turns kernels and graphs on; returns the tapes that stand in for graphs."""
    tapes: list[Tape] = []

    def capture(work, device):
        tapes.append(Tape())
        with tapes[-1]:
            output = work()
        return tapes[-1], output

    def turn_on() -> list[Tape]:
        monkeypatch.setattr(kv_attention, "_path", lambda *states: kv_cuda)
        monkeypatch.setattr(kv_graph, "capturable", lambda states: True)
        monkeypatch.setattr(kv_graph, "capture", capture)
        monkeypatch.setattr(kv_cuda.kv_store, "append", noted(append_reference))
        monkeypatch.setattr(kv_pack, "flush", noted(flush_reference))
        monkeypatch.setattr(kv_cuda.kv_decode, "decode", noted(decode_reference))
        # only decode steps are looked at; the kernels that select again would take the interpreter a minute
        renew = kv_hold.HeldHeads.renew
        monkeypatch.setattr(kv_hold.HeldHeads, "renew", lambda heads, column, kernels: renew(heads, column))
        compact = kv_budget.BudgetedHeads.compact
        monkeypatch.setattr(kv_budget.BudgetedHeads, "compact", lambda *args: compact(*args[:-1]))
        monkeypatch.setattr(kv_cuda, "attend", kv_attention.kv_torch.attend)
        return tapes

    return turn_on


@pytest.mark.parametrize("quantization", [None, LOSSLESS], ids=["16 bit", "quantized and rotated"])
def test_kernels_are_all_that_a_step_of_attention_launches(
    quantization: dict | None, graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stores, and the other attends, which are two launches on a device; views are none."""
    model = emitted("llama", 1, **({"quantization": quantization} if quantization else {}))
    decode, launched = kv_cuda.decode, []

    def watched(*args):
        with Tape() as tape:
            out = decode(*args)
        calls = [function for function, *_ in tape.calls]
        launched.append([each for each in calls if not getattr(each, "is_view", False)])
        return out

    graphs()
    monkeypatch.setattr(kv_cuda, "decode", watched)
    model.generate(tokens(1, 20), **GREEDY, max_new_tokens=4)
    assert launched == [[append_reference, decode_reference]] * 3


@pytest.mark.parametrize("kind", ["16 bit", "quantized", "budgeted", "held", "held, quantized"])
def test_steps_from_a_graph(kind: str, graphs) -> None:
    model = emitted("llama")
    section, new = model.config.kv_surgery, 45
    if "quantized" in kind:
        section["quantization"] = LOSSLESS
    if kind != "quantized" and kind != "16 bit":
        section["selection"] = {"window": 4, "kernel_size": 3, "pool": "max"}
        section["layers"] = [{"blocks": [[1, 3]], "budgets": [4, 9, 150]}] * 4
    if "held" in kind:  # selections come between replays
        section["selection"]["hold"] = 6
    model = type(model)(model.config).eval()
    ids = tokens(2, 250)
    mask = torch.ones_like(ids)
    mask[1, :130] = 0
    options = GREEDY | {"max_new_tokens": new, "attention_mask": mask}
    expected = model.generate(ids * mask, **options)
    tapes = graphs()
    with torch.inference_mode(kind == "held"):
        found = model.generate(ids * mask, **options)
    assert len(tapes) == 1
    # the prompt gives the first token; the next step is the kernels' first
    assert tapes[0].replays == new - 2 - kv_graph.EAGER_STEPS
    assert found.sequences.equal(expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert largest(one - other, other) <= 1e-5
    if kind == "quantized":  # tiles were packed between replays
        for output in (found, expected):
            assert output.past_key_values.layers[1].heads[0].groups[0].packed == [256, 128]

    # the cache goes on without the graph, and a copy has none
    again = copy.deepcopy(found.past_key_values)
    assert again.graph is None
    later = torch.cat([found.sequences, tokens(2, 3, seed=1)], 1)
    options |= {"attention_mask": torch.cat([mask, torch.ones(2, later.shape[1] - 250, dtype=torch.long)], 1)}
    ends = [model.generate(later, **options, past_key_values=cache) for cache in (found.past_key_values, again)]
    assert ends[0].sequences.equal(ends[1].sequences)


def test_what_cannot_be_captured_runs_as_always(graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = emitted("llama"), tokens(1, 20)
    expected = model.generate(ids, **GREEDY, max_new_tokens=50)
    graphs()

    def fail(work, device):
        work()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(kv_graph, "capture", fail)
    found = model.generate(ids, **GREEDY, max_new_tokens=50)
    assert found.sequences.equal(expected.sequences)
    assert model in kv_graph.UNFIT


def test_other_outputs_come_from_the_model_itself(graphs) -> None:
    tapes, model = graphs(), emitted("llama")
    options = GREEDY | {"max_new_tokens": 50}
    output = model.generate(tokens(1, 20), **options, output_hidden_states=True)
    assert len(output.hidden_states) == 50
    assert not tapes
    cache = model.generate(tokens(1, 20), **options).past_key_values
    assert len(tapes) == 1
    cache.reserve(200)
    for _ in range(9):  # where gradients are on
        model(tokens(1, 1), past_key_values=cache)
    assert len(tapes) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"output_hidden_states": True},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {"num_local_experts": 4},
    ],
    ids=str,
)
def test_models_that_are_not_captured(changes: dict) -> None:
    config = copy.deepcopy(emitted("llama", 1).config)
    assert not kv_graph.waits_for_the_device(config)
    for name, value in changes.items():
        setattr(config, name, value)
    model = torch.nn.Module()
    model.config = config
    model.eval()
    given = {"input_ids": torch.ones(1, 1, dtype=torch.long)}
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_graph, "capturable", lambda states: True)
        assert not kv_graph.fits(model, given)
        model.config = emitted("llama", 1).config
        assert kv_graph.fits(model, given)


def test_short_answers_are_not_captured(graphs) -> None:
    tapes = graphs()
    emitted("llama").generate(tokens(1, 20), **GREEDY, max_new_tokens=kv_graph.WORTHWHILE)
    assert not tapes


def accelerate_hook(module: torch.nn.Module, count: Callable) -> Callable[[], None]:
    hook = ModelHook()
    hook.pre_forward = lambda module, *args, **kwargs: count(module) or (args, kwargs)
    add_hook_to_module(module, hook)
    return partial(remove_hook_from_module, module)


def torch_hook(register: str, module: torch.nn.Module, count: Callable, **options) -> Callable[[], None]:
    place = torch_module if register.startswith("register_module") else module
    return getattr(place, register)(count, **options).remove


HOOKS = {
    "forward": partial(torch_hook, "register_forward_hook"),
    "forward, with arguments, always": partial(
        torch_hook, "register_forward_hook", with_kwargs=True, always_call=True, prepend=True
    ),
    "before": partial(torch_hook, "register_forward_pre_hook"),
    "before, with arguments": partial(torch_hook, "register_forward_pre_hook", with_kwargs=True),
    "global": partial(torch_hook, "register_module_forward_hook"),
    "global, before": partial(torch_hook, "register_module_forward_pre_hook"),
    "accelerate": accelerate_hook,
}


class Calls:
    """Counts the calls of a hook for one module."""

    count = 0

    def of(self, wanted: torch.nn.Module) -> Callable[..., None]:
        def hook(module: torch.nn.Module, *call) -> None:
            self.count += module is wanted

        return hook


@pytest.mark.parametrize("add", HOOKS.values(), ids=HOOKS)
def test_hooks_are_found(add) -> None:
    model = emitted("llama", 1)
    assert not kv_graph.hooked(model)
    remove = add(model.model.layers[0].mlp, lambda *call: None)
    try:
        assert kv_graph.hooked(model)
    finally:
        remove()
    assert not kv_graph.hooked(model)


def test_hooks_are_called_in_every_step(graphs) -> None:
    tapes, model, ids = graphs(), emitted("llama", 1), tokens(1, 20)
    options, mlp, calls = GREEDY | {"max_new_tokens": 45}, model.model.layers[0].mlp, [Calls() for _ in HOOKS]
    with ExitStack() as hooks:
        for add, own in zip(HOOKS.values(), calls, strict=True):
            hooks.callback(add(mlp, own.of(mlp)))
        expected = model.generate(ids, **options)
    assert [own.count for own in calls] == [45] * len(HOOKS)
    assert not tapes
    assert model.generate(ids, **options).sequences.equal(expected.sequences)
    assert len(tapes) == 1
    assert [own.count for own in calls] == [45] * len(HOOKS)


def test_hooks_that_come_and_go_while_tokens_are_generated(graphs) -> None:
    """Steps under a hook run as always; the graph goes on after them."""
    model, ids, new = emitted("llama", 1), tokens(1, 20), 45
    mlp = model.model.layers[0].mlp
    options = GREEDY | {"max_new_tokens": new}
    expected = model.generate(ids, **options)
    tapes = graphs()
    calls, kinds, removals = [], iter(HOOKS), []

    def change_hooks(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if removals:
            removals.pop()()
        elif ids.shape[1] % 3 == 0 and ids.shape[1] >= 40 and (kind := next(kinds, None)):
            calls.append(Calls())
            removals.append(HOOKS[kind](mlp, calls[-1].of(mlp)))
        return scores

    found = model.generate(ids, **options, logits_processor=[change_hooks])
    assert [own.count for own in calls] == [1] * len(HOOKS)
    assert len(tapes) == 1
    assert tapes[0].replays == new - 2 - kv_graph.EAGER_STEPS - len(calls)
    assert found.sequences.equal(expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert largest(one - other, other) <= 1e-5
