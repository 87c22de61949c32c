"""Rounding of keys by the queries: against a loop in float64, from the measured queries to the tokens of a model."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kvsurgery.conversion.revert import revert
from kvsurgery.conversion.verify import verify
from kvsurgery.errors import Mismatch
from kvsurgery.measure.query_rounding import query_factors
from kvsurgery.templates.kv_codes import dequantize, quantize
from kvsurgery.templates.kv_layout import ROUNDING_FILE, TILE, Quantization
from kvsurgery.templates.kv_rounding import QueryRounding
from tests.helpers.families import tokens
from tests.helpers.losses import least_error_factors, losses
from tests.helpers.shards import tree
from tests.helpers.slow_cache import SlowCache
from tests.helpers.surgery import Converted, convert_folder, random_profile, reform_profile
from tests.templates.test_quantized import in_parts


def rounded(
    keys: np.ndarray, scale: np.ndarray, low: np.ndarray, bits: int, order: np.ndarray, feedback: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Codes of one head's keys [tokens, channels], and how near each token came to the border of two codes."""
    wanted, codes, border = keys.astype(np.float64), np.zeros(keys.shape), np.full(len(keys), np.inf)
    for place, channel in enumerate(order):
        exact = (wanted[:, channel] - low[channel]) / scale[channel]
        codes[:, channel] = exact.round().clip(0, 2**bits - 1)
        border = np.minimum(border, abs(exact - np.floor(exact) - 0.5))
        error = wanted[:, channel] - low[channel] - scale[channel] * codes[:, channel]
        for later_place in range(place + 1, len(order)):
            wanted[:, order[later_place]] -= error * feedback[place, later_place]
    return codes, border


def queries(seed: int, heads: int, head_dim: int) -> np.ndarray:
    """Queries [heads, 300, head_dim] that lie mostly in four directions."""
    random = np.random.default_rng(seed)
    alike = random.normal(size=(heads, 300, 4)) @ random.normal(size=(heads, 4, head_dim))
    return alike + 0.2 * random.normal(size=(heads, 300, head_dim))


@given(
    bits=st.sampled_from([8, 4, 3, 2]),
    clip=st.booleans(),
    group_size=st.sampled_from([None, 32]),
    shape=st.tuples(*[st.integers(1, 3)] * 3),
    head_dim=st.sampled_from([16, 48, 80]),
    seed=st.integers(0, 100),
)
@settings(max_examples=20)
def test_codes_are_those_of_a_loop_and_lose_less_of_the_products(bits, clip, group_size, shape, head_dim, seed) -> None:
    batch, heads, count = shape
    asked = queries(seed, heads, head_dim)
    covariance = torch.from_numpy(asked).mT @ torch.from_numpy(asked)
    order, feedback = query_factors(covariance)
    rounding = QueryRounding(torch.from_numpy(order).long(), torch.from_numpy(feedback))
    quantization = Quantization(bits, group_size=group_size, clip=clip, rotate="none")
    states = torch.randn(2, batch, heads, count, TILE, head_dim, generator=torch.Generator().manual_seed(seed))
    nearest, by_queries = quantize(*states, quantization), quantize(*states, quantization, rounding)
    assert all(torch.equal(first, second) for first, second in zip(nearest[1:], by_queries[1:], strict=True))

    keys, (found, _) = states[0].numpy(), dequantize(by_queries, quantization.widths)
    size = group_size or TILE
    for place in np.ndindex(batch, heads, count):
        scale, low = by_queries.key_scales[place].double().numpy()
        for group, start in enumerate(range(0, TILE, size)):
            rows = slice(start, start + size)
            codes, border = rounded(
                keys[place][rows],
                scale[group],
                low[group],
                bits,
                order[place[1]],
                feedback[place[1]].astype(np.float64),
            )
            sure = border > 1e-4
            assert sure.mean() > 0.5
            expected = codes * scale[group] + low[group]
            np.testing.assert_allclose(found[place][rows].numpy()[sure], expected[sure], rtol=1e-5, atol=1e-5)

    def error(tiles) -> float:
        difference = (dequantize(tiles, quantization.widths)[0] - states[0]).double()
        return torch.einsum("bhtnd,hde,bhtne->", difference, covariance, difference).item()

    assert error(by_queries) < (0.95 if bits == 2 else 0.6) * error(nearest)


