"""Rolling budgets: whatever comes, in whatever parts, heads keep what a slow reference says, in constant bytes."""

import copy
from dataclasses import asdict
from functools import cache

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from transformers import DynamicCache

from kvsurgery.heads.section import layout_section
from kvsurgery.templates.kv_budget import BudgetedHeads
from kvsurgery.templates.kv_cache import KVSurgeryCache
from kvsurgery.templates.kv_codes import dequantize, quantize
from kvsurgery.templates.kv_columns import Columns
from kvsurgery.templates.kv_layout import KVLayout, Quantization, Widths
from kvsurgery.templates.kv_softmax import Scoring
from kvsurgery.templates.kv_storage import Storage
from tests.helpers.cache_operations import CacheOperations, stock_and_emitted
from tests.helpers.emitted import CLASSES, LOSSLESS, emitted
from tests.helpers.families import CACHE_PATHS, WITH_STATES, largest, stock, tokens
from tests.helpers.hold_reference import HoldReference
from tests.helpers.surgery import convert_folder
from tests.helpers.tile_size import use_tiles_of

WINDOW, HOLD = 3, 5
SELECTION = {"window": WINDOW, "kernel_size": 3, "pool": "max", "hold": HOLD}
BUDGETS = [[4, 6, 0], [3, 8, 1, 5]]
TILED = [4, 38, 68]  # with tiles of 32 tokens
LENGTH = 64  # columns of the longest cache
GREEDY = {"do_sample": False, "suppress_tokens": [0, 2]}
SECTIONS = {
    "16 bit": {},
    "mean pool, a block as long as the window": {"selection": SELECTION | {"pool": "avg", "hold": WINDOW}},
    "quantized": {"quantization": LOSSLESS | {"residual": 2}},
    "value norm": {"selection": SELECTION | {"select": "value-norm"}},
}


@cache
def models(family: str, kind: str = "16 bit") -> tuple[torch.nn.Module, torch.nn.Module]:
    """A stock model, and the same weights with rolling budgets; the first layer of Gemma 2 has its own window."""
    layers = [{"blocks": [[1, 3]], "budgets": BUDGETS[0]}, {"blocks": [[0, 4]], "budgets": BUDGETS[1]}]
    if family == "gemma2":
        layers = [{"blocks": [[0, 4]], "sink": 0, "recent": 6, "native": True}, layers[0]]
    return stock_and_emitted(family, 6, **({"selection": SELECTION, "layers": layers} | SECTIONS[kind]))


