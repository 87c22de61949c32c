"""A LoRA adapter of the original, converted, is the same function on the converted checkpoint."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvsurgery.checkpoint.source import read_config
from kvsurgery.conversion.adapter import convert_adapter
from kvsurgery.emit.config import auto_class
from kvsurgery.errors import CheckpointError, OutputError, UnsupportedModel
from tests.helpers.cases import some
from tests.helpers.command import run
from tests.helpers.families import EVERY, largest, tokens
from tests.helpers.surgery import convert_folder

peft = pytest.importorskip("peft")
set_peft_model_state_dict = peft.set_peft_model_state_dict
IDS = tokens(2, 20)
ATTENTION = re.compile(r"\.self_attn\.|\.mixer\.[qkvo]_proj$")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
LLAMA = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank-stabilised": {"use_rslora": True, "rank_pattern": {"q_proj": 2, "o_proj": 6}, "alpha_pattern": {"k_proj": 3}},
    "dora": {"use_dora": True},
    "biases": {"bias": "all", "lora_bias": True},
    "saved modules": {"modules_to_save": ["lm_head", "v_proj"], "target_modules": ["q_proj", "k_proj", "o_proj"]},
    "some layers": {"layers_to_transform": [1]},
}


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        # without a mask, stock GLM-4.1V fails in transformers 4
        return model(IDS, attention_mask=torch.ones_like(IDS), use_cache=False).logits


def drawn(model, **options):
    """The model with a new adapter, all of whose parameters are random."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, **options))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(0.2 * noise)
    return adapted


def load(folder: Path, **options):
    import transformers

    auto = getattr(transformers, auto_class(read_config(options.pop("like", folder))))
    return auto.from_pretrained(folder, dtype=torch.float32, **options).eval()


@pytest.fixture(scope="module")
def of_llama(checkpoint, tmp_path_factory):
    """An adapter of the tiny Llama by its kind, and the logits with it."""

    def make(kind: str) -> tuple[Path, torch.Tensor]:
        folder = tmp_path_factory.mktemp("adapter") / "lora"
        options = LLAMA | KINDS[kind]
        adapted = drawn(AutoModelForCausalLM.from_pretrained(checkpoint("llama-bias")), **options)
        adapted.save_pretrained(folder)
        return folder, logits(adapted.eval())

    return make


@pytest.fixture(scope="module")
def converted(checkpoint, tmp_path_factory):
    """The tiny Llama, half of its heads streaming, with more sinks than the tests have tokens."""
    return convert_folder(checkpoint("llama-bias"), tmp_path_factory.mktemp("out") / "llama", sparsity=0.5, sink=50)


@pytest.mark.parametrize("name", some(EVERY, 2))
def test_families(mixed, checkpoint, tmp_path, name):
    """Compared in the stock class, which computes no head as streaming."""
    folder = mixed(name).folder
    model = load(checkpoint(name), like=folder)
    targets = [
        path
        for path, module in model.named_modules()
        if ATTENTION.search(path) and isinstance(module, torch.nn.Linear) and "vision" not in path
    ]
    assert targets
    # peft takes the gate of attention for a part of experts
    targets = [path for path in targets if not path.endswith(".gate_proj")]
    adapted = drawn(model, target_modules=targets)
    adapted.save_pretrained(tmp_path / "adapter")
    report = convert_adapter(tmp_path / "adapter", folder, tmp_path / "converted")
    assert report.moved
    expected = logits(adapted.eval())
    after = peft.PeftModel.from_pretrained(load(folder), tmp_path / "converted").eval()
    assert largest(logits(after) - expected, expected) < 1e-5
    weights = set_peft_model_state_dict(after, load_file(tmp_path / "adapter" / WEIGHTS))
    assert not weights.unexpected_keys
    assert largest(logits(after) - expected, expected) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_adapters(converted, of_llama, tmp_path, kind):
    adapter, expected = of_llama(kind)
    convert_adapter(adapter, converted.folder, tmp_path / "out")
    ways = [peft.PeftModel.from_pretrained(converted.load(), tmp_path / "out").eval()]
    if kind not in ("saved modules", "dora"):  # of which transformers' own loader leaves a part out, with any model
        ways.append(converted.load())
        ways[-1].load_adapter(str(tmp_path / "out"))
    for model in ways:
        assert largest(logits(model) - expected, expected) < 1e-5
    with torch.no_grad():  # and in its own cache, where the emitted model generates
        cached = ways[0](IDS, use_cache=True).logits
    assert largest(cached - expected, expected) < 1e-5


