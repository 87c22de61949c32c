"""Budgeted heads keep what they should, in the bytes that they should, whatever the way the tokens come in."""

import copy
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.templates import kv_heads
from kvsurgery.templates.kv_budget import most_important
from kvsurgery.templates.kv_layout import EVERY, KVLayout, Selection
from kvsurgery.templates.kv_layout import Selection as LayoutSelection
from kvsurgery.templates.kv_received import attention_received
from kvsurgery.templates.kv_softmax import Scoring
from tests.helpers.emitted import BUDGETED, emitted
from tests.helpers.families import largest, tokens
from tests.helpers.surgery import convert_folder, random_profile
from tests.templates.test_exactness import left_padded, logits
from tests.templates.test_kv_cache import module_of

WINDOW, PROMPT = 4, 40
GREEDY = {"do_sample": False, "suppress_tokens": [0, 2]}


def budgeted(folder, out, budget=8, full_heads=0, pool="max"):
    selection = Selection(window=WINDOW, kernel_size=3, pool=pool)
    return convert_folder(
        folder, out, rest="budgeted", budget=budget, beta=1.3, full_heads=full_heads, selection=selection
    )


@pytest.fixture(scope="module")
def headkv(checkpoint, tmp_path_factory):
    """Conversions with budgets of 8 on average; some with a quarter of the heads full."""
    made = {}

    def make(family, **options):
        key = (family, *options.items())
        if key not in made:
            made[key] = budgeted(checkpoint(family), tmp_path_factory.mktemp("headkv") / family, **options)
        return made[key]

    return make


def kept_positions(converted, ids):
    """[layer][source KV head]: the prompt's tokens that each budgeted head must keep, from stock attention weights."""
    with torch.no_grad():
        weights = converted.stock(ids, output_attentions=True, use_cache=False).attentions
    start, result = ids.shape[1] - WINDOW, []
    for layer, weight in zip(converted.policy.layers, weights, strict=True):
        group = weight.shape[1] // len(layer.order)
        kept = {}
        for head, budget in zip(layer.order[layer.full :], layer.budgets or (), strict=False):
            importance = weight[0, head * group : (head + 1) * group, start:, :start].mean((0, 1))
            if converted.policy.layout.selection.pool == "max":
                pooled = F.pad(importance, (1, 1), value=-torch.inf).unfold(0, 3, 1).amax(-1)
            else:
                pooled = F.pad(importance, (1, 1)).unfold(0, 3, 1).mean(-1)
            kept[head] = sorted(sorted(range(start), key=lambda place: (-pooled[place].item(), place))[:budget])
        result.append(kept)
    return result


