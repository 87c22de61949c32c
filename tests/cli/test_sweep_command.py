"""`kvsurgery sweep` as it is typed: what it prints, writes and refuses."""

import json
import re
from pathlib import Path

import pytest

from kvsurgery.display import console
from kvsurgery.system.locks import reserved_folder
from tests.evaluate.recall import MODEL, write_language
from tests.helpers.command import done, refused, run
from tests.helpers.hub_server import serve
from tests.helpers.tiny_recall import FOLDER

PROFILE = ("--profile", FOLDER / "profile.safetensors")
NEEDLE = ("--tasks", "needle", "--lengths", "160", "--depths", "0.2", "--device", "cpu")
OWN = ("--text", "text.txt", "--needles", "needles.jsonl")
SWEEP = ("sweep", MODEL, *PROFILE, *NEEDLE, *OWN)
AXES = ("--sparsity", "0.83,0.84,1.5", "--sink", "4", "--recent", "8,8,16")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text and needles."""
    folder = tmp_path_factory.mktemp("place")
    write_language(folder)
    return folder


@pytest.fixture(autouse=True)
def _there(place, monkeypatch):
    monkeypatch.chdir(place)


def test_a_table_a_picture_and_json(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    said = done(*SWEEP, *AXES, "--out", "swept")
    title, *table = [line.split() for line in said.out.splitlines() if line.strip()]
    assert " ".join(title).endswith("of 166 tokens, with sink 4")
    first_words, second_words, _, original, *rows = table  # a wide table's headings take two lines
    assert first_words[:1] == ["KV"]
    assert second_words[:3] == ["sparsity", "recent", "bytes"]
    assert original[0] == "original"
    assert original[3:5] == ["100.0%", "100.0%"]
    assert [row[:2] for row in rows] == [
        [sparsity, recent] for sparsity in ["0.83", "0.84", "1.5"] for recent in ("8", "16")
    ]
    # 4 and 8 tokens of streaming heads, 166 of full ones
    assert rows[0][2:5] == ["113.00", "KiB", f"{(2 * 166 + 10 * 12) / (12 * 166):.1%}"]
    assert rows[-1][2:] == ["-"] * 6
    assert "left out: sparsity 1.5, sink 4, recent 8, and 1 more: --sparsity must lie in [0, 1], got 1.5" in said.err
    assert "2 of 4 settings give the policy of another" in said.err
    assert "wrote swept/index.html, sweep.png, sweep.json and sweep.csv" in said.err
    page = Path("swept/index.html").read_text()
    assert f"Sweep of {MODEL.name}" in page
    assert "sparsity 0.83, recent 8" in page
    assert {"sweep.png", "sweep.json", "sweep.csv", "samples.jsonl"} <= {path.name for path in Path("swept").iterdir()}
    # what is there is not computed again, and says the same
    again = json.loads(done(*SWEEP, *AXES, "--out", "swept", "--json").out)
    kept = json.loads(Path("swept/sweep.json").read_text())
    reasons, fields = ([point.pop("skipped") for point in found["points"]] for found in (again, kept))
    assert again == kept
    # what is printed names options, the file names fields
    assert set(reasons) == {None, "--sparsity must lie in [0, 1], got 1.5"}
    assert set(fields) == {None, "`sparsity` must lie in [0, 1], got 1.5"}
    assert again["command"].startswith("kvsurgery sweep")
    assert again["source"] == str(MODEL)
    # without room, a setting has its score alone
    monkeypatch.setattr(console, "fits", lambda table: False)
    narrow = done(*SWEEP, *AXES, "--out", "swept").out
    assert "difference" in said.out
    assert "difference" not in narrow
    assert rows[0][:5] in [line.split()[:5] for line in narrow.splitlines()]


def test_a_folder_that_another_process_writes():
    """What it has converted stays."""
    with reserved_folder(Path("busy")):
        scratch = Path("busy/policy-0123456789abcdef/sweep-checkpoint")
        scratch.mkdir(parents=True)
        assert "another process is writing busy; wait for it" in refused(*SWEEP, *AXES, "--out", "busy")
        assert scratch.exists()


def test_bits_need_no_profile():
    own = ("sweep", MODEL, *NEEDLE, *OWN)
    found = json.loads(done(*own, "--kv-bits", "16,4", "--kv-residual", "0", "--out", "bits", "--json").out)
    assert [point["options"]["kv_bits"] for point in found["points"]] == [16, 4]
    plain, packed = (point["kv_bytes"] for point in found["points"])
    assert packed < plain == found["dense_bytes"]
    assert "profile" not in found["settings"]
    assert "--sparsity requires a profile with scores" in refused(
        *own, "--kv-bits", "4", "--sparsity", "0.5", "--out", "no"
    )
    assert "--profile is missing" in run(*own, "--sparsity", "0.5", "--out", "no").err
    # a setting alone that changes nothing
    assert "--kv-bits 8, 4, 3 or 2 quantizes" in run(*own, "--kv-bits", "16", "--out", "no").err
    assert not Path("no").exists()


def test_a_sweep_that_measures_nothing_fails():
    Path("long.txt").write_text(" ".join([Path("text.txt").read_text()] * 3))
    beyond = ("--tasks", "perplexity", "--text", "long.txt", "--lengths", "8K", "--samples", "1")
    result = run("sweep", MODEL, "--kv-bits", "8", *beyond, "--out", "beyond")
    assert result.code == 1
    assert "perplexity: samples left out, original: " in result.err
    assert result.err.splitlines()[-1] == "kvsurgery: nothing was measured: every sample is left out"
    assert Path("beyond/sweep.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*SWEEP, "--sparsity", "0.5", "--full-heads", "4"), "--sparsity and --full-heads exclude each other"),
        ((*SWEEP, "--budget", "8", "--sink", "4"), "--sink and --budget exclude each other"),
        (("sweep", "nowhere/at/all", *PROFILE, *NEEDLE, *OWN, "--recent", "8"), "is neither a folder nor a Hub id"),
        (("sweep", MODEL, "--profile", "text.txt", *NEEDLE, *OWN, "--recent", "8"), "text.txt"),
        (("sweep", MODEL, *PROFILE, *NEEDLE, "--recent", "8"), r"\(--needles\)"),
    ],
)
def test_errors_are_one_line_and_nothing_is_written(arguments, words):
    before = sorted(Path.cwd().iterdir())
    assert re.search(words, refused(*arguments, "--out", "refused"))
    assert sorted(Path.cwd().iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "there is nothing to vary: give values of any of --sparsity, --full-heads"),
        (("--recent", "8,many"), "'many' is not a number of tokens"),
        (("--kv-bits", "5"), "'5' is not one of"),
        (("--recent", "8", "--method", "reform"), "--method reform keeps every head full"),
        (("--kv-bits", "16", "--kv-residual", "0"), "--kv-residual requires --kv-bits"),
        (("--recent", "8", "--passkeys", "3"), "--passkeys is an option of passkey"),
        (("--recent", "8", "--revision", "main"), "--revision requires a Hub id"),
    ],
)
def test_misuse_says_what_to_change(arguments, words):
    result = run(*SWEEP, *arguments, "--out", "refused")
    assert result.code == 2
    assert words in " ".join(result.err.replace("│", " ").split())
    assert not Path("refused").exists()


@pytest.mark.slow
def test_a_model_of_the_hub_is_downloaded_after_its_headers_were_seen_to(place, tmp_path):
    with serve() as hub:
        commit = hub.publish("surgeon/recall", MODEL).refs["main"]
        asked = ("sweep", "surgeon/recall", *PROFILE, *NEEDLE, "--text", place / "text.txt", "--needles")
        asked += (place / "needles.jsonl", "--limit", "1", "--out", tmp_path / "hub", "--full-heads")
        result = hub.run(tmp_path, *asked, "13")
        assert "no setting gives a policy" in result.stderr
        assert not [*tmp_path.rglob("model.safetensors")]
        result = hub.run(tmp_path, *asked, "2")
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "hub/sweep.json").read_text())
    assert found["source"] == "surgeon/recall"
    assert found["settings"]["conversion"]["revision"] == commit
