"""`bench.json` and `bench.csv`: what is written is what is read."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.bench.results import FILE, PHASES, TABLE, Bench, Phase, Row
from kvsurgery.errors import KVSurgeryError

SECONDS = st.floats(1e-9, 1e6)
COUNTS = st.integers(1, 1 << 50)
PHASE = st.builds(Phase, seconds=SECONDS, low=SECONDS, high=SECONDS, count=COUNTS, peak_bytes=COUNTS)
ROW = st.builds(
    Row,
    contender=st.text(min_size=1),
    tokens=COUNTS,
    batch=COUNTS,
    **dict.fromkeys(PHASES, st.none() | PHASE),
    kv_bytes=st.none() | COUNTS,
    predicted=st.none() | COUNTS,
    floor=st.none() | SECONDS,
    skipped=st.none() | st.text(),
)
SETTINGS = {"lengths": [512], "chunk": 256}


def bench(*rows: Row, **changes) -> Bench:
    facts = {"models": {"converted": "a", "original": "b"}, "command": "kvsurgery bench a", "settings": SETTINGS}
    facts |= {"versions": {"torch": "2"}, "checkpoint": {"name": "a"}, "weights": 8, "bandwidth": 4.0}
    facts |= {"contenders": ("converted", "original"), "left_out": {"hqq": "not installed"}, "rows": rows}
    return Bench(**{**facts, **changes})


@given(st.lists(ROW, max_size=3))
def test_what_is_saved_is_loaded(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> None:
    folder = tmp_path_factory.mktemp("bench")
    bench(*rows).save(folder)
    assert Bench.load(folder) == bench(*rows)


def test_a_line_of_the_table_per_row(tmp_path: Path) -> None:
    decode = Phase(0.5, 0.25, 0.75, 9, 100)
    bench(
        Row("converted", 512, 2, decode=decode, kv_bytes=64, predicted=64, floor=0.25),
        Row("original", 512, 2, skipped="no room"),
    ).save(tmp_path)
    with open(tmp_path / TABLE, newline="", encoding="utf-8") as file:
        measured, skipped = csv.DictReader(file)
    figures = {"decode_s": "0.5", "decode_low_s": "0.25", "decode_high_s": "0.75", "decode_count": "9"}
    figures |= {"decode_peak_bytes": "100", "kv_bytes": "64", "predicted": "64", "floor_s": "0.25"}
    figures |= {"contender": "converted", "tokens": "512", "batch": "2", "share_of_floor": "0.5"}
    assert {name: value for name, value in measured.items() if value} == figures
    assert {name: value for name, value in skipped.items() if value} == {
        "contender": "original",
        "tokens": "512",
        "batch": "2",
        "skipped": "no room",
    }
    assert [name for name in measured if name.endswith("peak_bytes")] == [f"{phase}_peak_bytes" for phase in PHASES]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "null",
        json.dumps({"format": "kvsurgery.evaluation", "version": 1}),
        json.dumps({**bench().to_json(), "version": 2}),
        json.dumps({**bench().to_json(), "rows": [{"contender": "converted"}]}),
        json.dumps({**bench().to_json(), "rows": 3}),
        json.dumps({**bench().to_json(), "more": 3}),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(KVSurgeryError, match=r"bench\.json is not what this version of `kvsurgery bench` writes"):
        Bench.load(tmp_path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(KVSurgeryError, match="run `kvsurgery bench` first"):
        Bench.load(tmp_path)
