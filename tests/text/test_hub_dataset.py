"""Datasets of the Hub: rows as they are taken, and whatever the library raises in one line."""

import re
import sys
from types import SimpleNamespace

import pytest

from kvsurgery.errors import TextError
from kvsurgery.text.hub_dataset import dataset_rows

MISSING = "Config name is missing.\nPlease pick one among the available configs: ['a', 'b']\nExample of usage:\n\t`...`"
UNREAD = "org/name is not a local file, and as a dataset of the Hub it cannot be read: "


@pytest.fixture
def given(monkeypatch):
    """Rows of a stand-in for `datasets`; an exception among them is raised in its place."""
    rows = []

    def load_dataset(dataset, config, *, split, streaming):
        assert (dataset, config, split, streaming) == ("org/name", "4k", "test", True)
        for row in rows:
            if isinstance(row, Exception):
                raise row
            yield row

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return rows


def test_rows_are_read_as_they_are_taken(given):
    given += [{"text": "a"}, {"text": "b"}, OSError("no route")]
    taken = dataset_rows("org/name", "4k", "test")
    assert [next(taken), next(taken)] == given[:2]
    with pytest.raises(TextError, match=f"^{UNREAD}no route$"):
        next(taken)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("no route\nto host"), UNREAD + "no route"),
        (KeyError("train"), UNREAD + "'train'"),
        (RuntimeError(), UNREAD + "RuntimeError"),
        (
            ValueError(MISSING),
            "dataset org/name has several configurations; give one, as org/name:NAME. Please pick one among the "
            "available configs: ['a', 'b']",
        ),
    ],
    ids=["offline", "split", "silent", "configuration"],
)
def test_what_the_library_raises_is_one_line(given, error, message):
    given.append(error)
    with pytest.raises(TextError, match=f"^{re.escape(message)}$"):
        next(dataset_rows("org/name", "4k", "test"))


def test_the_library_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        TextError, match="org/name is not a local file; to read it as a dataset of the Hub: pip install"
    ):
        next(dataset_rows("org/name", "4k", "test"))
