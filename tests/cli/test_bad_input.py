"""What hostile and unlucky users give: one line that names the thing and the fix, nothing left behind, nothing lost."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import save_file

from kvsurgery.dimensions import ModelDimensions
from kvsurgery.errors import CheckpointError
from tests.command import done, refused, run
from tests.shards import llama_checkpoint, llama_shapes, noise_shard, raw_shard, tree
from tests.surgery import random_profile

PROFILE = "profile.safetensors"
MODEL = ModelDimensions(layers=2, query_heads=6, kv_heads=3, head_dim=4)
SCORES = np.float32([[0.2, 0.9, 0.4], [0.7, 0.1, 0.8]])
CONVERT = ("convert", "llama", "--profile", PROFILE, "--out", "out")
SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
BUDGETED = ("--rest", "budgeted", "--budget")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the checkpoint `llama`, in three shards, and its profile."""
    llama_checkpoint(tmp_path / "llama", shards=3)
    monkeypatch.chdir(tmp_path)
    save_profile()
    return tmp_path


def save_profile(scores: Any = SCORES, **changes: Any) -> None:
    """Write the profile by hand, since `HeadProfile` would not."""
    names = ("layers", "query_heads", "kv_heads", "head_dim")
    metadata = {"format": "kvsurgery.head-profile", "version": "1", "method": "duo", "granularity": "kv"}
    metadata |= {"base_model": "llama", **{name: str(getattr(MODEL, name)) for name in names}}
    metadata |= {key: value for key, value in changes.items() if value is not ...}
    save_file({"scores": np.float32(scores)}, PROFILE, metadata)


def nothing_happens(here: Path, words: str, *arguments: Any, code: int = 1) -> str:
    """A command is refused with these words, and every file is as it was."""
    before = tree(here)
    line = refused(*arguments, code=code)
    assert re.search(words, line), line
    assert tree(here) == before
    assert not Path("out").exists()
    return line