class HoldMachine(CacheOperations):
    """`rows` are references, one of each row of the cache; `confirmed` columns are never taken back while recording."""

    family: str
    kind: str

    def __init__(self):
        super().__init__()
        self.stock, self.model = models(self.family, self.kind)
        self.layout = KVLayout.from_config(self.model.config)

    @initialize(pads=st.lists(st.integers(0, 9), min_size=1, max_size=3), prompt=st.integers(1, 24))
    def start(self, pads, prompt):
        self.cache = KVSurgeryCache(self.model.config)
        self.cache.expect_prompt(prompt)
        self.prompt, self.seen, self.seed, self.safe = prompt, 0, 0, 0
        self.firm = 0  # columns before which selections stayed, as they were confirmed at the time
        self.recording = False
        self.rows = [HoldReference(self.stock, self.layout, prompt, pad) for pad in pads]

    @rule(size=st.integers(1, 24))
    def append(self, size):
        self.feed(size)

    @rule(steps=st.integers(1, 8))
    def decode(self, steps):
        for _ in range(steps):
            self.feed(1)

    def feed(self, size: int):
        """Give the cache `size` further columns, fewer at the end, and compare what comes out."""
        size = min(size, LENGTH - self.seen)
        if not size:
            return
        self.seed += 1
        ids = tokens(len(self.rows), size, self.seed)
        mask = (torch.arange(self.seen + size) >= torch.tensor([row.pad for row in self.rows])[:, None]).long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, self.seen :]
        with torch.no_grad():
            logits = self.model(ids, past_key_values=self.cache, attention_mask=mask, position_ids=positions).logits
        assert logits.isfinite().all()
        for row, (reference, of_row) in enumerate(zip(self.rows, ids, strict=True)):
            reference.skip(range(self.seen, min(reference.pad, self.seen + size)))
            expected = reference.feed(of_row[max(0, reference.pad - self.seen) :])
            if len(expected):
                assert largest(logits[row, -len(expected) :] - expected, expected) <= 1e-4, f"row {row}"
        if self.recording and not self.safe:
            self.safe = size  # recorded from the start: the first input stays
        self.seen += size

    def keep(self, rows: list[int]):
        self.rows = [copy.deepcopy(self.rows[row]) for row in rows]

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def crop(self, data):
        least = data.draw(st.sampled_from([0, self.safe, max(0, self.seen - 4)]))
        length = data.draw(st.integers(min(least, self.seen), self.seen))
        self.firm = max(self.firm, self.safe)
        confirmed = self.safe if self.recording else float("inf")
        try:
            self.cache.crop(length - self.seen)
        except ValueError:
            firm = max(confirmed, self.firm)
            last = max((c for row in self.rows for s in row.states for c, *_ in s.before if c <= firm), default=0)
            unrestorable = self.family == "gemma2" and (not self.recording or length < self.safe)
            tiles = self.kind == "quantized" and (not self.recording or length < self.safe)
            assert unrestorable or tiles or length < max(last, self.prompt)
        else:
            for row in self.rows:
                row.crop(length, confirmed)
            self.seen = self.safe = length
        assert self.cache.get_seq_length() == self.seen

    @precondition(lambda self: self.seen >= self.prompt)
    @rule(candidates=st.integers(1, 14), accepted=st.integers(0, 14))
    def speculate(self, candidates, accepted):
        if not self.recording:
            self.record()
        self.cache.crop(0)
        self.safe = self.seen
        before = self.seen
        self.feed(candidates)
        length = min(self.seen, before + accepted)
        self.cache.crop(length - self.seen)
        for row in self.rows:
            row.crop(length, before)
        self.seen = self.safe = length

    @invariant()
    def allocates_what_it_predicts(self):
        layers = self.cache.layers
        if all(layer.is_initialized and layer.ready for layer in layers):
            [capacity] = {layer.capacity for layer in layers}
            predicted = self.layout.kv_bytes(
                len(self.rows), self.prompt, capacity - self.prompt, self.cache.columns.margin, itemsize=4
            )
            assert self.cache.allocated_bytes() == predicted


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", kind) for kind in SECTIONS] + [("gemma2", "16 bit"), ("gemma2", "value norm")],
    ids=lambda value: value,
)
def test_any_operations(family, kind, monkeypatch):
    use_tiles_of(4, monkeypatch)
    machine = type("HoldMachine", (HoldMachine,), {"family": family, "kind": kind})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=6, stateful_step_count=12, phases=[Phase.generate])
    )


@pytest.mark.parametrize("family", CACHE_PATHS)
def test_every_cache_path_equals_the_reference(checkpoint, tmp_path, family):
    sizes = {"window": WINDOW, "kernel_size": 3, "hold": HOLD}
    converted = convert_folder(checkpoint(family), tmp_path / "held", rest="budgeted", budget=6, full_heads=3, **sizes)
    stock = type(converted.stock).from_pretrained(converted.folder).eval()  # its heads are in the new order
    states, cache = DynamicCache(config=stock.config) if family in WITH_STATES else None, None
    reference = HoldReference(stock, KVLayout.from_config(converted.model.config), 14, cache=states)
    for ids in tokens(1, 30).split([14, 1, 1, 8, 1, 1, 4], 1):
        with torch.no_grad():
            output = converted.model(ids, past_key_values=cache, use_cache=True)
        cache, expected = output.past_key_values, reference.feed(ids[0])
        assert largest(output.logits[0] - expected, expected) <= 1e-4


@pytest.fixture
def held():
    """A model of four layers, of which a quarter of the heads are full."""
    layers = [{"blocks": [[1, 3]], "budgets": [4, 9, 30]}] * 4
    return emitted("llama", selection=SELECTION, layers=layers)


