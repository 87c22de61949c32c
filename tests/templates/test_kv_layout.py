from dataclasses import asdict

import pytest

from kvsurgery.heads.section import layout_section
from kvsurgery.templates.kv_layout import KVLayout, Quantization


def config(layers=None, **overrides):
    layers = layers or [
        {"blocks": [[1, 3]], "sink": 4, "recent": 16},
        {"blocks": [[4, 0]], "sink": 4, "recent": 16},
        {"blocks": [[0, 4]], "sink": 0, "recent": 8, "native": True},
    ]
    section = {"version": 2, "head_dim": 10, "layers": layers}
    section.update(overrides)
    return {"kv_surgery": section, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4}


def test_bytes_by_hand():
    layout = KVLayout.from_config(config())
    # 100 tokens: layer 0 keeps 100 + 3 x 20, layer 1 4 x 100, layer 2 4 x 8; keys and values, 10 elements of 2 bytes
    assert layout.kv_bytes(1, 90, 10) == 2 * (160 + 400 + 32) * 10 * 2
    assert layout.kv_bytes(3, 90, 10, itemsize=4) == 3 * 2 * layout.kv_bytes(1, 100)
    # the ring of 3 + 4 streaming heads grows by the margin
    assert layout.kv_bytes(1, 100, margin=5) - layout.kv_bytes(1, 100) == 2 * (3 + 4) * 5 * 10 * 2
    # the unconverted model keeps everything but for its own window
    assert layout.dense_bytes(1, 100) == 2 * (400 + 400 + 32) * 10 * 2
    assert layout.prefill_peak_bytes(1, 90, 10, chunk=30) == layout.kv_bytes(1, 100) + 2 * 4 * 30 * 10 * 2


def test_short_sequences_take_no_more_than_dense():
    layout = KVLayout.from_config(config())
    assert layout.kv_bytes(1, 8) == layout.dense_bytes(1, 8) == 2 * 12 * 8 * 10 * 2


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (None, "no kv_surgery section"),
        ({"version": 3}, "version 3 is unknown"),
        ({"version": "1"}, "version '1' is unknown"),
        ({"version": 2}, "malformed"),
        ({"head_dim": 0}, "malformed"),
        ({"layers": [{"blocks": [[1, 3]], "sink": 4, "recent": 16}]}, "describes 1 layers"),
        ({"layers": [{"blocks": [[1, 2]], "sink": 4, "recent": 16}] * 3}, "layer 0 3 KV heads"),
        ({"layers": [{"blocks": [[1, 1, 2]], "sink": 4, "recent": 16}] * 3}, "malformed"),
        ({"layers": [{"blocks": [], "sink": 4, "recent": 16}] * 3}, "layer 0 0 KV heads"),
        ({"layers": [{"blocks": [[1, 2], [1, 0]], "sink": 4, "recent": 16}] * 3}, "blocks of heads of different sizes"),
        (
            {
                "layers": [{"blocks": [[1, 3]], "sink": 4, "recent": 16}] * 2
                + [{"blocks": [[1, 1], [1, 1]], "sink": 4, "recent": 16}]
            },
            "blocks of heads of different sizes",
        ),
        ({"layers": [{"blocks": [[1, 3]], "sink": -1, "recent": 16}] * 3}, "malformed"),
        ({"layers": [{"blocks": [[1, 3]], "sink": 4, "recent": 0}] * 3}, "malformed"),
        ({"layers": [{"blocks": [[1.0, 3]], "sink": 4, "recent": 9}] * 3}, "malformed"),
        ({"layers": 3}, "malformed"),
    ],
)
def test_inconsistent_sections_are_refused(section, message):
    given = config()
    if section is None or "version" in section:
        given["kv_surgery"] = section
    else:
        given["kv_surgery"].update(section)
    with pytest.raises(ValueError, match=message):
        KVLayout.from_config(given)


