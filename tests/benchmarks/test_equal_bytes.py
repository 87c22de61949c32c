"""Caches at equal bytes: their bytes, what the simulation of each gives back, and what the page says of the results."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks import equal_bytes
from benchmarks.documented_tables import EQUAL_BYTES, results
from benchmarks.equal_bytes import BASE, WIDTHS, Cache, Groups, changes, ratios
from kvsurgery.measure.cache_trial import stored_states
from kvsurgery.measure.query_rounding import query_factors
from kvsurgery.templates.kv_layout import TILE, Quantization
from kvsurgery.templates.kv_rounding import QueryRounding

HEADS, TOKENS, HEAD_DIM = 2, 600, 64
FIRST = 3 * TILE  # tokens in tiles of a prompt of this length
# changes that find codes in another way, or keep other tokens; the others are compared with a loop over groups
FITS = {name for name in changes(2) if "regression" in name or "queries" in name}


def states(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with a mean and a size for each channel, and values."""
    random = torch.Generator().manual_seed(0)
    keys = torch.randn(1, HEADS, TOKENS, HEAD_DIM, generator=random)
    keys = keys * torch.linspace(0.2, 3, HEAD_DIM) + torch.linspace(-20, 20, HEAD_DIM)
    keys[:, :, 0] *= 9
    return keys.to(dtype), torch.randn(1, HEADS, TOKENS, HEAD_DIM, generator=random).to(dtype)