def header(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    tensors = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    del tensors["__metadata__"]
    return tensors


def edit_json(path: str, **changes: Any) -> None:
    """Change keys of a JSON object; `...` removes one."""
    content = {**json.loads(Path(path).read_text()), **changes}
    Path(path).write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def config(**changes: Any) -> Callable[[], None]:
    return partial(edit_json, "llama/config.json", **changes)


def cut(size: int) -> Callable[[], None]:
    return partial(os.truncate, f"llama/{SHARD}", size)


def write(name: str, content: bytes) -> Callable[[], None]:
    return lambda: Path("llama", name).write_bytes(content)


def edit_index(tensor: str, file: Any) -> Callable[[], None]:
    def edit() -> None:
        weights = json.loads(Path("llama", INDEX).read_text())["weight_map"]
        edit_json(f"llama/{INDEX}", weight_map={**weights, tensor: file})

    return edit


def shard(header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> Callable[[], None]:
    return lambda: raw_shard(Path("llama", SHARD), header, data, length)


def folder_for_shard() -> None:
    Path("llama", SHARD).unlink()
    Path("llama", SHARD).mkdir()


def pipe(name: str) -> None:
    """A file that nobody ever finishes reading."""
    Path("llama", name).unlink()
    os.mkfifo(f"llama/{name}")


def huge_header() -> None:
    """A header larger than allowed, all of it in the file, which is a hole."""
    raw_shard(Path("llama", SHARD), b"{", length=100_000_001)
    os.truncate(f"llama/{SHARD}", 100_000_100)


def one_file(shapes: dict[str, Any], dtype: str = "F32") -> None:
    for path in Path("llama").glob("model*.safetensors*"):
        path.unlink()
    noise_shard(Path("llama/model.safetensors"), shapes, dtype)


def with_tensor(name: str, *shape: int) -> Callable[[], None]:
    return lambda: one_file({**llama_shapes(), name: list(shape)})


def without_tensor(name: str) -> Callable[[], None]:
    return lambda: one_file({key: shape for key, shape in llama_shapes().items() if key != name})


def quantised_blocks() -> None:
    """fp8 weights with scales per block, and no word of it in config.json."""
    one_file(llama_shapes())
    path = Path("llama/model.safetensors")
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, entry in header.items():
        if name.endswith("q_proj.weight"):
            entry["dtype"] = "F8_E4M3"
            entry["shape"][0] *= 4
    raw_shard(path, header, content[8 + length :])


def only(*names: str) -> Callable[[], None]:
    """Leave only these files in the checkpoint, empty where they are new."""

    def remove() -> None:
        for path in Path("llama").iterdir():
            if path.name not in names:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in names:
            Path("llama", name).touch()

    return remove


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BAD_SOURCES: dict[str, tuple[Callable[[], None], str]] = {
    "shard cut by a byte": (cut(2000), f"{SHARD} is truncated"),
    "shard cut in its header": (cut(100), f"{SHARD} is truncated.*fetch it again"),
    "empty shard": (cut(0), f"{SHARD} is truncated"),
    "missing shard": (lambda: Path("llama", SHARD).unlink(), f"{SHARD} is missing.*fetch it again"),
    "shard is a folder": (folder_for_shard, f"llama/{SHARD} is not a regular file"),
    "config is a pipe": (partial(pipe, "config.json"), "config.json is not a regular file"),
    "shard is a pipe": (partial(pipe, SHARD), f"{SHARD} is not a regular file"),
    "git lfs pointer": (write(SHARD, b"version https://git-lfs.github.com/spec/v1\n"), SHARD),
    "corrupt header": (shard(b'{"a": [}', bytes(8)), f"{SHARD} has a corrupt header"),
    "header beyond the file": (shard({}, length=1 << 62), f"{SHARD} is truncated"),
    "oversized header": (huge_header, f"{SHARD} has a header of 100000001 bytes; at most"),
    "overlapping tensors": (shard({"a": ENTRY, "b": ENTRY}, bytes(8)), f"{SHARD}: 'b' overlaps"),
    "hole between tensors": (shard({"a": {**ENTRY, "data_offsets": [8, 16]}}, bytes(16)), "'a' leaves a hole"),
    "index outside the folder": (edit_index("lm_head.weight", "../x.safetensors"), "not a file of this folder"),
    "index to the root": (edit_index("lm_head.weight", "/etc/passwd"), "not a file of this folder"),
    "index is no JSON": (write(INDEX, b"{"), f"{INDEX} is not JSON"),
    "index is a list": (write(INDEX, b"[]"), f"{INDEX} is not a JSON object"),
    "index of other tensors": (edit_index("ghost", SHARD), "puts 'ghost' in"),
    "unknown tensor": (
        with_tensor("model.layers.0.self_attn.q_proj.lora_A.weight", 2, 12),
        "'model.layers.0.self_attn.q_proj.lora_A.weight' is not known in family llama",
    ),
    "layer too many": (with_tensor("model.layers.2.self_attn.q_proj.weight", 24, 12), "beyond the 2 layers"),
    "missing tensor": (
        without_tensor("model.layers.1.self_attn.k_proj.weight"),
        "layer 1 has no self_attn.k_proj.weight",
    ),
    "wrong shape": (
        with_tensor("model.layers.1.self_attn.k_proj.weight", 24, 12),
        r"'model.layers.1.self_attn.k_proj.weight' has shape \[24, 12\], config.json implies \[12, 12\]",
    ),
    "unknown family": (config(model_type="gpt2"), "'gpt2' is not supported; supported: gemma2, .*qwen3_moe"),
    "no family": (config(model_type=...), "model_type None is not supported"),
    "not a causal model": (config(architectures=["LlamaForSequenceClassification"]), "must be one of .*CausalLM"),
    "quantised": (config(quantization_config={"quant_method": "gptq"}), "quantised; give the original"),
    "quantised in blocks": (quantised_blocks, "q_proj.weight' is F8_E4M3; surgery takes"),
    "pickles only": (
        only("config.json", "pytorch_model.bin"),
        r"pytorch_model.bin.*: python -c '.*from_pretrained\(\"llama\".*save_pretrained",
    ),
    "adapter alone": (only("adapter_config.json", "adapter_model.safetensors"), "adapter.*merge"),
    "weights alone": (only("model.safetensors"), "config.json: No such file"),
    "config alone": (only("config.json"), "no model.safetensors"),
    "config is no JSON": (write("config.json", b"{"), "config.json is not JSON"),
    "config is not text": (write("config.json", b"\xff\xfe"), "config.json is not JSON"),
    "config is a list": (write("config.json", b"[]"), "config.json is not a JSON object"),
    "config is too deep": (write("config.json", b'{"a":' * 99_999), "config.json is not JSON"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers is 0"),
    "too many layers": (config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    "negative heads": (config(num_attention_heads=-6), "num_attention_heads is -6"),
    "heads are text": (config(num_key_value_heads="3"), "num_key_value_heads is '3'"),
    "heads are a list of nulls": (config(num_key_value_heads=[[None]]), "num_key_value_heads is"),
    "fractional heads": (config(head_dim=4.5), "head_dim is 4.5"),
    "uneven groups": (config(num_key_value_heads=4), "do not share 4 KV heads evenly"),
    "another width": (config(hidden_size=16), "config.json implies"),
    "rope is text": (config(rope_theta=1e4, rope_scaling="linear"), "RoPE settings"),
    "generation config is no JSON": (write("generation_config.json", b"{"), "generation_config.json is not JSON"),
}


@pytest.mark.parametrize(("damage", "words"), BAD_SOURCES.values(), ids=BAD_SOURCES)
@pytest.mark.parametrize("dry_run", [False, True], ids=["convert", "dry-run"])
def test_source(here: Path, damage: Callable[[], None], words: str, dry_run: bool) -> None:
    damage()
    nothing_happens(here, words, *CONVERT, *["--dry-run"] * dry_run)


def test_side_file_that_cannot_be_copied(here: Path) -> None:
    Path("llama/vocab.txt").symlink_to("gone")
    nothing_happens(here, "llama/vocab.txt is a link to nothing; fetch it again", *CONVERT)


def test_converted_source(here: Path) -> None:
    done("convert", "llama", "--profile", PROFILE, "--out", "duo")
    nothing_happens(here, "already converted; .*revert", "convert", "duo", "--profile", PROFILE, "--out", "out")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("./nowhere", "./nowhere is no folder and no Hub id; give the checkpoint as the first argument"),
        ("llama/config.json", "llama/config.json is a file; give the folder"),
        (PROFILE, f"{PROFILE} is a file; give the folder"),
    ],
)
def test_source_that_is_no_checkpoint(here: Path, source: str, words: str) -> None:
    nothing_happens(here, words, "convert", source, "--profile", PROFILE, "--out", "out")


BAD_PROFILES: dict[str, tuple[Callable[[], Any], str]] = {
    "NaN": (lambda: save_profile([[0.2, np.nan, 0.4], [0.7, 0.1, 0.8]]), "score of layer 0, head 1 is nan"),
    "infinity": (lambda: save_profile([[0.2, 0.9, 0.4], [0.7, 0.1, np.inf]]), "score of layer 1, head 2 is inf"),
    "negative": (lambda: save_profile(-SCORES), "duo scores are >= 0 and <= 1, got -0.9"),
    "above one": (lambda: save_profile(SCORES + 1), "duo scores are >= 0 and <= 1"),
    "wrong shape": (lambda: save_profile(SCORES.T), r"shape \[3, 2\], but llama has 2 layers of 3 kv heads"),
    "flat": (lambda: save_profile(SCORES.ravel()), r"shape \[6\]"),
    "empty": (lambda: save_profile(np.empty((0, 3))), r"shape \[0, 3\]"),
    "query heads": (lambda: save_profile(granularity="query"), "of 6 query heads"),
    "another head_dim": (lambda: save_profile(head_dim="8"), "profile is of llama .*of 8.*, but llama has .*of 4"),
    "another model": (
        lambda: save_profile(np.ones((32, 8)), base_model="org/big", layers="32", query_heads="32", kv_heads="8"),
        "profile is of org/big .32 layers, 32 query heads, 8 KV heads of 4., but llama has 2 layers",
    ),
    "unknown method": (lambda: save_profile(method="magic"), "unknown profile method 'magic'; known: duo"),
    "newer version": (lambda: save_profile(version="9"), "profile version 9; this tool reads 1"),
    "no model": (lambda: save_profile(base_model=""), "names the model"),
    "numbers are words": (lambda: save_profile(layers="two"), "bad metadata.*'two'"),
    "a model's weights": (lambda: shutil.copy(f"llama/{SHARD}", PROFILE), "not a head profile; .*profile import"),
    "DuoAttention's file": (lambda: Path(PROFILE).write_text("0.1\t0.2\n"), "not a head profile.*profile import"),
    "HeadKV's file": (lambda: Path(PROFILE).write_text('{"0-0": [0.1]}' * 9), "not a head profile.*profile import"),
    "empty file": (lambda: Path(PROFILE).write_bytes(b""), "not a head profile"),
    "cut": (lambda: os.truncate(PROFILE, 100), "not a head profile"),
    "a folder": (lambda: (Path(PROFILE).unlink(), Path(PROFILE).mkdir()), f"{PROFILE}: it is not a regular file"),
    "missing": (lambda: Path(PROFILE).unlink(), f"cannot read head profile {PROFILE}: No such file"),
}


@pytest.mark.parametrize(("damage", "words"), BAD_PROFILES.values(), ids=BAD_PROFILES)
def test_profile(here: Path, damage: Callable[[], Any], words: str) -> None:
    damage()
    line = nothing_happens(here, words, *CONVERT)
    assert PROFILE in line or "profile is of" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--threshold", 0.5, "--sparsity", 0.5), "--sparsity and --threshold exclude each other; give one"),
        (("--full-heads", 1, "--sparsity", 0.5), "--sparsity and --full-heads exclude each other"),
        (("--sparsity", 1.01), r"--sparsity lies in \[0, 1\], got 1.01"),
        (("--sparsity", -0.1), r"--sparsity lies in \[0, 1\], got -0.1"),
        (("--sparsity", "nan"), r"--sparsity lies in \[0, 1\], got nan"),
        (("--threshold", "nan"), "--threshold must be finite"),
        (("--threshold", "inf"), "--threshold must be finite"),
        (("--full-heads", 7), r"--full-heads lies in \[0, 6\] for this model, got 7"),
        (("--full-heads", -1), r"--full-heads lies in \[0, 6\]"),
        (("--sink", -1), "--sink must be >= 0"),
        (("--recent", 0), "--recent >= 1"),
        (("--sink", 10**30), "--sink"),
        (("--budget", 9), "--budget is for budgeted heads"),
        ((*BUDGETED, 0), r"--budget lies in \[1, "),
        ((*BUDGETED, 10**30), r"--budget lies in \[1, "),
        ((*BUDGETED, 9, "--beta", 1), "beta"),
        ((*BUDGETED, 9, "--beta", "nan"), "beta"),
        ((*BUDGETED, 9, "--window", 0), r"--window lies in \[1, "),
        ((*BUDGETED, 9, "--window", 10**30), r"--window lies in \[1, "),
        ((*BUDGETED, 9, "--kernel-size", 4), "--kernel-size must be odd"),
        ((*BUDGETED, 9, "--kernel-size", 10**30 + 1), "--kernel-size must be odd and in"),
        (("--recent", 2**63), "--recent"),
    ],
    ids=str,
)
def test_options(here: Path, options: tuple[Any, ...], words: str) -> None:
    nothing_happens(here, words, *CONVERT, *options)


