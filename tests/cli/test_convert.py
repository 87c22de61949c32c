"""`kvsurgery convert` as a user meets it, up to the way back."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from kvsurgery.conversion import engine
from kvsurgery.profile.head_profile import HeadProfile
from tests.helpers.command import CONVERT, HEAVY, MODEL, PROFILE, SCORES, done, refused, run
from tests.helpers.families import largest, make, tokens
from tests.helpers.shards import LLAMA, tree
from tests.helpers.surgery import random_profile

# runs a command and prints which heavy modules it loaded; a number of finished shards, if given, ends it by SIGKILL
CHILD = """
import os, signal, sys
from kvsurgery.cli import main
if shards := int(sys.argv.pop(1)):
    from kvsurgery.checkpoint.journal import Journal
    record = Journal.record
    def record_and_die(journal, *arguments):
        record(journal, *arguments)
        if len(journal.finished) == shards:
            os.kill(os.getpid(), signal.SIGKILL)
    Journal.record = record_and_die
try:
    main()
finally:
    print(%s & sys.modules.keys(), file=sys.stderr)
"""


def child(*arguments: str, shards: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD % HEAVY, str(shards), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def states(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def emitted_names(folder: Path) -> set[str]:
    return set(json.loads((folder / "kvsurgery.json").read_text())["emitted"])


class TestTheWholePath:
    @pytest.fixture
    def qwen(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Tied embeddings, q/k/v biases, several shards."""
        folder = make("qwen2", tmp_path / "qwen", shard="40KB", tie_word_embeddings=True, use_sliding_window=False)
        monkeypatch.chdir(tmp_path)
        random_profile(folder).save(PROFILE)
        return folder

    def test_convert_load_verify_revert(self, qwen: Path) -> None:
        before = tree(qwen)
        report = done("convert", "qwen", "--profile", PROFILE, "--out", "duo")
        code, other = set(), set()
        for name in tree(Path("duo")).keys() - before.keys():
            (code if name.endswith(".py") else other).add(name)
        assert before.keys() < tree(Path("duo")).keys()
        assert other == {"README.md", "kvsurgery.json"}
        assert {"kv_layout.py", "modeling_kvsurgery_qwen2.py"} < code

        ids = tokens(2, 24)
        stock = AutoModelForCausalLM.from_pretrained("qwen").eval()
        plain = AutoModelForCausalLM.from_pretrained("duo").eval()
        trusted = AutoModelForCausalLM.from_pretrained("duo", trust_remote_code=True).eval()
        assert type(plain) is Qwen2ForCausalLM
        assert "modeling_kvsurgery_qwen2" in type(trusted).__module__
        with torch.no_grad():
            expected = stock(ids).logits
            assert largest(plain(ids).logits - expected, expected) < 1e-5
            # 24 tokens lie within every head's window
            assert largest(trusted(ids).logits - expected, expected) < 1e-5

        [following] = [line for line in report.err.splitlines() if line.startswith("Next: kvsurgery ")]
        assert "OK: duo was converted from " in done(*shlex.split(following)[2:]).out
        shutil.rmtree("qwen")
        done("revert", "duo", "--out", "qwen")
        assert tree(qwen) == before

    def test_without_a_source_the_profile_names_it(self, here: Path) -> None:
        done("convert", "--profile", PROFILE, "--out", "implied")
        done("convert", "llama", "--profile", PROFILE, "--out", "named")
        assert tree(here / "implied") == tree(here / "named")

    def test_paths_are_taken_as_they_are(self, here: Path) -> None:
        Path("llama").rename("my [bold] model α")
        Path(PROFILE).rename("a profile")
        out = "deep/down/out [red] 'x'"
        result = done("convert", "my [bold] model α/", "--profile", "a profile", "--out", out)
        assert result.out.startswith("my [bold] model α, llama: ")
        assert f"wrote {out}: " in result.out
        done(*shlex.split(result.err.splitlines()[-1])[2:])
        assert f"{out} is this" in done("convert", "my [bold] model α", "--profile", "a profile", "--out", out).out
        done("revert", out, "--out", "back")
        assert tree(here / "back").items() <= tree(here / "my [bold] model α").items()

    def test_what_the_config_leaves_to_defaults_is_filled_in(self, checkpoint, tmp_path: Path) -> None:
        source = shutil.copytree(checkpoint("gemma3"), tmp_path / "gemma")
        config = json.loads((source / "config.json").read_text())
        # gemma3's own default is 4, as is the number here
        assert config.pop("num_key_value_heads") == 4
        (source / "config.json").write_text(json.dumps(config))
        random_profile(source).save(tmp_path / PROFILE)
        done("convert", source, "--profile", tmp_path / PROFILE, "--out", tmp_path / "out")
        assert json.loads((tmp_path / "out/config.json").read_text())["num_key_value_heads"] == 4
        done("verify", tmp_path / "out", "--source", source)

    def test_a_name_that_is_no_text(self, here: Path) -> None:
        os.rename(b"llama", b"ll\xffama")
        name = os.fsdecode(b"ll\xffama")
        done("convert", name, "--profile", PROFILE, "--out", "out")
        done("verify", "out", "--source", name)


