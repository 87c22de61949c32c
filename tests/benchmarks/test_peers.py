"""The comparison with other caches: that it counts, asks and tells presses right, whoever is installed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.peers import contenders, entries, run, worker
from benchmarks.peers.held import held_bytes
from kvsurgery.profile.head_profile import HeadProfile
from tests.helpers.tiny_recall import FOLDER, task

NAMES = {each.name: each for each in contenders.CONTENDERS}
TOKEN = 3 * 4 * 2 * 32 * 4  # bytes of the bundled model's keys and values
LENGTH = 300


@pytest.fixture(scope="module")
def profile() -> HeadProfile:
    return HeadProfile.load(FOLDER / "profile.safetensors")


@pytest.fixture(scope="module")
def folder(profile: HeadProfile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers")
    for name in ("kvsurgery, duo, 1 full", "kvsurgery, budgets of 16"):
        run.make(NAMES[name], profile, folder)
    return folder


def entered(name: str, profile: HeadProfile, folder: Path, shares: dict | None = None) -> entries.Entry:
    return entries.enter(NAMES[name], FOLDER / "model", folder, torch.tensor(profile.scores), shares or {})


def test_storage_counts_whole_and_once() -> None:
    """A view keeps all of what it views; a tensor made of others is those."""
    whole = torch.zeros(100, dtype=torch.float32)
    wrapped = SimpleNamespace(codes=torch.zeros(8, dtype=torch.uint8), scales=torch.zeros(2))
    wrapped.__tensor_flatten__ = lambda: (["codes", "scales"], None)
    assert held_bytes(whole[:10]) == 400
    assert held_bytes([whole, {"part": whole[10:20]}, (whole.view(10, 10),)]) == 400
    assert held_bytes(SimpleNamespace(layers=[wrapped, torch.float32, torch.Tensor, None, "name"])) == 8 + 8
    assert held_bytes([whole, whole.clone()]) == 800


@pytest.mark.parametrize("name", ["stock", "kvsurgery, duo, 1 full", "kvsurgery, budgets of 16"])
@torch.inference_mode()
def test_bytes_of_caches(name: str, profile: HeadProfile, folder: Path) -> None:
    entry = entered(name, profile, folder)
    cache, _ = entry.read(torch.ones(1, LENGTH, dtype=torch.long), 0)
    if name == "stock":
        assert held_bytes(cache) == LENGTH * TOKEN
    else:
        assert held_bytes(cache) == cache.allocated_bytes() < LENGTH * TOKEN


def test_questions() -> None:
    """The prompt ends in a question, its answer and a question for another fact follow."""
    tokens = run.questions(task, 3, 20, LENGTH)
    assert tokens.shape == (20, LENGTH + worker.AFTER)
    for text in tokens.tolist():
        known = {}
        for at, token in enumerate(text[: LENGTH - 2]):
            if token == task.REMEMBER:
                known[text[at + 1]] = text[at + 2 : at + 5]
        first, second = text[LENGTH - 1], text[LENGTH + 5]
        assert text[LENGTH - 2] == text[LENGTH + 4] == task.RECALL
        assert first != second
        assert text[LENGTH : LENGTH + 3] == known[first]
        assert text[-3:] == known[second]


@pytest.mark.parametrize("name", ["stock", "kvsurgery, duo, 1 full"])
@torch.inference_mode()
def test_recall_is_what_generate_recalls(name: str, profile: HeadProfile, folder: Path) -> None:
    entry, tokens = entered(name, profile, folder), run.questions(task, 4, 12, LENGTH)
    asked = task.Prompts(*tokens[:, : LENGTH + task.VALUES].split([LENGTH, task.VALUES], 1))
    later = task.Prompts(*tokens.split([LENGTH + worker.AFTER - task.VALUES, task.VALUES], 1))
    found = worker.recall(entry, tokens, "some")
    assert found == {
        "some_asked": pytest.approx(task.exact_match(entry.model, asked)),
        "some_later": pytest.approx(task.exact_match(entry.model, later)),
    }
    assert (found["some_later"] == 1) == (name == "stock")


@torch.inference_mode()
def test_perplexity_of_counted_tokens(profile: HeadProfile, folder: Path) -> None:
    entry, tokens = entered("stock", profile, folder), run.questions(task, 5, 3, LENGTH)
    counted = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    found = worker.perplexity(entry, tokens, counted, LENGTH)
    logits = entry.model(tokens).logits[:, LENGTH - 1 : -1].log_softmax(-1)
    nats = -logits.gather(2, tokens[:, LENGTH:, None])[..., 0][counted[:, LENGTH:]]
    assert found["perplexity"] == pytest.approx(nats.mean().exp().item(), rel=1e-4)
    assert found["kv_bytes_at_end"] == (tokens.shape[1] - 1) * TOKEN


class Press:
    """What the worker needs of a press: `compression_ratio`, and a context around the prompt."""

    compression_ratio = 0.0

    @contextlib.contextmanager
    def __call__(self, model):
        self.inside = True
        yield
        self.inside = False


@torch.inference_mode()
def test_a_press_is_told_the_share_of_a_converted_model(profile: HeadProfile, folder: Path) -> None:
    stock = entered("stock", profile, folder)
    [contender] = [each for each in contenders.PRESSES if each.name == "SnapKVPress = duo, 2 full"]
    shares = {(contender.equals, 20): 0.25, (contender.equals, 30): 0.125}
    press = Press()
    entry = entries.Entry(contender, stock.model, stock.make, shares, press)
    inside = []
    hook = stock.model.register_forward_hook(lambda *call: inside.append(press.inside))
    for length in (20, 30):
        entry.through(torch.ones(1, length + 3, dtype=torch.long), length)
        assert press.compression_ratio == 1 - shares[contender.equals, length]
    hook.remove()
    assert inside == [True, False, False] * 2


def test_presses_run(profile: HeadProfile, folder: Path) -> None:
    pytest.importorskip("kvpress")
    shares = {(each.equals, LENGTH): 0.2 for each in contenders.PRESSES}
    for contender in contenders.PRESSES:
        entry = entered(contender.name, profile, folder, shares)
        cache, _ = entry.read(run.questions(task, 3, 1, LENGTH)[:, :LENGTH], 0)
        masked = contender.series in ("AdaKVPress", "DuoAttentionPress")
        assert held_bytes(cache) / (LENGTH * TOKEN) == pytest.approx(1.0 if masked else 0.2, abs=0.01)


def test_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Of those that are here; who refuses is noted, and the others go on."""
    names = ["stock", "kvsurgery, duo, 2 full", "kvsurgery, budgets of 16", "SnapKVPress = duo, 2 full"]
    step = entries.Entry.step

    def refuse(entry: entries.Entry, cache: object, token: torch.Tensor, position: int) -> torch.Tensor:
        if entry.contender.name == names[2] and token.shape[0] > 2:
            raise ValueError("no more than 2\nat a time")
        return step(entry, cache, token, position)

    def here(command: list, env: dict, check: bool) -> None:
        assert command[:3] == [Path("python"), "-m", worker.__name__]
        monkeypatch.setattr(sys, "argv", [str(part) for part in command[2:]])
        worker.main()

    monkeypatch.setattr(entries.Entry, "step", refuse)
    monkeypatch.setattr(run.subprocess, "run", here)
    for name, value in {"SHORT": 200, "LONG": 260, "FOLLOWING": 150, "TIMED": 3}.items():
        monkeypatch.setattr(run, name, value)
    report, picture = tmp_path / "peers.json", tmp_path / "peers.png"
    arguments = ["--queries", "3", "--long-queries", "2", "--texts", "1", "--rounds", "2", "--python", "python"]
    monkeypatch.setattr(
        sys, "argv", ["run.py", *arguments, "--only", *names, "--json", str(report), "--plot", str(picture)]
    )
    run.main()
    results = json.loads(report.read_text())
    rows, left_out = results["contenders"], results["left_out"]
    assert {*rows, *left_out} == {*names}
    assert (names[3] in left_out) == (entries.kvpress is None)
    assert rows["stock"]["kv_bytes"] == 200 * TOKEN
    assert rows["stock"]["kv_bytes_after_answer"] == 202 * TOKEN
    assert rows["stock"]["kv_bytes_at_end"] == 349 * TOKEN
    assert rows[names[1]]["of_full"] == rows[names[1]]["said"] < 0.5
    assert rows[names[2]]["refused"] == {"recall": "ValueError: no more than 2"}
    assert {"perplexity", "long_recall_later", "decode_ms"} <= rows[names[2]].keys()
    assert results["packages"]["torch"] == importlib.metadata.version("torch")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "refused recall" in capsys.readouterr().out


def test_the_environment_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls, wanted = [], tmp_path / "requirements.txt"
    wanted.write_text("one==1\n")
    monkeypatch.setattr(run, "REQUIREMENTS", wanted)
    monkeypatch.setattr(run.venv, "create", lambda folder, **options: folder.mkdir(exist_ok=True))
    monkeypatch.setattr(run.subprocess, "run", lambda command, check: calls.append(command))
    for expected in (1, 1):
        assert run.environment(tmp_path / "venv") == tmp_path / "venv" / "bin" / "python"
        assert len(calls) == expected
    wanted.write_text("one==2\n")
    run.environment(tmp_path / "venv")
    assert len(calls) == 2
