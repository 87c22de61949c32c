"""`kvsurgery fit` and `convert --fit`: what is printed, what it converts to, and what is refused."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvsurgery.templates.kv_layout import KVLayout
from tests.helpers.command import PROFILE, done, nothing_happens, refused, run
from tests.helpers.families import make, tokens
from tests.helpers.hub_server import serve
from tests.helpers.shards import tree
from tests.helpers.surgery import random_profile

FIT = ("fit", "--profile", PROFILE, "--memory", "1GB", "--context", 1000)
SIZE = ("--context", 1000, "--batch", 2)
METHODS = ("duo", "headkv-r2")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose cache outweighs all else, and beside it a profile of each of `METHODS`."""
    widths = {"hidden_size": 16, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 4}
    folder = make("llama", tmp_path_factory.mktemp("fit") / "deep", num_hidden_layers=8, **widths)
    profile = random_profile(folder)
    for method in METHODS:
        replace(profile, method=method).save(folder.parent / method)
    return folder


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def typed(folder: Path, method: str = "duo", memory: str = "1GB", size: tuple = SIZE) -> tuple[Any, ...]:
    return "fit", folder, "--profile", folder.parent / method, "--memory", memory, *size


def found(*command: Any) -> dict[str, Any]:
    return json.loads(done(*command, "--json").out)


def choice(facts: dict[str, Any]) -> dict[str, Any]:
    """What was chosen, which nothing beats."""
    [one] = [one for one in facts["pareto"] if one["total"] == facts["fit"]["total"]]
    return one


