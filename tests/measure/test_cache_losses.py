"""Measured losses of caches: the trial computes what emitted models do, and the file holds every head's own loss."""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsurgery.errors import ProfileError, UnsupportedModel
from kvsurgery.measure.cache_losses import TrialSizes, cache_losses
from kvsurgery.measure.cache_trial import CacheTrial, Window
from kvsurgery.templates.kv_cache import KVSurgeryCache
from kvsurgery.templates.kv_layout import KVLayout, Quantization
from tests.helpers.emitted import emitted
from tests.helpers.families import CACHE_PATHS, SHARED_CACHE, WITH_STATES, stock, tokens
from tests.helpers.gpu_strides import lay_out_as_on_a_gpu
from tests.helpers.losses import least_error_factors
from tests.helpers.measured_models import measured_model
from tests.helpers.surgery import convert_folder

PROMPT, FOLLOWING = 300, 12
SMALL = TrialSizes(passages=2, context=300, scored=12, alone=8, sink=3, recent=40)


def gemma(depth: int = 4) -> torch.nn.Module:
    """A model with soft caps, scaled embeddings, and a window of its own in every other layer."""
    return stock("gemma2", num_hidden_layers=depth).eval()


def log_probabilities(model, ids, cache=None):
    """After each of the last tokens, read in one forward after a prompt."""
    with torch.no_grad():
        cache = model(ids[:, :PROMPT], past_key_values=cache, use_cache=True).past_key_values
        return model(ids[:, PROMPT:], past_key_values=cache).logits[0].log_softmax(-1)


def check_trial(original, made, how, changes, cache=None):
    """A trial of the original and the emitted model agree, with heads that are quantized (1) and streaming (2)."""
    ids = tokens(1, PROMPT + FOLLOWING)
    exact = log_probabilities(original, ids)
    found = log_probabilities(made, ids, cache)
    expected = (exact.exp() * (exact - found)).sum(-1).mean()

    trial = CacheTrial(original, measured_model(original).layers, ids, PROMPT, [how, Window(3, 5)])
    assert expected > 1e-5
    assert trial.converted_divergence(changes).item() == pytest.approx(expected.item(), rel=1e-2, abs=1e-7)
    changes[changes == 2] = 0
    assert trial.converted_divergence(changes).tolist() == pytest.approx(trial.divergence(changes).tolist(), rel=1e-3)


