"""`kvsurgery eval` as it is typed: what it prints, writes and refuses."""

import json
import re
import shutil
from pathlib import Path

import pytest

from kvsurgery.cli.evaluate import check_measured
from kvsurgery.errors import KVSurgeryError
from kvsurgery.evaluate.results import Cell
from kvsurgery.templates.kv_layout import KVLayout
from tests.evaluate.recall import MODEL, convert, write_language
from tests.helpers.command import done, refused, run
from tests.report import builders

NEEDLE = ("--tasks", "needle", "--lengths", "96", "--depths", "0,1", "--batch", "2", "--device", "cpu")
OWN = ("--text", "text.txt", "--needles", "needles.jsonl")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the bundled model converted to 16 tokens a head, a text and needles."""
    folder = tmp_path_factory.mktemp("place")
    write_language(folder)
    convert(folder / "recall-cli", sparsity=None, rest="budgeted", budget=16)
    shutil.copytree(MODEL, folder / "wider")
    config = json.loads((folder / "wider" / "config.json").read_text())
    (folder / "wider" / "config.json").write_text(json.dumps({**config, "rope_theta": 5e5}))
    return folder


@pytest.fixture(autouse=True)
def _there(place, monkeypatch):
    monkeypatch.chdir(place)


def test_a_table_a_page_and_json(place):
    said = done("eval", "recall-cli", "--source", MODEL, *NEEDLE, *OWN, "--out", "two")
    head, *rows = [line.split() for line in said.out.splitlines() if line.strip()][1:]
    assert head == ["task", "metric", "samples", "original", "converted", "difference", "[95%]"]
    assert rows[1:] == [
        ["needle", metric, "4", "100.0%", "100.0%", "+0.0", "[+0.0,", "+0.0]"]
        for metric in ("rouge1_recall", "string_match_all")
    ]
    assert "wrote two/index.html" in said.err
    assert "needle" in Path("two/index.html").read_text()
    # what is there is not computed again, and says the same
    again = json.loads(done("eval", "recall-cli", "--source", MODEL, *NEEDLE, *OWN, "--out", "two", "--json").out)
    written = json.loads(Path("two/results.json").read_text())
    assert again.items() <= written.items()
    assert again["command"].startswith("kvsurgery eval recall-cli --source")
    layout = KVLayout.from_config(json.loads(Path("recall-cli/config.json").read_text()))
    samples = [json.loads(line) for line in Path("two/samples.jsonl").read_text().splitlines()]
    longest = max(samples, key=lambda sample: sample["tokens"] + sample["limit"])
    decoded = longest["continuation"]
    size = longest["tokens"] - decoded, longest["limit"] + decoded
    assert again["tokens"] == sum(size)
    assert again["kv_bytes"] == layout.kv_bytes(1, *size, itemsize=4) < layout.dense_bytes(1, *size, itemsize=4)
    assert again["dense_bytes"] == layout.dense_bytes(1, *size, itemsize=4)


def test_one_model_alone():
    said = done("eval", "recall-cli", *NEEDLE, *OWN, "--limit", "1", "--out", "one", "--json")
    assert [*json.loads(said.out)["models"]] == ["converted"]
    said = done("eval", MODEL, *NEEDLE, *OWN, "--limit", "1", "--out", "stock", "--json")
    [result, _] = json.loads(said.out)["tasks"]
    assert result["difference"] is None
    assert result["scores"]["original"]["mean"] == 1


def test_nothing_that_could_be_asked_is_a_failure():
    """The table and the page say what was left out, and why."""
    Path("long.txt").write_text(" ".join([Path("text.txt").read_text()] * 3))
    asked = ("--tasks", "perplexity", "--text", "long.txt", "--lengths", "8K", "--samples", "1")
    result = run("eval", MODEL, *asked, "--out", "beyond")
    assert result.code == 1
    assert "1 sample left out, original: " in result.err
    assert result.err.splitlines()[-1] == "kvsurgery: nothing was measured: every sample is left out"
    assert Path("beyond/index.html").exists()


def test_some_scores_or_none_to_be_had_are_no_failure():
    """Of tasks that others judge there are none; where the original skips all, the converted model may answer."""
    check_measured((), judged=1)
    with pytest.raises(KVSurgeryError, match="every sample is left out"):
        check_measured((), judged=0)
    answered = Cell({"tokens": 96}, 4, {"converted": 0.5})
    check_measured([builders.task("needle", 1, 1, scores={}, cells=(answered,))])
    with pytest.raises(KVSurgeryError, match="every sample is left out"):
        check_measured([builders.task("needle", 1, 1, scores={})])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("recall-cli", "--source", "text.txt", *NEEDLE), "text.txt is a file; give the folder"),
        (("nowhere", *NEEDLE), "nowhere is not a folder"),
        (("recall-cli", "--source", "no/such/folder", *NEEDLE), "is neither a folder nor a Hub id"),
        (
            ("recall-cli", "--source", "recall-cli", *NEEDLE, *OWN),
            "recall-cli is a converted checkpoint; give the orig",
        ),
        (("recall-cli", "--source", "wider", *NEEDLE, *OWN), "wider is not what recall-cli was converted from"),
        (("recall-cli", *NEEDLE), r"\(--needles\)"),
        (("recall-cli", "--tasks", "perplexity"), r"give a text that it knows \(--text\)"),
        (("recall-cli", "--tasks", "perplexity", "--text", "./none.txt"), "cannot read text ./none.txt"),
        (("recall-cli", *NEEDLE, "--needles", "text.txt"), "text.txt, line 1: not JSON"),
        (("recall-cli", "--tasks", "longbench", "--longbench-prompts", "text.txt"), "text.txt is not JSON"),
    ],
)
def test_errors_are_one_line_and_nothing_is_written(arguments, words):
    before = sorted(Path.cwd().iterdir())
    assert re.search(words, refused("eval", *arguments, "--out", "refused"))
    assert sorted(Path.cwd().iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("recall-cli", *NEEDLE, "--passkeys", "3"), "--passkeys is an option of passkey"),
        (("recall-cli", "--tasks", "noodle"), "'noodle' is not one of"),
        (("recall-cli", "--tasks", "needle", "--lengths", "many"), "'many' is not a number of tokens"),
        ((MODEL, "--source", MODEL, *NEEDLE), "is not a converted checkpoint"),
        (("recall-cli", *NEEDLE, "--batch", "0"), "--batch"),
    ],
)
def test_misuse_says_what_to_change(arguments, words):
    result = run("eval", *arguments, "--out", "refused")
    assert result.code == 2
    assert words in " ".join(result.err.replace("│", " ").split())
    assert not Path("refused").exists()
