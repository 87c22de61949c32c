"""Which published profiles fit a model, and why."""

import json
import shlex
import tomllib

import pytest

from kvsurgery.cli.profile.importing import import_group
from kvsurgery.errors import CheckpointError, UnsupportedModel
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.importers.reform import HEADS
from kvsurgery.profile.published import ancestors, normal, published
from kvsurgery.profile.suggestion import ModelIdentity, suggestions

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def identity(folder, name, card="", **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
    if card:
        (folder / "README.md").write_text(card)
    return ModelIdentity.read(folder, name)


def fits(model):
    return {(one.published.format, one.published.model): one.fit for one in suggestions(model)}


class TestPublished:
    @pytest.mark.parametrize("entry", published(), ids=lambda entry: f"{entry.format} {entry.model}")
    def test_its_command_parses(self, entry):
        *clone, command = entry.commands("./my model")
        program, group, verb, name, *words = shlex.split(command)
        assert (program, group, verb) == ("kvsurgery", "profile", "import")
        import_group.commands[name].make_context(name, list(words))
        if clone:
            assert words[0].startswith(clone[0].rpartition("/")[2] + "/")
            assert "./my model" in words

    def test_no_file_is_listed_twice(self):
        files = [(entry.repository, entry.path, entry.options) for entry in published() if entry.path]
        assert len(files) == len(set(files)) > 30

    def test_shipped_heads_are_of_the_dimensions_they_say(self):
        heads = tomllib.loads(HEADS.read_text())
        found = {entry.model: entry.dimensions for entry in published() if entry.format == "reform"}
        assert found == {name: ModelDimensions(*content["model"]) for name, content in heads.items()}

    def test_names(self):
        assert normal("meta-llama/Meta-Llama-3-8B-hf") == normal("./models/llama-3-8b/") == "llama-3-8b"
        assert ancestors(["deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"]) == {"qwen2.5-math-7b", "qwen2.5-7b"}
        assert ancestors(["someone/unknown"]) == set()


class TestFit:
    def test_the_measured_model_itself(self, tmp_path):
        found = fits(identity(tmp_path / "a", "./models/Llama-3.1-8B-Instruct"))
        assert found["duo", "meta-llama/Llama-3.1-8B-Instruct"] == "measured"
        assert found["rlkv", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"] == "related"
        assert found["lu-kv", "meta-llama/Llama-3.1-8B"] == "related"
        assert found["headkv", "meta-llama/Meta-Llama-3-8B-Instruct"] == "shape"
        assert found["duo", "mistralai/Mistral-7B-Instruct-v0.2"] == "no"
        assert found["duo", "togethercomputer/Llama-2-7B-32K-Instruct"] == "no"

    @pytest.mark.parametrize(
        "name",
        [
            "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16",
            "nvidia/Llama-3.1-8B-Instruct-FP8",
            "nvidia/Llama-3.1-8B-Instruct-NVFP4",
            "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4",
            "hugging-quants/Meta-Llama-3.1-8B-Instruct-GPTQ-INT4",
            "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit",
            "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic",
        ],
    )
    def test_quantized_weights_have_the_heads_of_what_they_were_made_from(self, tmp_path, name):
        settings = {"quant_method": "fp8"}
        found = fits(identity(tmp_path / "a", name, quantization_config=settings))
        assert found["duo", "meta-llama/Llama-3.1-8B-Instruct"] == "related"
        assert fits(identity(tmp_path / "b", name))["duo", "meta-llama/Llama-3.1-8B-Instruct"] == "shape"

    def test_the_best_come_first(self, tmp_path):
        order = [one.fit for one in suggestions(identity(tmp_path / "a", "Llama-3.1-8B-Instruct"))]
        assert order == sorted(order, key=["measured", "related", "shape", "no"].index)
        assert len(order) == len(published())

    @pytest.mark.parametrize(
        "card",
        [
            "---\nbase_model: meta-llama/Llama-3.1-8B-Instruct\n---\n",
            "---\nlicense: mit\nbase_model:\n- other/merge\n- meta-llama/Llama-3.1-8B-Instruct\ntags:\n- x\n---\n# y\n",
            "---\r\nbase_model: 'meta-llama/Meta-Llama-3.1-8B-Instruct'\r\n---\r\n",
            '---\nbase_model: ["meta-llama/Llama-3.1-8B-Instruct"]\n---\n',
        ],
        ids=["one", "several", "quoted", "inline"],
    )
    def test_a_fine_tune_by_its_card(self, tmp_path, card):
        [one] = [
            one
            for one in suggestions(identity(tmp_path / "a", "./mine", card))
            if (one.published.format, one.published.model) == ("wg-kv", "meta-llama/Llama-3.1-8B-Instruct")
        ]
        assert (one.fit, one.reason) == (
            "related",
            "measured on meta-llama/Llama-3.1-8B-Instruct, which this model was made from",
        )

    def test_a_name_in_the_config(self, tmp_path):
        model = identity(tmp_path / "a", "./mine", _name_or_path="meta-llama/Llama-3.1-8B-Instruct")
        assert fits(model)["duo", "meta-llama/Llama-3.1-8B-Instruct"] == "measured"
        assert "_name_or_path" not in identity(tmp_path / "a", "./mine", _name_or_path=[]).names

    def test_the_base_of_what_was_measured(self, tmp_path):
        reasons = {one.reason for one in suggestions(identity(tmp_path / "a", "meta-llama/Llama-3.1-8B"))}
        assert "measured on meta-llama/Llama-3.1-8B-Instruct, which was made from this model" in reasons

    @pytest.mark.parametrize(
        "card", ["base_model: a/b", "---\nbase_model:\n---\n", "---\nbase_model: [\n", "\0", "---\n"]
    )
    def test_a_card_that_says_nothing(self, tmp_path, card):
        assert identity(tmp_path / "a", "./mine", card).ancestors == set()

    def test_other_dimensions_and_families_say_why(self, tmp_path):
        reasons = {one.reason for one in suggestions(identity(tmp_path / "a", "x", num_hidden_layers=33))}
        assert "meta-llama/Llama-3.1-8B has 32 layers, 32 query heads, 8 KV heads of 128" in reasons
        found = suggestions(identity(tmp_path / "a", "x"))
        assert any("is a mistral model, and this is a llama model" in one.reason for one in found)

    def test_no_model(self, tmp_path):
        with pytest.raises(CheckpointError):
            ModelIdentity.read(tmp_path / "nothing", "x")
        with pytest.raises(UnsupportedModel, match="model_type"):
            identity(tmp_path / "a", "x", model_type="mamba")