def test_settings_and_files_beside_stay(converted, of_llama, tmp_path):
    adapter, _ = of_llama("rank-stabilised")
    (adapter / "vocabulary.txt").write_text("mine")
    (adapter / "optimizer.pt").write_bytes(b"state")
    report = convert_adapter(adapter, converted.folder, tmp_path / "out", "owner/name")
    before, after = (json.loads((folder / CONFIG).read_text()) for folder in (adapter, tmp_path / "out"))
    assert after == before | {"base_model_name_or_path": "owner/name", "revision": None}
    assert (tmp_path / "out" / "vocabulary.txt").read_text() == "mine"
    assert report.left_out == ("optimizer.pt",)


def test_command_line(converted, of_llama, tmp_path):
    def output(*words: Any, code: int = 0) -> str:
        result = run(*words)
        assert result.code == code, result
        return result.out + result.err

    adapter, _ = of_llama("dora")
    out, back = tmp_path / "out", tmp_path / "back"
    made = ("convert", "--adapter", adapter, "--for", converted.folder, "--out", out)
    facts = json.loads(run(*made, "--json").out)
    assert 0 < facts["moved"] < facts["tensors"]
    assert "already" in output(*made)
    output("verify", out, "--source", adapter)
    output("verify", out, "--logits", code=2)
    output("revert", out, "--out", back)
    for name in (WEIGHTS, CONFIG):
        assert (back / name).read_bytes() == (adapter / name).read_bytes()
    assert not (back / "config.json").exists()
    output("verify", out, "--source", converted.source, code=1)
    for named, words in {
        "--kv-bits": ["--kv-bits", "4"],
        "--dry-run": ["--dry-run"],
        "SRC": [converted.source],
    }.items():
        assert named in output(*made, *words, code=2)
    output("convert", "--adapter", adapter, "--out", tmp_path / "more", code=2)

    weights = load_file(out / WEIGHTS)
    name = next(name for name in weights if "q_proj.lora_B" in name)
    weights[name][0] += 1
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    output("verify", out, code=3)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication"),
        ({"use_qalora": True}, "use_qalora"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ],
)
def test_adapters_that_are_not_covered(converted, of_llama, tmp_path, settings, named):
    adapter, _ = of_llama("plain")
    content = json.loads((adapter / CONFIG).read_text()) | settings
    (adapter / CONFIG).write_text(json.dumps(content))
    with pytest.raises(UnsupportedModel, match=named):
        convert_adapter(adapter, converted.folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tensors_that_do_not_fit(converted, of_llama, tmp_path):
    adapter, _ = of_llama("plain")
    weights = load_file(adapter / WEIGHTS)
    name = next(name for name in weights if "q_proj.lora_B" in name)

    def refused(changed: dict[str, torch.Tensor], kind: type[Exception], named: str) -> None:
        save_file(changed, adapter / WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(kind, match=named):
            convert_adapter(adapter, converted.folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    refused(weights | {name: weights[name][:-8].clone()}, CheckpointError, "shape")
    refused(weights | {name.replace("lora_B", "lora_S"): weights[name].clone()}, UnsupportedModel, "lora_S")
    refused(weights | {name.replace("layers.0", "layers.9"): weights[name].clone()}, UnsupportedModel, "layer 9")
    refused(
        weights | {"base_model.model.other.layers.0.x.weight": weights[name].clone()}, UnsupportedModel, "other.layers"
    )
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="save_pretrained"):
        convert_adapter(adapter, converted.folder, tmp_path / "out")


def test_what_is_no_pair(converted, checkpoint, of_llama, tmp_path):
    adapter, _ = of_llama("plain")
    out = tmp_path / "out"
    convert_adapter(adapter, converted.folder, out)
    with pytest.raises(CheckpointError, match="already converted"):
        convert_adapter(out, converted.folder, tmp_path / "twice")
    with pytest.raises(CheckpointError, match="a converted adapter"):
        convert_adapter(adapter, out, tmp_path / "more")
    with pytest.raises(CheckpointError, match=r"kvsurgery\.json"):
        convert_adapter(adapter, checkpoint("llama-bias"), tmp_path / "more")
    with pytest.raises(CheckpointError, match=CONFIG.replace(".", r"\.")):
        convert_adapter(converted.folder, converted.folder, tmp_path / "more")
    with pytest.raises(OutputError):
        convert_adapter(of_llama("dora")[0], converted.folder, out)
    convert_adapter(of_llama("dora")[0], converted.folder, out, overwrite=True)

    trained = tmp_path / "trained"
    shutil.copytree(adapter, trained)
    content = json.loads((trained / CONFIG).read_text()) | {"base_model_name_or_path": str(converted.folder)}
    (trained / CONFIG).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="trained on the converted checkpoint"):
        convert_adapter(trained, converted.folder, tmp_path / "more")