def reference_step(converted, prompt, answer):
    """Logits of the last token when budgeted heads see, of the prompt, their selection and the window only.

    The stock model, recomputed: tokens of the answer have a mask of their own in every head.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    kept, start, length = kept_positions(converted, prompt), prompt.shape[1] - WINDOW, prompt.shape[1]
    ids = torch.cat([prompt, answer], 1)
    total = ids.shape[1]

    def attention(
        module, query, key, value, mask, scaling=None, softcap=None, sliding_window=None, s_aux=None, **kwargs
    ):
        group = query.shape[1] // key.shape[1]
        visible = torch.ones(key.shape[1], total, total, dtype=torch.bool).tril()
        if sliding_window is not None:
            visible &= ~torch.ones(total, total, dtype=torch.bool).tril(-sliding_window)
        else:
            for head, places in kept[module.layer_idx].items():
                visible[head, length:, :start] = False
                visible[head, length:, places] = True
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = query.double() @ key.double().mT * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible.repeat_interleave(group, 0), -torch.inf)
        if s_aux is not None:  # one more key, without a value
            scores = torch.cat([scores, s_aux.double()[:, None, None].expand(1, -1, total, 1)], -1)
        return (scores.softmax(-1)[..., :total] @ value.double()).to(query.dtype).transpose(1, 2), None

    AttentionInterface.register("tests_budget_reference", attention)
    AttentionMaskInterface.register("tests_budget_reference", lambda *args, **kwargs: None)
    before = converted.stock.config._attn_implementation
    converted.stock.config._attn_implementation = "tests_budget_reference"
    try:
        return logits(converted.stock, ids, use_cache=False)[:, -1]
    finally:
        converted.stock.config._attn_implementation = before


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in ("llama", "gemma2", "gpt_oss")),
        *((family, {"full_heads": 4}) for family in ("llama-tied-mha", "qwen2")),
        *((family, {"pool": "avg"}) for family in ("phi3", "gemma2")),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "all",
)
def test_steps_equal_a_reference_that_selects_by_hand(headkv, family, options):
    converted, prompt = headkv(family, **options), tokens(1, PROMPT)
    with torch.no_grad():
        output = converted.model(prompt)
    expected = logits(converted.stock, prompt)
    assert largest(output.logits - expected, expected) <= 1e-5  # exact until selection
    answer = tokens(1, 6, seed=1)
    for step in range(6):
        with torch.no_grad():
            found = converted.model(answer[:, step : step + 1], past_key_values=output.past_key_values).logits[:, -1]
        expected = reference_step(converted, prompt, answer[:, : step + 1])
        assert largest(found - expected, expected) <= 1e-4
    # what was dropped matters
    everything = logits(converted.stock, torch.cat([prompt, answer], 1))[:, -1]
    assert largest(everything - expected, expected) > 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("size", [1, 7, 39, 64])
def test_a_prompt_in_chunks_selects_the_same(headkv, family, size):
    model, ids = headkv(family, full_heads=4).model, tokens(2, PROMPT)
    options = GREEDY | {"max_new_tokens": 10}
    assert model.generate(ids, **options, prefill_chunk_size=size).equal(model.generate(ids, **options))


def test_rows_of_a_padded_batch_select_for_themselves(headkv):
    model = headkv("llama").model
    lengths = [PROMPT, 25, 9, 3, 1]
    ids, mask, _ = left_padded(tokens(5, PROMPT, seed=2), lengths)
    options = GREEDY | {"max_new_tokens": 12}
    together = model.generate(ids, attention_mask=mask, **options)
    for row, length in enumerate(lengths):
        alone = model.generate(ids[row : row + 1, PROMPT - length :], **options)
        assert together[row, PROMPT:].equal(alone[0, length:])


@pytest.mark.parametrize("beams", [1, 3])
def test_assisted_decoding_beams_and_copies_of_rows(headkv, beams):
    model, ids = headkv("llama", full_heads=4).model, tokens(1, 20, seed=3).repeat(1, 2)
    options = GREEDY | {"max_new_tokens": 16}
    expected = model.generate(ids, **options)
    if beams == 1:
        assert model.generate(ids, **options, prompt_lookup_num_tokens=4).equal(expected)
        draft = headkv("llama", full_heads=4).load()
        assert model.generate(ids, **options, assistant_model=draft).equal(expected)
    else:
        several = model.generate(ids.repeat(2, 1), num_beams=beams, **options)
        assert several[0].equal(several[1])
        assert several[:1].equal(model.generate(ids, num_beams=beams, **options))


def heads(cache):
    """The groups of every budgeted head of a cache."""
    kinds = (kind for layer in cache.layers for kind in layer.heads if hasattr(kind, "budgets"))
    return [group for kind in kinds for group in kind.groups]


def test_later_turns_append(headkv):
    model, first = headkv("llama").model, tokens(1, PROMPT)
    cache = model(first).past_key_values
    kept = [(group, group.dropped, group.keys[:, :, : PROMPT - group.dropped[0]].clone()) for group in heads(cache)]
    whole = tokens(1, 30, seed=4)
    at_once = model(whole, past_key_values=cache).logits
    for group, dropped, keys in kept:
        assert group.dropped == dropped
        assert group.keys[:, :, : keys.shape[2]].equal(keys)
    cache = model(first).past_key_values
    one_by_one = torch.cat([model(whole[:, i : i + 1], past_key_values=cache).logits for i in range(30)], 1)
    assert largest(at_once - one_by_one, one_by_one) <= 1e-5


@pytest.mark.parametrize(("batch", "prompt", "new"), [(1, PROMPT, 7), (3, 10, 5), (2, 3, 9), (1, PROMPT, 1)])
@pytest.mark.parametrize("full_heads", [0, 4])
def test_bytes_are_the_sum_of_the_budgets(headkv, batch, prompt, new, full_heads):
    converted = headkv("llama", full_heads=full_heads)
    output = converted.model.generate(tokens(batch, prompt), **GREEDY, max_new_tokens=new, return_dict_in_generate=True)
    layout = module_of(converted.model, "kv_layout").KVLayout.from_config(converted.model.config)
    cache = output.past_key_values
    assert cache.allocated_bytes() == layout.kv_bytes(batch, prompt, new, itemsize=4)
    rows = 0
    for layer in converted.policy.layers:
        window = min(WINDOW, prompt)
        rows += layer.full * (prompt + new)
        rows += sum(min(budget, prompt - window) + window + new for budget in layer.budgets)
    assert cache.allocated_bytes() == 2 * batch * rows * 6 * 4


@pytest.mark.parametrize("chunk", [None, 7, 64])
def test_the_peak_of_a_prefill(headkv, chunk, monkeypatch):
    """The most that is stored at any time, beside what a layer's chunk takes on its way in."""
    model = headkv("llama", full_heads=4).load()
    layers, stored = [], []
    attend = module_of(model, "kv_attention")._with_cache

    def noting(query, key, value, layer, *rest):
        if layer not in layers:
            layers.append(layer)
        output = attend(query, key, value, layer, *rest)
        stored.append(sum(each.nbytes for each in layers) + key.nbytes + value.nbytes)
        return output

    monkeypatch.setattr(module_of(model, "kv_attention"), "_with_cache", noting)
    model.generate(tokens(2, 300), **GREEDY, max_new_tokens=5, prefill_chunk_size=chunk)
    layout = module_of(model, "kv_layout").KVLayout.from_config(model.config)
    peak = layout.prefill_peak_bytes(2, 300, 5, chunk, itemsize=4)
    assert 0.9 * peak <= max(stored) <= peak


