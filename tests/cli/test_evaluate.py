"""`kvsurgery eval` as it is typed: what it prints, writes and refuses."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from kvsurgery.cli.evaluate import check_measured
from kvsurgery.errors import KVSurgeryError
from kvsurgery.evaluate.quick import quick_options
from kvsurgery.evaluate.results import Cell
from kvsurgery.system.locks import reserved_folder
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


def test_a_table_a_page_and_json(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    said = done("eval", "recall-cli", "--source", MODEL, *NEEDLE, *OWN, "--out", "two")
    head, *rows = [line.split() for line in said.out.splitlines() if line.strip()][1:]
    assert head == ["task", "metric", "samples", "original", "converted", "against", "the", "original"]
    assert rows[1:3] == [
        ["needle", metric, "4", "100.0%", "100.0%", *["too", "few", "samples", "to", "tell"]]
        for metric in ("rouge1_recall", "string_match_all")
    ]
    assert rows[3][:3] == ["KV", "cache", "bytes"]
    assert rows[3][-4:] == [f"{again_share(Path('two')):.1%}", "of", "the", "original's"]
    assert rows[4][:2] == ["Cannot", "tell:"]
    assert "4 prompts for each model, of at most 96 tokens: 4 of needle" in said.err
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


def again_share(folder):
    """The KV bytes of a converted model as a share of the original's."""
    found = json.loads((folder / "results.json").read_text())
    return found["kv_bytes"] / found["dense_bytes"]


def prompts_by_task(folder):
    """How many prompts of each task and length there are."""
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return Counter((sample["task"], sample["facts"]["tokens"]) for sample in samples)


PASSKEYS = ("--passkeys", "2", "--passkey-tokens", "4", "--passkey-hidden", "remember {key} .")
GENERATED = ("--tasks", "needle,passkey,perplexity", *PASSKEYS, "--passkey-asked", "recall {cue}", *OWN)


def test_a_folder_that_another_process_writes():
    with reserved_folder(Path("busy")):
        line = refused("eval", "recall-cli", "--source", MODEL, *NEEDLE, *OWN, "--out", "busy")
    assert "another process is writing busy; wait for it" in line


def test_one_option_limits_every_task():
    asked = (*GENERATED, "--lengths", "96,160", "--depths", "0,0.6", "--continuation", "8")
    said = done("eval", MODEL, *asked, "--samples", "3", "--out", "three")
    tasks = ("needle", "passkey", "perplexity")
    assert prompts_by_task(Path("three")) == {(task, length): 3 for task in tasks for length in (96, 160)}
    assert "18 prompts for each model, of at most 160 tokens: 6 of needle, 6 of passkey, 6 of perplexity" in said.err


def test_what_cannot_go_on_is_found_before_a_model_is_loaded(monkeypatch):
    """Other settings, also where a trial chooses needles; another converted model; damaged answers of either."""
    asked = ("--source", MODEL, *NEEDLE, *OWN, "--samples", "1", "--out", "begun")
    done("eval", "recall-cli", *asked)
    shutil.copytree("begun", "damaged")
    answers = Path("damaged/answers-converted.jsonl")
    answers.write_text(answers.read_text().replace('"scores"', '"score"'))
    convert(Path("recall-other"), sparsity=None, rest="budgeted", budget=24)
    for name in ("runner", "trial"):
        monkeypatch.setattr(f"kvsurgery.evaluate.{name}.load", lambda *_, **__: pytest.fail("a model is loaded"))
    line = refused("eval", "recall-cli", *asked, "--batch", "3")
    assert "--batch is 2 there and 3 here" in line
    line = refused("eval", "recall-cli", *asked[:-4], "--needles", "auto", "--samples", "1", "--out", "begun")
    assert "--needles of needle is needles.jsonl there and auto here" in line
    assert "begun holds answers of another converted model" in refused("eval", "recall-other", *asked)
    assert "answers-converted.jsonl, line 1" in refused("eval", "recall-cli", *asked[:-1], "damaged")


def test_data_that_cannot_be_read_is_found_before_a_trial(monkeypatch):
    Path("scbench_kv.jsonl").write_text("{}\n")
    monkeypatch.setattr("kvsurgery.evaluate.trial.load", lambda *_, **__: pytest.fail("a model is loaded"))
    asked = ("--tasks", "needle,scbench", "--scbench", "scbench_kv.jsonl", "--text", "text.txt")
    assert "scbench_kv.jsonl, row 1" in refused("eval", "recall-cli", *asked, "--out", "refused")


def test_a_quick_check_ends_with_a_verdict():
    said = done("eval", "recall-cli", "--source", MODEL, "--quick", *OWN, "--lengths", "96,128", "--out", "quick")
    assert sum(prompts_by_task(Path("quick")).values()) == 16
    assert json.loads(Path("quick/results.json").read_text())["settings"]["batch"] == 2
    assert re.match("(Still good|No clear loss|Not as good): ", said.out.splitlines()[-1])
    assert "--quick requires --source" in run("eval", "recall-cli", "--quick", "--out", "refused").err


def test_a_quick_check_asks_beyond_what_heads_keep(place, monkeypatch):
    convert(Path("recall-wide"), sparsity=0.5, sink=16, recent=784)
    assert quick_options(Path("recall-wide"))["lengths"] == (1600,)
    assert quick_options(MODEL)["lengths"] == quick_options(Path("recall-cli"))["lengths"] == (512,)


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
    """Where the original skips all, the converted model may answer."""
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
