"""What a conversion writes."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from kvsurgery.checkpoint.source import INDEX
from kvsurgery.conversion.prepared import PreparedConversion
from kvsurgery.policy.evidence import Evidence
from kvsurgery.recipe import Recipe
from kvsurgery.templates.kv_layout import KVLayout
from tests.helpers.shards import FILES, convert_llama, tree
from tests.helpers.surgery import random_profile


def test_what_is_written(source: Path, out: Path) -> None:
    report = convert_llama(source, out)
    before, after = tree(source), tree(out)
    shards = {name for name in before if name.endswith(".safetensors")}
    copied = {"tokenizer.json", "LICENSE", "picture.png", "additional_chat_templates/tool.jinja", INDEX}
    assert after.keys() == shards | copied | FILES.keys() | {"kvsurgery.json"}
    assert {name: after[name] for name in copied} == {name: before[name] for name in copied}
    assert {name: after[name] for name in FILES} == FILES
    assert all(len(after[name]) == len(before[name]) for name in shards)
    assert {".env", ".cache/", "pytorch_model.bin", "original/", "onnx/", "model.Q4_K.gguf"} == set(report.left_out)
    assert (report.tensors, report.moved) == (21, 8)
    assert report.size == sum(len(before[name]) for name in shards)


def test_secrets_are_not_taken_along(source: Path, out: Path) -> None:
    convert_llama(source, out)
    kept = json.loads((out / "kvsurgery.json").read_text())["originals"]
    assert kept.keys() == {".gitattributes", "README.md", "config.json", "generation_config.json", "modeling_custom.py"}
    assert b"SECRET" not in b"".join(tree(out).values())


def test_provenance_hashes_are_of_the_source(source: Path, out: Path) -> None:
    convert_llama(source, out)
    provenance = json.loads((out / "kvsurgery.json").read_text())
    assert provenance["source"] == "source"
    assert provenance["permutation"] == [[2, 0, 1], [1, 0, 2]]
    assert provenance["copied"]["LICENSE"] == blake3(b"do what you like").hexdigest()
    assert provenance["emitted"]["kv_generation.py"] == blake3(b"pass").hexdigest()
    assert provenance["emitted"]["README.md"] is None
    assert provenance["copied"]["picture.png"] == blake3((source / "picture.png").read_bytes()).hexdigest()
    for name, digest in provenance["headers"].items():
        raw = (source / name).read_bytes()
        assert digest == blake3(raw[: 8 + int.from_bytes(raw[:8], "little")]).hexdigest()


@pytest.mark.parametrize("jobs", [1, 8])
def test_the_same_input_gives_the_same_bytes(source: Path, out: Path, tmp_path: Path, jobs: int) -> None:
    convert_llama(source, out, jobs=jobs)
    elsewhere = tmp_path / "elsewhere" / "source"
    shutil.copytree(source, elsewhere)
    convert_llama(elsewhere, tmp_path / "deep" / "down" / "out")
    assert tree(out) == tree(tmp_path / "deep" / "down" / "out")


def test_modes_are_left_to_the_umask(source: Path, out: Path) -> None:
    before = os.umask(0o027)
    try:
        convert_llama(source, out)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*") if path.is_file()} == {0o640}


def test_repeating_a_finished_conversion(source: Path, out: Path) -> None:
    convert_llama(source, out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert convert_llama(source, out).already_done
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


@pytest.mark.parametrize("options", [{}, {"rest": "budgeted", "budget": 16}, {"kv_bits": 4, "tp": 2}], ids=str)
def test_the_config_is_what_its_file_says(checkpoint: Callable[[str], Path], options: dict[str, Any]) -> None:
    folder = checkpoint("gemma3")
    emitted = PreparedConversion.prepare(folder, Recipe.of(**options), Evidence(random_profile(folder))).emitted
    written = json.loads(emitted.files["config.json"])
    assert json.loads(json.dumps(emitted.config)) == written
    assert KVLayout.from_config(dict(emitted.config)) == KVLayout.from_config(written)
