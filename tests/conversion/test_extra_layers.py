"""Layers that predict further tokens, which transformers does not load: they have heads of their own, which stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvsurgery.errors import UnsupportedModel
from tests.helpers.families import FAMILIES, largest, make, tokens
from tests.helpers.surgery import convert_folder

EXTRA_LAYERS = {
    "exaone_moe": ("mtp.layers.0.", ("mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight")),
    "hy_v3": ("model.layers.4.", ("model.layers.4.eh_proj.weight", "model.layers.4.enorm.weight")),
}
families = pytest.mark.parametrize("family", [name for name in EXTRA_LAYERS if name in FAMILIES])


def with_extra_layer(family: str, folder: Path) -> Path:
    """A checkpoint whose extra layer has the tensors of its fourth and last layer, and some of its own."""
    make(family, folder)
    prefix, own_names = EXTRA_LAYERS[family]
    weights = load_file(folder / "model.safetensors")
    last = {name.removeprefix("model.layers.3."): weight for name, weight in weights.items() if ".layers.3." in name}
    weights |= {prefix + name: torch.randn_like(weight) for name, weight in last.items()}
    weights |= {name: torch.randn(48, 96) for name in own_names}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return folder


@families
def test_extra_layers_are_copied(family: str, tmp_path: Path) -> None:
    converted = convert_folder(with_extra_layer(family, tmp_path / "stock"), tmp_path / "out")
    before = load_file(tmp_path / "stock" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    prefix, own_names = EXTRA_LAYERS[family]
    extra = {name for name in before if name.startswith(prefix)} | {*own_names}
    assert len(extra) > len(own_names) + 4
    assert before.keys() == after.keys()
    moved = {name for name, weight in before.items() if not weight.equal(after[name])}
    assert not moved & extra
    assert {name.split("self_attn.")[1] for name in moved} >= {f"{part}_proj.weight" for part in "qkvo"}
    ids = tokens(2, 20)
    with torch.no_grad():
        expected = converted.stock(ids).logits
        found = convert_folder(tmp_path / "stock", tmp_path / "full", sparsity=0.0).model(ids).logits
    assert largest(found - expected, expected) < 1e-5


@pytest.mark.skipif("hy_v3" not in FAMILIES, reason="no such family in this version of transformers")
def test_a_layer_that_the_config_does_not_count_is_refused(tmp_path: Path) -> None:
    folder = with_extra_layer("hy_v3", tmp_path / "stock")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(UnsupportedModel, match="tensors of layer 4 lie beyond the 4 layers"):
        convert_folder(folder, tmp_path / "out")