class TestTrial:
    def test_attention_may_have_the_strides_of_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = stock("llama", num_hidden_layers=4).eval()
        layers, ids = measured_model(original).layers, tokens(1, PROMPT + FOLLOWING)
        changes = torch.ones(1, 4, 4, dtype=torch.int64)

        def divergence() -> float:
            return CacheTrial(original, layers, ids, PROMPT, [Window(3, 5)]).converted_divergence(changes).item()

        expected = divergence()
        lay_out_as_on_a_gpu(monkeypatch)
        assert divergence() == pytest.approx(expected, rel=1e-4)

    @pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
    @pytest.mark.parametrize(
        "how",
        [
            Quantization(2, "per-token", 2),
            Quantization(8, sink=0, residual=20),
            Quantization(8, residual=0, rotate="both", clip=True),
        ],
        ids=["per token", "8 bits", "rotated"],
    )
    def test_is_what_the_emitted_model_computes(self, family: str, how: Quantization) -> None:
        if family != "llama" and how.bits == 8:
            how = replace(how, bits=3)
        if family == "llama":  # heads of 6
            how = replace(how, bits=8)
        made = emitted(family)
        original = stock(family, num_hidden_layers=4).eval()
        original.load_state_dict(made.state_dict())
        original.set_attn_implementation("eager")
        changes = torch.zeros(1, 4, 4, dtype=torch.int64)
        for layer, entry in enumerate(made.config.kv_surgery["layers"]):
            if not entry.get("native"):
                [[full, _]] = entry["blocks"]
                changes[0, layer] = torch.tensor([1] * full + [2] * (4 - full))
        check_trial(original, made, how, changes, KVSurgeryCache(made.config, quantization=how))

    @pytest.mark.parametrize("family", [name for name in (*SHARED_CACHE, *WITH_STATES) if name in CACHE_PATHS])
    def test_layers_that_share_a_cache_and_layers_with_states(self, checkpoint, tmp_path, family: str) -> None:
        """Heads of a cache that several layers read change for all of them, and states go on after the prompt."""
        converted = convert_folder(checkpoint(family), tmp_path / "out", sparsity=0.5, kv_bits=3)
        quantization = KVLayout.from_config(converted.model.config).quantization
        changes = torch.zeros(1, len(converted.full), 4, dtype=torch.int64)
        for layer in measured_model(converted.stock).full_layers():
            changes[0, layer] = 2 - torch.tensor(converted.full[layer], dtype=torch.int64)
        check_trial(converted.stock, converted.model, quantization, changes)

    @given(st.data())
    @settings(max_examples=10)
    def test_rows_and_layers_below_do_not_matter(self, data) -> None:
        """Several changes together give what each gives alone, though layers below a lone change are not computed."""
        model = gemma()
        caches = [Quantization(2), Window(3, 20)]
        trial = CacheTrial(model, measured_model(model).layers, tokens(1, PROMPT + FOLLOWING), PROMPT, caches)
        rows = data.draw(st.integers(1, 4))
        changes = torch.zeros(rows, 4, 4, dtype=torch.int64)
        for row in range(rows):
            layer = data.draw(st.sampled_from([1, 3]))  # without a window
            changes[row, layer, data.draw(st.integers(0, 3))] = data.draw(st.integers(0, 2))
        alone = [trial.divergence(row[None]).item() for row in changes]
        assert trial.divergence(changes).tolist() == pytest.approx(alone, rel=1e-3, abs=1e-8)
        unchanged = ~changes.flatten(1).any(1)
        assert (trial.divergence(changes)[unchanged] < 1e-8).all()

    def test_the_first_tokens_do_not_see_the_others(self) -> None:
        model, ids = gemma(), tokens(1, PROMPT + FOLLOWING)
        layers, caches = measured_model(model).layers, [Quantization(2), Window(3, 20)]
        changes = torch.zeros(2, 4, 4, dtype=torch.int64)
        changes[0, 3], changes[1, 1] = 1, 2
        found = CacheTrial(model, layers, ids, PROMPT, caches).divergence(changes, tokens=5)
        shorter = CacheTrial(model, layers, ids[:, : PROMPT + 5], PROMPT, caches)
        # how logits round differs between processors
        assert found.tolist() == pytest.approx(shorter.divergence(changes).tolist(), rel=1e-3, abs=2e-7)

    def test_rows_share_the_prompt_of_their_streaming_heads(self) -> None:
        model = gemma()
        trial = CacheTrial(
            model,
            measured_model(model).layers,
            tokens(1, PROMPT + FOLLOWING),
            PROMPT,
            [Quantization(2), Window(3, 20)],
        )
        changes = torch.zeros(4, 4, 4, dtype=torch.int64)
        changes[:3, 1, :2] = 2
        changes[1, 3] = 1
        changes[2, 1, 2:] = 1
        changes[3, 3] = 1
        alone = [trial.converted_divergence(row[None]).item() for row in changes]
        assert trial.converted_divergence(changes).tolist() == pytest.approx(alone, rel=1e-3, abs=1e-8)
        assert len({round(loss, 9) for loss in alone}) == 4

    def test_the_model_is_left_as_it_was(self) -> None:
        model, ids = gemma(), tokens(1, PROMPT + FOLLOWING)
        before = model(ids).logits
        trial = CacheTrial(model, measured_model(model).layers, ids, PROMPT, [Quantization(4)])
        trial.divergence(torch.ones(1, 4, 4, dtype=torch.int64))
        assert model(ids).logits.equal(before)