def test_spread_budgets_cost_what_even_ones_do(checkpoint, tmp_path):
    scores = np.ones((4, 4), dtype=np.float32)
    even = HeadProfile(scores, "duo", "kv", "even", random_profile(checkpoint("llama")).model)
    spread = HeadProfile(np.where(np.arange(16).reshape(4, 4) == 5, 1, 0.01), "duo", "kv", "spread", even.model)
    found = []
    for name, profile in (("even", even), ("spread", spread)):
        converted = convert_folder(checkpoint("llama"), tmp_path / name, profile, rest="budgeted", budget=6, beta=1.1)
        found.append(converted.model(tokens(1, 300)).past_key_values.allocated_bytes())
        assert max(max(layer.budgets) for layer in converted.policy.layers) == (6 if name == "even" else 77)
    assert found[0] == found[1]


def test_without_a_cache_nothing_is_selected(headkv):
    converted, ids = headkv("llama"), tokens(2, PROMPT)
    expected = logits(converted.stock, ids)
    assert largest(logits(converted.model, ids, use_cache=False) - expected, expected) <= 1e-5


def test_to_take_nothing_back_is_allowed_within_a_prompt(headkv):
    model = headkv("llama").model
    cache = module_of(model, "kv_cache").KVSurgeryCache(model.config)
    cache.expect_prompt(PROMPT)
    model(tokens(1, 5), past_key_values=cache)
    cache.crop(0)
    cache.crop(5)
    assert cache.get_seq_length() == 5


def test_taking_back(headkv):
    """What follows the prompt can come again, and its observation window too, which then sees the selection."""
    model, ids = headkv("llama", full_heads=4).model, tokens(1, PROMPT + 5)
    cache = model(ids[:, :PROMPT]).past_key_values
    after = model(ids[:, PROMPT:], past_key_values=cache).logits
    cache.crop(-5)
    found = model(ids[:, PROMPT:], past_key_values=cache).logits
    assert largest(found - after, after) <= 1e-5
    for back in (6, 5 + WINDOW):
        cache.crop(-back)
        at_once = model(ids[:, PROMPT + 5 - back :], past_key_values=cache).logits
        cache.crop(-back)
        steps = [model(part, past_key_values=cache).logits for part in ids[:, PROMPT + 5 - back :].split(1, 1)]
        assert largest(at_once - torch.cat(steps, 1), at_once) <= 1e-5
    with pytest.raises(ValueError, match="before the observation window"):
        cache.crop(-5 - WINDOW - 1)
    short = model(tokens(1, WINDOW - 1)).past_key_values
    with pytest.raises(ValueError, match="before the observation window"):
        short.crop(1 - WINDOW)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("elements", [1, 300, 10**6])
