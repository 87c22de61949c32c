"""Running balances through compressed caches: which lines of an answer are right, and what the table says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.real_model import running_balances
from benchmarks.real_model.running_balances import Account
from benchmarks.real_model.which_cache import Contender
from kvsurgery.checkpoint.model import Model
from tests.helpers.families import stock
from tests.helpers.losses import losses
from tests.helpers.vocabularies import tokenizer

ACCOUNT = Account((250, -1000, 30))
ANSWER = "001. 5000 + 250 = 5250\n002. 5250 - 1000 = 4250\n003. 4250 + 30 = 4280"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (f"{ANSWER}\n", [1, 1, 1]),
        (ANSWER.replace("5250 - 1000 = 4250", "5250 - 1000 = 4350"), [1, 0, 0]),  # the last line begins with another
        (ANSWER.replace("4250", "4350").replace("4280", "4380"), [1, 0, 1]),  # and here it goes on from the error
        (ANSWER.replace("+ 250", "- 250"), [0, 1, 1]),
        (ANSWER.replace("+ 30", "+ 40"), [1, 1, 0]),
        (ANSWER.replace("003", "004"), [1, 1, 0]),
        (ANSWER.rsplit("\n", 1)[0], [1, 1, 0]),
        (f"Here it is:\n{ANSWER}", [0, 0, 0]),
        ("", [0, 0, 0]),
    ],
)
def test_a_line_is_right_by_what_stands_before_it(answer: str, right: list[int]) -> None:
    assert ACCOUNT.right_lines(answer) == right


@pytest.mark.parametrize(
    ("answer", "draft"),
    [
        ("", "001. 5000 + 250 = 5250\n002. 5250 - 1000 = 4250\n"),
        ("001. 5000 + 2", "50 = 5250\n"),
        ("001. 5000 + 250 = 5350\n", "002. 5350 - 1000 = 4350\n003. 4350 + 30 = 4380\n"),  # goes on from the error
        ("001. 5000 + 250 = 53", "50\n"),
        ("002. 5000 - 1000 = 4000\n", "003. 4000 + 30 = 4030\n"),  # as the written number says
        (f"{ANSWER}\n", ""),
    ],
)
def test_a_draft_goes_on_from_what_is_written(answer: str, draft: str) -> None:
    assert ACCOUNT.draft(answer) == draft


def test_accounts_differ_and_balances_keep_four_digits() -> None:
    accounts = [Account.random(400, seed) for seed in range(8)]
    assert len(set(accounts)) == len(accounts)
    for account in accounts:
        balances = [running_balances.FIRST + sum(account.amounts[: count + 1]) for count in range(400)]
        assert all(1000 <= balance < 10000 for balance in balances)
        assert all(100 <= abs(amount) < 1000 for amount in account.amounts)


def test_the_request_has_the_form_that_is_read() -> None:
    [example] = running_balances.LINE.findall(ACCOUNT.request)
    assert example == ("001", "5000", "+", "250", "5250")
    assert "001. deposit 250\n002. withdraw 1000\n003. deposit 30\n" in ACCOUNT.request


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict]:
    """Run the benchmark on a small model; its report."""
    words = tokenizer("bytes", [ACCOUNT.request], size=400, chat=True)
    model = stock("llama", vocab_size=len(words), head_dim=16, max_position_embeddings=1024)
    model.save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    shape = Model.of(model.config.to_dict()).dimensions
    losses(shape, measured=(8, 4, 3, "k3v2", 2), rounded=True).save(tmp_path / "losses.safetensors")

    def measured(*options: str) -> dict:
        command = ["running_balances.py", str(tmp_path / "model"), "--json", str(tmp_path / "found.json")]
        command += ["--measured", str(tmp_path / "losses.safetensors"), "--accounts", "2", "--transactions", "3"]
        monkeypatch.setattr(sys, "argv", [*command, *options])
        running_balances.main()
        return json.loads((tmp_path / "found.json").read_text())

    return measured


def test_results_are_complete_and_are_not_computed_again(run: Callable[..., dict], tmp_path: Path) -> None:
    names = "kvsurgery, 2 bits, measured", "kvsurgery, 2 bits, keys and values rotated"
    found = run("--only", names[0], "--answers", str(tmp_path / "answers"))
    assert [*found["results"]] == ["original", names[0]]
    accounts = [Account.random(3, seed) for seed in range(2)]
    for name, result in found["results"].items():
        answers = [(tmp_path / "answers" / f"{number} {name}.txt").read_text() for number in range(2)]
        expected = [account.right_lines(answer) for account, answer in zip(accounts, answers, strict=True)]
        assert result["right"] == expected
        assert all(tokens <= 3 * running_balances.LINE_TOKENS for tokens in result["tokens"])
    again = run("--only", names[1])
    assert {name: again["results"][name] for name in found["results"]} == found["results"]
    assert names[1] in again["results"]
    with pytest.raises(SystemExit):
        run("--transactions", "4")


def test_an_interrupted_answer_is_the_only_one_that_is_written_again(
    run: Callable[..., dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, written = "kvsurgery, 2 bits, keys and values rotated", []
    drafted = running_balances.drafted

    def interrupted(contender: Contender, *arguments: object) -> list[int]:
        written.append(contender.name)
        if len(written) == 4:
            raise KeyboardInterrupt
        return drafted(contender, *arguments)

    monkeypatch.setattr(running_balances, "drafted", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("--only", name)
    kept = json.loads((tmp_path / "found.json").read_text())
    assert [len(result["right"]) for result in kept["results"].values()] == [2, 1]
    assert len(running_balances.table(kept)) == 3
    found = run("--only", name)["results"]
    assert written == ["original"] * 2 + [name] * 3
    (tmp_path / "found.json").unlink()
    whole = run("--only", name)["results"]
    for part in ("kv_bytes", "right", "tokens", "sha256"):
        assert {each: result[part] for each, result in found.items()} == {
            each: result[part] for each, result in whole.items()
        }


def test_the_table() -> None:
    original = {"right": [[1] * 8, [1] * 8], "kv_bytes": 200}
    worse = {"right": [[1] * 8, [1, 0, 1, 1, 0, 0, 0, 0]], "kv_bytes": 30}
    assert running_balances.table({"results": {"2 bits": worse, "original": original}})[2:] == [
        "| original | 100% | 100.0% [100.0%, 100.0%] |  | 100% | 100% | 2 of 2 |",
        "| 2 bits | 15% | 68.8% [37.5%, 100.0%] | -31.2 [-62.5, +0.0] | 75% | 50% | 1 of 2 |",
    ]