def test_factors_are_those_of_a_regression() -> None:
    asked = queries(3, 2, 24)
    covariance = asked.transpose(0, 2, 1) @ asked
    order, feedback = query_factors(torch.from_numpy(covariance))
    for head in range(2):
        expected_order, expected_feedback = least_error_factors(covariance[head])
        assert (order[head] == expected_order).all()
        np.testing.assert_allclose(feedback[head], expected_feedback, rtol=2e-3, atol=1e-3)


class RoundedSlowCache(SlowCache):
    """A `SlowCache` whose keys are rounded by the queries, with the factors of the original's heads."""

    def __init__(self, quantization, config, factors):
        super().__init__(quantization, config)
        self.factors = factors

    def pack(self, layer, settled):
        self.layer = layer
        super().pack(layer, settled)

    def coded(self, states, dim, bits):
        if dim == 3:
            return super().coded(states, dim, bits)
        found = torch.empty_like(states)
        for row, head in np.ndindex(states.shape[:2]):
            keys = states[row, head].numpy()
            low, scale = keys.min(0), (keys.max(0) - keys.min(0)) / np.float32(2**bits - 1)
            factors = self.factors.order[self.layer, head], self.factors.feedback[self.layer, head].astype(np.float64)
            codes, _ = rounded(keys, scale, low, bits, *factors)
            found[row, head] = torch.from_numpy(codes * scale + low)
        return found


def measured(source: Path, out: Path) -> Path:
    """A file of losses for a checkpoint, where rounding by the queries loses least."""
    profile = random_profile(source)
    losses(profile.model, str(source), rounded=True).save(out)
    return out


@pytest.fixture(scope="module")
def converted(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    folder = tmp_path_factory.mktemp("rounded")
    path = measured(checkpoint("qwen3"), folder / "losses.safetensors")
    return convert_folder(checkpoint("qwen3"), folder / "out", sparsity=0.5, kv_bits=3, kv_measured=str(path))


def test_a_file_beside_the_weights_has_the_factors_of_all_heads(converted: Converted) -> None:
    section = json.loads((converted.folder / "config.json").read_text())["kv_surgery"]["quantization"]
    assert (section["rounding"], section["rotate"]) == ("queries", "both")
    tensors = load_file(converted.folder / ROUNDING_FILE)
    made = losses(random_profile(converted.source).model, rounded=True).rounding["both"]
    rounded_layers = [(index, layer) for index, layer in enumerate(converted.policy.layers) if layer.full]
    assert len(tensors) == 2 * len(rounded_layers) > 2
    for index, layer in rounded_layers:
        assert (tensors[f"layers.{index}.order"].numpy() == made.order[index, list(layer.order)]).all()
        assert (tensors[f"layers.{index}.feedback"].numpy() == made.feedback[index, list(layer.order)]).all()
    report = verify(converted.folder, converted.source)
    assert report.unrecorded == ()


def test_a_model_computes_what_a_loop_makes_of_its_keys(checkpoint, converted: Converted, tmp_path: Path) -> None:
    path = converted.folder.parent / "losses.safetensors"
    full = convert_folder(
        checkpoint("qwen3"), tmp_path / "full", sparsity=0.0, kv_bits=3, kv_measured=str(path), kv_residual=5
    )
    quantization = full.policy.quantization
    assert quantization is not None
    factors = losses(random_profile(full.source).model, rounded=True).rounding["both"]
    ids = tokens(1, 390)
    parts = ids.split([140, 3, 115, *[1] * 20, 112], 1)
    found, cache = in_parts(full.model, parts)
    expected, nearest = [], []
    by_queries, plain = (
        RoundedSlowCache(quantization, full.stock.config, factors),
        SlowCache(quantization, full.stock.config),
    )
    for part in parts:
        with torch.no_grad():
            expected.append(full.stock(part, past_key_values=by_queries).logits)
            nearest.append(full.stock(part, past_key_values=plain).logits)
    difference = torch.cat(nearest, 1) - torch.cat(expected, 1)
    # not nearer, since a state on the edge of two codes may take the other one
    assert (found - torch.cat(expected, 1)).norm() <= 0.1 * difference.norm()
    assert max(cache.layers[-1].heads[0].groups[0].packed) == TILE * quantization.tiles(386)


def test_copies_of_a_cache_go_on_alike(converted: Converted) -> None:
    ids = tokens(1, 700)
    with torch.no_grad():
        cache = converted.model(ids[:, :300]).past_key_values
        found = [
            converted.model(ids[:, 300:], past_key_values=one).logits
            for one in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache)
        ]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])


