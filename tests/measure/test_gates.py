"""Gates against attention written out with a dense mask per head, finite differences, and what a step may keep."""

import pytest
import torch
import torch.nn.functional as F

from kvsurgery.bench.memory import LiveBytes
from kvsurgery.errors import UnsupportedModel
from kvsurgery.measure import blockwise, gates
from kvsurgery.measure.attention_hooks import intercepted
from kvsurgery.measure.gates import add_gradient, gate_scores, initial_gates, mixed_attention, rate
from tests.helpers.families import (
    CACHE_PATHS,
    LAYER_HEADS,
    MEASURED,
    SHARED_CACHE,
    STATES_ALONE,
    WITH_STATES,
    largest,
    rounding,
    stock,
    tokens,
)
from tests.helpers.measured_models import measured_model
from tests.helpers.reference import softmax, visible

SINK, RECENT = 3, 5
SIZES = {"sink": SINK, "recent": RECENT}
TOKENS = tokens(2, 37)
TARGETS = torch.zeros_like(TOKENS, dtype=torch.bool)
TARGETS[0, [20, 21, 36]] = TARGETS[1, [0, 30]] = True  # the first token of a row has nothing before it
LAYERS = {"num_hidden_layers": 2}
OTHER_LAYERS = [name for name in (*LAYER_HEADS, *SHARED_CACHE, *WITH_STATES) if name in CACHE_PATHS]


def random_gates(measured, seed=0):
    """Some between, some at the ends."""
    drawn = torch.rand(initial_gates(measured).shape, generator=torch.Generator().manual_seed(seed)) * 1.6 - 0.3
    return drawn.clamp(0, 1).to(measured.model.dtype).requires_grad_()


