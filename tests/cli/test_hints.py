"""What was mistyped, or is of another kind, gets the line that helps; hints are commands that run."""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from kvsurgery.cli.profile.compute import compute
from kvsurgery.errors import KVSurgeryError
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.origin import ModelOrigin
from kvsurgery.report import card_files
from tests.helpers.command import CONVERT, PROFILE, done, refused, run, save_profile
from tests.helpers.hub_server import serve
from tests.helpers.shards import llama_checkpoint
from tests.report import builders


class TestMistyped:
    @pytest.mark.parametrize(
        ("typed", "meant"),
        [
            (["convrt"], "kvsurgery convert"),
            (["verfy", "out"], "kvsurgery verify"),
            (["compute"], "kvsurgery profile compute"),
            (["profile", "compte"], "kvsurgery profile compute"),
            (["profile", "import", "headkvs"], "kvsurgery profile import headkv"),
        ],
    )
    def test_a_command(self, typed, meant):
        result = run(*typed)
        assert result.code == 2
        assert f"Did you mean `{meant}`?" in result.err

    def test_a_command_like_no_other(self):
        result = run("xyzzy")
        assert (result.code, "Did you mean" in result.err) == (2, False)

    def test_an_option(self, here):
        assert "--profile" in run("convert", "llama", "--profil", PROFILE, "--out", "out").err

    @pytest.mark.parametrize(
        "arguments",
        [
            ("convert", "./lama", "--profile", PROFILE, "--out", "out"),
            ("fit", "./lama", "--profile", PROFILE, "--memory", "1GB", "--context", 100),
            ("inspect", "./Llamma"),
            ("profile", "suggest", "./lama"),
            ("eval", "lama", "--out", "report"),
            ("verify", "lama"),
            ("revert", "lama", "--out", "out"),
            ("push", "lama", "owner/name"),
        ],
        ids=lambda arguments: arguments[0],
    )
    def test_a_folder(self, here, arguments):
        assert "did you mean" in refused(*arguments)

    def test_a_folder_that_looks_like_a_hub_id(self, here):
        with serve() as hub:
            result = hub.run(here, "inspect", "lama")
        assert "(no folder lama is here; did you mean llama?)" in result.stderr