def test_the_section_of_version_1_is_read():
    """It spells the cache's quantization as the converter's first release did, which packed all tokens as they are."""
    stored = {"bits": 2, "scheme": "kivi", "group_size": None, "residual": 128, "streaming": False}
    first = config(head_dim=16, version=1, quantisation=stored)
    assert KVLayout.from_config(first).quantization == Quantization(2, sink=0, rotate="none", clip=False)


def test_version_2_says_all_of_the_quantization():
    stored = asdict(Quantization(2))
    assert KVLayout.from_config(config(head_dim=16, quantization=stored)).quantization == Quantization(2)
    for name in ("bits", "scheme", "group_size", "residual", "sink", "rotate", "clip"):
        without = {key: value for key, value in stored.items() if key != name}
        with pytest.raises(ValueError, match=name):
            KVLayout.from_config(config(head_dim=16, quantization=without))


def in_blocks():
    """Four blocks of a head each or two; 100 tokens, windows of 20."""
    streaming = {"blocks": [[1, 1], [0, 2], [1, 1], [0, 2]], "sink": 4, "recent": 16}
    budgeted = {"blocks": [[0, 2], [1, 1], [0, 2], [1, 1]], "budgets": [5, 6, 7, 8, 9, 10]}
    native = {"blocks": [[0, 2]] * 4, "sink": 0, "recent": 8, "native": True}
    given = config([streaming, budgeted, native], selection={"window": 4, "kernel_size": 3, "pool": "max"})
    return KVLayout.from_config({**given, "num_key_value_heads": 8})


def test_parts_by_hand():
    layout = in_blocks()
    assert layout.processes == (1, 2, 4)
    tokens = [
        [(100 + 20, 5 + 4 + 6 + 4, 16), (40, 100 + 7 + 4, 16), (120, 8 + 4 + 9 + 4, 16), (40, 100 + 10 + 4, 16)],
        [(160, 130, 32), (160, 139, 32)],
    ]
    for processes, expected in zip((4, 2), tokens, strict=True):
        parts = layout.parts(processes)
        assert [part.kv_bytes(1, 100) for part in parts] == [2 * sum(each) * 10 * 2 for each in expected]
        assert sum(part.kv_bytes(3, 100, 7) for part in parts) == layout.kv_bytes(3, 100, 7)
        assert sum(part.dense_bytes(1, 100) for part in parts) == layout.dense_bytes(1, 100)
    assert layout.parts(1) == [layout]
    assert layout.parts(2)[1].parts(2) == layout.parts(4)[2:]


def test_parts_that_nothing_tells_apart():
    streaming, budgeted, native = in_blocks().layers
    with pytest.raises(ValueError, match="4 blocks of heads do not divide over 3 processes"):
        in_blocks().parts(3)
    for layer in (streaming, budgeted):
        with pytest.raises(ValueError, match="processes hold different heads"):
            layer.part(None, 4)
    assert native.part(None, 4) == native.part(3, 4)
    assert streaming.part(None, 2) == streaming.part(1, 2)
    with pytest.raises(ValueError, match="processes hold different heads"):
        budgeted.part(None, 2)  # as many full ones, but other budgets


BUDGETS = {"blocks": [[1, 3]], "budgets": [5, 7, 9]}
NEAREST_SECTION = {name: value for name, value in asdict(Quantization(4)).items() if name != "rounding"}
SELECTION = {"window": 4, "kernel_size": 3, "pool": "avg"}


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"selection": {**SELECTION, "select": "value-norm"}, "layers": [BUDGETS] * 3},
        {"head_dim": 16, "quantization": {**asdict(Quantization(4, residual=9)), "rounding": "queries"}},
        {"head_dim": 16, "quantization": NEAREST_SECTION},
        {"layers": [{"blocks": [[1, 1], [0, 2]], "sink": 1, "recent": 2}] * 3},
    ],
    ids=["streaming", "budgets", "rounded by the queries", "rounded to the nearest", "blocks"],
)
def test_a_section_is_read_and_written_alike(section):
    whole = config(**section)
    assert layout_section(KVLayout.from_config(whole)) == whole["kv_surgery"]
