"""`kvsurgery inspect`: facts from headers, against the models that transformers makes of them."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from kvsurgery.cli import cli
from tests.evaluate.recall import convert
from tests.helpers.families import FAMILIES, attention_of
from tests.helpers.hub_server import serve
from tests.helpers.surgery import RECENT, SINK


def inspect(source: Path, *options: str) -> dict:
    result = CliRunner().invoke(cli, ["inspect", str(source), "--json", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def text(source: Path) -> str:
    return CliRunner().invoke(cli, ["inspect", str(source)], catch_exceptions=False).stdout


@pytest.fixture
def broken(checkpoint, tmp_path):
    """A copy of the stock Llama with its config changed."""

    def change(**keys) -> Path:
        folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **keys}))
        return folder

    return change


def test_a_quantized_cache_that_vllm_keeps_in_16_bit(tmp_path: Path) -> None:
    said = text(convert(tmp_path / "duo", kv_bits=4, kv_streaming=True, sparsity=0.5, recent=512))
    assert "vLLM holds " in said
    assert "vLLM ignores the quantized cache" in said
    assert "vLLM ignores" not in text(convert(tmp_path / "full", kv_bits=4))


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_are_those_of_the_loaded_model(checkpoint, family):
    folder = checkpoint(family)
    facts = inspect(folder)
    config, model = AutoConfig.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    chunk = getattr(config, "attention_chunk_size", None)
    layers = [attention_of(layer) for layer in model.model.layers]
    slides = [getattr(layer, "is_sliding", True) for layer in layers]  # of EXAONE, every layer has the window's size
    if facts["chunked"]:  # Llama 4, whose layers with chunks are those with RoPE
        slides = [layer.use_rope for layer in layers]
    # where layers differ, dimensions are those of full attention
    attention = next(
        (layer for layer, sliding in zip(layers, slides, strict=True) if layer and not sliding), layers[-1]
    )
    assert facts["dimensions"] == {
        "layers": len(model.model.layers),
        "query_heads": config.num_attention_heads,
        "kv_heads": config.num_attention_heads // attention.num_key_value_groups,
        "head_dim": attention.head_dim,
    }
    assert facts["windows"] == [
        0 if layer is None else getattr(layer, "sliding_window", chunk) if sliding else None
        for layer, sliding in zip(layers, slides, strict=True)
    ]
    assert facts["chunked"] == (chunk is not None)
    stored = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    assert facts["parameters"] == {"F32": sum(stored.values())}
    assert facts["tied"] == (model.lm_head.weight is model.get_input_embeddings().weight)
    assert facts["size"] == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert (facts["supported"], facts["problem"], facts["surgery"]) == (True, None, None)


def test_a_converted_checkpoint_tells_its_surgery(mixed):
    converted = mixed("gemma3")
    facts = inspect(converted.folder)
    surgery = facts["surgery"]
    native = [window is not None for window in facts["windows"]]
    assert any(native)
    assert surgery["full_heads"] == [
        None if own else sum(full) for own, full in zip(native, converted.full, strict=True)
    ]
    assert surgery["streaming"] == sum(
        len(full) - sum(full) for own, full in zip(native, converted.full, strict=True) if not own
    )
    kinds = [
        ["window" if own else "full" if kept else "streaming" for kept in layer]
        for own, layer in zip(native, converted.full, strict=True)
    ]
    assert surgery["heads"] == kinds
    assert surgery["base_model"] == converted.source.name
    assert surgery["options"]["sparsity"] == 0.5
    assert surgery["revertible"]
    # keys and values in float32: full heads keep all tokens, streaming ones sinks and window, native ones their window
    tokens, head, window = 512, 2 * 4 * facts["dimensions"]["head_dim"], max(filter(None, facts["windows"]))
    own = sum(native) * facts["dimensions"]["kv_heads"] * window
    full, streaming = sum(filter(None, surgery["full_heads"])), surgery["streaming"]
    assert surgery["kv_dtype"] == "float32"
    assert surgery["kv_bytes"][0] == {
        "tokens": 512,
        "before": head * ((full + streaming) * tokens + own),
        "after": head * (full * tokens + streaming * (SINK + RECENT) + own),
    }
    assert f"{full} KV heads full, {streaming} streaming" in text(converted.folder)
    serving = surgery["vllm"]
    assert serving["command"] == f"vllm serve {converted.folder}"
    assert serving["kv_bytes"] < serving["dense_bytes"]
    assert serving["command"] in text(converted.folder)


def test_equal_layers_are_counted_once(all_full, mixed):
    assert "full heads per layer: 4 in each\n" in text(all_full("llama").folder)
    counts = " ".join(str(sum(layer)) for layer in mixed("llama").full)
    assert f"full heads per layer: {counts}\n" in text(mixed("llama").folder)


def test_heads_are_told_in_the_originals_order(mixed):
    converted = mixed("qwen2")
    assert any(layer.order != tuple(sorted(layer.order)) for layer in converted.policy.layers)
    heads = inspect(converted.folder)["surgery"]["heads"]
    assert [[kind == "full" for kind in layer] for layer in heads] == converted.full


def test_without_provenance_it_says_that_there_is_no_way_back(mixed, tmp_path):
    folder = Path(shutil.copytree(mixed("llama").folder, tmp_path / "saved"))
    (folder / "kvsurgery.json").unlink()
    assert not inspect(folder)["surgery"]["revertible"]
    assert "cannot be reverted" in text(folder)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"model_type": "bert"}, "bert"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "one latent for all heads (MLA)"),
        ({"model_type": "mimo_v2_flash", "v_head_dim": 4}, "values of another size than keys"),
        ({"model_type": "laguna", "num_attention_heads_per_layer": [8, 4]}, "number of query heads in some layers"),
        ({"num_hidden_layers": 3}, "beyond the 3 layers"),
    ],
    ids=["family", "quantized", "latent", "values", "query heads", "layers"],
)
def test_what_cannot_be_converted_is_no_error_but_says_why(broken, keys, reason):
    folder = broken(**keys)
    facts = inspect(folder)
    assert not facts["supported"]
    assert reason in facts["problem"]
    assert facts["problem"] in text(folder)


def test_an_unknown_family_is_compared_with_known_ones(checkpoint, tmp_path):
    def of(family, model_type, **names):
        folder = Path(shutil.copytree(checkpoint(family), tmp_path / model_type))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
        weights = load_file(folder / "model.safetensors")
        for old, new in names.items():
            weights = {name.replace(old, new): tensor for name, tensor in weights.items() if new or old not in name}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return inspect(folder)["resembles"]

    assert of("llama", "new1") == "its layers resemble llama most: all 9 tensors have the same names and shapes"
    assert of("olmo2", "new2").startswith("its layers resemble olmo2 most: all 11 tensors")
    assert "resemble llama most, with 8 tensors of the same names; it has mlp.down.weight" in of(
        "llama", "new3", down_proj="down"
    )
    assert of("llama", "new4", v_proj="").endswith("it lacks self_attn.v_proj.weight")
    assert of("llama", "new5", layers="blocks") is None
    assert "resembles" not in text(checkpoint("llama"))


def test_pickled_weights(broken):
    folder = broken()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    facts = inspect(folder)
    assert "save_pretrained" in facts["problem"]
    assert facts["dimensions"]["layers"] == 4
    assert facts["shards"] == 0


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"rope_parameters": {"sliding_attention": 7}}, "RoPE"),
        ({"kv_surgery": {"version": 99}}, "version 99"),
        ({"hidden_size": 32}, "shape"),
    ],
    ids=["rope", "surgery", "shape"],
)
def test_a_malformed_checkpoint_is_an_error(broken, tmp_path, keys, word):
    with serve() as hub:
        result = hub.run(tmp_path, "inspect", broken(**keys))
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("kvsurgery: ")
    assert word in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_on_the_hub_the_same_facts_cost_no_weights(checkpoint, tmp_path):
    folder = checkpoint("llama")
    with serve() as hub:
        commit = hub.publish("surgeon/llama", folder).refs["main"]
        result = hub.run(tmp_path, "inspect", "surgeon/llama", "--json")
        fetched = sum(count for path, count in hub.served.items() if path.endswith(".safetensors"))
    assert json.loads(result.stdout) == {**inspect(folder), "name": "surgeon/llama", "revision": commit}
    header = 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    assert fetched == header


def test_a_name_that_is_neither_folder_nor_repository(tmp_path):
    with serve() as hub:
        result = hub.run(tmp_path, "inspect", str(tmp_path / "nowhere"))
    assert result.returncode == 1
    assert "nowhere is neither a folder nor a Hub id" in result.stderr
    assert hub.requests == []


@pytest.mark.parametrize("command", [["inspect"], ["profile", "suggest"]], ids=" ".join)
@pytest.mark.parametrize("name", ["lama-duo", "modles/llama"])
def test_a_mistyped_folder(tmp_path, command, name):
    with serve() as hub:
        result = hub.run(tmp_path, *command, name)
    assert result.returncode == 1
    assert f"(no folder {name} is here)" in result.stderr


def test_a_folder_has_no_revision(checkpoint):
    result = CliRunner().invoke(cli, ["inspect", str(checkpoint("llama")), "--revision", "main"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--revision requires a Hub id" in result.stderr