def covariance() -> torch.Tensor:
    """Of queries whose channels go together, float64 [HEADS, HEAD_DIM, HEAD_DIM]."""
    queries = torch.randn(HEADS, 500, HEAD_DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mixed = queries @ torch.randn(HEAD_DIM, HEAD_DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return mixed.mT @ mixed


def received() -> torch.Tensor:
    return torch.rand(HEADS, TOKENS, generator=torch.Generator().manual_seed(3))


def restored(cache: Cache, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.restored(*states(dtype), received(), covariance())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", WIDTHS)
def test_the_base_is_the_product(bits: int, dtype: torch.dtype) -> None:
    quantization = Quantization(bits)
    expected = stored_states(*states(dtype), quantization)
    assert all(map(torch.equal, restored(changes(bits)[BASE], dtype), expected))
    groups_of_32 = Cache(bits, Groups(32, 1), Groups(1, 32))
    expected = stored_states(*states(dtype), replace(quantization, group_size=32))
    assert all(map(torch.equal, restored(groups_of_32, dtype), expected))


@pytest.mark.parametrize("bits", WIDTHS)
def test_rounding_by_the_queries_is_that_of_the_product(bits: int) -> None:
    order, feedback = map(torch.from_numpy, query_factors(covariance()))
    quantization = Quantization(bits, rounding="queries")
    expected = stored_states(*states(), quantization, QueryRounding(order.long(), feedback))
    found = restored(changes(bits)["keys rounded by the queries"])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_bytes_are_those_of_the_product(head_dim: int) -> None:
    """Tiles of the groups that it has, and sinks."""
    for bits in WIDTHS:
        for cache, quantization in (
            (changes(bits)[BASE], Quantization(bits)),
            (changes(bits)["16 sinks"], Quantization(bits, sink=16)),
        ):
            tiles = quantization.tiles(1024 - quantization.sink)
            size = tiles * quantization.tile_bytes(head_dim) + quantization.sink * 2 * head_dim * 2
            values = 2 * head_dim * (tiles * TILE + quantization.sink)
            assert cache.bits_a_value(head_dim) == pytest.approx(8 * size / values)


def test_bytes_of_the_changes() -> None:
    """Beside the base with heads of 64 channels, in tiles of 768 tokens and in sinks."""
    caches = changes(2)
    base = (768 * (2 + 32 / 128 / 2 + 32 / 64 / 2) + 4 * 16) / 772
    share = 768 / 772
    expected = {
        BASE: 0,
        "8-bit scales": -16 / 128 / 2 - 16 / 64 / 2,
        "groups of 32, 8-bit scales": 16 / 64 / 2,
        "keys in groups of 64": 32 / 128 / 2,
        "keys in groups of 64, 8-bit scales": 0,
        "keys in groups of 64, 8-bit scales, 16-bit minima": (24 / 64 - 32 / 128) / 2,
        "keys in groups of 64, all scales in 8 bits": -16 / 64 / 2,
        **dict.fromkeys(FITS, 0),
    }
    for name, added in expected.items():
        assert caches[name].bits_a_value(64) == pytest.approx(base + share * added), name
    # other tokens than the first keep a place in tiles, and have a position for 2 * 64 values
    assert caches["4 smallest keys"].bits_a_value(64) == pytest.approx(2.375 + 4 * (16 + 16 / 128) / 768)


def stored_in_8_bits(scale: float, low: float, levels: int) -> tuple[float, float]:
    """A scale with 3 bits of mantissa, at least this one, and a minimum in 32nds of its range."""
    scale = torch.tensor(max(scale, abs(low) * 32 / 127 / levels)).half().item()
    eighth = 2.0 ** (math.floor(math.log2(scale)) - 3)
    stored = math.ceil(scale / eighth) * eighth
    unit = stored * levels / 32
    return stored, max(-128, min(127, round(low / unit))) * unit


def group_reference(group: list[float], bits: int, clip: bool) -> list[float]:
    """What codes of one group with a scale and a minimum of 8 bits give back, number by number."""
    levels, best = 2**bits - 1, (math.inf, group)
    low, high = min(group), max(group)
    for twentieths in range(20, 13 if clip else 19, -1):
        span = (high - low) * twentieths / 20
        scale, start = stored_in_8_bits(span / levels, (low + high - span) / 2, levels)
        given_back = [scale * max(0, min(levels, round((x - start) / scale))) + start for x in group]
        error = sum((x - y) ** 2 for x, y in zip(group, given_back, strict=True))
        if error < best[0] * (1 - 1e-5):
            best = error, given_back
    return best[1]


@pytest.mark.parametrize("bits", WIDTHS)
def test_scales_of_8_bits_by_a_loop(bits: int) -> None:
    """Keys of one head, whose groups are 32 tokens of a channel."""
    keys, _ = states()
    found, _ = restored(changes(bits)["groups of 32, 8-bit scales"])
    for channel in range(0, HEAD_DIM, 9):
        for first in range(4, 4 + 2 * TILE, 32):
            group = keys[0, 1, first : first + 32, channel]
            expected = torch.tensor(group_reference(group.tolist(), bits, clip=bits < 4))
            error, least = (
                (given - group).square().sum() for given in (found[0, 1, first : first + 32, channel], expected)
            )
            torch.testing.assert_close(error, least, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in changes(2) if "tokens" in name or "smallest" in name])
def test_tokens_that_are_found_are_exact(name: str) -> None:
    cache, (keys, values) = changes(2)[name], states()
    new_keys, new_values = restored(cache)
    ranks = received() if "attention" in name else -keys[0].norm(dim=-1)
    expected = ranks[:, :FIRST].topk(cache.sinks).indices.sort().values
    for head in range(HEADS):
        same = (new_keys[0, head] == keys[0, head]).all(-1) & (new_values[0, head] == values[0, head]).all(-1)
        assert same[:FIRST].nonzero()[:, 0].tolist() == expected[head].tolist()
        assert same[FIRST:].all()


def test_exact_tokens_do_not_widen_ranges() -> None:
    """A token that is thousands of times larger changes nothing of the others where it is exact."""
    keys, values = states()
    large = keys.clone()
    large[:, :, 70] = keys[:, :, 70] * 1000
    attention = torch.zeros(HEADS, TOKENS)
    attention[:, 70] = 1
    cache = Cache(2, sinks=1, rank=equal_bytes.by_attention)
    found, expected = (cache.restored(each, values, attention, covariance())[0] for each in (large, keys))
    assert torch.equal(found[:, :, 70], large[:, :, 70])
    found[:, :, 70] = expected[:, :, 70]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("bits", WIDTHS)
def test_fits_lower_what_they_fit(bits: int) -> None:
    """Regression lowers the squared error; ranges and codes by the queries lower the expected error of q . k."""
    keys, _ = states()
    caches = changes(bits)
    metric = covariance().float()

    def losses(name: str) -> tuple[float, float]:
        errors = (restored(caches[name])[0] - keys)[0]
        return errors.square().sum().item(), ((errors @ metric) * errors).sum().item()

    squared, by_queries = losses(BASE)
    assert losses("regression from the best range")[0] < squared
    ranges, codes = (losses(f"key ranges{what} by the queries")[1] for what in ("", " and codes"))
    assert ranges < by_queries
    assert codes < 0.7 * by_queries


def test_divergences_at_equal_bytes() -> None:
    """Those of the base lie on lines between logarithms, and go on beyond its widths."""
    report = {
        "bits": {"5 kivi": 5.5, "4 kivi": 4.5, "3 kivi": 3.5, "2 kivi": 2.5, "2 other": 3.0, "3 less": 2.0},
        "windows": {
            "0": {"5 kivi": 0.001, "4 kivi": 0.01, "3 kivi": 0.1, "2 kivi": 0.4, "2 other": 0.1, "3 less": 0.7},
            "1": {"5 kivi": 0.001, "4 kivi": 0.01, "3 kivi": 0.1, "2 kivi": 0.4, "2 other": 0.3, "3 less": 0.9},
        },
    }
    window = report["windows"]["0"]
    assert [equal_bytes.at_equal_bytes(report, window, bits) for bits in (2.5, 3.0, 4.0, 4.75)] == pytest.approx(
        [0.4, 0.2, 10**-1.5, 10**-2.25]
    )
    assert ratios(report, "2 other") == (pytest.approx(1.0), 1)
    assert ratios(report, "3 less") == (pytest.approx(1.0), 1)


def test_a_cell_is_bold_where_every_passage_is_lower() -> None:
    base = {"5 kivi": 0.001, "4 kivi": 0.01, "3 kivi": 0.1, "2 kivi": 0.4}
    report = {
        "bits": {"5 kivi": 5.5, "4 kivi": 4.5, "3 kivi": 3.5, "2 kivi": 2.5, "2 always": 2.5, "2 once": 2.5},
        "windows": {"0": {**base, "2 always": 0.3, "2 once": 0.1}, "1": {**base, "2 always": 0.39, "2 once": 0.5}},
    }
    cells = [equal_bytes.cell(report, f"2 {name}") for name in ("always", "once", "unmeasured")]
    assert cells == ["**-14%**", "-25%", "–"]


def test_the_documented_findings() -> None:
    """What docs/quantized-caches.md says of SmolLM2, Gemma 3 270M and Qwen2.5-Coder-1.5B."""
    smollm2, gemma, qwen = map(results, EQUAL_BYTES)
    assert all(len(report["windows"]) == 3 for report in (smollm2, gemma, qwen))

    def differences(name: str, *widths: int) -> list[float]:
        """In percent, of SmolLM2 and Gemma at each width."""
        return [100 * (ratios(report, f"{bits} {name}")[0] - 1) for report in (smollm2, gemma) for bits in widths]

    groups_of_64 = "keys in groups of 64, 8-bit scales"
    assert all(report["bits"][f"2 {groups_of_64}"] == report["bits"]["2 kivi"] for report in (smollm2, gemma))
    lower = differences(groups_of_64, 3, 2)
    assert (round(min(lower)), round(max(lower))) == (-31, -21)
    assert max(differences(groups_of_64, 4)) > 0
    lower = differences("keys in groups of 64, all scales in 8 bits", 3, 2)
    assert (round(min(lower)), round(max(lower))) == (-38, -25)
    assert [round(100 * (ratios(qwen, f"{bits} {groups_of_64}")[0] - 1)) for bits in (3, 2)] == [156, 63]
    assert ratios(qwen, f"2 {groups_of_64}, 16-bit minima")[0] > 1
    assert all(
        ratios(report, f"{bits} keys rounded by the queries")[0] < 1
        for report in (smollm2, gemma, qwen)
        for bits in WIDTHS
    )
    assert min(differences("16 sinks", *WIDTHS) + differences("32 sinks", *WIDTHS)) > 0
    for name in ("key ranges by the queries", "key ranges and codes by the queries"):
        assert ratios(smollm2, f"4 {name}")[0] > 1
    for bits in WIDTHS:
        assert ratios(smollm2, f"{bits} 4 smallest keys")[0] > 1
        assert ratios(gemma, f"{bits} 4 smallest keys")[0] > 2
        assert ratios(smollm2, f"{bits} 4 tokens of most attention")[1] == 3
        assert ratios(gemma, f"{bits} 4 tokens of most attention")[0] > 0.95
    for name in ("regression from the full range", "regression from the best range"):
        assert min(differences(name, *WIDTHS)) < 0 < max(differences(name, *WIDTHS))
