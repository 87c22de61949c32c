"""Codes of a tile: what rounding, clipping and rotations lose, and their bytes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsurgery.templates.kv_codes import (
    dequantize,
    empty_tiles,
    key_products,
    quantize,
    rotated,
    rotation,
    weighted_values,
)
from kvsurgery.templates.kv_layout import EVERY, TILE, Quantization, Widths, in_window
from kvsurgery.templates.kv_tiles import QuantizedGroup
from tests.helpers.families import largest

# bits of keys and of values
WIDTHS = st.builds(Widths, *[st.sampled_from([8, 4, 3, 2])] * 2)


@given(
    widths=WIDTHS,
    scheme=st.sampled_from(["kivi", "per-token"]),
    group_size=st.sampled_from([None, 16, 32]),
    head_dim=st.sampled_from([32, 64, 96]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 100),
)
@settings(max_examples=60)
def test_codes_are_within_half_a_step(widths, scheme, group_size, head_dim, dtype, seed):
    quantization = Quantization(widths.bits, scheme, group_size, clip=False)
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(head_dim, generator=generator) * 5
    states = (torch.randn(2, 2, 3, TILE, head_dim, generator=generator) * spread).to(dtype)
    tiles = quantize(*states, quantization)
    assert [part.shape for part in tiles] == [part.shape for part in empty_tiles(states[0], 3, quantization)]
    assert tiles.nbytes == 2 * 3 * quantization.tile_bytes(head_dim, dtype.itemsize)
    rounding = 4 * torch.finfo(dtype).eps
    by_channel = scheme == "kivi", False
    for exact, found, bits, per_channel in zip(states, dequantize(tiles, widths), widths, by_channel, strict=True):
        dim = -2 if per_channel else -1
        size = group_size or exact.shape[dim]
        grouped = exact.double().unflatten(dim, (-1, size))
        steps = (grouped.amax(dim) - grouped.amin(dim)) / (2**bits - 1)
        bound = (steps / 2).unsqueeze(dim).expand_as(grouped).flatten(
            dim - 1, dim
        ) + rounding * exact.double().abs().amax()
        assert ((found.double() - exact.double()).abs() <= bound).all()


@given(
    widths=WIDTHS,
    scheme=st.sampled_from(["kivi", "per-token"]),
    group_size=st.sampled_from([None, 16, 32]),
    head_dim=st.sampled_from([32, 64, 96]),
    shape=st.tuples(*[st.integers(1, 3)] * 4),
    at_once=st.integers(1, 3),
    seed=st.integers(0, 100),
)
@settings(max_examples=60)
def test_products_with_codes_are_those_with_what_they_stand_for(
    widths, scheme, group_size, head_dim, shape, at_once, seed
):
    batch, heads, queries, count = shape
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(2, batch, heads, count, TILE, head_dim, generator=generator, dtype=torch.float64)
    asked = torch.randn(batch, heads, queries, head_dim, generator=generator, dtype=torch.float64)
    weights = torch.rand(batch, heads, queries, count * TILE, generator=generator, dtype=torch.float64)
    tiles = quantize(*states, Quantization(widths.bits, scheme, group_size))
    keys, values = (part.flatten(2, 3) for part in dequantize(tiles, widths))
    room = asked.new_full((batch * heads * at_once * TILE * head_dim,), float("nan"))
    torch.testing.assert_close(key_products(asked, tiles, widths.keys, room), asked @ keys.mT)
    torch.testing.assert_close(weighted_values(weights, tiles, widths.values, room), weights @ values)


@given(
    seen=st.integers(1, 900),
    pads=st.lists(st.integers(0, 500), min_size=1, max_size=3),
    sink=st.integers(0, 5),
    residual=st.integers(0, 140),
    margin=st.integers(0, 600),
    excess=st.none() | st.integers(0, 200),
    chunked=st.booleans(),
)
def test_a_row_sees_each_token_of_its_span_once(seen, pads, sink, residual, margin, excess, chunked):
    """In a slot, or in a tile, which may go round a ring; nothing else is seen."""
    span = EVERY if excess is None else 2 * (residual + TILE) + excess
    quantization = Quantization(4, residual=residual, sink=sink)
    group = QuantizedGroup(torch.zeros(len(pads), 1, 1, 8), 1, quantization, sink, span)
    group.margin = margin
    group.align(pads)
    lengths = [max(seen - pad, 1) for pad in pads]
    group.packed = [TILE * quantization.tiles(max(length - sink - margin, 0)) for length in lengths]
    count = max(1, min(max(group.packed) // TILE, quantization.window_tiles(span)))
    group.tiles = empty_tiles(group.keys, count, quantization).map(lambda part: part[:, None])
    slots = min(max(lengths), sink + group.ring)
    visible = group.visible(seen, slots, chunked)
    sees = torch.cat([~visible.hidden, visible.in_tiles(count)], 2)[:, 0]
    for row, length in enumerate(lengths):
        expected = set()
        for position in range(length):
            after_sinks = position - sink
            if after_sinks >= 0 and not in_window(length - 1, position, span, chunked):
                continue
            if 0 <= after_sinks < group.packed[row]:
                expected.add(slots + after_sinks % (TILE * count))
            else:
                expected.add(group.slot(position))
        assert expected == {*sees[row].nonzero()[:, 0].tolist()}


def test_places_are_of_the_rows_tiles():
    """Heads of a group lie beside those of others, each row's after the row before."""
    quantization = Quantization(4, residual=0)
    group = QuantizedGroup(torch.zeros(2, 1, 1, 8), 3, quantization, 4, 3 * TILE)
    layer_tiles = empty_tiles(group.keys, 3 * 3 + 5, quantization)
    for part in layer_tiles:
        part.copy_(torch.randint(0, 100, part.shape))
    group.tiles = layer_tiles.map(lambda part: part[:, 2:11].unflatten(1, (3, 3)))
    group.align([0, 400])
    group.packed = [5 * TILE, 2 * TILE]
    visible = group.visible(700, 4)
    assert visible.places.shape == (2, 3)
    for placed, part in zip(group.by_place(), group.tiles, strict=True):
        assert placed[visible.places[0]].transpose(0, 1).equal(part[0][:, [2, 0, 1]])
        assert placed[visible.places[1]].transpose(0, 1).equal(part[1])


