"""Models with code of their own, and converted checkpoints that were saved again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from kvsurgery import inspect, revert, verify
from kvsurgery.checkpoint.source import read_config
from kvsurgery.conversion.prepared import PreparedConversion
from kvsurgery.errors import CheckpointError, UnsupportedModel
from kvsurgery.evaluate import checkpoint as evaluate
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.policy.evidence import Evidence
from kvsurgery.recipe import Recipe
from tests.helpers.surgery import Converted, convert_folder

OWN = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


def with_config(source: Path, folder: Path, **settings: Any) -> Path:
    shutil.copytree(source, folder)
    config = {**json.loads((folder / "config.json").read_text()), **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("auto_map", [OWN, {"AutoModel": "owner/repo--modeling_own.Own"}], ids=["local", "remote"])
def test_modeling_code_of_its_own(checkpoint: Callable[[str], Path], tmp_path: Path, auto_map: dict[str, str]) -> None:
    source = with_config(checkpoint("llama"), tmp_path / "m", auto_map=auto_map)
    (source / "modeling_own.py").write_text("class OwnForCausalLM: ...\n")
    with pytest.raises(UnsupportedModel, match=r"modeling code of the model's own.*ignore_model_code"):
        convert_folder(source, tmp_path / "out", sparsity=0.5)
    assert not (tmp_path / "out").exists()
    assert "ignore_model_code" in str(inspect(source).problem)
    out = convert_folder(source, tmp_path / "out", sparsity=0.5, ignore_model_code=True).folder
    assert all("modeling_kvsurgery_llama" in code for code in read_config(out)["auto_map"].values())
    assert not (out / "modeling_own.py").exists()
    revert(out, tmp_path / "back")
    assert (tmp_path / "back" / "modeling_own.py").read_text() == "class OwnForCausalLM: ...\n"


@pytest.mark.parametrize(
    "auto_map", [OWN, {"AutoTokenizer": ["tokenization_own.Own", None]}], ids=["model", "tokenizer"]
)
def test_the_stock_class_in_place_of_modeling_code_is_named(
    checkpoint: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, auto_map: dict[str, Any]
) -> None:
    source = with_config(checkpoint("llama"), tmp_path / "m", auto_map=auto_map)
    for load in (partial(evaluate.load, device="cpu"), MeasuredModel.load):
        caplog.clear()
        with suppress(UnsupportedModel):  # of the tokenizer, which is not there
            load(source)
        lines = [record.getMessage() for record in caplog.records if record.name.startswith("kvsurgery")]
        assert len(lines) == (auto_map is OWN)
        assert all("configuration_own" in line and "runs in its place" in line for line in lines)


def test_a_converted_checkpoint_names_no_modeling_code(
    mixed: Callable[[str], Converted], caplog: pytest.LogCaptureFixture
) -> None:
    evaluate.load(mixed("llama").folder, device="cpu")
    assert not [record for record in caplog.records if record.name.startswith("kvsurgery")]


def refused(folder: Path, out: Path, words: str) -> None:
    """Every command that takes a folder says what this one is."""
    with pytest.raises(UnsupportedModel, match=words):
        PreparedConversion.prepare(folder, Recipe.of(kv_bits=4), Evidence())
    for command in (lambda: verify(folder), lambda: revert(folder, out)):
        with pytest.raises(CheckpointError, match=words):
            command()
    assert not out.exists()


def test_saved_as_stock(mixed: Callable[[str], Converted], tmp_path: Path) -> None:
    converted = mixed("llama")
    AutoModelForCausalLM.from_pretrained(converted.folder).save_pretrained(tmp_path / "again")
    config = read_config(tmp_path / "again")
    assert "kv_surgery" in config
    assert not [*(tmp_path / "again").glob("*.py")]
    refused(tmp_path / "again", tmp_path / "out", "saved as a stock model.*copy the .py files")
    assert "copy the .py files" in str(inspect(tmp_path / "again").problem)
    with pytest.raises(CheckpointError, match="saved as a stock model"):
        verify(converted.folder, tmp_path / "again")
    for path in converted.folder.glob("*.py"):
        shutil.copy(path, tmp_path / "again")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert "kvsurgery" in type(model).__module__
    refused(tmp_path / "again", tmp_path / "out", "save_pretrained wrote again.*it runs")


def test_saved_by_the_emitted_class(mixed: Callable[[str], Converted], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixed("llama").folder, trust_remote_code=True)
    model.save_pretrained(tmp_path / "again")
    refused(tmp_path / "again", tmp_path / "out", "save_pretrained wrote again.*it runs")
    facts = inspect(tmp_path / "again")
    assert facts.problem is None
    assert not facts.surgery.revertible


def test_what_kvsurgery_wrote_is_converted_already(mixed: Callable[[str], Converted]) -> None:
    with pytest.raises(UnsupportedModel, match="already converted"):
        PreparedConversion.prepare(mixed("llama").folder, Recipe.of(kv_bits=4), Evidence())


def test_quantized_afterwards(mixed: Callable[[str], Converted], tmp_path: Path) -> None:
    folder = with_config(mixed("llama").folder, tmp_path / "m", quantization_config={"quant_method": "awq"})
    (folder / "kvsurgery.json").unlink()
    for path in folder.glob("*.py"):
        path.unlink()
    refused(folder, tmp_path / "out", "saved as a stock model")