class TestWhatItSays:
    def test_report(self, here: Path) -> None:
        result = done("convert", "llama", "--profile", PROFILE, "--out", "out", "--sink", "3", "--recent", "5")
        first, second, *_, last = result.out.splitlines()
        assert first == "llama, llama: 3 of 6 KV heads stream (sparsity 0.5, sink 3, recent 5)"
        assert second == "profile: duo, measured on llama"
        assert re.fullmatch(
            r"wrote out: [\d.]+ KiB of weights, in [\d.]+ s, [\d.]+ MB/s, peak memory [\d.]+ [MG]iB", last
        )
        # secrets and weights in other formats stay behind, and are named
        assert "not copied, and not restored by revert: .cache/, .env, " in result.err
        loading, following = result.err.splitlines()[-2:]
        assert loading == 'Load it with: AutoModelForCausalLM.from_pretrained("out", trust_remote_code=True)'
        assert following == "Next: kvsurgery verify out"

    def test_what_the_config_loses(self, here: Path) -> None:
        place = Path("llama/config.json")
        key = "_attn_implementation_internal"
        place.write_text(json.dumps({**json.loads(place.read_text()), key: "someone/kernel"}, indent=1))
        [line] = [line for line in done(*CONVERT).out.splitlines() if key in line]
        assert line.startswith(f"left out of config.json, and kept for revert: {key}, ")
        assert key not in Path("out/config.json").read_text()
        facts = json.loads(done("convert", "llama", "--profile", PROFILE, "--dry-run", "--json").out)
        assert facts["left_out_of_config"] == [key]
        done("verify", "out", "--source", "llama")
        done("revert", "out", "--out", "back")
        assert Path("back/config.json").read_bytes() == place.read_bytes()

    def test_json(self, here: Path) -> None:
        facts = json.loads(done("convert", "llama", "--profile", PROFILE, "--out", "out", "--json").out)
        assert (facts["source"], facts["family"], facts["out"]) == ("llama", "llama", "out")
        assert facts["profile"] == {
            "base_model": "llama",
            "method": "duo",
            "hash": HeadProfile.load(PROFILE).hash,
        }
        assert facts["bytes"] == sum(path.stat().st_size for path in Path("out").glob("*.safetensors"))
        assert facts["seconds"] > 0
        assert facts["peak_memory"] > 1 << 20
        assert facts["already_done"] is False
        assert ".env" in facts["left_out"]