@pytest.mark.parametrize(
    "arguments",
    [
        ("llama", "--profile", PROFILE),
        ("llama", "--out", "out"),
        ("llama", "other", "--profile", PROFILE, "--out", "out"),
        (*CONVERT[1:], "--jobs", 0),
        (*CONVERT[1:], "--sparsity", "half"),
        (*CONVERT[1:], "--full-heads", 1.5),
        (*CONVERT[1:], "--group-reduce", "median"),
        (*CONVERT[1:], "--revision", "main"),
        (*CONVERT[1:], "--bogus", 3),
    ],
    ids=lambda arguments: " ".join(map(str, arguments)),
)
def test_usage(here: Path, arguments: tuple[Any, ...]) -> None:
    before = tree(here)
    result = run("convert", *arguments)
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(r"Usage: .*\nTry .*\n\nError: .*\n", result.err)
    assert tree(here) == before


def test_names_that_the_terminal_cannot_show(here: Path) -> None:
    Path("llama").rename("modèle")
    os.rename(PROFILE, b"\xff.safetensors")
    typed = ["kvsurgery", "convert", "modèle", "--profile", os.fsdecode(b"\xff.safetensors"), "--dry-run"]
    for encoding in ("ascii", "utf-8"):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        command = [sys.executable, "-m", *typed]
        result = subprocess.run(command, env=environment, capture_output=True, check=True)
        assert result.stdout.startswith("modèle".encode(encoding, "backslashreplace"))


