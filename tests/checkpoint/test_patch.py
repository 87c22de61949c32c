"""Patch files are read by a schema: what it does not know is refused by name."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from kvsurgery.checkpoint import family as families
from kvsurgery.checkpoint.family import load_family, load_module, supported
from kvsurgery.errors import UnsupportedModel
from kvsurgery.system.resources import PATCHES


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(families, "PATCHES", tmp_path)
    load_family.cache_clear()
    yield
    load_family.cache_clear()


def edited(folder: Path, name: str, before: str, after: str) -> None:
    text = (PATCHES / f"{name}.toml").read_text()
    assert before in text
    (folder / f"{name}.toml").write_text(text.replace(before, after, 1))


@pytest.mark.parametrize(
    ("name", "before", "after", "words"),
    [
        ("qwen2", "[windows]", "[window]", "window.*did you mean 'windows'"),
        ("qwen2", "enabled_by", "enabled_bye", "enabled_bye.*did you mean 'windows.enabled_by'"),
        ("qwen2", "layer_types = true", 'layer_types = "yes"', "layer_types.*got 'yes'"),
        ("qwen2", "use_sliding_window = false", "use_sliding_windw = false", "use_sliding_windw.*use_sliding_window"),
        ("qwen2", '["q", "hidden"]', '["p", "hidden"]', "self_attn.q_proj.weight.*p"),
        ("qwen2", '["q", "hidden"]', '["hidden", "hidden"]', "no axis of heads"),
        ("qwen2", '["q", "hidden"]', '"q"', "permute"),
        ("qwen2", "AutoModelForCausalLM", "AutoModelForCausaLM", "did you mean 'AutoModelForCausalLM'"),
        ("qwen2", "title", "titel", "titel.*did you mean 'modeling.title'"),
        ("llama", "[permute_if_present]", "[permute_if_presnt]", "permute_if_presnt"),
        ("llama", '"mlp.*_proj.bias"', '"mpl.*_proj.bias"', "mpl"),
        ("llama", "unread =", "unred =", "unred"),
        ("gpt_oss", '"replicated"', '"replicate"', "replicate"),
        ("gemma3n_text", "[sharing]", "[shareing]", "shareing.*sharing"),
        ("mixtral", "weights = { MixtralModel", "weights = { MixtralModle", "MixtralModle"),
        ("qwen3_moe", '"mlp.experts" = "num_experts"', '"mlp.expert" = "num_experts"', "mlp.experts"),
        ("glm4_moe", "layers_beyond", "layer_beyond", "layer_beyond"),
        ("llava", 'section = "vision_config"', 'sectoin = "vision_config"', "sectoin.*section"),
        ("qwen2", "[permute]", "[permute", "qwen2.toml"),
    ],
)
def test_misspelled(tmp_path: Path, name: str, before: str, after: str, words: str) -> None:
    edited(tmp_path, name, before, after)
    with pytest.raises(UnsupportedModel, match=words) as raised:
        load_family(name)
    assert f"{name}.toml" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["qwen2", "gemma4_text", "qwen3_next"])
def test_every_missing_table_or_required_key_is_refused(tmp_path: Path, name: str) -> None:
    tables = tomllib.loads((PATCHES / f"{name}.toml").read_text())
    text = (PATCHES / f"{name}.toml").read_text()
    for table in ("classes", "modeling", "copy"):
        assert table in tables
        (tmp_path / f"{name}.toml").write_text(text.replace(f"[{table}]", f"[defaults.{table}]"))
        load_family.cache_clear()
        with pytest.raises(UnsupportedModel, match=table):
            load_family(name)


def test_files_that_ship(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "PATCHES", PATCHES)
    for name in supported():
        family = load_family(name)
        for place in family.beside.values():
            assert load_module(place.get("module") or place["default"]) is not None
    assert all(load_module(path.stem) for path in (PATCHES / "modules").glob("*.toml"))