class TestDryRun:
    def test_writes_nothing(self, here: Path) -> None:
        before = tree(here)
        result = done("convert", "llama", "--profile", PROFILE, "--dry-run")
        done("convert", "llama", "--profile", PROFILE, "--dry-run", "--out", "out", "--json")
        assert tree(here) == before
        assert not Path("out").exists()
        assert "layer   full   streaming" in result.out
        assert "own window" not in result.out
        assert re.search(r"^8 tensors permuted, 13 copied; [\d.]+ KiB to write$", result.out, re.MULTILINE)

    def test_the_plan_is_what_then_happens(self, here: Path) -> None:
        options = ("convert", "llama", "--profile", PROFILE, "--full-heads", 2, "--sink", 4, "--recent", 100)
        plan = json.loads(done(*options, "--dry-run", "--json").out)
        written = json.loads(done(*options, "--out", "out", "--json").out)
        assert plan.items() <= written.items()
        config = json.loads(Path("out/config.json").read_text())
        emitted = config["kv_surgery"]["layers"]
        assert [[layer["full"], layer["streaming"]] for layer in plan["layers"]] == [
            layer["blocks"][0] for layer in emitted
        ]
        assert plan["kv_heads"] == {"eligible": 6, "full": 2, "streaming": 4, "budgeted": 0}
        assert plan["bytes_to_write"] == written["bytes"] + sum(
            len(content) for name, content in tree(here / "out").items() if name in emitted_names(here / "out")
        )

        # the emitted module, alone, does the same arithmetic; and so does a hand
        spec = importlib.util.spec_from_file_location("emitted_kv_layout", "out/kv_layout.py")
        module = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, spec.name, module)
            spec.loader.exec_module(module)
            layout = module.KVLayout.from_config(config)
        for row, length in zip(plan["kv_bytes"], (8 << 10, 32 << 10, 128 << 10), strict=True):
            assert (row["before"], row["after"]) == (layout.dense_bytes(1, length), layout.kv_bytes(1, length))
            element = 2 * LLAMA["head_dim"] * 2
            assert (row["before"], row["after"]) == (6 * length * element, (2 * length + 4 * 104) * element)

    def test_layers_with_a_window_of_their_own(self, checkpoint, tmp_path: Path) -> None:
        random_profile(checkpoint("gemma2")).save(tmp_path / PROFILE)
        result = done("convert", checkpoint("gemma2"), "--profile", tmp_path / PROFILE, "--dry-run")
        lines = [line.split() for line in result.out.splitlines()]
        assert ["layer", "full", "streaming", "own", "window"] in lines
        assert ["0", "0", "4", "9"] in lines
        assert "4 of 8 KV heads stream" in result.out