def test_output_that_cannot_be_written(here: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "kvsurgery", *CONVERT]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert "kvsurgery: [Errno 28] No space left on device" in result.stderr
    assert "Traceback" not in result.stderr
    done("verify", "out")


class TestOut:
    """`--out` in a wrong place; what lies there stays."""

    @pytest.mark.parametrize(
        ("out", "words"),
        [
            ("taken", "taken is not empty; choose another folder"),
            (PROFILE, f"{PROFILE} is not a folder"),
            (f"{PROFILE}/out", "cannot write"),
            ("llama", "llama is the source or lies in it"),
            ("../here/llama", "is the source"),
            ("link", "link is the source"),
            ("llama/deep/out", "llama/deep/out is the source or lies in it"),
            ("link/out", "lies in it"),
            (".", "not empty"),
            ("dangling", "dangling is not a folder"),
            ("/proc/out", "/proc/out"),
            ("x" * 300, "cannot write xxx.*: File name too long"),
        ],
    )
    def test_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, words: str) -> None:
        here = tmp_path / "here"
        llama_checkpoint(here / "llama", shards=3)
        monkeypatch.chdir(here)
        save_profile()
        (here / "taken").mkdir()
        (here / "taken/notes.txt").write_text("mine")
        (here / "link").symlink_to("llama")
        (here / "dangling").symlink_to("gone")
        nothing_happens(here, words, "convert", "llama", "--profile", PROFILE, "--out", out)

    def test_read_only(self, here: Path) -> None:
        Path("locked").mkdir(mode=0o555)
        if os.access("locked", os.W_OK):
            pytest.skip("root may write anywhere")
        nothing_happens(here, "no permission in .*locked", *CONVERT[:-1], "locked/out")

    @pytest.mark.parametrize("command", ["convert", "revert"])
    def test_disk_too_small(self, here: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
        done("convert", "llama", "--profile", PROFILE, "--out", "duo")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 999, 1))
        arguments = CONVERT if command == "convert" else ("revert", "duo", "--out", "out")
        nothing_happens(here, r"out needs [\d.]+ KiB, but only 1 B are free there", *arguments)

    def test_disk_that_fills_up(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            line = refused(*CONVERT)
        assert line.endswith("cannot write out: No space left on device; run the same command again to go on from here")
        assert not Path("out/config.json").exists()
        done(*CONVERT)
        done("verify", "out")

    def test_another_conversion_is_kept(self, here: Path) -> None:
        done("convert", "llama", "--profile", PROFILE, "--out", "duo")
        arguments = ("convert", "llama", "--profile", PROFILE, "--out", "duo", "--sparsity", 0.2)
        nothing_happens(here, "duo holds another conversion; choose another folder", *arguments)


class TestWayBack:
    """`verify` and `revert` on what they should not accept."""

    @pytest.fixture
    def duo(self, here: Path) -> Path:
        done("convert", "llama", "--profile", PROFILE, "--out", "duo")
        return here / "duo"

    @pytest.mark.parametrize("command", [("verify",), ("revert", "--out", "out")], ids=["verify", "revert"])
    @pytest.mark.parametrize(
        ("folder", "words"),
        [
            ("llama", "llama has no kvsurgery.json: it was not converted by kvsurgery"),
            ("nowhere", "nowhere is not a folder"),
            (PROFILE, f"{PROFILE} is not a folder"),
        ],
    )
    def test_not_ours(self, here: Path, command: tuple[str, ...], folder: str, words: str) -> None:
        nothing_happens(here, words, *command, folder)

    @pytest.mark.parametrize("command", [("verify",), ("revert", "--out", "out")], ids=["verify", "revert"])
    def test_a_flipped_bit_names_the_tensor(self, duo: Path, command: tuple[str, ...]) -> None:
        content = bytearray((duo / SHARD).read_bytes())
        content[-1] ^= 0x10
        (duo / SHARD).write_bytes(content)
        last = max(tensors := header(duo / SHARD), key=lambda name: tensors[name]["data_offsets"])
        nothing_happens(duo.parent, f"{re.escape(last)} in duo/{SHARD} does not have", *command, "duo", code=3)

    @pytest.mark.parametrize("name", ["kv_cache.py", "modeling_kvsurgery_llama.py", "config.json", "tokenizer.json"])
    def test_an_edited_file_is_named(self, duo: Path, name: str) -> None:
        with open(duo / name, "a") as file:
            file.write("\n")
        nothing_happens(duo.parent, f"duo/{name} was changed after the conversion", "verify", "duo", code=3)
        (duo / name).unlink()
        nothing_happens(duo.parent, f"duo/{name} is missing", "verify", "duo", code=3)

    def test_another_original(self, duo: Path, here: Path) -> None:
        llama_checkpoint(here / "other", shards=2)
        words = "other/model.*is not what was converted"
        nothing_happens(here, words, "verify", "duo", "--source", "other", code=3)
        nothing_happens(
            here, "nowhere/at/all is no folder and no Hub id", "verify", "duo", "--source", "nowhere/at/all"
        )

    @pytest.mark.parametrize(
        ("out", "words"),
        [
            ("duo", "is the source or lies in it"),
            ("duo/back", "lies in it"),
            ("llama", "not empty"),
            ("/proc/x", "/proc/x"),
        ],
    )
    def test_revert_into_a_wrong_place(self, duo: Path, out: str, words: str) -> None:
        Path("llama/mine.txt").write_text("mine")
        Path("llama/config.json").unlink()
        nothing_happens(duo.parent, words, "revert", "duo", "--out", out)

    def test_saved_again(self, mixed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        mixed("llama").load().save_pretrained("again")
        for command in (("verify",), ("revert", "--out", "out")):
            nothing_happens(tmp_path, "again has no kvsurgery.json: .*save_pretrained", *command, "again")


def test_debug_shows_the_traceback(here: Path) -> None:
    for arguments in (("--debug", "verify", "llama"), ("verify", "llama", "--debug")):
        with pytest.raises(CheckpointError, match=r"kvsurgery\.json"):
            run(*arguments)


JUNK = (None, True, -1, 0, 1, 3, 0.5, 10**9, -(10**30), float("nan"), float("inf"), "", "x", "../x", "\0", "\ud800")
JUNK += ([], {}, [None], [[]], {"a": None}, "0" * 64, "sliding_attention", {"full_attention": 3}, {"rope_type": []})


def damaged(content: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A JSON object with one random node removed or replaced, at a random depth."""
    result = json.loads(json.dumps(content))
    place, key = result, rng.choice(list(result))
    while isinstance(place[key], dict | list) and place[key] and rng.random() < 0.7:
        place = place[key]
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
    if rng.random() < 0.3:
        del place[key]
    else:
        place[key] = rng.choice(JUNK)
    return result


def works_or_is_refused(*arguments: Any) -> bool:
    """Run a command that may do either, but nothing else; returns whether it worked."""
    result = run(*arguments)
    lines = [line for line in result.err.splitlines() if line.startswith("kvsurgery: ")]
    assert result.code in (0, 1, 3)
    assert len(lines) == (result.code != 0)
    return result.code == 0


class TestFuzz:
    """Whatever stands in a file, a command works or says in one line why not."""

    @pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
    def test_config(self, checkpoint, tmp_path: Path, family: str) -> None:
        folder = shutil.copytree(checkpoint(family), tmp_path / family)
        random_profile(folder).save(tmp_path / PROFILE)
        config = json.loads((folder / "config.json").read_text())
        worked = 0
        for seed in range(80):
            (folder / "config.json").write_text(json.dumps(damaged(config, random.Random(seed))))
            worked += works_or_is_refused("convert", folder, "--profile", tmp_path / PROFILE, "--dry-run")
            works_or_is_refused("inspect", folder)
        assert 20 < worked < 75

    def test_provenance_that_was_damaged(self, here: Path) -> None:
        done("convert", "llama", "--profile", PROFILE, "--out", "duo")
        path = here / "duo/kvsurgery.json"
        record = json.loads(path.read_text())
        for seed in range(60):
            path.write_text(json.dumps(damaged(record, random.Random(seed))))
            changed = json.dumps(json.loads(path.read_text())) != json.dumps(record)
            assert works_or_is_refused("verify", "duo") is not changed
            assert works_or_is_refused("revert", "duo", "--out", f"out{seed}") is not changed
            assert Path(f"out{seed}").exists() is not changed

    def test_provenance_that_was_forged(self, here: Path) -> None:
        done("convert", "llama", "--profile", PROFILE, "--out", "duo")
        path = here / "duo/kvsurgery.json"
        record = json.loads(path.read_text())
        del record["checksum"]
        before = {name for name in tree(here) if not name.startswith("out")}
        for seed in range(60):
            forged = damaged(record, random.Random(seed))
            checksum = blake3(json.dumps(forged, sort_keys=True).encode()).hexdigest()
            path.write_text(json.dumps({**forged, "checksum": checksum}))
            works_or_is_refused("verify", "duo")
            worked = works_or_is_refused("revert", "duo", "--out", "out")
            assert Path("out").exists() == worked
            shutil.rmtree("out", ignore_errors=True)
            assert tree(here).keys() == before

    def test_profile(self, here: Path) -> None:
        content = Path(PROFILE).read_bytes()
        for seed in range(150):
            rng, flipped = random.Random(seed), bytearray(content)
            for _ in range(rng.choice((1, 1, 2, 5))):
                flipped[rng.randrange(len(content))] = rng.choice((rng.randrange(256), *b'",0{}'))
            Path(PROFILE).write_bytes(flipped)
            works_or_is_refused("convert", "llama", "--profile", PROFILE, "--dry-run")
            works_or_is_refused("profile", "show", PROFILE)
