"""Adapters of peft on a converted model: its own work, those of the original are refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.helpers.families import tokens
from tests.helpers.surgery import convert_folder

peft = pytest.importorskip("peft")
IDS = tokens(1, 20)


def logits(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def trained(folder, out, modules=("q_proj", "o_proj"), **options):
    """An adapter of a checkpoint in a folder, with weights as if it had been trained, and the logits with it."""
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[*modules]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    adapted.save_pretrained(out)
    return out, logits(adapted)


@pytest.fixture(scope="module")
def of_original(checkpoint, tmp_path_factory):
    return trained(checkpoint("llama"), tmp_path_factory.mktemp("adapter") / "original")


@pytest.fixture(scope="module")
def of_converted(mixed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter") / "converted"
    return trained(mixed("llama").folder, folder, trust_remote_code=True)


def with_base(adapter: Path, base: str | None, folder: Path) -> Path:
    """A copy of an adapter that names another base."""
    shutil.copytree(adapter, folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": base}))
    return folder


WAYS = {
    "peft": lambda model, adapter: peft.PeftModel.from_pretrained(model, adapter),
    "to train on": lambda model, adapter: peft.PeftModel.from_pretrained(model, adapter, is_trainable=True),
    "merged": lambda model, adapter: peft.PeftModel.from_pretrained(model, adapter).merge_and_unload(),
    "transformers": lambda model, adapter: model.load_adapter(str(adapter)),
}


@pytest.mark.parametrize("way", WAYS)
def test_adapters_of_the_original_are_refused(mixed, of_original, checkpoint, way):
    with pytest.raises(ValueError, match=r"'default' was trained on \S+llama-stock, .* convert it"):
        WAYS[way](mixed("llama").load(), of_original[0])


def test_what_an_adapter_does_not_name_or_is_not_there_is_no_base(mixed, of_original, tmp_path):
    for base in (None, "org/somewhere"):
        adapter = with_base(of_original[0], base, tmp_path / str(base))
        with pytest.raises(ValueError, match=r"base_model_name_or_path in its adapter_config\.json to '.*llama-mixed'"):
            peft.PeftModel.from_pretrained(mixed("llama").load(), adapter)


def test_a_second_adapter_is_refused_by_the_next_forward(mixed, of_original, of_converted):
    model = peft.PeftModel.from_pretrained(mixed("llama").load(), of_converted[0])
    model.load_adapter(of_original[0], "second")
    with pytest.raises(ValueError, match="'second' was trained on"):
        logits(model)
    model.delete_adapter("second")
    assert torch.allclose(logits(model), of_converted[1], atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_adapters_of_the_checkpoint_itself_work(mixed, of_converted, way, tmp_path):
    converted = mixed("llama")
    model = converted.load()
    adapted = WAYS[way](model, of_converted[0])
    assert torch.allclose(logits(model if way == "transformers" else adapted), of_converted[1], atol=1e-4)


def test_a_copy_of_the_checkpoint_has_the_same_heads(mixed, of_converted, tmp_path):
    shutil.copytree(mixed("llama").folder, tmp_path / "copy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", trust_remote_code=True)
    assert torch.allclose(logits(peft.PeftModel.from_pretrained(model, of_converted[0])), of_converted[1], atol=1e-4)


def test_where_heads_stay_in_order_adapters_of_the_original_work(all_full, checkpoint, of_original, of_converted):
    converted = all_full("llama")
    adapted = peft.PeftModel.from_pretrained(converted.load(), of_original[0])
    assert torch.allclose(logits(adapted), of_original[1], atol=1e-4)
    with pytest.raises(ValueError, match="was trained on"):
        peft.PeftModel.from_pretrained(converted.load(), of_converted[0])


def test_an_adapter_merged_into_the_original_is_converted_with_it(checkpoint, of_original, tmp_path):
    original = AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    peft.PeftModel.from_pretrained(original, of_original[0]).merge_and_unload().save_pretrained(tmp_path / "merged")
    converted = convert_folder(tmp_path / "merged", tmp_path / "out", sparsity=0.5, sink=50)  # more than the prompt
    assert torch.allclose(logits(converted.model), of_original[1], atol=1e-4)


def test_adapters_beside_attention_belong_to_both(mixed, checkpoint, tmp_path):
    adapter, _ = trained(checkpoint("llama"), tmp_path / "mlp", ("up_proj", "down_proj"))
    adapted = peft.PeftModel.from_pretrained(mixed("llama").load(), adapter)
    assert not torch.allclose(logits(adapted), logits(mixed("llama").model), atol=1e-2)


def test_new_adapters_are_trained(mixed):
    config = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    for adapt in (peft.get_peft_model, peft.PeftModel):
        model = adapt(mixed("llama").load(), peft.LoraConfig(**config))
        model(input_ids=IDS, labels=IDS).loss.backward()
    peft.inject_adapter_in_model(peft.LoraConfig(**config), mixed("llama").load())(IDS, labels=IDS).loss.backward()


def test_prefix_tuning_is_refused_and_prompt_tuning_is_that_of_the_original(mixed, all_full):
    options = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    model = peft.get_peft_model(mixed("llama").load(), peft.PrefixTuningConfig(**options))
    for door in (lambda: model(IDS), lambda: model.generate(input_ids=IDS, max_new_tokens=3)):
        with pytest.raises(TypeError, match=r"got DynamicCache; .* prefix tuning"):
            door()
    sequences = []
    for base in (all_full("llama").load(), AutoModelForCausalLM.from_pretrained(all_full("llama").source)):
        torch.manual_seed(0)
        model = peft.get_peft_model(base.eval(), peft.PromptTuningConfig(**options))
        sequences.append(model.generate(input_ids=IDS, max_new_tokens=6, do_sample=False))
    assert sequences[0].equal(sequences[1])


@pytest.mark.skipif(
    not hasattr(PreTrainedModel, "enable_peft_hotswap"), reason="this version of transformers swaps no adapters"
)
def test_adapters_are_not_swapped_in_place(mixed, of_original, of_converted):
    model = mixed("llama").load()
    model.load_adapter(str(of_converted[0]), "default")
    for swap in (lambda: model.load_adapter(str(of_original[0]), "default", hotswap=True), model.enable_peft_hotswap):
        with pytest.raises(ValueError, match=r"not swapped in place.*delete_adapter\(\)"):
            swap()
    assert torch.allclose(logits(model), of_converted[1], atol=1e-4)