def test_tiles_that_are_due_before_a_step_with_kernels_are_packed_alike(converted: Converted) -> None:
    """Kernels do not round by the queries, so storage packs in plain torch and tells them."""
    ids, model = tokens(1, 261), converted.model
    with torch.no_grad():
        expected = model(ids[:, :260]).past_key_values
        cache = copy.deepcopy(expected)
        model(ids[:, 260:], past_key_values=expected)
    cache.begin(None, 1, 1)
    packed = 0
    for layer, expected_layer in zip(cache.attention, expected.attention, strict=True):
        layer.make_room(1)
        for group, expected_group in zip(layer.storage.tiled, expected_layer.storage.tiled, strict=True):
            assert group.packed == [0]
            layer.storage.table()
            layer.pack()
            assert group.packed == expected_group.packed == [TILE]
            assert layer.storage.table().packed[0, : group.heads].tolist() == [TILE] * group.heads
            assert all(map(torch.equal, group.tiles, expected_group.tiles))
            packed += 1
    assert packed > 1


def without_a_layer(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["layers.0.feedback"]


def of_other_heads(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.0.order"] = tensors["layers.0.order"][:1]


def no_order(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.0.order"][0, 0] = tensors["layers.0.order"][0, 1]


def not_finite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.0.feedback"][1, 2, 5] = float("inf")


@pytest.mark.parametrize("damage", [without_a_layer, of_other_heads, no_order, not_finite])
def test_a_wrong_file_is_one_line(converted: Converted, tmp_path: Path, damage) -> None:
    folder = shutil.copytree(converted.folder, tmp_path / "damaged")
    tensors = load_file(folder / ROUNDING_FILE)
    damage(tensors)
    save_file(tensors, folder / ROUNDING_FILE)
    with pytest.raises(ValueError, match=f"^{ROUNDING_FILE} has no factors of 4 heads of 16 for layer 0; .*$"):
        Converted(converted.source, folder, converted.policy).load()
    with pytest.raises(Mismatch, match="was changed after the conversion"):
        verify(folder)


@pytest.mark.parametrize("content", [None, b"not a file of tensors"], ids=["missing", "damaged"])
def test_without_the_file_nothing_loads(converted: Converted, tmp_path: Path, content: bytes | None) -> None:
    folder = shutil.copytree(converted.folder, tmp_path / "damaged")
    (folder / ROUNDING_FILE).unlink()
    if content is not None:
        (folder / ROUNDING_FILE).write_bytes(content)
    with pytest.raises(ValueError, match=f"has no readable {ROUNDING_FILE}, by which its keys are rounded") as refused:
        Converted(converted.source, folder, converted.policy).load()
    assert len(str(refused.value).splitlines()) == 1


def test_reverting_leaves_no_trace(converted: Converted, tmp_path: Path) -> None:
    revert(converted.folder, tmp_path / "back")
    assert tree(tmp_path / "back") == tree(converted.source)


def test_a_question_about_a_long_prompt_is_answered_from_rounded_keys(checkpoint, tmp_path: Path) -> None:
    """As the same cache answers the gathered prompt, and not as one whose keys are rounded to the nearest code."""
    source = checkpoint("qwen3")
    recipe = {"sparsity": 0.5, "kv_bits": 2, "kv_measured": str(measured(source, tmp_path / "losses.safetensors"))}
    sizes = {"chunk": 64, "encode_budget": 32, "keep": 4, "window": 5, "pool": 3, "recompute_budget": 300}
    long = convert_folder(source, tmp_path / "long", **recipe, reform=reform_profile(source), sizes=sizes)
    by_queries = convert_folder(source, tmp_path / "queries", **recipe)
    nearest = convert_folder(source, tmp_path / "nearest", **recipe, kv_rounding="nearest")
    greedy = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = tokens(1, 700)
    found, [places] = long.model.generate(ids, return_gathered=True, **greedy)
    gathered = ids[:, places]
    assert found[:, 700:].equal(by_queries.model.generate(gathered, **greedy)[:, 300:])
    assert not found[:, 700:].equal(nearest.model.generate(gathered, **greedy)[:, 300:])