def test_a_chat_of_twenty_turns_in_constant_memory(held):
    """Budgeted heads, and beside them a cache that grows: that of the full heads, a slot for each column."""
    layout, ids, cache, beside = KVLayout.from_config(held.config), tokens(1, 30), None, set()
    for turn in range(20):
        output = held.generate(ids, **GREEDY, max_new_tokens=6, past_key_values=cache, return_dict_in_generate=True)
        cache = output.past_key_values
        columns = cache.layers[0].capacity
        beside.add(cache.allocated_bytes() - 4 * columns * 2 * layout.head_dim * 4)
        assert cache.allocated_bytes() == layout.kv_bytes(1, 30, columns - 30, itemsize=4)
        ids = torch.cat([output.sequences, tokens(1, 5, seed=turn)], 1)
    slots = sum(budget + WINDOW + HOLD for budget in (4, 9, 30))
    assert max(beside) == 4 * slots * 2 * layout.head_dim * 4
    assert len(beside) <= 2  # the first turn is shorter


@pytest.fixture
def tiled(monkeypatch):
    """A model of two layers with larger budgets, and tiles of 32 tokens."""
    use_tiles_of(32, monkeypatch)
    original = stock("llama", num_hidden_layers=2, head_dim=16)
    section = {"version": 2, "head_dim": 16, "selection": SELECTION, "quantization": LOSSLESS}
    original.config.kv_surgery = section | {"layers": [{"blocks": [[1, 3]], "budgets": TILED}] * 2}
    return CLASSES["llama"].from_pretrained(None, config=original.config, state_dict=original.state_dict()).eval()


def test_quantized_heads_take_constant_memory(tiled):
    layout, cache, beside = KVLayout.from_config(tiled.config), KVSurgeryCache(tiled.config), set()
    for part in tokens(1, 175).split([75, *[1] * 25, 50, *[1] * 25], 1):
        with torch.no_grad():
            tiled(part, past_key_values=cache)
        columns = cache.layers[0].capacity
        assert cache.allocated_bytes() == layout.kv_bytes(1, 75, columns - 75, itemsize=4)
        beside.add(sum(group.nbytes for group in cache.layers[0].heads[-1].groups))
    assert len(beside) <= 2  # at the end of the prompt there is no block yet
    assert [group.packed for group in cache.layers[0].heads[-1].groups] == [[0], [32], [64]]


def test_full_heads_in_tiles_beside_budgets_in_the_models_dtype(tiled):
    """Budgets that nothing exceeds, and windows that nothing leaves: full heads are quantized alike beside both."""
    section = {**tiled.config.kv_surgery, "quantization": asdict(Quantization(4, residual=5))}
    window = {"blocks": [[1, 3]], "sink": 0, "recent": 125}
    found = []
    for layers in ([{"blocks": [[1, 3]], "budgets": [125] * 3}] * 2, [window] * 2):
        tiled.config.kv_surgery = section | {"layers": layers}
        model = CLASSES["llama"](tiled.config).eval()
        model.load_state_dict(tiled.state_dict())
        cache = KVSurgeryCache(model.config)
        with torch.no_grad():
            parts = tokens(1, 110).split([75, *[1] * 20, 15], 1)
            found.append(torch.cat([model(part, past_key_values=cache).logits for part in parts], 1))
        assert [group.packed for group in cache.layers[0].storage.tiled] == [[96]]
    assert largest(found[0] - found[1], found[1]) <= 1e-5


@pytest.mark.parametrize(("bits", "dtype"), [(8, torch.float32), ("k3v2", torch.float32), (2, torch.bfloat16)])
def test_no_token_in_tiles_is_quantized_twice(tiled, bits, dtype):
    """After seventeen selections, tiles of the first layer hold what its tokens become when they are quantized once."""
    section = {"bits": bits, "scheme": "per-token", "residual": 5, "sink": 3, "rotate": "none"}
    quantization = Quantization(**section, clip=bits != 8)
    layers = [{"blocks": [[4, 0]], "sink": 0, "recent": 1}] * 2
    caches = []
    for part in (
        tiled.config.kv_surgery | {"quantization": asdict(quantization)},
        {"version": 2, "head_dim": 16, "layers": layers},
    ):
        tiled.config.kv_surgery = part
        model = CLASSES["llama"](tiled.config).eval()
        model.load_state_dict(tiled.state_dict())
        caches.append(KVSurgeryCache(model.config))
        for columns in tokens(1, 160).split([75] + [1] * 85, 1):
            with torch.no_grad():
                model.to(dtype)(columns, past_key_values=caches[-1])
    budgeted, every = caches[0].layers[0].heads[-1].groups, caches[1].layers[0].heads[0].groups[0]
    states = (part[:, :, :160].unflatten(2, (-1, 32)) for part in (every.keys, every.values))
    once = [part.flatten(2, 3)[0] for part in dequantize(quantize(*states, quantization), Widths.of(bits))]
    assert [group.packed for group in budgeted] == [[0], [32], [64]]
    for head, group in enumerate(budgeted, 1):
        found = (part.flatten(2, 3)[0, 0, : group.packed[0]] for part in dequantize(group.tiles, Widths.of(bits)))
        same = [(mine[:, None] == each[head]).all(-1) for mine, each in zip(found, once, strict=True)]
        assert (same[0] & same[1]).any(1).all()


