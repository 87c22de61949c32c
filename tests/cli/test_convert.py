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
from tests.helpers.command import CONVERT, HEAVY, PROFILE, done, nothing_happens, refused, run, save_profile
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

    def test_a_model_of_the_profile_that_is_not_here(self, here: Path) -> None:
        save_profile(base_model="./elsewhere/llama")
        words = (
            "elsewhere/llama is neither a folder nor a Hub id; SRC was left out, so it is the model that the profile"
        )
        nothing_happens(here, words, "convert", "--profile", PROFILE, "--out", "out")

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
        assert re.fullmatch(r"wrote out: [\d.]+ KiB of weights, in [\d.]+ s, [\d.]+ MB/s", last)
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
        assert line.startswith(f"left out of config.json, and kept for revert: {key}; ")
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
            "file": None,
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
        with_out = done("convert", "llama", "--profile", PROFILE, "--dry-run", "--out", "out")
        assert "llama is not empty" in refused("convert", "llama", "--profile", PROFILE, "--dry-run", "--out", "llama")
        done("convert", "llama", "--profile", PROFILE, "--dry-run", "--out", "out", "--json")
        assert tree(here) == before
        assert not Path("out").exists()
        assert "layer   full   streaming" in result.out
        assert "own window" not in result.out
        assert re.search(r"^8 tensors permuted, 13 copied; [\d.]+ KiB to write$", result.out, re.MULTILINE)
        for said, folder in ((result, "llama-converted"), (with_out, "out")):
            [following] = said.err.splitlines()
            done(*shlex.split(following.removeprefix("Next: kvsurgery ")))
            assert Path(folder, "config.json").exists()

    def test_a_conversion_that_saves_nothing_says_so(self, here: Path) -> None:
        line = "this saves nothing: the KV cache is as large as the original's"
        options = ("convert", "llama", "--profile", PROFILE, "--dry-run", "--sink", 4, "--recent", 100)
        assert line in done(*options, "--sparsity", 0).out
        assert line not in done(*options).out

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
        heads = [["full"] * full + ["streaming"] * others for full, others in (layer["blocks"][0] for layer in emitted)]
        assert [layer["heads"] for layer in plan["layers"]] == heads
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
            assert (row["before"], row["after"]) == (
                layout.dense_bytes(1, length, itemsize=4),
                layout.kv_bytes(1, length, itemsize=4),
            )
            element = 2 * LLAMA["head_dim"] * 4
            assert (row["before"], row["after"]) == (6 * length * element, (2 * length + 4 * 104) * element)

    def test_layers_with_a_window_of_their_own(self, checkpoint, tmp_path: Path) -> None:
        random_profile(checkpoint("gemma2")).save(tmp_path / PROFILE)
        result = done("convert", checkpoint("gemma2"), "--profile", tmp_path / PROFILE, "--dry-run")
        lines = [line.split() for line in result.out.splitlines()]
        assert ["layer", "full", "streaming", "own", "window"] in lines
        assert ["0", "0", "4", "9"] in lines
        assert "4 of 8 KV heads stream" in result.out


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
        assert "its conversion was interrupted; run the same command" in refused("inspect", "out")
        assert "interrupted" in refused("verify", "out")
        assert "interrupted" in refused("revert", "out", "--out", "back")
        assert "unfinished run with another policy" in refused(*options, "--sparsity", 0.2)
        assert re.search(r"^wrote out: .* of them in an earlier run, in ", done(*options).out, re.MULTILINE)
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
        assert interrupted.err.endswith(f"kvsurgery: interrupted; continue with: kvsurgery {' '.join(options)}\n")
        assert not list(here.rglob("*.part"))
        done(*options)
        whole = {"convert": "duo", "revert": "llama"}[command]
        assert tree(here / "out").items() <= tree(here / whole).items()


def test_an_interrupt_where_nothing_is_half_done(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done("convert", "llama", "--profile", PROFILE, "--out", "out")
    monkeypatch.setattr(
        "kvsurgery.conversion.verify._check_tensors", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    interrupted = run("verify", "out")
    assert interrupted.code == 130
    assert interrupted.err.endswith("kvsurgery: interrupted; run the same command again\n")


def test_converting_loads_neither_torch_nor_transformers(here: Path) -> None:
    result = child("convert", "llama", "--profile", PROFILE, "--out", "out")
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[-1] == "{'numpy'}"