def dense_states(measured, gates, ids):
    """Last hidden states of a model whose heads are mixed by dense masks."""
    sources = measured.layers.sources
    gated = [layer for layer, window in enumerate(measured.windows) if window is None and layer not in sources]

    def attend(stock, module, query, key, value, attention_mask, scaling, softcap=None, s_aux=None, **options):
        group, tokens = query.shape[1] // key.shape[1], query.shape[2]
        key, value = key.repeat_interleave(group, 1).double(), value.repeat_interleave(group, 1).double()
        scores = query.double() @ key.mT * scaling
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()

        def over(sink, recent, chunked=False):
            seen = visible(tokens, 0, sink, recent, chunked)
            return softmax(scores.masked_fill(~seen, float("-inf")), s_aux) @ value

        window = measured.windows[module.layer_idx]
        if window is not None:
            output = over(0, window, measured.layers.chunked)
        elif gates is None:
            output = over(None, 1)
        else:
            own = sources.get(module.layer_idx, module.layer_idx)
            gate = gates[gated.index(own)].repeat_interleave(group)[:, None, None]
            output = gate * over(None, 1) + (1 - gate) * over(SINK, RECENT)
        return output.to(query.dtype).transpose(1, 2).contiguous(), None

    with intercepted(measured.model, attend, masks=False), torch.no_grad():
        return measured.model.model(ids, use_cache=False).last_hidden_state


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks in a short input."""
    monkeypatch.setattr(blockwise.kv_softmax, "BLOCK", 8)
    monkeypatch.setattr(blockwise.kv_softmax, "SCORES", 2**10)


class TestMixedAttention:
    @pytest.mark.parametrize("family", MEASURED)
    def test_a_dense_mask_per_head(self, family, small_blocks):
        measured = measured_model(stock(family))
        mix = random_gates(measured)
        for ids in (TOKENS, *((TOKENS[:, :7], TOKENS[:1, :9]) if family in CACHE_PATHS else ())):
            expected = dense_states(measured, mix, ids)
            with mixed_attention(measured, mix, **SIZES), torch.no_grad():
                states = measured.model.model(ids, use_cache=False).last_hidden_state
            assert largest(states - expected, expected) < rounding(family)
        assert largest(dense_states(measured, None, ids) - expected, expected) > 1e-3

    @pytest.mark.parametrize("family", MEASURED)
    def test_gates_of_one_are_the_model(self, family):
        measured = measured_model(stock(family))
        # eager, since stock SDPA leaves soft caps out
        measured.model.set_attn_implementation("eager")
        with torch.no_grad():
            expected = measured.model.model(TOKENS, use_cache=False).last_hidden_state
            for mix in (None, initial_gates(measured)):
                with mixed_attention(measured, mix, **SIZES):
                    states = measured.model.model(TOKENS, use_cache=False).last_hidden_state
                assert largest(states - expected, expected) < rounding(family)
        assert measured.model.config._attn_implementation == "eager"

    def test_bfloat16_weights_take_float32_gates(self):
        measured = measured_model(stock("llama").bfloat16())
        mix = initial_gates(measured)
        with torch.no_grad():
            mix.fill_(0.3)
        expected = dense_states(measured, mix.detach(), TOKENS)
        with mixed_attention(measured, mix, **SIZES):
            states = measured.model.model(TOKENS, use_cache=False).last_hidden_state
        assert states.dtype == torch.bfloat16
        assert largest((states - expected).detach(), expected) < 0.1
        loss = add_gradient(measured, mix, TOKENS, TARGETS, "distill", **SIZES)
        assert loss.dtype == mix.grad.dtype == torch.float32
        assert mix.grad.abs().min() > 0


class TestLoss:
    @pytest.mark.parametrize("family", ["llama", "gemma2"])
    def test_distillation_by_hand(self, family):
        measured = measured_model(stock(family))
        mix = random_gates(measured)
        apart = dense_states(measured, mix, TOKENS).double() - dense_states(measured, None, TOKENS).double()
        # the states before each target; that of the first token has none
        squares = [apart[row, at - 1].square().mean() for row, at in ((0, 20), (0, 21), (0, 36), (1, 30))]
        loss = add_gradient(measured, mix, TOKENS, TARGETS, "distill", **SIZES)
        assert loss.item() == pytest.approx((sum(squares) / 4).item(), rel=1e-4)

    @pytest.mark.parametrize("family", ["llama", "gemma2"])
    def test_language_modelling_by_hand(self, family, monkeypatch):
        monkeypatch.setattr(gates, "LOGIT_POSITIONS", 3)
        measured = measured_model(stock(family))
        mix = random_gates(measured)
        with mixed_attention(measured, mix, **SIZES), torch.no_grad():
            logits = measured.model(TOKENS, use_cache=False).logits
        losses = [
            F.cross_entropy(logits[row, at - 1], TOKENS[row, at]) for row, at in ((0, 20), (0, 21), (0, 36), (1, 30))
        ]
        loss = add_gradient(measured, mix, TOKENS, TARGETS, "lm", **SIZES)
        assert loss.item() == pytest.approx((sum(losses) / 4).item(), rel=1e-5)

    def test_nothing_is_lost_with_gates_of_one(self):
        measured = measured_model(stock("llama"))
        mix = initial_gates(measured)
        assert add_gradient(measured, mix, TOKENS, TARGETS, "distill", **SIZES) == 0
        assert (mix.grad == 0).all()


@pytest.mark.parametrize(
    ("family", "loss"),
    [
        *((family, "distill") for family in ("llama", "qwen2", "gemma2", "gemma3", "gpt_oss", *OTHER_LAYERS)),
        ("llama", "lm"),
        ("gemma2", "lm"),
    ],
)
def test_gradients_are_finite_differences(family, loss, small_blocks):
    depth = LAYERS if family == "llama" else {}
    original = stock(family, experts_implementation="eager", **depth)
    measured = measured_model(original.double())  # fused experts have no float64
    mix = random_gates(measured)

    def loss_and_gradient(values):
        given = values.clone().requires_grad_()
        return add_gradient(measured, given, TOKENS, TARGETS, loss, **SIZES).item(), given.grad

    _, gradient = loss_and_gradient(mix.detach())
    assert gradient.abs().max() > 1e-3
    step, generator = 1e-3, torch.Generator().manual_seed(0)
    # in a direction in which every gate moves
    direction = F.normalize(torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype), dim=(0, 1))
    above, below = (loss_and_gradient(mix.detach() + sign * step * direction)[0] for sign in (1, -1))
    # norms and scores under a soft cap are float32 whatever the model is
    assert abs((gradient * direction).sum() - (above - below) / (2 * step)) < 1e-3 * gradient.norm()


def test_gradients_add_up():
    measured = measured_model(stock("llama", **LAYERS))
    mix = random_gates(measured)
    for row in range(2):
        add_gradient(measured, mix, TOKENS[row : row + 1], TARGETS[row : row + 1], "distill", **SIZES)
    both, mix.grad = mix.grad, None
    expected = torch.zeros_like(both)
    for row in range(2):
        mix.grad = None
        add_gradient(measured, mix, TOKENS[row : row + 1], TARGETS[row : row + 1], "distill", **SIZES)
        expected += mix.grad
    torch.testing.assert_close(both, expected)


def test_layers_with_a_window_of_their_own_have_no_gates():
    measured = measured_model(stock("qwen2"))
    assert measured.windows == (None, None, None, 9)
    mix = initial_gates(measured)
    assert mix.shape == (3, 4)
    scores = gate_scores(measured, mix)
    assert (scores[:3] == 1).all()
    assert (scores[3] == 0).all()
    nothing = measured_model(stock("qwen2", max_window_layers=0))
    with pytest.raises(UnsupportedModel, match="no layer of random has full attention"):
        initial_gates(nothing)


@pytest.mark.parametrize("family", SHARED_CACHE)
def test_layers_that_share_a_cache_share_its_gates(family):
    """Of six layers, 1, 3 and 5 have full attention, and 3 and 5 read the cache of 1."""
    measured = measured_model(stock(family))
    mix = random_gates(measured)
    assert mix.shape == (1, 4)
    scores = gate_scores(measured, mix)
    assert (scores[[1, 3, 5]] == mix.detach().numpy()).all()
    assert (scores[[0, 2, 4]] == 0).all()


@pytest.mark.parametrize("family", STATES_ALONE)
def test_layers_with_states_have_no_gates(family):
    measured = measured_model(stock(family))
    mix = random_gates(measured)
    assert mix.shape == (2, 4)
    scores = gate_scores(measured, mix)
    assert (scores[2:] == mix.detach().numpy()).all()
    assert (scores[:2] == 0).all()


def test_the_model_is_left_as_it_was():
    measured = measured_model(stock("llama"))
    before = measured.model(TOKENS).logits
    add_gradient(measured, initial_gates(measured), TOKENS, TARGETS, "distill", **SIZES)
    assert torch.equal(measured.model(TOKENS).logits, before)
    assert not any(parameter.requires_grad for parameter in measured.model.parameters())
    assert not any("forward" in vars(layer) for layer in measured.model.model.layers)


def test_schedule_by_hand():
    # up over a fifth of the steps, from a tenth, and down to a tenth in the last
    shares = [rate(step, 11) for step in range(11)]
    assert shares[0] == pytest.approx(0.1)
    assert shares[1] == pytest.approx(0.1 + 0.9 / 2.2)
    assert shares[2] == pytest.approx(0.1 + 0.9 * 2 / 2.2)
    assert shares[3] == pytest.approx(0.1 + 0.9 * 7 / 7.8)
    assert shares[10] == pytest.approx(0.1)
    assert rate(400, 2000) == 1
    assert rate(1999, 2000) == pytest.approx(0.1)
    assert [rate(step, 1) for step in range(1)] == [pytest.approx(0.1)]
    assert all(0.1 <= rate(step, steps) <= 1 for steps in range(1, 30) for step in range(steps))


def step_bytes(family, loss, length):
    measured = measured_model(stock(family, **LAYERS))
    mix = initial_gates(measured)
    with torch.no_grad():
        mix.fill_(0.5)
    ids = tokens(1, length)
    targets = torch.zeros_like(ids, dtype=torch.bool)
    targets[:, 1 if loss == "lm" else -30 :] = True
    with LiveBytes() as live:
        add_gradient(measured, mix, ids, targets, loss, **SIZES)
    return live.take()


@pytest.mark.parametrize(("family", "loss"), [("llama", "distill"), ("llama", "lm"), ("gemma2", "distill")])
def test_memory_of_a_step_is_linear_in_its_tokens(family, loss, monkeypatch):
    monkeypatch.setattr(blockwise.kv_softmax, "BLOCK", 16)
    monkeypatch.setattr(blockwise.kv_softmax, "SCORES", 2**12)
    lengths = 64, 128, 256
    first, second, third = (step_bytes(family, loss, length) for length in lengths)
    # with a quadratic term, a token more costs more in a longer input
    assert (third - second) / 128 < 1.1 * (second - first) / 64
    assert third < 8 * 256 * 256 * 4, "less than one layer's attention weights"