class TestLosses:
    @pytest.fixture(scope="class")
    @staticmethod
    def measured():
        steps = []
        found = cache_losses(
            measured_model(gemma()),
            tokens(1, 2000)[0].numpy(),
            SMALL,
            prefix_tokens=(1,),
            data={"text": "random"},
            progress=lambda done, of: steps.append((done, of)),
        )
        return found, steps

    def test_every_head_with_full_attention_has_a_loss(self, measured) -> None:
        found, steps = measured
        assert {name: losses.shape for name, losses in found.heads.items()} == dict.fromkeys(
            ["8", "4", "3", "k3v2", "2", "streaming"], (4, 4)
        )
        for losses in found.heads.values():
            assert (losses[[1, 3]] > 0).all()
            assert not losses[[0, 2]].any()
        assert found.heads["2"].sum() > found.heads["4"].sum() > found.heads["8"].sum()
        assert steps[0] == (0, steps[-1][1])
        assert steps[-1][0] == steps[-1][1]
        assert [done for done, _ in steps] == sorted({done for done, _ in steps})

    def test_losses_of_a_width_are_of_its_best_setting(self, measured) -> None:
        found, _ = measured
        assert [len(settings) for settings in found.settings.values()] == [1, 8, 8, 8, 8]
        for bits, some in found.settings.items():
            assert found.best(bits).loss == min(setting.loss for setting in some)
            assert found.expected(str(bits)).sum() == pytest.approx(found.best(bits).loss)

    def test_they_add_up_in_a_random_model(self, measured) -> None:
        found, _ = measured
        names = [one.name for one in found.combinations]
        assert "8 heads streaming" in names
        assert "4 heads streaming, the others in 2 bits" in names
        assert [one.streaming for one in found.combinations] == [2, 4, 0, 0, 0, 0, 6, 7, 8, 0]
        assert found.expected("streaming").sum() == pytest.approx(found.combinations[-2].measured)
        for one in found.combinations:
            assert 0.3 < one.measured / one.expected < 3, one

    def test_a_permuted_model_has_the_losses_of_its_original(self, measured) -> None:
        order = ((2, 0, 3, 1),) * 4
        moved = cache_losses(
            measured_model(gemma(), permutation=order), tokens(1, 2000)[0].numpy(), SMALL, prefix_tokens=(1,), data={}
        )
        for name, losses in measured[0].heads.items():
            assert np.allclose(moved.heads[name][:, list(order[0])], losses)
        for rotate, factors in measured[0].rounding.items():
            moved_order, moved_feedback = vars(moved.rounding[rotate]).values()
            assert (moved_order[1, list(order[0])] == factors.order[1]).all()
            assert (moved_feedback[1, list(order[0])] == factors.feedback[1]).all()
            assert factors.feedback[[1, 3]].any((2, 3)).all()
            assert not factors.feedback[[0, 2]].any()

    def test_queries_are_summed_over_the_passages(self, measured) -> None:
        """Of a head's group, after RoPE, at the positions of the prompt."""
        model, queries = gemma(), []
        module = sys.modules[type(model).__module__]
        rotate, passages = module.apply_rotary_pos_emb, SMALL.of(tokens(1, 2000)[0].numpy(), (1,))

        def noted(*states, **options):
            queries.append(rotate(*states, **options))
            return queries[-1]

        covariance = np.zeros((4, 16, 16))
        with mock.patch.object(module, "apply_rotary_pos_emb", noted), torch.no_grad():
            for passage in passages:
                queries.clear()
                model(passage[None, : SMALL.context])
                query = queries[3][0][0].double().unflatten(0, (4, -1)).flatten(1, 2)
                covariance += (query.mT @ query).numpy()
        found = measured[0].rounding["values"]
        for head in range(4):
            order, feedback = least_error_factors(covariance[head])
            assert (found.order[3, head] == order).all()
            np.testing.assert_allclose(found.feedback[3, head], feedback, rtol=1e-2, atol=5e-3)

    def test_refusals(self) -> None:
        text = tokens(1, 2000)[0].numpy()
        for sizes in (replace(SMALL, context=260), replace(SMALL, recent=500)):
            with pytest.raises(ProfileError, match="`context` must be at least "):
                cache_losses(measured_model(gemma()), text, sizes, data={})
        with pytest.raises(UnsupportedModel, match="no layer"):
            cache_losses(measured_model(gemma(1)), text, SMALL, data={})
