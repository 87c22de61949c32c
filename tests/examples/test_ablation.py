"""Against an attention written out per token and per head, with the visible tokens as a set."""

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.families import largest, stock
from tests.helpers.reference import reference_logits
from tests.helpers.tiny_recall import ablation

LAYERS, QUERY_HEADS, KV_HEADS, DIM = 2, 4, 2, 8
SINK, RECENT = 2, 3
TOKENS = torch.randint(0, 40, (2, 17), generator=torch.Generator().manual_seed(1))
TARGETS = torch.zeros_like(TOKENS, dtype=torch.bool)
TARGETS[0, [9, 16]] = TARGETS[1, [0, 12]] = True  # the first token of a row has nothing before it to predict it from
SOME = torch.tensor([[False, True], [True, False]])


@pytest.fixture(params=["sdpa", "eager"])
def model(request):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        attn_implementation=request.param,
    )
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.4)
    return model


@torch.no_grad()
def logits_by_hand(model, row, heads):
    """float32 [tokens, vocabulary] of one sequence; `heads` [layers, kv_heads] are restricted."""
    position = torch.arange(len(row))
    angle = position[:, None] * 10_000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotate(x):
        turned = torch.complex(x[:, : DIM // 2], x[:, DIM // 2 :]) * turn
        return torch.cat([turned.real, turned.imag], dim=1)

    x = model.model.embed_tokens(row)
    for index, layer in enumerate(model.model.layers):
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        queries = attention.q_proj(normed).split(DIM, dim=1)
        keys, values = (project(normed).split(DIM, dim=1) for project in (attention.k_proj, attention.v_proj))
        out = torch.zeros(len(row), QUERY_HEADS * DIM)
        for head, query in enumerate(queries):
            shared = head * KV_HEADS // QUERY_HEADS
            q, k = rotate(query), rotate(keys[shared])
            for i in range(len(row)):
                seen = [j for j in range(i + 1) if not heads[index, shared] or j < SINK or i - j < RECENT]
                weight = (k[seen] @ q[i] / math.sqrt(DIM)).softmax(0)
                out[i, head * DIM : (head + 1) * DIM] = weight @ values[shared][seen]
        x = x + attention.o_proj(out)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(model.model.norm(x))


def loss_by_hand(model, heads):
    losses = []
    for row, targets in zip(TOKENS, TARGETS, strict=True):
        scores = logits_by_hand(model, row, heads).log_softmax(-1)
        losses += [-scores[t - 1, row[t]] for t in targets.nonzero().flatten().tolist() if t > 0]
    return torch.stack(losses).mean().item()


@pytest.mark.parametrize("heads", [SOME, ~SOME, torch.ones_like(SOME)], ids=["some", "others", "all"])
def test_restricted_heads_see_sink_and_recent_only(model, heads):
    with ablation.restricted(model, heads, sink=SINK, recent=RECENT), torch.no_grad():
        logits = model(TOKENS).logits
    expected = torch.stack([logits_by_hand(model, row, heads) for row in TOKENS])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits, model(TOKENS).logits, atol=1e-2)


def test_learned_sinks_stay():
    model, heads = stock("gpt_oss"), torch.zeros(4, 4, dtype=torch.bool)
    heads[1::2, ::2] = True  # every other layer has a window of its own
    expected = reference_logits(model, (~heads).tolist(), SINK, RECENT, TOKENS)
    with ablation.restricted(model, heads, sink=SINK, recent=RECENT), torch.no_grad():
        assert largest(model(TOKENS).logits - expected, expected) < 1e-5


def test_decoding_with_a_cache_agrees(model):
    with ablation.restricted(model, SOME, sink=SINK, recent=RECENT), torch.no_grad():
        whole = model(TOKENS).logits
        first = model(TOKENS[:, :9])
        parts = [first.logits]
        for t in range(9, TOKENS.shape[1]):
            parts.append(model(TOKENS[:, t : t + 1], past_key_values=first.past_key_values).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)


def test_the_model_is_left_as_it_was(model):
    before = model.config._attn_implementation, model(TOKENS).logits
    with pytest.raises(RuntimeError, match="stop"), ablation.restricted(model, SOME, sink=SINK, recent=RECENT):
        raise RuntimeError("stop")
    assert model.config._attn_implementation == before[0]
    assert torch.equal(model(TOKENS).logits, before[1])


def test_target_loss_counts_targets_only(model):
    assert ablation.target_loss(model, [(TOKENS, TARGETS)]) == pytest.approx(
        loss_by_hand(model, torch.zeros_like(SOME)), rel=1e-4
    )
    rows = [(TOKENS[:1], TARGETS[:1]), (TOKENS[1:], TARGETS[1:])]
    assert ablation.target_loss(model, rows) == pytest.approx(
        ablation.target_loss(model, [(TOKENS, TARGETS)]), rel=1e-5
    )


def test_scores_are_the_rise_of_the_loss(model):
    scores = ablation.ablation_scores(model, [(TOKENS, TARGETS)], sink=SINK, recent=RECENT)
    baseline = loss_by_hand(model, torch.zeros_like(SOME))
    expected = np.zeros((LAYERS, KV_HEADS))
    for place in np.ndindex(*expected.shape):
        heads = torch.zeros_like(SOME)
        heads[place] = True
        expected[place] = loss_by_hand(model, heads) - baseline
    assert scores.dtype == np.float32
    assert (expected < 0).any(), "this model must try the clamp"
    np.testing.assert_allclose(scores, expected.clip(min=0), atol=1e-4)


def test_a_window_that_holds_everything_costs_nothing(model):
    scores = ablation.ablation_scores(model, [(TOKENS, TARGETS)], sink=0, recent=TOKENS.shape[1])
    np.testing.assert_allclose(scores, 0, atol=1e-5)