def memories(*command: Any) -> list[str]:
    """What the smallest policy takes, one in the middle of those that nothing beats, and the largest."""
    totals = [one["total"] for one in found(*command)["pareto"]]
    assert len(totals) > 9
    return [f"{totals[place]}B" for place in (0, len(totals) // 2, -1)]


def as_typed(command: str) -> list[str]:
    program, *words = shlex.split(command)
    assert program == "kvsurgery"
    return words


def layout(folder: str) -> KVLayout:
    return KVLayout.from_config(json.loads(Path(folder, "config.json").read_text()))


class TestTheCommandThatIsPrinted:
    @pytest.mark.parametrize(
        ("method", "options"),
        [
            ("duo", ("--chunk", 16)),
            (
                "duo",
                ("--sink", 4, "--recent", 16, "--kv-scheme", "per-token", "--kv-group-size", 8, "--kv-residual", 9),
            ),
            ("headkv-r2", ("--hold", 64, "--new-tokens", 300)),
            ("headkv-r2", ("--hold", 64, "--kv-scheme", "per-token", "--kv-residual", 9, "--new-tokens", 300)),
            ("duo", ("--rest", "budgeted", "--beta", 3, "--window", 5, "--kernel-size", 3, "--pool", "avg")),
            ("duo", ("--recent", 300, "--kv-residual", 0, "--kv-streaming")),
            ("headkv-r2", ("--new-tokens", 100)),
            ("headkv-r2", ("--method", "duo")),
            ("duo", ("--tp", 2)),
            ("duo", ("--tp", 4, "--tp-uneven")),
            ("headkv-r2", ("--tp", 2)),
        ],
        ids=[
            "duo",
            "streaming",
            "held",
            "held, quantized",
            "budgets",
            "windows",
            "headkv",
            "headkv streaming",
            "tp",
            "tp uneven",
            "tp budgets",
        ],
    )
    def test_takes_the_bytes_that_were_printed(self, deep: Path, method: str, options: tuple) -> None:
        _, memory, _ = memories(*typed(deep, method), *options)
        self.check(memory, *typed(deep, method, memory), *options)

    @pytest.mark.parametrize("method", METHODS)
    def test_of_the_smallest_and_of_the_largest_policy(self, deep: Path, method: str) -> None:
        smallest, _, largest = memories(*typed(deep, method))
        for memory in (smallest, largest):
            self.check(memory, *typed(deep, method, memory))

    def check(self, memory: str, *command: Any) -> None:
        facts = found(*command)
        printed = done(*command).out.splitlines()[-1]
        assert printed == facts["command"]
        done(*as_typed(printed))
        chosen, new = choice(facts), facts["fit"]["new_tokens"]
        assert f"{chosen['total']}B" == memory
        converted = layout("deep-fit")
        parts = converted.parts(facts["policy"].get("tp", 1))
        held = max(part.kv_bytes(2, 1000 - new, new, itemsize=4) for part in parts)
        assert held == chosen["kv_bytes"] == facts["fit"]["kv_bytes"]
        assert (converted.quantization.bits if converted.quantization else 32) == chosen["bits"]
        assert sum(layer.full for layer in converted.layers) == chosen["full_heads"]
        provenance = json.loads(Path("deep-fit/kvsurgery.json").read_text())
        assert {**provenance["options"], "hash": provenance["policy"]} == facts["policy"]
        shutil.rmtree("deep-fit")

    @pytest.mark.parametrize(
        ("method", "options"),
        [("duo", ()), ("headkv-r2", ("--tp", 4, "--tp-uneven"))],
        ids=["duo", "headkv, tp uneven"],
    )
    def test_is_what_convert_does_in_one_go(self, deep: Path, method: str, options: tuple) -> None:
        _, memory, _ = memories(*typed(deep, method), *options)
        facts = found(*typed(deep, method, memory), *options)
        done(*as_typed(facts["command"]))
        convert = ("convert", deep, "--profile", deep.parent / method, "--fit", memory, *SIZE, *options)
        convert = *convert, "--out", "one-go"
        assert json.loads(done(*convert, "--json").out)["fit"] == facts["fit"]
        assert tree(Path("one-go")) == tree(Path("deep-fit"))
        again = done(*convert).out
        assert "one-go is this conversion already" in again
        assert "% of the score kept" in again

    def test_says_only_what_is_unusual(self, here: Path) -> None:
        convert = f"kvsurgery convert --profile {PROFILE} --full-heads 6 --rest streaming"
        for options in ((), ("--sink", 4), ("--group-reduce", "max", "--window", 4)):
            text = done("fit", "--profile", PROFILE, "--memory", "1GB", "--context", "1K", *options).out
            said = " --sink 4" if "--sink" in options else ""
            assert text.splitlines()[-1] == f"{convert}{said} --out llama-fit"

    def test_names_with_spaces(self, here: Path) -> None:
        Path("llama").rename("my [bold] model")
        Path(PROFILE).rename("a profile")
        text = done("fit", "my [bold] model", "--profile", "a profile", "--memory", "1GB", "--context", "1K").out
        done(*as_typed(text.splitlines()[-1]))
        assert Path("my [bold] model-fit/config.json").exists()

    @pytest.mark.parametrize("method", METHODS)
    def test_the_model_allocates_what_was_printed(self, deep: Path, method: str) -> None:
        size = ("--context", 400, "--batch", 2, "--new-tokens", 10)
        _, memory, _ = memories(*typed(deep, method, size=size))
        facts = found(*typed(deep, method, memory, size))
        done(*as_typed(facts["command"]))
        model = AutoModelForCausalLM.from_pretrained("deep-fit", trust_remote_code=True, dtype=torch.float32)
        chunk = facts["fit"]["chunk"]
        output = model.generate(
            tokens(2, 390),
            attention_mask=torch.ones(2, 390, dtype=torch.long),
            max_new_tokens=10,
            min_new_tokens=10,
            prefill_chunk_size=chunk if chunk < 390 else None,
            return_dict_in_generate=True,
        )
        assert output.past_key_values.allocated_bytes() == facts["fit"]["kv_bytes"]


class TestWhatItSays:
    def test_an_original_that_fits(self, deep: Path) -> None:
        line = "the original fits this memory; nothing has to be converted"
        _, middle, largest = memories(*typed(deep))
        assert line in done(*typed(deep, memory=largest)).out
        assert line not in done(*typed(deep, memory=middle)).out

    def test_table(self, deep: Path) -> None:
        _, memory, _ = memories(*typed(deep))
        text = done(*typed(deep, memory=memory)).out
        assert " for 2 x 1,000 tokens: weights " in text
        assert " with one-shot prefill\n" in text
        assert " with prefill_chunk_size=64\n" in done(*typed(deep), "--chunk", 64).out
        rows = [line.split() for line in text.splitlines() if line.endswith("% ")]
        [chosen] = [row for row in rows if row[0] == "chosen"]
        place = rows.index(chosen)
        assert 0 < place < len(rows) - 1
        assert all(row[:2] == ["too", "large"] for row in rows[place + 1 :])
        smaller = [row for row in rows[:place] if row[0] != "next"]
        assert smaller
        assert all(row[0].isdigit() for row in smaller)
        assert len([row for row in rows if row[:2] == ["next", "best"]]) == 3
        assert rows[-1][2:4] == ["32", "unquantized"]
        assert rows[-1][-1] == "100.00%"

    def test_budgets_have_a_column(self, deep: Path) -> None:
        columns = r"heads +budget +bits +cache +total +kept"
        assert re.search(columns, done(*typed(deep, "headkv-r2")).out)
        assert not re.search(columns, done(*typed(deep)).out)

    def test_json_lists_what_nothing_beats(self, deep: Path) -> None:
        facts = found(*typed(deep, memory="10MB"), "--chunk", "1K")
        kept, totals = ([one[name] for one in facts["pareto"]] for name in ("kept", "total"))
        assert kept == sorted(set(kept))
        assert totals == sorted(set(totals))
        filled = facts["fit"]
        assert filled["weights"] + filled["kv_bytes"] + filled["workspace"] == filled["total"]
        demand = {"memory": 10_000_000, "context": 1000, "batch": 2, "new_tokens": 0, "chunk": 1000}
        assert demand.items() <= filled.items()
        assert facts["source"] == "deep"
        assert not Path("deep-fit").exists()

    @pytest.mark.parametrize("command", ["fit", "convert"])
    def test_a_context_beyond_the_model_s_positions(self, checkpoint, tmp_path: Path, command: str) -> None:
        random_profile(checkpoint("llama")).save(tmp_path / PROFILE)
        words = [command, checkpoint("llama"), "--profile", tmp_path / PROFILE]
        words += ["--memory", "1GB"] if command == "fit" else ["--fit", "1GB", "--dry-run"]
        assert "--context 1024 exceeds the 512 positions" in done(*words, "--context", "1K").err
        assert "is beyond" not in done(*words, "--context", 512).err

    def test_generated_tokens_that_budgets_do_not_cover(self, deep: Path) -> None:
        _, memory, _ = memories(*typed(deep, "headkv-r2"))
        assert "kvsurgery fit --new-tokens" in done(*typed(deep, "headkv-r2", memory)).err
        assert "--new-tokens" not in done(*typed(deep, "headkv-r2", memory), "--hold").err
        assert done(*typed(deep, "headkv-r2", memory), "--new-tokens", 1).err.count("--new-tokens") == 0
        assert "--new-tokens" not in done(*typed(deep)).err

    @pytest.mark.parametrize(
        ("written", "meant"),
        [("24GB", 24 * 10**9), ("24GiB", 24 << 30), ("1.5gb", 1_500_000_000), ("80 GB", 80 * 10**9), ("1TB", 10**12)],
    )
    def test_sizes(self, here: Path, written: str, meant: int) -> None:
        assert found("fit", "--profile", PROFILE, "--memory", written, "--context", 9)["fit"]["memory"] == meant

    @pytest.mark.parametrize(("written", "meant"), [("128K", 131072), ("128000", 128000), ("1m", 1 << 20)])
    def test_tokens(self, here: Path, written: str, meant: int) -> None:
        facts = found("fit", "--profile", PROFILE, "--memory", "80GB", "--context", written)
        assert facts["fit"]["context"] == meant

    def test_several_processes_fit_where_one_does_not(self, deep: Path) -> None:
        facts = [found(*typed(deep), "--tp", count)["fit"] for count in (1, 2, 4)]
        assert [facts[0]["kv_bytes"] // one["kv_bytes"] for one in facts] == [1, 2, 4]
        for smaller, larger in pairwise(reversed(facts)):
            assert smaller["weights"] < larger["weights"]
            assert smaller["workspace"] < larger["workspace"]
        tight = *typed(deep, memory=f"{facts[2]['total']}B"), "--tp", 4
        assert found(*tight)["fit"]["kept"] == 1
        assert " on each of 4 devices for 2 x 1,000 tokens: weights " in done(*tight).out
        assert " devices " not in done(*typed(deep)).out

    def test_attention_that_is_replicated_has_a_whole_cache(self, checkpoint, tmp_path: Path) -> None:
        random_profile(checkpoint("phi3")).save(tmp_path / PROFILE)
        words = ("fit", checkpoint("phi3"), "--profile", tmp_path / PROFILE, "--memory", "1GB", "--context", 100)
        one, two = (found(*words, "--tp", count)["fit"] for count in (1, 2))
        assert one["kv_bytes"] == two["kv_bytes"]
        assert one["weights"] > two["weights"]

    def test_layers_with_a_window_of_their_own_count(self, checkpoint, tmp_path: Path) -> None:
        random_profile(checkpoint("gemma2")).save(tmp_path / PROFILE)
        facts = found("fit", checkpoint("gemma2"), "--profile", tmp_path / PROFILE, "--memory", "1GB", "--context", 100)
        # two layers of 100 tokens and two of 9, 4 heads of 16, keys and values of 4 bytes
        assert facts["fit"]["kv_bytes"] == 2 * (100 + 9) * 4 * 2 * 16 * 4


class TestPlot:
    def test_picture(self, here: Path) -> None:
        assert "wrote fit.png" in done(*FIT, "--plot", "fit.png").err
        assert Path("fit.png").read_bytes().startswith(b"\x89PNG")

    def test_where_no_picture_can_go(self, here: Path) -> None:
        nothing_happens(here, "cannot write x.safetensors", *FIT, "--plot", "x.safetensors")


class TestRefusals:
    def test_impossible(self, deep: Path) -> None:
        least = found(*typed(deep))["pareto"][0]["total"]
        assert "nothing fits in 1000 B: the weights alone take " in refused(*typed(deep, memory="1000B"))
        lacking = least % 1000 + 1
        line = refused(*typed(deep, memory=f"{least - lacking}B"))
        assert f": the smallest policy takes {least / 2**20:.2f} MiB, {lacking} B too much" in line
        least_budgeted = found(*typed(deep, "headkv-r2"))["pareto"][0]["total"]
        assert "set --rest to streaming" in refused(*typed(deep, "headkv-r2", memory=f"{least_budgeted - 1000}B"))
        convert = ("convert", deep, "--profile", deep.parent / "duo", "--fit", "1KB", *SIZE, "--out", "out")
        assert "nothing fits in 1000 B" in refused(*convert)
        assert not Path("out").exists()

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--context", 0), r"--context must lie in \[1, "),
            (("--context", "900000M"), r"--context must lie in \[1, "),
            (("--batch", 0), r"--batch must lie in \[1, "),
            (("--new-tokens", 1000), "--new-tokens must be less than --context"),
            (("--chunk", 0), "--chunk must be at least 1 token"),
            (("--kv-group-size", 3), "--kv-group-size: the group size 3"),
            (("--rest", "budgeted", "--beta", 1), "--beta must be > 1"),
            (("--tp", 2), r"--tp must divide the 3 KV heads of a layer \(1, 3\), got 2"),
        ],
        ids=str,
    )
    def test_options(self, here: Path, options: tuple, words: str) -> None:
        nothing_happens(here, words, *FIT, *options)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("fit", "--profile", PROFILE, "--context", 9), "Missing option '--memory'"),
            (("fit", "--profile", PROFILE, "--memory", "1GB"), "Missing option '--context'"),
            (
                ("fit", "--profile", PROFILE, "--memory", "1GB", "--context", 9, "--method", "reform"),
                "--method reform keeps every head full",
            ),
            *(
                (("fit", "--profile", PROFILE, "--memory", size, "--context", 9), f"'{size}' is not a size; write 24GB")
                for size in ("24", "24G", "-1GB", "24 apples", "1e9B", "9" * 5000 + "B")
            ),
            *(
                (("fit", "--profile", PROFILE, "--memory", "1GB", "--context", size), "is not a number of tokens")
                for size in ("128KB", "-5", "1.5", "many", "9" * 5000)
            ),
            (("--fit", "1GB"), "--fit requires --context"),
            (("--context", 9), "--context requires --fit"),
            (("--batch", 1), "--batch requires --fit"),
            *(
                (
                    ("--fit", "1GB", "--context", 9, flag, value),
                    f"fitting a memory budget decides {flag}; leave out what it",
                )
                for flag, value in [("--sparsity", 0), ("--threshold", 0), ("--full-heads", 0), ("--budget", 9)]
            ),
            (("--fit", "1GB", "--context", 9, "--kv-bits", 4, "--sparsity", 1), "decides --sparsity and --kv-bits;"),
        ],
        ids=lambda value: " ".join(map(str, value))[:60] if isinstance(value, tuple) else "",
    )
    def test_usage(self, here: Path, arguments: tuple, words: str) -> None:
        if arguments[0] != "fit":
            arguments = ("convert", "llama", "--profile", PROFILE, "--out", "out", *arguments)
        before = tree(here)
        result = run(*arguments)
        assert (result.code, result.out) == (2, "")
        assert words in " ".join(result.err.split())
        assert tree(here) == before


def test_of_a_hub_id_only_headers_are_read(checkpoint, tmp_path: Path) -> None:
    source = checkpoint("llama")
    random_profile(source).save(tmp_path / PROFILE)
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in source.glob("*.safetensors"))
    with serve() as hub:
        hub.publish("surgeon/stock", source)
        words = ("fit", "surgeon/stock", "--profile", tmp_path / PROFILE, "--memory", "1GB", "--context", "400")
        result = hub.run(tmp_path, *words, "--revision", "main")
        assert result.returncode == 0, result.stderr
        assert sum(count for path, count in hub.served.items() if path.endswith(".safetensors")) == headers
    words = as_typed(result.stdout.splitlines()[-1])
    assert words[:4] == ["convert", "surgeon/stock", "--revision", "main"]
    assert words[-2:] == ["--out", "stock-fit"]
