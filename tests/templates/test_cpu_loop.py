"""The loop in C over the codes of tiles, beside attention in float64 to what the codes stand for."""

import platform
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsurgery.templates import kv_cpu
from kvsurgery.templates.kv_codes import dequantize, quantize
from kvsurgery.templates.kv_layout import TILE, Quantization
from kvsurgery.templates.kv_softmax import Scoring
from tests.helpers.cases import some
from tests.helpers.loop_in_c import needs_compiler

SETS = {
    "x86_64": {"512": "", "256": " -mno-avx512f", "128": " -mno-avx2 -mno-avx512f"},
}.get(platform.machine(), {"own": ""})


def forget() -> None:
    """Compile anew."""
    kv_cpu.codes_loop.cache_clear()
    kv_cpu._compiled.cache_clear()


@pytest.fixture
def fresh() -> Iterator[None]:
    """Compile anew, and again afterwards."""
    forget()
    yield
    forget()


@pytest.fixture(params=[*SETS.values()], ids=[*SETS])
def flags(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """Compile for processors with vectors of this width."""
    monkeypatch.setattr(kv_cpu, "FLAGS", kv_cpu.FLAGS + request.param)


def expected(query, keys, values, seen, scale, softcap):
    """Attention in float64 over keys that are seen [..., queries, keys], and its log-sum-exp."""
    scores = query.double() @ keys.double().mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp(min=-1e30)[..., None]).exp()
    return weights @ values.double(), lse


def check(quantization, head_dim, dtype, softcap, shape, ranges, threads, seed):
    """Compare the loop with `expected`: tiles lie in any order, and some of the other tokens are hidden."""
    requests, heads, group, new, others, tiles = shape
    generator = torch.Generator().manual_seed(seed)
    rooms = requests * tiles + 2
    states = torch.randn(2, rooms, heads, TILE, head_dim, generator=generator).to(dtype)
    largest_state = states.abs().max().item()
    packed = quantize(*states, quantization)
    places = torch.randperm(rooms, generator=generator)[: requests * tiles].view(requests, tiles)
    other_states = torch.randn(requests, heads, others, 2 * head_dim, generator=generator).to(dtype)
    other_keys, other_values = other_states.split(head_dim, -1)
    query = torch.randn(requests, heads, group * new, head_dim, generator=generator).to(dtype) * 2
    hidden = torch.rand(requests, new, others, generator=generator) < 0.4
    ends = [sorted(pair) for pair in ranges]
    seen = torch.tensor([ends[i % len(ends)] for i in range(requests * new)]).view(requests, new, 2) % (
        tiles * TILE + 1
    )
    place = torch.arange(tiles * TILE)
    sees = torch.cat([~hidden, (place >= seen[..., :1]) & (place < seen[..., 1:])], 2)
    sees = sees[:, None, None].expand(-1, heads, group, -1, -1).flatten(2, 3)
    scale = 0.7 * head_dim**-0.5
    float_tiles = packed.map(lambda part: part if part.dtype == torch.uint8 else part.double())
    older_states = (part[places].transpose(1, 2).flatten(2, 3) for part in dequantize(float_tiles, quantization.widths))
    keys, values = (
        torch.cat([own.double(), part], 2) for own, part in zip((other_keys, other_values), older_states, strict=True)
    )
    exact, exact_lse = expected(query, keys, values, sees, scale, softcap)

    loop = kv_cpu.codes_loop(quantization, head_dim, dtype)
    assert loop is not None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found, lse = loop(query, (other_keys, other_values), hidden, packed, places, seen, Scoring(scale, softcap))
    finally:
        torch.set_num_threads(before)
    assert found.dtype == lse.dtype == torch.float32
    whole = torch.full((2, heads, others + tiles * TILE, head_dim), float("nan"), dtype=dtype)
    loop.unpack(packed, places[0], *whole[:, :, others:])
    for part, older in zip(whole, dequantize(packed, quantization.widths), strict=True):
        assert part[:, :others].isnan().all()
        wanted = older[places[0]].transpose(0, 1).flatten(1, 2)
        torch.testing.assert_close(part[:, others:], wanted, rtol=0, atol=2 * torch.finfo(dtype).eps * largest_state)
    sees_any = sees.any(-1)
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.double()[sees_any], exact_lse[sees_any], rtol=2e-5, atol=2e-5)
    assert (lse[~sees_any] < -1e29).all()


