"""Any sequence of cache operations, step by step against a dense reference of each row's own tokens."""

from functools import cache
from itertools import product
from typing import NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvsurgery.templates.kv_cache import KVSurgeryCache
from kvsurgery.templates.kv_layout import KVLayout
from tests.helpers.cache_operations import CacheOperations, stock_and_emitted
from tests.helpers.cases import some
from tests.helpers.emitted import LOSSLESS
from tests.helpers.families import largest, tokens
from tests.helpers.loop_in_c import HAVE_COMPILER, counted
from tests.helpers.reference import reference_logits
from tests.helpers.tile_size import use_tiles_of

SINK = 2
LENGTH = 56  # tokens of the longest row
FULL = {"llama": [1, 3], "gemma2": [0, 2]}  # full heads of each layer; the first of Gemma 2 has its own window


class Storage(NamedTuple):
    """How heads store their tokens: windows of streaming heads and of the model's own, tiles, and how they are made."""

    recent: int = 4
    window: int = 6
    tile: int = 8
    quantization: dict | None = None


STORED = {
    "16 bit": Storage(),
    "quantized": Storage(quantization=LOSSLESS),
    "quantized, in C": Storage(tile=16, quantization=LOSSLESS),
    "quantized windows": Storage(13, 15, 4, {**LOSSLESS, "residual": 2, "streaming": True}),
    "quantized windows, in C": Storage(32, 33, 16, {**LOSSLESS, "residual": 0, "streaming": True}),
}