class TestAnotherKind:
    @pytest.fixture
    def gguf(self, here) -> Path:
        folder = here / "gguf"
        folder.mkdir()
        (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
        return folder

    @pytest.mark.parametrize("source", ["gguf", "gguf/model-Q4_K_M.gguf"])
    def test_gguf(self, gguf, source):
        line = refused("convert", source, "--profile", PROFILE, "--out", "out")
        assert "GGUF file for llama.cpp" in line

    def test_gguf_beside_a_config(self, gguf):
        shutil.copy("llama/config.json", gguf)
        assert "GGUF" in refused("convert", "gguf", "--profile", PROFILE, "--out", "out")
        assert "cannot be converted: gguf has a GGUF" in done("inspect", "gguf").out

    def test_gguf_on_the_hub(self, gguf):
        shutil.copy("llama/config.json", gguf)
        with serve() as hub:
            hub.publish("org/model-GGUF", gguf)
            result = hub.run(gguf, "convert", "org/model-GGUF", "--profile", PROFILE, "--out", "out")
        assert "GGUF" in result.stderr

    def test_an_adapter(self, here):
        Path("adapter").mkdir()
        Path("adapter/adapter_config.json").write_text("{}")
        assert "merge_and_unload" in refused("convert", "adapter", "--profile", PROFILE, "--out", "out")

    def test_the_folder_above(self, here):
        Path("runs").mkdir()
        Path("llama").rename("runs/final model")
        line = refused("convert", "runs", "--profile", PROFILE, "--out", "out")
        assert "'runs/final model'" in line

    def test_a_file_of_the_folder(self, here):
        assert "give the folder of the checkpoint, llama" in refused(
            "convert", "llama/config.json", "--profile", PROFILE, "--out", "out"
        )


def test_a_profile_with_blanks_in_its_name_is_quoted(here, capsys):
    Path("a model").mkdir()
    llama_checkpoint(Path("a model/llama"))
    Path("gates.tsv").write_text("0.5\t1.0\t0.25\n" * 2)
    said = done("profile", "import", "duo", "gates.tsv", "--model", "a model/llama", "-o", "my duo")
    [following] = [line for line in said.err.splitlines() if line.startswith("Next: ")]
    words = shlex.split(following)
    assert words[1:5] == ["kvsurgery", "convert", "a model/llama", "--profile"]
    done(*words[2:])


@pytest.mark.parametrize("source", [["a model"], []], ids=["typed", "of the profile"])
def test_a_fit_without_losses_says_how_to_measure_them(here, source):
    Path("llama").rename("a model")
    save_profile(fingerprint=ModelOrigin.of_folder(Path("a model")).fingerprint)
    for arguments in (["fit", "--memory", "1GB"], ["convert", "--fit", "1GB", "--dry-run"]):
        command, *options = arguments
        said = done(command, *source, "--profile", PROFILE, *options, "--context", "1K").err
        [line] = [line for line in said.splitlines() if line.startswith("Measure ")]
        words = shlex.split(line.partition(": ")[2])
        assert words[:6] == ["kvsurgery", "profile", "compute", "a model", "--method", "kv-bits"]
        assert compute.make_context("compute", words[3:]).params["out"] == Path("losses.safetensors")


def test_a_cache_that_was_not_measured_says_how_to(here):
    said = done("convert", "llama", "--profile", PROFILE, "--kv-bits", 8, "--out", "an out")
    assert "not measured" in said.out
    [line] = [line for line in said.err.splitlines() if line.startswith("Measure it: ")]
    words = shlex.split(line.partition(": ")[2])
    assert words[:3] == ["kvsurgery", "convert", "llama"]
    assert words[-4:] == ["--out", "an out", "--kv-check", "TEXT"]
    assert "Measure it" not in done("convert", "llama", "--profile", PROFILE, "--out", "plain").err


def test_a_tower_whose_tensors_are_not_known_is_named(checkpoint, tmp_path):
    source = tmp_path / "llava"
    shutil.copytree(checkpoint("llava"), source)
    convert = ["convert", source, "--kv-bits", 8, "--dry-run"]
    assert "without a check" not in done(*convert).err
    config = json.loads((source / "config.json").read_text())
    config["vision_config"]["model_type"] = "eyes"
    (source / "config.json").write_text(json.dumps(config))
    warning = done(*convert).err
    assert "without a check" in warning
    assert "vision_tower" in warning
    assert "'eyes'" in warning


def test_a_report_without_its_page_says_how_to_write_it(tmp_path):
    folder = tmp_path / "a report"
    folder.mkdir()
    builders.results().save(folder)
    with pytest.raises(KVSurgeryError) as refusal:
        card_files(tmp_path, folder)
    assert shlex.split(str(refusal.value).split("`")[1]) == ["kvsurgery", "report", str(folder)]


def test_comparisons_name_the_files(here):
    done("profile", "merge", PROFILE, PROFILE, "-o", "merged.safetensors")
    text = done("profile", "compare", PROFILE, "merged.safetensors").out
    assert f"A: {PROFILE}, of llama " in text
    assert "B: merged.safetensors, of llama " in text


class TestServingLimits:
    """What vLLM does not do is said before a conversion, in the words of `inspect`."""

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--rest", "budgeted", "--budget", 8], "vLLM serves budgeted heads, but refuses beams"),
            (["--kv-bits", 8], ""),
            (["--kv-bits", 8, "--kv-streaming", "--recent", 512], "vLLM ignores the quantized cache (--kv-bits)"),
            (["--sparsity", 0.5], ""),
        ],
    )
    @pytest.mark.parametrize("dry_run", [True, False])
    def test_said_by_convert(self, here, options, words, dry_run):
        result = done(*CONVERT, *options, *(["--dry-run"] if dry_run else []))
        assert words in result.err
        assert ("vLLM" in result.err) == bool(words)

    def test_said_by_fit(self, here):
        options = ["--rest", "budgeted", "--memory", "780KiB", "--context", "1K"]
        assert (
            "vLLM serves budgeted heads, but refuses beams" in run("fit", "llama", "--profile", PROFILE, *options).err
        )


def test_a_context_beyond_the_model_is_said_where_nothing_fits(checkpoint, tmp_path):
    source = checkpoint("llama")
    HeadProfile(np.eye(4), "duo", "kv", "llama", model_of(source)).save(tmp_path / PROFILE)
    line = refused("fit", source, "--profile", tmp_path / PROFILE, "--memory", "1MB", "--context", "128K")
    assert "--context is beyond the 512 positions" in line


def model_of(folder):
    from kvsurgery.profile.profiled_model import ProfiledModel

    return ProfiledModel.read(str(folder)).dimensions