class TestOptions:
    """Each option reaches the policy."""

    @pytest.mark.parametrize(
        ("options", "streaming"),
        [
            ((), 3),
            (("--sparsity", 0.34), 2),
            (("--sparsity", 0), 0),
            (("--sparsity", 1), 6),
            (("--full-heads", 5), 1),
            (("--threshold", 0), 0),
            (("--threshold", 1.1), 6),
        ],
        ids=str,
    )
    def test_how_many_heads_stream(self, here: Path, options: tuple, streaming: int) -> None:
        plan = json.loads(done("convert", "--profile", PROFILE, "--dry-run", "--json", *options).out)
        assert plan["kv_heads"]["streaming"] == streaming
        lowest = sorted(SCORES.flat)[:streaming]
        counts = [sum(score in lowest for score in row) for row in SCORES]
        assert [layer["streaming"] for layer in plan["layers"]] == counts

    def test_without_groups_three_quarters_stream(self, tmp_path: Path) -> None:
        folder = make("llama-tied-mha", tmp_path / "mha")
        random_profile(folder).save(tmp_path / PROFILE)
        result = done("convert", folder, "--profile", tmp_path / PROFILE, "--dry-run")
        assert "24 of 32 KV heads stream (sparsity 0.75, sink 64, recent 256)" in result.out

    def test_sizes_reach_the_model(self, here: Path) -> None:
        done("convert", "llama", "--profile", PROFILE, "--out", "out", "--sink", 7, "--recent", 11)
        layers = json.loads(Path("out/config.json").read_text())["kv_surgery"]["layers"]
        assert {(layer["sink"], layer["recent"]) for layer in layers} == {(7, 11)}

    def test_group_reduce(self, here: Path) -> None:
        # by mean the second head of each layer leads, by maximum the third
        scores = [[0.1, 0.1, 0.5, 0.5, 0.9, 0.0]] * 2
        HeadProfile(scores, "headkv-r", "query", "llama", MODEL).save("query.safetensors")
        orders = {}
        for how in ("mean", "max"):
            done(
                "convert",
                "--profile",
                "query.safetensors",
                "--method",
                "duo",
                "--full-heads",
                2,
                "--group-reduce",
                how,
                "--out",
                how,
            )
            provenance = json.loads(Path(how, "kvsurgery.json").read_text())
            orders[how] = provenance["permutation"]
            assert provenance["options"]["group_reduce"] == how
        assert orders == {"mean": [[1, 0, 2]] * 2, "max": [[2, 0, 1]] * 2}

    def test_budgets(self, here: Path) -> None:
        scores = [[4, 4, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1]]
        HeadProfile(scores, "headkv-r2", "query", "llama", MODEL).save("query.safetensors")
        command = ("convert", "--profile", "query.safetensors", "--budget", 100, "--beta", 2)
        text = done(*command, "--dry-run").out
        assert "6 of 6 KV heads have budgets (group_reduce mean, budget 100, beta 2.0, window 8" in text
        assert "50 to 183" in text
        done(*command, "--out", "out", "--window", 4, "--kernel-size", 3, "--pool", "avg")
        section = json.loads(Path("out/config.json").read_text())["kv_surgery"]
        assert section["selection"] == {"window": 4, "kernel_size": 3, "pool": "avg", "select": "attention"}
        # shares of 50 and a pool of 300 by 4 2 0 1 1 1
        assert [layer["budgets"] for layer in section["layers"]] == [[183, 117, 50], [84, 83, 83]]
        assert "**budgeted heads** keep 100 tokens" in Path("out/README.md").read_text()
        assert "6 budgeted" in done("inspect", "out").out

    def test_budgets_from_another_profile(self, here: Path) -> None:
        shares = HeadProfile([[0.1, 0.2, 0.3], [0.4, 0.5, 0.0]], "lu-kv", "kv", "llama", MODEL)
        shares.save("shares.safetensors")
        command = ("convert", "--budgets-from", "shares.safetensors", "--budget", 100)
        text = done(*command, "--dry-run").out
        assert f"6 of 6 KV heads have budgets (budgets_from lu-kv {shares.hash[:16]}, budget 100, window 8" in text
        done(*command, "--out", "out", "--save-recipe", "recipe.toml")
        layers = json.loads(Path("out/config.json").read_text())["kv_surgery"]["layers"]
        assert [layer["budgets"] for layer in layers] == [[40, 80, 120], [160, 200, 0]]
        assert json.loads(Path("out/kvsurgery.json").read_text())["options"]["budgets_from"].endswith(shares.hash[:16])
        assert 'budgets_from = "shares.safetensors"' in Path("recipe.toml").read_text()
        done("convert", "--recipe", "recipe.toml", "--out", "again")
        assert tree(Path("again")) == tree(Path("out"))
        done("revert", "out", "--out", "back")
        # the gates choose the full heads: 1 and 2 of either layer
        mixed = ("convert", "--profile", PROFILE, "--budgets-from", "shares.safetensors", "--full-heads", 3)
        facts = json.loads(done(*mixed, "--budget", 100, "--dry-run", "--json").out)
        assert [layer["full"] for layer in facts["layers"]] == [1, 2]
        assert sum(sum(layer["budgets"]) for layer in facts["layers"]) == 300
        assert "--full-heads or --sparsity, or leave the profile out" in refused(*mixed[:5], "--budget", 9, "--dry-run")
        assert "--budget is missing" in refused(*mixed, "--dry-run")
        assert "cannot read head profile nowhere" in refused("convert", "--budgets-from", "nowhere", "--dry-run")

    def test_budgets_of_every_head(self, here: Path) -> None:
        HeadProfile([[1, 2, 3], [4, 50, 0]], "budgets", "kv", "llama", MODEL).save("budgets.safetensors")
        facts = json.loads(done("convert", "--profile", "budgets.safetensors", "--dry-run", "--json").out)
        assert [layer["budgets"] for layer in facts["layers"]] == [[1, 2, 3], [4, 50, 0]]

    def test_budgets_that_hold(self, here: Path) -> None:
        command = ("convert", "llama", "--profile", PROFILE, "--rest", "budgeted", "--budget", 100, "--hold")
        says = "budgeted heads select again every 128 tokens, and never keep more than their budget and 136 tokens"
        assert says in done(*command, "--dry-run").out
        done(*command, "--full-heads", 2, "--kv-bits", 4, "--save-recipe", "recipe.toml", "--out", "out")
        section = json.loads(Path("out/config.json").read_text())["kv_surgery"]
        assert section["selection"] == {
            **{"window": 8, "kernel_size": 7, "pool": "max"},
            **{"hold": 128, "select": "attention"},
        }
        assert "hold = 128" in Path("recipe.toml").read_text()
        assert "4 budgeted" in (text := done("inspect", "out").out)
        assert says in text
        card = " ".join(Path("out/README.md").read_text().split())
        assert "at most 128 tokens since, after which they choose again" in card
        assert "4 bits (kivi, values rotated), except in budgeted heads" in card
        done(*command, 64, "--out", "other")
        assert json.loads(Path("other/config.json").read_text())["kv_surgery"]["selection"]["hold"] == 64

    def test_by_what_budgeted_heads_select(self, here: Path) -> None:
        command = ("convert", "llama", "--profile", PROFILE, "--rest", "budgeted", "--budget", 100, "--select")
        says = "budgeted heads select again every 128 tokens by accumulated attention, and never"
        text = done(*command, "accumulated", "--hold", "--save-recipe", "recipe.toml", "--out", "out").out
        assert says in text
        assert says in done("inspect", "out").out
        assert json.loads(done("inspect", "out", "--json").out)["surgery"]["hold"]["select"] == "accumulated"
        assert "the attention, summed over all selections so far" in " ".join(Path("out/README.md").read_text().split())
        assert 'select = "accumulated"' in Path("recipe.toml").read_text()
        assert "select value-norm" in done(*command, "value-norm", "--out", "other").out
        assert "select value-norm" in done("inspect", "other").out
        assert json.loads(Path("other/config.json").read_text())["kv_surgery"]["selection"]["select"] == "value-norm"
        assert "the norm of their values times the attention of its last 8 tokens" in " ".join(
            Path("other/README.md").read_text().split()
        )

    def test_a_quantized_cache(self, here: Path) -> None:
        command = ("convert", "llama", "--profile", PROFILE, "--kv-bits", 4)
        text = done(*command, "--dry-run").out
        assert "kv_bits 4, kv_scheme kivi, kv_residual 128" in text
        rows = [
            json.loads(done(*command[:4], *more, "--dry-run", "--json").out)["kv_bytes"] for more in ((), command[4:])
        ]
        assert all(one["after"] > other["after"] for one, other in zip(*rows, strict=True))
        done(*command, "--out", "out", "--kv-scheme", "per-token", "--kv-group-size", 2, "--kv-residual", 64)
        section = json.loads(Path("out/config.json").read_text())["kv_surgery"]
        assert section["quantization"] == {
            "bits": 4,
            "scheme": "per-token",
            "group_size": 2,
            "residual": 64,
            "streaming": False,
            "sink": 4,
            "rotate": "values",
            "clip": False,
        }
        card = Path("out/README.md").read_text()
        assert "The first 4 and at least the newest 64 tokens stay in the model's dtype; the other tokens are" in card
        assert "stored in 4 bits (per-token, groups of 2, values rotated), except in streaming heads." in card
        assert (
            "KV cache in 4 bits (per-token, groups of 2, values rotated), the first 4 and the newest 64 tokens as they "
            "are" in done("inspect", "out").out
        )
        assert json.loads(done("inspect", "out", "--json").out)["surgery"]["quantization"] == section["quantization"]

    def test_quantized_windows(self, here: Path) -> None:
        command = ("convert", "llama", "--profile", PROFILE, "--recent", 512, "--kv-bits", 4)
        sizes = [
            json.loads(done(*command, *more, "--dry-run", "--json").out)["kv_bytes"][0]["after"]
            for more in ((), ("--kv-streaming",))
        ]
        # of three streaming heads, window and sinks of 4 channels in 2 bytes become 4 tiles, 256 tokens and the sinks
        tile = 2 * 128 * 2 + 2 * 4 * 2 + 2 * 128 * 2
        assert sizes[0] - sizes[1] == 3 * ((512 - 256) * 2 * 4 * 2 - 4 * tile)
        done(*command, "--kv-streaming", "--out", "out")
        assert json.loads(Path("out/config.json").read_text())["kv_surgery"]["quantization"]["streaming"] is True
        assert "long windows of streaming heads too" in done("inspect", "out").out

    def test_details_of_bits_without_bits(self, here: Path) -> None:
        result = run("convert", "llama", "--profile", PROFILE, "--out", "out", "--kv-group-size", 2, "--kv-residual", 1)
        assert result.code == 2
        assert "--kv-group-size and --kv-residual goes with --kv-bits" in result.err

    def test_kinds_that_contradict_each_other(self, here: Path) -> None:
        result = run("convert", "llama", "--profile", PROFILE, "--out", "out", "--method", "duo", "--rest", "budgeted")
        assert result.code == 2
        assert "--method duo means --rest streaming" in result.err


