"""Code completion over a repository: which lines are asked for, how they are completed, and what the table says."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.real_model import repository as benchmark
from benchmarks.real_model.code_lines import PER_FILE, Line, Repository, mentions, repository
from benchmarks.real_model.sdists import SDISTS, Sdist, python_files
from benchmarks.real_model.which_cache import ORIGINAL, Contender
from kvsurgery.checkpoint.model import Model
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.text.tokens import text_of, token_ids
from tests.helpers.families import stock
from tests.helpers.vocabularies import tokenizer

PRICES = '''"""Prices."""

from decimal import Decimal

FREE_SHIPPING = 50


class Price:
    """Of an article."""

    currency: str = "EUR"

    def with_taxes(self, country):
        return country

    def rounded_up(self):
        return self


def cheapest_offer(offers):
    return min(offers)
'''
ORDERS = """from decimal import Decimal
from shop.prices import FREE_SHIPPING, Price, cheapest_offer

LIMIT = 3


def total(articles, country):
    # the currency of cheapest_offer
    offer = cheapest_offer(articles)
    price = Price(currency="USD")
    shown = price.with_taxes(country)
    again = price.with_taxes(LIMIT)
    if shown > FREE_SHIPPING:
        return shown.rounded_up()
    return offer
"""
FILES = {
    "shop/__init__.py": "",
    "shop/orders.py": ORDERS,
    "shop/prices.py": PRICES,
    "shop/returns.py": "def refund(price):\n    result = price.rounded_up()\n    return result\n",
    "shop/broken.py": "def (",
}


@pytest.fixture(scope="module")
def words():
    return tokenizer("bytes", [PRICES, ORDERS], size=400)


@pytest.fixture(scope="module")
def length(words) -> int:
    """Tokens that hold the file that others import, and no other file."""
    return len(token_ids(words, f"# shop/prices.py\n{PRICES}\n"))


@pytest.fixture(scope="module")
def shop(words, length: int) -> Repository:
    return repository("shop", FILES, words, length, 3, before=20, new=48, seed=0)


def test_the_files_that_most_others_import_are_read_whole(shop: Repository, words, length: int) -> None:
    assert shop.paths == ("shop/prices.py",)
    assert text_of(words, shop.text) == f"# shop/prices.py\n{PRICES.strip()}\n\n"
    assert len(shop.text) <= length


def test_lines_use_what_the_files_define(shop: Repository, words) -> None:
    uses = {"FREE_SHIPPING", "Price", "cheapest_offer", "with_taxes", "rounded_up", "currency"}
    assert {line.name for line in shop.lines} <= uses
    assert len({line.name for line in shop.lines}) == len(shop.lines) == 3
    assert sum(line.path == "shop/orders.py" for line in shop.lines) <= PER_FILE
    for line in shop.lines:
        text = text_of(words, line.tokens)
        assert text.strip() == FILES[line.path].splitlines()[line.number - 1].strip()
        assert text.endswith("\n")
        assert not text.lstrip().startswith(("#", "from", "import"))
        assert line.name in text_of(words, line.tokens[line.in_name])
        assert not mentions(text_of(words, line.tokens[~line.in_name]), line.name)


@pytest.mark.parametrize("seed", range(5))
def test_a_question_does_not_have_the_name_that_it_asks_for(words, length: int, seed: int) -> None:
    for line in repository("shop", FILES, words, length, 3, before=20, new=48, seed=seed).lines:
        prefix = text_of(words, line.prefix)
        assert prefix.startswith(f"# {line.path}\n")
        assert "from shop.prices import" not in prefix or line.name not in ("Price", "cheapest_offer", "FREE_SHIPPING")
        assert not mentions(prefix, line.name)
        before = "".join(FILES[line.path].splitlines(keepends=True)[: line.number - 1])
        assert before.endswith(prefix.rstrip(" ")[-10:])


def test_a_name_that_another_file_defines_too_is_not_asked_for(words, length: int) -> None:
    files = {**FILES, "shop/taxes.py": "def with_taxes(x):\n    return x\n\n\ndef rounded_up(x):\n    return x\n"}
    for seed in range(6):
        lines = repository("shop", files, words, length, 2, before=20, new=48, seed=seed).lines
        assert not {line.name for line in lines} & {"with_taxes", "rounded_up"}


def test_other_seeds_ask_for_other_lines(words, length: int) -> None:
    drawn = [repository("shop", FILES, words, length, 2, before=20, new=48, seed=seed).lines for seed in range(6)]
    assert len({tuple(line.name for line in lines) for lines in drawn}) > 1


def sdist(folder: Path, name: str = "shop") -> Sdist:
    """A source distribution of the files, written to a folder."""
    path = folder / f"{name}-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for file, source in {**FILES, "shop/data.txt": "no code"}.items():
            member = tarfile.TarInfo(f"{name}-1.0/src/{file}")
            member.size = len(source.encode())
            archive.addfile(member, io.BytesIO(source.encode()))
    return Sdist(name, "1.0", "src/shop", hashlib.sha256(path.read_bytes()).hexdigest())


def test_an_sdist_is_read_and_checked(tmp_path: Path) -> None:
    made = sdist(tmp_path)
    assert python_files(made.fetch(tmp_path), made.folder) == FILES
    (tmp_path / made.file_name).write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"is not the source of shop==1\.0"):
        made.fetch(tmp_path)


@torch.inference_mode()
def test_a_line_asked_for_later_is_the_line_after_the_whole_prompt(shop: Repository, words, tmp_path: Path) -> None:
    """The most likely tokens and their likelihood are those of one forward without a cache."""
    model = stock("llama", vocab_size=len(words), head_dim=16)
    model.save_pretrained(tmp_path)
    arguments = Namespace(model=tmp_path, dtype="float32", device="cpu", reuse=None)
    found = benchmark.answers(Contender(), arguments, [shop, shop])
    token = 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * model.config.head_dim * 2
    assert found["kv_bytes"] == [len(shop.text) * token] * 2
    for line, tokens, nats in zip([*shop.lines] * 2, found["tokens"], found["nats"], strict=True):
        prompt = torch.from_numpy(np.concatenate([shop.text, line.prefix, line.tokens]))
        logs = model(prompt[None, :-1]).logits[0, -len(line.tokens) :].log_softmax(-1)
        assert tokens == logs.argmax(-1).tolist()
        own = logs.gather(1, torch.from_numpy(line.tokens)[:, None])[:-1]
        assert nats == pytest.approx(-own.mean().item(), rel=1e-4)


@torch.inference_mode()
def test_what_is_not_read_is_not_known(shop: Repository, words, tmp_path: Path) -> None:
    model = stock("llama", vocab_size=len(words), head_dim=16)
    model.save_pretrained(tmp_path)
    arguments = Namespace(model=tmp_path, dtype="float32", device="cpu", reuse=None)
    found = benchmark.answers(benchmark.Without(), arguments, [shop])
    assert found["kv_bytes"] == [0]
    for line, tokens in zip(shop.lines, found["tokens"], strict=True):
        alone = torch.from_numpy(np.concatenate([line.prefix, line.tokens]))[None, :-1]
        assert tokens == model(alone).logits[0, -len(line.tokens) :].argmax(-1).tolist()


def test_a_line_is_right_when_it_ends_where_it_should(words) -> None:
    tokens = np.array(token_ids(words, "price.rounded_up()\n"))
    line = Line("shop/orders.py", 1, "rounded_up", tokens[:0], tokens, np.arange(len(tokens)) == 1)
    right, end = tokens.tolist(), token_ids(words, "\n")
    assert right[-1:] == end
    assert benchmark.right_line(right, line, words)
    assert not benchmark.right_line([*right[:-1], *token_ids(words, ".")], line, words)
    assert benchmark.right_line([right[1], *right[1:]], line, words)  # before the name
    assert not benchmark.right_line([*right[:-2], right[0], right[-1]], line, words)
    assert benchmark.right_name(right, line)
    assert benchmark.right_name([right[1], *right[1:]], line)
    assert not benchmark.right_name([right[0], right[0], *right[2:]], line)


def test_retrieval_finds_the_part_that_shares_words_with_the_question() -> None:
    text = np.arange(1000)
    question = np.array([300, 301, 700, 5000])
    chosen = benchmark.Retrieval(parts=2, part=50).selected(text, question)
    assert chosen.tolist() == [*range(300, 350), *range(700, 750)]


@pytest.fixture
def run(tmp_path: Path, words, length: int, monkeypatch: pytest.MonkeyPatch):
    """A function that runs the benchmark on a small model for some rows, and returns its file."""
    model = stock("llama", vocab_size=len(words), head_dim=16)
    model.save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    shape = Model.of(model.config.to_dict()).dimensions
    scores = np.random.default_rng(0).random((shape.layers, shape.kv_heads), dtype=np.float32)
    HeadProfile(scores, "ablation", "kv", "made up", shape).save(tmp_path / "er.safetensors")
    (tmp_path / "sdists").mkdir()
    monkeypatch.setattr(benchmark, "SDISTS", tuple(sdist(tmp_path / "sdists", name) for name in ("shop", "again")))

    def measured(*rows: str) -> dict:
        command = ["repository.py", tmp_path / "model", "--profile", tmp_path / "er.safetensors"]
        command += ["--sdists", tmp_path / "sdists", "--json", tmp_path / "found.json", "--lines", tmp_path / "lines"]
        command += ["--length", length, "--questions", 3, "--before", 20, "--dtype", "float32"]
        command += [word for row in rows for word in ("--only", row)]
        monkeypatch.setattr(sys, "argv", [str(word) for word in command])
        benchmark.main()
        return json.loads((tmp_path / "found.json").read_text())

    return measured


def test_a_run_goes_on_from_its_file(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streaming, bits = "kvsurgery, 50% of heads full by er", "kvsurgery, all heads full, 4 bits"
    first = run(benchmark.WITHOUT)
    measure, seen = benchmark.answers, []

    def watched(row: Contender, arguments: Namespace, *rest) -> dict:
        seen.append(row.name)
        return measure(row, arguments, *rest)

    monkeypatch.setattr(benchmark, "answers", watched)
    found = run(benchmark.WITHOUT, streaming, bits)
    assert seen == [streaming, bits]
    assert {name: found["results"][name] for name in first["results"]} == first["results"]
    assert found["results"][benchmark.WITHOUT]["kv_bytes"] == [0, 0]
    tokens = [package["tokens"] for package in found["packages"]]
    sizes = found["results"][ORIGINAL]["kv_bytes"]
    assert sizes[0] / tokens[0] == sizes[1] / tokens[1] > 0
    for result in found["results"].values():
        assert len(result["right"]) == len(result["named"]) == len(result["nats"]) == len(result["sha256"]) == 6
        assert set(result) == {"kv_bytes", "right", "named", "nats", "sha256"}
    lines = json.loads((tmp_path / "lines" / f"{bits}.json").read_text())
    asked = [each for package in found["packages"] for each in package["asked"]]
    assert all(mentions(line, each["name"]) for (line, _), each in zip(lines, asked, strict=True))
    assert [line for line, _ in lines[:3]] == [line for line, _ in lines[3:]]


def test_other_settings_need_another_file(run, tmp_path: Path) -> None:
    (tmp_path / "found.json").write_text(json.dumps({"settings": {"length": 1}}))
    with pytest.raises(SystemExit):
        run()


def test_the_table() -> None:
    def result(right: list[int], nats: list[float], size: int) -> dict:
        return {"right": right, "named": [1, 1, 0, 0], "nats": nats, "kv_bytes": [size, size]}

    report = {
        "packages": [{}, {}],
        "results": {
            "SnapKVPress, 20%": result([0, 0, 0, 0], [1.1, 1.1, 2.1, 2.1], 20),
            ORIGINAL: result([1, 1, 1, 0], [1, 1, 2, 2], 100),
            benchmark.WITHOUT: result([0, 1, 0, 0], [2, 2, 3, 3], 0),
        },
    }
    named = "50% [0%, 100%]"
    assert benchmark.table(report)[2:] == [
        f"| original | 100% | 75% [50%, 100%] |  | {named} | × 1 |",
        f"| SnapKVPress, 20% | 20% | 0% [0%, 0%] | -75 [-100, -50] | {named} | × 1.105 [1.105, 1.105] |",
        f"| {benchmark.WITHOUT} | 0% | 25% [0%, 50%] | -50 [-50, -50] | {named} | × 2.718 [2.718, 2.718] |",
    ]


def test_packages_are_named_with_what_they_are() -> None:
    assert len({package.name for package in SDISTS}) == len(SDISTS) >= 9
    assert all(len(package.sha256) == 64 and package.version for package in SDISTS)