def test_attention_that_columns_receive(elements, softcap, monkeypatch):
    monkeypatch.setattr(kv_heads, "BLOCK", elements)
    torch.manual_seed(0)
    query, keys, pads = torch.randn(3, 6, WINDOW, 8), torch.randn(3, 2, 21, 8), [0, 5, 17]
    found = attention_received(query, keys, torch.tensor(pads)[:, None, None], Scoring(0.4, softcap))
    for row, pad in enumerate(pads):
        scores = query[row].double() @ keys[row].double().repeat_interleave(3, 0).mT * 0.4
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores[:, :, :pad] = -torch.inf
        weights = (scores + torch.full((WINDOW, 21), -torch.inf).triu(22 - WINDOW)).softmax(-1)
        expected = weights.view(2, 3, WINDOW, 21).mean((1, 2))
        assert largest(found[row] - expected, expected) <= 1e-6


def test_ties_go_to_the_earlier_token():
    selection = LayoutSelection(4, 3, "max")
    # of the second head, the maximum over neighbors is 5 at 1, 2 and 3
    importance = torch.tensor([[[0.0] * 6, [0.0, 0, 5, 0, 0, 0]]])
    chosen = most_important(importance, torch.zeros(1, 1, 1), [[3, 2]], selection)
    assert chosen.tolist() == [[[0, 1, 2], [1, 2, EVERY]]]
    padded = most_important(importance, torch.tensor([[[3]]]), [[3, 2]], selection)
    assert padded.tolist() == [[[3, 4, 5], [3, 4, EVERY]]]


def test_layout_sections(headkv):
    config = headkv("llama", full_heads=4).model.config.to_dict()
    KVLayout.from_config(config)
    for change in (
        lambda section: section.pop("selection"),
        lambda section: section["layers"][0]["budgets"].append(3),
        lambda section: section["selection"].update(kernel_size=2),
        lambda section: section["selection"].update(pool="sum"),
        lambda section: section["layers"][0].update(budgets=[-1] * 4),
    ):
        broken = copy.deepcopy(config)
        change(broken["kv_surgery"])
        with pytest.raises(ValueError, match="malformed"):
            KVLayout.from_config(broken)


@pytest.mark.parametrize(("hold", "options"), [(None, "--rest budgeted"), (8, "--rest budgeted and --hold")])
def test_a_checkpoint_without_the_code_of_budgets_says_how_to_get_it(checkpoint, tmp_path, hold, options):
    converted = convert_folder(checkpoint("llama"), tmp_path / "plain", sparsity=0.5)
    assert not {"kv_budget.py", "kv_hold.py"} & {path.name for path in converted.folder.iterdir()}
    config = json.loads((converted.folder / "config.json").read_text())
    section, heads = config["kv_surgery"], [{"blocks": [[1, 3]], "budgets": [4, 5, 6]}]
    section["selection"] = {"window": 4, "kernel_size": 3, "pool": "max", **({"hold": hold} if hold else {})}
    section["layers"] = heads * len(section["layers"])
    (converted.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"budgeted heads.* without their code; convert .* with {options}$"):
        converted.load()


STREAMING = {"layers": [{"blocks": [[1, 3]], "sink": 3, "recent": 14}, {"blocks": [[0, 4]], "sink": 3, "recent": 20}]}


@pytest.mark.parametrize(
    ("section", "prompt", "joined"),
    [
        (BUDGETED, 3, [[4], [4]]),
        (BUDGETED, 20, [[1, 1, 2], [1, 1, 1, 1]]),
        (STREAMING, 13, [[4], [4]]),  # the last steps make room for more, and need a ring for some
        (STREAMING, 20, [[1, 3], [4]]),
    ],
    ids=["budgets", "less than that", "windows", "less than all"],
)
def test_steps_take_heads_together_that_hold_as_much(section: dict, prompt: int, joined: list[list[int]]) -> None:
    """They give what each head gives alone, which is how they are computed with gradients."""
    model, ids = emitted("llama", 2, **section), tokens(2, prompt + 6)
    with torch.no_grad():
        cache = model(ids[:, :prompt], use_cache=True).past_key_values
    assert [[run.heads for run in layer.runs] for layer in cache.layers] == joined
    for rows, part in zip(([0, 1], [1, 0]), ids[:, prompt:].split(3, 1), strict=True):
        cache.reorder_cache(torch.tensor(rows))
        apart = copy.deepcopy(cache)
        for token in part.split(1, 1):
            expected = model(token, past_key_values=apart).logits
            with torch.no_grad():
                found = model(token, past_key_values=cache).logits
            assert largest(found - expected, expected) <= 1e-5