class TestAgain:
    def test_a_finished_conversion_is_left_alone(self, here: Path) -> None:
        options = ("convert", "llama", "--profile", PROFILE, "--out", "out")
        done(*options)
        before = states(Path("out"))
        again = done(*options)
        assert again.out.endswith("out is this conversion already; nothing to do\n")
        assert "converting" not in again.err
        assert json.loads(done(*options, "--json").out)["already_done"] is True
        assert states(Path("out")) == before

    def test_kill_and_go_on(self, here: Path) -> None:
        options = ("convert", "llama", "--profile", PROFILE, "--out", "out")
        assert child(*options, shards=2).returncode == -9
        finished = states(Path("out"))
        assert "config.json" not in finished
        assert "interrupted" in refused("verify", "out")
        assert "interrupted" in refused("revert", "out", "--out", "back")
        assert "unfinished run with another policy" in refused(*options, "--sparsity", 0.2)
        assert re.search(r"^wrote out: .* of them before, in ", done(*options).out, re.MULTILINE)
        kept = {name: state for name, state in finished.items() if name.endswith("-of-00003.safetensors")}
        assert len(kept) == 2
        assert kept.items() <= states(Path("out")).items()
        done("convert", "llama", "--profile", PROFILE, "--out", "undisturbed")
        assert tree(here / "out") == tree(here / "undisturbed")

    @pytest.mark.parametrize("command", ["convert", "revert"])
    def test_interrupt_and_go_on(self, here: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
        done("convert", "llama", "--profile", PROFILE, "--out", "duo")
        options = ("revert", "duo", "--out", "out")
        if command == "convert":
            options = ("convert", "llama", "--profile", PROFILE, "--out", "out")
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            interrupted = run(*options)
        assert interrupted.code == 130
        assert interrupted.err.endswith("kvsurgery: interrupted; the same command goes on from here\n")
        assert not list(here.rglob("*.part"))
        done(*options)
        whole = {"convert": "duo", "revert": "llama"}[command]
        assert tree(here / "out").items() <= tree(here / whole).items()


def test_converting_loads_neither_torch_nor_transformers(here: Path) -> None:
    result = child("convert", "llama", "--profile", PROFILE, "--out", "out")
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[-1] == "{'numpy'}"