@cache
def models(family: str, stored: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A stock model, and the same weights under the emitted code."""
    storage = STORED[stored]
    layers = [{"blocks": [[full, 4 - full]], "sink": SINK, "recent": storage.recent} for full in FULL[family]]
    if family == "gemma2":
        layers[0] |= {"sink": 0, "recent": storage.window, "native": True}
    quantized = {"quantization": storage.quantization} if storage.quantization else {}
    return stock_and_emitted(family, storage.window, layers=layers, **quantized)


class CacheMachine(CacheOperations):
    """`rows` are the real tokens of each row, `pads` its left padding, in columns that may be yet to come."""

    family: str
    stored: str

    def __init__(self):
        super().__init__()
        self.stock, self.model = models(self.family, self.stored)
        self.cache = KVSurgeryCache(self.model.config)
        self.layout = KVLayout.from_config(self.model.config)
        self.seen, self.safe, self.recording, self.seed = 0, 0, False, 0

    @initialize(
        pads=st.lists(st.integers(0, 12), min_size=1, max_size=3), padded=st.booleans(), positions=st.booleans()
    )
    def start(self, pads, padded, positions):
        self.positions = positions  # whether position ids are given; without them columns count, padding included
        self.pads = [pad if padded else 0 for pad in pads]
        self.rows = [torch.empty(0, dtype=torch.long) for _ in pads]

    @rule(size=st.integers(1, 20), masked=st.booleans())
    def append(self, size, masked):
        self.compare([self.feed(size, masked)])

    @rule(steps=st.integers(1, 6))
    def decode(self, steps):
        self.compare([self.feed(1, masked=True) for _ in range(steps)])

    def feed(self, size: int, masked: bool) -> torch.Tensor:
        """Logits of `size` further columns, less at the end; padding is masked where the cache cannot know it."""
        size = min(size, LENGTH - self.seen)
        if not size:
            return torch.empty(len(self.rows), 0, 101)
        self.seed += 1
        ids = tokens(len(self.rows), size, self.seed)
        mask = (torch.arange(self.seen + size) >= torch.tensor(self.pads)[:, None]).long()
        given = {"attention_mask": mask} if masked or any(pad > self.seen for pad in self.pads) else {}
        if self.positions:
            given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, self.seen :]
        with torch.no_grad():
            logits = self.model(ids, past_key_values=self.cache, **given).logits
        assert logits.isfinite().all()
        if self.recording and not self.safe:
            self.safe = size  # recorded from the start: the first input stays
        fresh = [row[max(0, pad - self.seen) :] for row, pad in zip(ids, self.pads, strict=True)]
        self.rows = [torch.cat(pair) for pair in zip(self.rows, fresh, strict=True)]
        self.seen += size
        return logits

    def compare(self, parts: list[torch.Tensor]):
        logits = torch.cat(parts, 1)
        for row, expected in enumerate(self.expected()):
            new = min(logits.shape[1], len(expected))
            if new:
                assert largest(logits[row, -new:] - expected[-new:], expected) <= 1e-4, f"row {row}"

    def expected(self) -> list[torch.Tensor]:
        """Logits of each row's real tokens [tokens, vocabulary]."""
        batch = torch.zeros(len(self.rows), LENGTH, dtype=torch.long)  # what follows a row's end changes nothing
        for row, ids in enumerate(self.rows):
            batch[row, : len(ids)] = ids
        full = [[head < count for head in range(4)] for count in FULL[self.family]]
        logits = reference_logits(self.stock, full, SINK, STORED[self.stored].recent, batch)
        return [part[: len(ids)] for part, ids in zip(logits, self.rows, strict=True)]

    def keep(self, rows: list[int]):
        self.rows, self.pads = [self.rows[row] for row in rows], [self.pads[row] for row in rows]

    @precondition(lambda self: len(self.rows) <= 2)
    @rule()
    def repeat(self):
        self.cache.batch_repeat_interleave(2)
        self.keep([row for row in range(len(self.rows)) for _ in range(2)])

    @rule(data=st.data(), says_how_many_stay=st.booleans())
    def crop(self, data, says_how_many_stay):
        least = data.draw(st.sampled_from([0, self.safe, max(0, self.seen - 8)]))
        length = data.draw(st.integers(min(least, self.seen), self.seen))
        try:
            self.cache.crop(length if says_how_many_stay and length else length - self.seen)
        except ValueError:
            assert length < self.safe or not self.recording
        else:
            self.took_back(length)
        assert self.cache.get_seq_length() == self.seen

    def took_back(self, length: int):
        self.seen = self.safe = length  # what is left after a crop is there to stay
        self.rows = [ids[: max(0, length - pad)] for ids, pad in zip(self.rows, self.pads, strict=True)]

    @precondition(lambda self: self.seen)
    @rule(candidates=st.integers(1, 9), accepted=st.integers(0, 9))
    def speculate(self, candidates, accepted):
        if not self.recording:
            self.record()
        before = self.safe = self.seen
        self.cache.crop(0)
        self.append(candidates, masked=False)
        length = min(self.seen, before + accepted)
        self.cache.crop(length - self.seen)
        self.took_back(length)

    @precondition(lambda self: not self.seen)
    @rule(data=st.data(), padded=st.booleans())
    def pad_otherwise(self, data, padded):
        self.pads = [data.draw(st.integers(0, 12)) if padded else 0 for _ in self.rows]

    @rule(data=st.data())
    def reset(self, data):
        self.cache.reset()
        self.seen, self.safe, self.recording = 0, 0, False
        pads = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=3))
        self.start(pads, data.draw(st.booleans()), data.draw(st.booleans()))

    @invariant()
    def allocates_what_it_predicts(self):
        layers = self.cache.layers
        if layers[0].is_initialized:
            assert len({layer.capacity for layer in layers}) == 1
            predicted = self.layout.kv_bytes(
                len(self.rows), layers[0].capacity, margin=self.cache.columns.margin, itemsize=4
            )
            assert self.cache.allocated_bytes() == predicted

    @invariant()
    def tables_are_written_in_place(self):
        for layer in self.cache.layers:
            if layer.keys is None:
                continue
            storage, table = layer.storage, layer.storage.table()
            storage.made = None
            fresh = storage.table()
            storage.made = table  # which later steps write to
            for name, part in table._asdict().items():
                assert not torch.is_tensor(part) or part.equal(getattr(fresh, name)), name


@pytest.mark.parametrize(("family", "stored"), some(product(FULL, STORED), 2))
def test_any_operations_on_a_cache(family, stored, monkeypatch):
    use_tiles_of(STORED[stored].tile, monkeypatch)
    calls = counted(monkeypatch)
    machine = type("CacheMachine", (CacheMachine,), {"family": family, "stored": stored})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=40, stateful_step_count=20),
    )
    assert bool(calls) == (stored.endswith("in C") and HAVE_COMPILER)
