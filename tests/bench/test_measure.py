"""What is timed, counted and skipped, on tiny models and a clock that their forwards set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from kvsurgery.bench import contenders as who
from kvsurgery.bench import timing
from kvsurgery.bench.contenders import Contender, contenders, load_models, step_weights
from kvsurgery.bench.measure import Turns, measure, prompts
from kvsurgery.bench.results import Row
from kvsurgery.bench.workload import WARM, Workload
from kvsurgery.display.progress import silent
from kvsurgery.errors import KVSurgeryError
from kvsurgery.profile.embedding_heads import EmbeddingHead
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.system.processes import Processes
from kvsurgery.templates.kv_cache import CACHE
from kvsurgery.templates.kv_layout import KVLayout, Quantization
from tests.helpers.surgery import Converted, convert_folder, random_profile

CPU = torch.device("cpu")
NEW, CHUNK = WARM + 5, 16
WORK = Workload((40,), (2,), NEW, CHUNK, rounds=3)
SIZES = {"chunk": 32, "encode_budget": 24, "keep": 4, "window": 5, "pool": 3, "recompute_budget": 60, "query_length": 6}


@pytest.fixture(scope="module")
def pair(mixed: Callable[[str], Converted]) -> list[Contender]:
    """The converted model and the original."""
    found = contenders(*load_models(mixed("llama").folder, None))
    return [next(found), next(found)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, pair: list[Contender]) -> SimpleNamespace:
    """Time passes in forwards alone: by `seconds(tokens of the forward, tokens before it)`."""
    clock = SimpleNamespace(now=0.0, seconds=lambda tokens, seen: float(tokens), turns=[])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    for contender in pair:
        forward = contender.model.forward

        def timed(
            input_ids: torch.Tensor,
            forward: Callable = forward,
            name: str = contender.name,
            **options,
        ):
            seen = options[CACHE].get_seq_length()
            if not clock.turns or clock.turns[-1] != name:
                clock.turns.append(name)
            clock.now += clock.seconds(input_ids.shape[1], seen)
            return forward(input_ids, **options)

        monkeypatch.setattr(contender.model, "forward", timed)
    return clock


def test_medians_of_what_the_clock_says(clock: SimpleNamespace, pair: list[Contender]) -> None:
    """Neither the round that shows the memory nor the first steps count."""
    begun = [0]  # chunks, whole prompt and `generate` begin with an empty cache

    def seconds(tokens: int, seen: int) -> float:
        begun[0] += seen == 0
        number, phase = divmod(begun[0] - 1, 3)
        if number == 0:
            return 1e9
        if tokens > 1:
            return float(tokens * number * 10**phase)
        return 1e6 if seen < 40 + WARM else float(seen)

    clock.seconds = seconds
    [[row]] = measure(pair[:1], WORK, 1.0, silent)
    for phase, scale in ((row.chunked, 1), (row.prefill, 10), (row.first_token, 100)):
        assert (phase.low, phase.seconds, phase.high) == (60.0 * scale, 80.0 * scale, 100.0 * scale)
        assert phase.count == 3
    assert (row.decode.low, row.decode.seconds, row.decode.high) == (45.0, 46.0, 47.0)
    assert row.decode.count == 3 * (NEW - WARM)


def test_contenders_take_turns(clock: SimpleNamespace, pair: list[Contender]) -> None:
    """Each round begins with another one. Progress counts tokens, as long prompts take longer."""
    notes: list[tuple[int, int]] = []
    list(measure(pair, WORK, 1.0, lambda done, of, note: notes.append((done, of))))
    first, second = "converted", "original"
    assert clock.turns == [first, second, first, second, first]  # neighbors in time are one
    assert notes == [(80 * turns, 640) for turns in range(9)]


def rows_of(folder: Converted, work: Workload = WORK) -> list[Row]:
    found = contenders(*load_models(folder.folder, None))
    return [*chain(*measure([next(found), next(found)], work, 1e9, silent))]


@pytest.mark.parametrize(
    ("length", "options"),
    [
        pytest.param(60, {"sparsity": 0.5}, id="streaming"),
        pytest.param(60, {"full_heads": 3, "rest": "budgeted", "budget": 8}, id="budgeted"),
        pytest.param(200, {"sparsity": 0.25, "quantization": Quantization(4, residual=8)}, id="quantized"),
    ],
)
def test_bytes(checkpoint: Callable, tmp_path_factory: pytest.TempPathFactory, length: int, options: dict) -> None:
    """Allocated is predicted; the original's cache is what its heads and tokens make; peaks are above caches."""
    folder = convert_folder(checkpoint("qwen3"), tmp_path_factory.mktemp("bench") / "out", **options)
    rows = rows_of(folder, replace(WORK, lengths=(length,), chunk=length // 2, rounds=1))
    assert [row.contender for row in rows] == ["converted", "original"]
    for row in rows:
        whole = 2 * 4 * 4 * (row.tokens + NEW) * 16 * 2 * 4  # batch, layers, heads, tokens, head_dim, keys and values
        assert row.decode.peak_bytes >= row.kv_bytes
        assert row.prefill.peak_bytes > row.kv_bytes
        if row.contender == "original":
            assert (row.kv_bytes, row.predicted) == (whole, None)
            half = whole // (row.tokens + NEW) * (row.tokens + NEW / 2)
            assert row.floor == pytest.approx((step_weights(folder.stock, 2) + half) / 1e9)
        else:
            layout = KVLayout.from_config(folder.model.config)
            assert row.kv_bytes == row.predicted == layout.kv_bytes(2, row.tokens, NEW, itemsize=4) < whole
            half = layout.kv_bytes(2, row.tokens, NEW // 2, itemsize=4)
            assert row.floor == pytest.approx((step_weights(folder.stock, 2) + half) / 1e9, rel=1e-9)
        assert row.share == row.floor / row.decode.seconds


def test_prompts_that_tokens_are_gathered_of(checkpoint: Callable, tmp_path_factory: pytest.TempPathFactory) -> None:
    """They have a time to the first token, and the cache of the gathered ones, beyond the context too."""
    source = checkpoint("llama")
    profile = random_profile(source)
    heads = (EmbeddingHead(0, "q", 5), EmbeddingHead(1, "k", 2))
    reform = HeadProfile(None, "reform", None, str(source), profile.model, embedding_heads=heads)
    out = tmp_path_factory.mktemp("reform") / "out"
    folder = convert_folder(source, out, profile, reform=reform, sizes=SIZES, sparsity=0.5)
    short, _, long, original, beyond, skipped = rows_of(folder, replace(WORK, lengths=(60, 100, 600), rounds=1))
    assert short.decode is not None
    for row in (long, beyond):
        assert (row.prefill, row.chunked, row.decode, row.floor) == (None, None, None, None)
        assert row.first_token.count == 1
        assert row.kv_bytes == row.predicted == short.predicted
    assert original.decode is not None
    assert skipped.skipped == f"600 and {NEW} new tokens are beyond its 512 positions"


def test_a_length_that_is_given_twice_is_measured_once() -> None:
    assert Workload((16, 32, 16), (1, 1)).cells == [(1, 16), (1, 32)]


def test_a_prompt_of_one_chunk(pair: list[Contender]) -> None:
    lengths = measure(pair, Workload((CHUNK, CHUNK + 1), (1,), NEW, CHUNK, 1), 1e9, silent)
    assert [[row.chunked is None for row in rows] for rows in lengths] == [[True, True], [False, False]]


def test_a_cache_without_room(pair: list[Contender], monkeypatch: pytest.MonkeyPatch) -> None:
    layout = pair[0].layout
    room = (layout.kv_bytes(2, 40, NEW, itemsize=4) + layout.dense_bytes(2, 40, NEW, itemsize=4)) // 2
    monkeypatch.setattr(who, "free_bytes", lambda device: room)
    [(converted, original)] = measure(pair, replace(WORK, rounds=1), 1e9, silent)
    assert converted.decode is not None
    assert "its KV cache takes" in original.skipped


def test_what_fails(pair: list[Contender], monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory is noted of all, other errors of other libraries' caches; ours must work."""
    ids = prompts(pair[0].model, 1, 20, 0)

    def failing(error: Exception) -> Callable:
        def make(prompt: int, new: int) -> None:
            raise error

        return make

    for name, error, said in [
        ("converted", torch.OutOfMemoryError("17 GiB"), "out of memory"),
        ("original", MemoryError(), "out of memory"),
        ("original, hqq int4", ValueError("an odd size\nof which more"), "ValueError: an odd size"),
    ]:
        turns = Turns(replace(pair[1], name=name, make=failing(error)), ids, WORK, Processes())
        turns.take(warm=False)
        turns.take(warm=True)
        assert turns.row(1.0) == Row(name, 20, 1, skipped=said)
    with pytest.raises(ValueError, match="an odd size"):
        Turns(replace(pair[0], make=failing(ValueError("an odd size"))), ids, WORK, Processes()).take(warm=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lengths": ()}, "lengths"),
        ({"lengths": (5, 0)}, "lengths"),
        ({"batches": (-1,)}, "batches"),
        ({"new": WARM}, f"`new` must be {WARM + 1} or more"),
        ({"chunk": 0}, "chunk"),
        ({"rounds": 0}, "rounds"),
    ],
)
def test_numbers_out_of_range(change: dict, words: str) -> None:
    with pytest.raises(KVSurgeryError, match=words):
        replace(WORK, **change)