def test_generation_is_the_same_however_it_runs(held):
    """Chunks of the prompt, assisted decoding and beams: beside stock code that does not know of selections."""
    ids = tokens(1, 20, seed=3).repeat(1, 2)
    options = GREEDY | {"max_new_tokens": 40}
    expected = held.generate(ids, **options)
    assert held.generate(ids, **options, prefill_chunk_size=7).equal(expected)
    with torch.inference_mode():
        assert held.generate(ids, **options).equal(expected)
    assert held.generate(ids, **options, prompt_lookup_num_tokens=4).equal(expected)
    assert held.generate(ids, **options, prompt_lookup_num_tokens=3 * HOLD).equal(expected)
    assert held.generate(ids, **options, assistant_model=copy.deepcopy(held)).equal(expected)
    beams = held.generate(ids.repeat(2, 1), **options, num_beams=3)
    assert beams[0].equal(beams[1])
    assert beams[:1].equal(held.generate(ids, **options, num_beams=3))


@pytest.mark.parametrize(
    ("bits", "residual", "packed", "drafts"),
    [(2, 2, [0, 32, 64, 32], "looked up"), ("k3v2", 16, [0, 0, 32, 0], "of a model")],
)
def test_assisted_decoding_of_quantized_heads_is_the_same(tiled, bits, residual, packed, drafts):
    """Heads in few bits select and fill tiles before the same columns, and rejected tokens leave no trace."""
    tiled.config.kv_surgery["quantization"] = asdict(Quantization(bits, "per-token", residual=residual, sink=1))
    tiled.config.kv_surgery["layers"] = [{"blocks": [[0, 4]], "budgets": [*TILED, 40]}] * 2
    model = CLASSES["llama"](tiled.config).eval()
    model.load_state_dict(tiled.state_dict())
    ids, options = tokens(1, 15, seed=3).repeat(1, 3), GREEDY | {"max_new_tokens": 40}
    expected = model.generate(ids, **options, return_dict_in_generate=True)
    assert [group.packed[0] for group in expected.past_key_values.layers[0].storage.tiled] == packed
    drafting = {"prompt_lookup_num_tokens": 3 * HOLD} if drafts == "looked up" else {"assistant_model": model}
    assert model.generate(ids, **options, **drafting).equal(expected.sequences)


