"""What hostile and unlucky users give: one line that names the thing and the fix, nothing left behind, nothing lost."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.command import CONVERT, PROFILE, SCORES, done, nothing_happens, run, save_profile
from tests.helpers.shards import llama_shapes, noise_shard, raw_shard, tree

SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
BUDGETED = ("--rest", "budgeted", "--budget")


def edit_json(path: str, **changes: Any) -> None:
    """Change keys of a JSON object; `...` removes one."""
    content = {**json.loads(Path(path).read_text()), **changes}
    Path(path).write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def config(**changes: Any) -> Callable[[], None]:
    return functools.partial(edit_json, "llama/config.json", **changes)


def cut(size: int) -> Callable[[], None]:
    return functools.partial(os.truncate, f"llama/{SHARD}", size)


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


def quantized_blocks() -> None:
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
    "config is a pipe": (functools.partial(pipe, "config.json"), "config.json is not a regular file"),
    "shard is a pipe": (functools.partial(pipe, SHARD), f"{SHARD} is not a regular file"),
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
        "model.layers.1.self_attn.k_proj.weight is missing",
    ),
    "wrong shape": (
        with_tensor("model.layers.1.self_attn.k_proj.weight", 24, 12),
        r"'model.layers.1.self_attn.k_proj.weight' has shape \[24, 12\], config.json implies \[12, 12\]",
    ),
    "unknown family": (config(model_type="gpt2"), "'gpt2' is not supported; supported: .*gemma2, .*qwen3_moe"),
    "no family": (config(model_type=...), "model_type None is not supported"),
    "not a causal model": (config(architectures=["LlamaForSequenceClassification"]), "must be one of .*CausalLM"),
    "quantized": (config(quantization_config={"quant_method": "hqq"}), "quantized by .hqq.; converted are"),
    "quantized in blocks": (quantized_blocks, "q_proj.weight' is F8_E4M3; conversion supports"),
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
    "a value is too deep": (
        config(more=functools.reduce(lambda inner, _: [inner], range(200), [])),
        "more than 100 deep",
    ),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers is 0"),
    "too many layers": (config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    "negative heads": (config(num_attention_heads=-6), "num_attention_heads is -6"),
    "heads are text": (config(num_key_value_heads="3"), "num_key_value_heads is '3'"),
    "heads are a list of nulls": (config(num_key_value_heads=[[None]]), "num_key_value_heads is"),
    "fractional heads": (config(head_dim=4.5), "head_dim is 4.5"),
    "uneven groups": (config(num_key_value_heads=4), "do not share 4 KV heads evenly"),
    "layer types are a number": (config(layer_types=5), "layer_types is 5, not a list"),
    "heads by layer": (config(per_layer_config={"0": {"head_dim": 8}}), "per_layer_config is not supported"),
    "heads by layer are a number": (config(per_layer_config=12), "per_layer_config is not supported"),
    "a name of two lines": (config(model_type="a\r\nb\u2028c"), r"model_type 'a\\r\\nb"),
    "another width": (config(hidden_size=16), "config.json implies"),
    "rope is text": (config(rope_theta=1e4, rope_scaling="linear"), "RoPE settings"),
    "generation config is no JSON": (write("generation_config.json", b"{"), "generation_config.json is not JSON"),
    "generation config is too deep": (write("generation_config.json", b"[" * 99_999), "generation_config.json is not"),
}


@pytest.mark.parametrize(("damage", "words"), BAD_SOURCES.values(), ids=BAD_SOURCES)
@pytest.mark.parametrize("dry_run", [False, True], ids=["convert", "dry-run"])
def test_source(here: Path, damage: Callable[[], None], words: str, dry_run: bool) -> None:
    damage()
    nothing_happens(here, words, *CONVERT, *["--dry-run"] * dry_run)


def test_side_file_that_cannot_be_copied(here: Path) -> None:
    Path("llama/vocab.txt").symlink_to("gone")
    nothing_happens(here, "llama/vocab.txt is a broken link; fetch the file again", *CONVERT)


def test_a_card_whose_metadata_is_no_yaml(here: Path) -> None:
    Path("llama/README.md").write_text('---\nlicense: "\\U00110000"\n---\n')
    done(*CONVERT)


def test_converted_source(here: Path) -> None:
    done("convert", "llama", "--profile", PROFILE, "--out", "duo")
    nothing_happens(here, "already converted; .*revert", "convert", "duo", "--profile", PROFILE, "--out", "out")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("./nowhere", "./nowhere is neither a folder nor a Hub id"),
        ("llama/config.json", "llama/config.json is a file; give the folder"),
        (PROFILE, f"{PROFILE} is a file; give the folder"),
    ],
)
def test_source_that_is_no_checkpoint(here: Path, source: str, words: str) -> None:
    nothing_happens(here, words, "convert", source, "--profile", PROFILE, "--out", "out")


def two_lines() -> None:
    header = json.dumps({"scores": {"dtype": "F\n32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    Path(PROFILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


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
    "a dtype of two lines": (two_lines, "not a head profile"),
    "cut": (lambda: os.truncate(PROFILE, 100), "not a head profile"),
    "a folder": (lambda: (Path(PROFILE).unlink(), Path(PROFILE).mkdir()), f"{PROFILE}: it is not a regular file"),
    "missing": (lambda: Path(PROFILE).unlink(), f"cannot read head profile {PROFILE}: No such file"),
}


@pytest.mark.parametrize(("damage", "words"), BAD_PROFILES.values(), ids=BAD_PROFILES)
def test_profile(here: Path, damage: Callable[[], Any], words: str) -> None:
    damage()
    line = nothing_happens(here, words, *CONVERT)
    assert PROFILE in line or "profile is of" in line


@pytest.mark.parametrize("arguments", [("profile", "show"), ("convert", "llama", "--out", "out", "--profile")])
def test_an_empty_name_is_no_file(here: Path, arguments: tuple[str, ...]) -> None:
    nothing_happens(here, "the name of the file is empty; give a file, or its address", *arguments, "")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--recent", 0), "--recent >= 1"),
        (("--budget", 9, "--method", "duo"), "--rest streaming and --budget exclude each other"),
        (
            ("--budget", 9, "--sink", 4),
            "--sink and --budget exclude each other, as heads that are not full either stream",
        ),
        ((*BUDGETED, 9, "--window", 0), r"--window must lie in \[1, "),
        ((*BUDGETED, 9, "--window", 10**30), r"--window must lie in \[1, "),
        ((*BUDGETED, 9, "--kernel-size", 4), "--kernel-size must be odd"),
        ((*BUDGETED, 9, "--kernel-size", 10**30 + 1), "--kernel-size must be odd and in"),
        ((*BUDGETED, 9, "--hold", 7), r"--hold must lie in \[8, .*: the observation window, --window, must fit into"),
    ],
)
def test_options_that_no_recipe_has(here, options, words):
    before = tree(here)
    result = run(*CONVERT, *options)
    assert result.code == 2
    assert re.search(words, result.err)
    assert tree(here) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--sparsity", 1.01), r"--sparsity must lie in \[0, 1\], got 1.01"),
        (("--sparsity", -0.1), r"--sparsity must lie in \[0, 1\], got -0.1"),
        (("--sparsity", "nan"), r"--sparsity must lie in \[0, 1\], got nan"),
        (("--threshold", "nan"), r"--threshold must lie in \[0, 1\] for duo scores, got nan"),
        (("--threshold", 1.1), r"--threshold must lie in \[0, 1\] for duo scores, got 1.1"),
        (("--threshold", -0.1), r"--threshold must lie in \[0, 1\] for duo scores, got -0.1"),
        (("--full-heads", 7), r"--full-heads must lie in \[0, 6\] for this model, got 7"),
        (("--full-heads", -1), r"--full-heads must lie in \[0, 6\]"),
        ((*BUDGETED, 0), r"--budget must lie in \[1, "),
        ((*BUDGETED, 9, "--beta", 1), "beta"),
        ((*BUDGETED, 9, "--beta", "nan"), "beta"),
        (("--hold",), "--budget is missing"),
        (("--save-recipe", PROFILE), "exists and is not a recipe; give another file"),
        (("--save-recipe", "nowhere/recipe.toml"), "there is no folder nowhere; make it first"),
        (
            (*BUDGETED, 9, "--select", "value-norm"),
            "--select value-norm keeps the first 4 tokens .* is 3; raise --budget",
        ),
        ((*BUDGETED, 9, "--hold", "--kv-bits", 4), "--kv-bits: heads with rolling budgets are quantized with the"),
        (
            ("--kv-bits", 4, "--kv-group-size", 3),
            "--kv-group-size: the group size 3 does not divide",
        ),
        (("--kv-bits", 4, "--kv-group-size", 0), "group size 0"),
        (("--kv-bits", 8, "--kv-streaming"), "--kv-streaming is for windows of at least 512 tokens"),
        (("--kv-bits", 8, "--sparsity", 1), "--kv-bits is for full and budgeted heads, and this policy has none"),
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
        (*CONVERT[1:], "--sink", -1),
        (*CONVERT[1:], "--recent", 2**63),
        (*CONVERT[1:], *BUDGETED, 10**30),
        (*CONVERT[1:], "--kv-bits", 4, "--kv-residual", -1),
        (*CONVERT[1:], "--group-reduce", "median"),
        (*CONVERT[1:], "--revision", "main"),
        (*CONVERT[1:], "--kv-bits", 5),
        (*CONVERT[1:], "--kv-scheme", "per-token"),
        (*CONVERT[1:], "--threshold", 0.5, "--sparsity", 0.5),
        (*CONVERT[1:], "--full-heads", 1, "--sparsity", 0.5),
        (*CONVERT[1:], "--bogus", 3),
        (*CONVERT[1:-1], ""),
    ],
    ids=lambda arguments: " ".join(map(str, arguments)),
)
def test_usage(here: Path, arguments: tuple[Any, ...]) -> None:
    before = tree(here)
    result = run("convert", *arguments)
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(r"Usage: .*\nTry .*\n\nError: .*\n", result.err)
    assert tree(here) == before
