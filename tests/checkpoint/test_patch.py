"""Patch files are read by a schema: what it does not know is refused by name."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from kvsurgery.checkpoint import family as families
from kvsurgery.checkpoint import patch
from kvsurgery.checkpoint.family import load_family, load_module, supported
from kvsurgery.errors import PolicyError, UnsupportedModel
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
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / f"{name}.toml").write_text(text.replace(before, after, 1))


@pytest.mark.parametrize(
    ("name", "before", "after", "words"),
    [
        ("qwen2", "[windows]", "[window]", "window.*did you mean 'windows'"),
        ("qwen2", "enabled_by", "enabled_bye", "enabled_bye.*did you mean 'windows.enabled_by'"),
        ("qwen2", "layer_types = true", 'layer_types = "yes"', "layer_types.*got 'yes'"),
        ("qwen2", "use_sliding_window = false", "use_sliding_windw = false", "use_sliding_windw.*use_sliding_window"),
        ("qwen2", '["qkvo", "qkv_bias"]', '["qkvo", "qkv_bais"]', "qkv_bais.*did you mean 'qkv_bias'"),
        ("qwen2", '["qkvo", "qkv_bias"]', '"qkvo"', "permute.*list of strings"),
        ("qwen2", "permute = ", "permut = ", "permut.*did you mean 'permute'"),
        ("qwen2", "mlp.{gate,up,down}_proj", "mlp.{gate,up,down_proj", "gate,up,down_proj.weight' has a brace without"),
        ("qwen2", "mlp.{gate,up,down}_proj", "mlp.gate,up,down}_proj", "brace without its pair"),
        ("qwen2", "mlp.{gate,up,down}_proj", "mlp.{gate,{up,down}}_proj", "brace without its pair"),
        ("qwen2", "AutoModelForCausalLM", "AutoModelForCausaLM", "did you mean 'AutoModelForCausalLM'"),
        ("qwen2", "title", "titel", "titel.*did you mean 'modeling.title'"),
        ("llama", "permute_if_present", "permute_if_presnt", "permute_if_presnt"),
        ("llama", '"mlp.*_proj.bias"', '"mpl.*_proj.bias"', "mpl"),
        ("llama", "unread =", "unred =", "unred"),
        ("gpt_oss", '"replicated"', '"replicate"', "replicate"),
        ("gemma3n_text", "[sharing]", "[shareing]", "shareing.*sharing"),
        ("mixtral", "weights = { MixtralModel", "weights = { MixtralModle", "MixtralModle"),
        ("qwen3_moe", '"mlp.experts" = "num_experts"', '"mlp.expert" = "num_experts"', "mlp.experts"),
        ("glm4_moe", "layers_beyond", "layer_beyond", "layer_beyond"),
        ("llava", 'section = "vision_config"', 'sectoin = "vision_config"', "sectoin.*section"),
        ("qwen2", "[copy]", "[copy", "qwen2.toml"),
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


@pytest.mark.parametrize(
    ("shape", "words"), [(["p", "hidden"], "p"), (["hidden", "hidden"], "no axis"), (["q", "k"], "several")]
)
def test_shapes_of_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: list[str], words: str) -> None:
    monkeypatch.setattr(patch, "PERMUTATIONS", tmp_path / "sets.toml")
    patch.PERMUTATIONS.write_text(f'[qkvo]\n"self_attn.q_proj.weight" = {json.dumps(shape)}\n')
    with pytest.raises(PolicyError, match=f"self_attn.q_proj.weight.*{words}"):
        patch.permutations.__wrapped__()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("number = ", "nubmer = ", "nubmer.*did you mean 'number'"),
        ("[when]", "[whne]", "whne.*did you mean 'when'"),
        ("head.*", "haed.*", "haed"),
        ("layer_norm{1,2}", "layer_norm{1,2", "brace"),
    ],
)
def test_misspelled_in_a_tower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, words: str
) -> None:
    edited(tmp_path, "modules/siglip_vision_model", before, after)
    monkeypatch.setattr(families, "MODULES", tmp_path / "modules")
    with pytest.raises(UnsupportedModel, match=f"siglip_vision_model.toml.*{words}"):
        load_module.__wrapped__("siglip_vision_model")


def test_sets_and_braces_stand_for_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "PATCHES", PATCHES)
    llama = load_family("llama")
    attention = "self_attn.{}_proj.{}".format
    queries = {attention("q", "weight"): ("q", "hidden"), attention("o", "weight"): ("hidden", "q")}
    assert llama.permute == {**queries, **{attention(head, "weight"): (head, "hidden") for head in "kv"}}
    assert llama.optional == {attention(head, "bias"): (head,) for head in "qkv"}
    assert llama.copied.model == ("embed_tokens.weight", "norm.weight", "lm_head.weight")
    mlp = [f"mlp.{part}_proj.{kind}" for part in ("gate", "up", "down") for kind in ("weight", "bias")]
    norms = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    assert llama.copied.layer == (*norms, attention("o", "bias"), *mlp)
    experts = load_family("gpt_oss").copied.layer[-4:]
    assert experts == tuple(f"mlp.experts.{part}_proj{end}" for part in ("gate_up", "down") for end in ("", "_bias"))


def test_files_that_ship(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "PATCHES", PATCHES)
    for name in supported():
        family = load_family(name)
        for place in family.beside.values():
            assert load_module(place.get("module") or place["default"]) is not None
    assert all(load_module(path.stem) for path in (PATCHES / "modules").glob("*.toml"))