def test_rows_of_a_padded_batch_are_what_they_are_alone(held):
    lengths, ids = [25, 14, 2], tokens(3, 25, seed=2)
    mask = (torch.arange(25) >= torch.tensor([[25 - length] for length in lengths])).long()
    options = GREEDY | {"max_new_tokens": 30}
    together = held.generate(ids * mask, attention_mask=mask, **options)
    for row, length in enumerate(lengths):
        alone = held.generate(ids[row : row + 1, 25 - length :], **options)
        assert together[row, 25:].equal(alone[0, length:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_turn_in_chunks_equals_single_steps(held, dtype):
    model, ids, ends = held.to(dtype), tokens(2, 70), []
    for sizes in ([20, 50], [20, 13, 1, 36], [20] + [1] * 50):
        cache, stop = KVSurgeryCache(model.config), 0
        for size in sizes:
            with torch.no_grad():
                logits = model(ids[:, stop : stop + size], past_key_values=cache).logits
            stop += size
        ends.append(logits[:, -1])
    assert all(largest(end - ends[0], ends[0]) <= (1e-5 if dtype == torch.float32 else 0.1) for end in ends)


def test_gradients_flow_through_a_selection(held):
    cache = held(tokens(1, 20)).past_key_values
    logits = held(tokens(1, 12, seed=1), past_key_values=cache).logits
    logits.sum().backward()
    assert all(part.grad.isfinite().all() for part in held.parameters() if part.grad is not None)


def test_taking_back_what_was_dropped_raises(held):
    cache = held(tokens(1, 20)).past_key_values
    held(tokens(1, HOLD + 1, seed=1), past_key_values=cache)
    cache.crop(-1 - WINDOW)  # to the observation window of the last selection
    with pytest.raises(ValueError, match=r"to 21 tokens: .* the observation window of the last selection"):
        cache.crop(-1)


@pytest.mark.parametrize("hold", [WINDOW - 1, 0, 2.5, "128", True])
def test_a_block_must_hold_the_window(held, hold):
    held.config.kv_surgery["selection"] = SELECTION | {"hold": hold}
    with pytest.raises(ValueError, match=f"malformed.*at least {WINDOW}, got {hold!r}"):
        KVLayout.from_config(held.config)


@pytest.mark.parametrize("selection", [{"select": "accumulated"}, {"select": "h2o", "hold": HOLD}, {"select": None}])
def test_an_unknown_or_unfit_selection_is_refused(held, selection):
    held.config.kv_surgery["selection"] = {"window": WINDOW, "kernel_size": 3, "pool": "max"} | selection
    with pytest.raises(ValueError, match="heads select by attention or value-norm, got"):
        KVLayout.from_config(held.config)


def test_accumulated_attention_of_earlier_versions_is_read_and_not_run(held):
    """Bytes count a score of 4 bytes for each selected token, which such a checkpoint's own code keeps."""
    plain = KVLayout.from_config(held.config)
    held.config.kv_surgery["selection"] = SELECTION | {"select": "accumulated"}
    layout = KVLayout.from_config(held.config)
    assert layout.kv_bytes(1, 20, 100) - plain.kv_bytes(1, 20, 100) == 4 * 4 * (4 + 9 + 30)
    with pytest.raises(ValueError, match="accumulated attention, which this code does not do; convert the original"):
        CLASSES["llama"](held.config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_first_tokens_stay_where_values_count(held, dtype):
    """However small their values are."""
    held.config.kv_surgery["selection"] = SELECTION | {"select": "value-norm", "kernel_size": 1}
    model = CLASSES["llama"](held.config).eval()
    keys, values = torch.randn(2, 1, 3, 40, 6, dtype=dtype)
    values[:, :, :10] *= 1e-6
    layout, columns = KVLayout.from_config(model.config).layers[0], Columns()
    columns.prompt = 40
    heads = BudgetedHeads(keys, layout, columns, Storage(layout))
    heads.observe(37, torch.randn(1, 6, 3, 6, dtype=dtype))
    kept = heads.select(keys, values, [], Scoring(1))[0]
    assert kept[0, :4].tolist() == [0, 1, 2, 3]
    assert kept[1, :4].tolist() == [0, 1, 2, 3]
    assert kept[1, 4] >= 10


def test_without_hold_nothing_is_selected_again(held):
    held.config.kv_surgery["selection"] = {"window": WINDOW, "kernel_size": 3, "pool": "max"}
    layout = KVLayout.from_config(held.config)
    assert "hold" not in layout_section(layout)["selection"]
    assert layout.kv_bytes(1, 20, 100) - layout.kv_bytes(1, 20, 0) == 16 * 100 * 2 * layout.head_dim * 2


def test_a_cache_that_is_asked_to_be_quantized(held):
    """Without scales for each token only full heads are quantized; without these nothing would be."""
    options = GREEDY | {"max_new_tokens": 4, "return_dict_in_generate": True}
    options |= {"cache_implementation": "quantized", "cache_config": {"nbits": 8}}
    cache = held.generate(tokens(1, 400), **options).past_key_values
    layer = cache.layers[0]
    assert len(layer.storage.tiled) == 1
    assert layer.heads[0].groups[0].packed == [256]
    quantized = cache.layers[0].layout.quantization
    layout = KVLayout.from_config(held.config).quantized(quantized)
    assert cache.allocated_bytes() == layout.kv_bytes(1, 400, 4, itemsize=4)
    for section in held.config.kv_surgery["layers"]:
        section.update(blocks=[[0, 4]], budgets=[9] * 4)
    with pytest.raises(
        ValueError, match="quantized with the scheme per-token only, and no other head is quantized; choose"
    ):
        held.generate(tokens(1, 20), **options)