@given(
    widths=WIDTHS,
    scheme=st.sampled_from(["kivi", "per-token"]),
    head_dim=st.integers(1, 20).map(lambda eighth: 8 * eighth),
    seed=st.integers(0, 100),
)
@settings(max_examples=30)
def test_clipping_never_adds_to_the_squared_error_of_a_group(widths, scheme, head_dim, seed):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(2, 2, TILE, head_dim, generator=generator).pow(3)
    errors = []
    for clip in (False, True):
        found = dequantize(quantize(*states, Quantization(widths.bits, scheme, clip=clip)), widths)
        sums = (1 if scheme == "kivi" else 2, 2)
        triples = zip(found, states, sums, strict=True)
        errors.append([(new - old).square().sum(dim) for new, old, dim in triples])
    for whole, clipped in zip(*errors, strict=True):
        assert (clipped <= whole * (1 + 1e-3) + 1e-9).all()
    if widths == (2, 2) and head_dim >= 16:
        assert sum(part.sum() for part in errors[1]) < 0.95 * sum(part.sum() for part in errors[0])


@given(head_dim=st.integers(1, 130).map(lambda half: 2 * half), heads=st.integers(0, 3), seed=st.integers(0, 100))
@settings(max_examples=50)
def test_rotations_are_orthonormal_and_even(head_dim, heads, seed):
    matrix = rotation(head_dim, torch.float64, torch.device("cpu"))
    assert (matrix @ matrix.T - torch.eye(head_dim)).abs().max() <= 1e-12
    if head_dim % 16 == 0:  # an odd part of m has elements up to 2 ** 0.5 times the mean
        assert matrix.abs().max() <= (2 / head_dim) ** 0.5 + 1e-12
    states = torch.randn(2, 3, 5, head_dim, generator=torch.Generator().manual_seed(seed))
    turned = rotated(states, heads)
    assert largest(rotated(turned, heads, back=True) - states, states) <= 1e-5
    assert turned[:, heads:].equal(states[:, heads:])
    assert largest(turned.square().sum(-1) - states.square().sum(-1), states.square().sum(-1)) <= 1e-5


def test_the_rotation_of_a_power_of_two_is_a_hadamard_matrix():
    assert rotation(64, torch.float32, torch.device("cpu")).abs().unique().tolist() == [0.125]


@given(
    widths=WIDTHS,
    head_dim=st.integers(1, 16).map(lambda sixteenth: 16 * sixteenth),
    scheme=st.sampled_from(["kivi", "per-token"]),
    seed=st.integers(0, 100),
)
@settings(max_examples=30)
def test_integers_in_the_range_of_codes_come_back(widths, head_dim, scheme, seed):
    generator, states = torch.Generator().manual_seed(seed), []
    for bits in widths:
        states.append(torch.randint(2**bits, (1, 3, TILE, head_dim), generator=generator).float())
        states[-1][..., 0, :], states[-1][..., 1, :] = 0, 2**bits - 1
        states[-1][..., 0], states[-1][..., 1] = 0, 2**bits - 1
    tiles = quantize(*states, Quantization(widths.bits, scheme))
    code_bytes = [part.shape[-1] for part in (tiles.key_codes, tiles.value_codes)]
    assert code_bytes == [head_dim * bits // 8 for bits in widths]
    for exact, found in zip(states, dequantize(tiles, widths), strict=True):
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-4)


def test_bytes_of_a_tile():
    """Against 64 KiB in 16 bit, at 128 channels."""
    ratios = [64 * 1024 / Quantization(bits).tile_bytes(128) for bits in (8, 4, 3, "k3v2", 2)]
    assert [round(ratio, 2) for ratio in ratios] == [1.94, 3.76, 4.92, 5.82, 7.11]