@needs_compiler
@pytest.mark.parametrize(
    ("quantization", "head_dim", "dtype", "softcap"),
    some(
        [
            (Quantization(4), 64, torch.float32, None),
            (Quantization(3), 64, torch.bfloat16, 5.0),
            (Quantization("k3v2", group_size=32), 80, torch.float16, None),
            (Quantization("k8v3", group_size=16), 96, torch.float32, None),
            (Quantization(2, "per-token"), 128, torch.bfloat16, None),
            (Quantization("k3v4", "per-token", group_size=16), 112, torch.float32, None),
            (Quantization(8, "per-token"), 24, torch.float16, None),
        ],
        2,
    ),
    ids=lambda part: str(getattr(part, "bits", part)),
)
def test_every_width_scheme_and_dtype_is_attended_to_exactly(flags, quantization, head_dim, dtype, softcap):
    spans = [(100, 384), (0, 384), (128, 129), (17, 200), (5, 5)]
    check(quantization, head_dim, dtype, softcap, (2, 3, 2, 3, 150, 3), spans, 1, 0)


@needs_compiler
@given(
    shape=st.tuples(
        st.integers(1, 3),
        st.integers(1, 3),
        st.integers(1, 4),
        st.integers(1, 4),
        st.integers(0, 300),
        st.integers(1, 6),
    ),
    ranges=st.lists(st.tuples(*[st.integers(0, 6 * TILE)] * 2), min_size=1, max_size=4),
    threads=st.sampled_from([1, 2, 7]),
    seed=st.integers(0, 100),
)
@settings(max_examples=60)
def test_any_numbers_of_tokens_and_threads_are_attended_to_exactly(shape, ranges, threads, seed):
    check(Quantization(3), 40, torch.bfloat16, None, shape, ranges, threads, seed)


@needs_compiler
@pytest.mark.parametrize("part", ["query", "key in a tile", "other key"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(part, value):
    """So that a model whose states overflow does not answer as if nothing was wrong."""
    states = torch.randn(2, 1, 1, TILE, 16)
    others = torch.randn(2, 1, 1, 5, 16)
    query = torch.randn(1, 1, 1, 16)
    tiles = quantize(*states, Quantization(8))
    place = {"query": query, "key in a tile": tiles.key_scales, "other key": others[0]}[part]
    place.view(-1)[3] = value
    seen, hidden = torch.tensor([[[0, TILE]]]), torch.zeros(1, 1, 5, dtype=torch.bool)
    loop = kv_cpu.codes_loop(Quantization(8), 16, torch.float32)
    assert loop is not None
    output, lse = loop(query, (others[0], others[1]), hidden, tiles, torch.zeros(1, 1).long(), seen, Scoring(0.25))
    assert not output.isfinite().any()
    assert not lse.isfinite().any()


@needs_compiler
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_hidden_keys_may_be_anything(value):
    others, query = torch.randn(2, 1, 1, 5, 16), torch.randn(1, 1, 1, 16)
    tiles = quantize(*torch.randn(2, 1, 1, TILE, 16), Quantization(8)).map(lambda part: part[:0])
    hidden, no_tiles = torch.tensor([[[False, True, False, False, True]]]), torch.zeros(1, 0).long()
    seen = torch.zeros(1, 1, 2).long()
    loop = kv_cpu.codes_loop(Quantization(8), 16, torch.float32)
    assert loop is not None
    scoring = Scoring(0.25)
    expected = loop(query, (others[0], others[1]), hidden, tiles, no_tiles, seen, scoring)
    others[0][hidden[:, :1]] = value
    found = loop(query, (others[0], others[1]), hidden, tiles, no_tiles, seen, scoring)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("compiler", "named"),
    [("/no/such/compiler", "/no/such/compiler"), ("gcc '", "quotation"), ("gcc --no-such-flag", "no-such-flag")],
)
def test_without_a_compiler_there_is_no_loop_but_one_warning(compiler, named, fresh, monkeypatch, caplog):
    monkeypatch.setenv("CC", compiler)
    for _ in range(2):
        assert kv_cpu.codes_loop(Quantization(4), 64, torch.float32) is None
    (record,) = caplog.records
    assert named in record.getMessage()


def test_without_a_temporary_folder_there_is_no_loop(fresh, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    assert kv_cpu.codes_loop(Quantization(4), 64, torch.float32) is None
    (record,) = caplog.records
    assert "/no/such/folder" in record.getMessage()


@needs_compiler
def test_an_empty_cc_is_none(fresh, monkeypatch):
    monkeypatch.setenv("CC", "")
    assert kv_cpu.codes_loop(Quantization(4), 64, torch.float32) is not None


def test_states_and_groups_that_the_loop_does_not_know_have_none():
    assert kv_cpu.codes_loop(Quantization(4), 64, torch.float64) is None
    assert kv_cpu.codes_loop(Quantization(4, group_size=8), 64, torch.float32) is None
