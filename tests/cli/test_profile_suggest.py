"""`kvsurgery profile suggest` as a user meets it."""

import json

from tests.helpers.command import done, refused, run
from tests.helpers.hub_server import serve
from tests.helpers.shards import llama_checkpoint

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def test_a_model_that_was_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Llama-3.1-8B-Instruct").mkdir()
    (tmp_path / "Llama-3.1-8B-Instruct/config.json").write_text(json.dumps(CONFIG))
    result = done("profile", "suggest", "Llama-3.1-8B-Instruct")
    text = result.out
    assert "measured on this model:\n  duo: measured on meta-llama/Llama-3.1-8B-Instruct\n" in text
    assert "    git clone https://github.com/mit-han-lab/duo-attention\n" in text
    assert "--model Llama-3.1-8B-Instruct -o duo.safetensors\n" in text
    assert "of other families or dimensions; --all lists them" in text
    assert "the cost of measuring cannot be estimated" in result.err
    every = done("profile", "suggest", "Llama-3.1-8B-Instruct/config.json", "--all").out
    assert "cannot be used:" in every
    assert "Qwen/Qwen2.5-7B-Instruct has 28 layers, 28 query heads, 4 KV heads of 128" in every
    facts = json.loads(done("profile", "suggest", "Llama-3.1-8B-Instruct", "--json").out)
    assert facts["profiles"][0]["fit"] == "measured"
    assert facts["measuring_estimate"] == []


def test_a_model_that_nobody_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    llama_checkpoint(tmp_path / "llama")
    text = done("profile", "suggest", "llama").out
    assert "No published profile fits; measure one." in text
    assert "Estimated cost of measuring" in text
    assert "Nothing was timed" in text
    assert "Measure: kvsurgery profile compute llama --method duo -o profile.safetensors\n" in text
    [duo, *_] = json.loads(done("profile", "suggest", "llama", "--json").out)["measuring_estimate"]
    assert (duo["method"], duo["prompts"]) == ("duo", 2000)


def test_commands_are_complete(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    llama_checkpoint(tmp_path / "my models" / "Llama-3.1-8B-Instruct")
    (tmp_path / "my models/Llama-3.1-8B-Instruct/config.json").write_text(json.dumps(CONFIG))
    for source in ("my models/Llama-3.1-8B-Instruct", "my models/Llama-3.1-8B-Instruct/config.json"):
        text = done("profile", "suggest", source).out
        assert f"--model '{source}' -o duo.safetensors\n" in text
        assert "Measure: kvsurgery profile compute 'my models/Llama-3.1-8B-Instruct' --method duo -o" in text


def test_one_line_of_trouble(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "./nowhere is neither a folder nor a Hub id" in refused("profile", "suggest", "./nowhere")
    (tmp_path / "empty").mkdir()
    assert "cannot read empty/config.json" in refused("profile", "suggest", "empty")
    assert "--revision requires a Hub id" in run("profile", "suggest", "empty", "--revision", "main").err


def test_a_hub_id_by_its_headers_and_card(tmp_path):
    llama_checkpoint(tmp_path / "llama")
    (tmp_path / "llama/README.md").write_text("---\nbase_model: meta-llama/Llama-3.1-8B\n---\n")
    with serve() as hub:
        hub.publish("org/tuned", tmp_path / "llama")
        result = hub.run(tmp_path, "profile", "suggest", "org/tuned", "--json")
        assert result.returncode == 0, result.stderr
        fetched = sum(count for path, count in hub.served.items() if path.endswith(".safetensors"))
        assert fetched < (tmp_path / "llama/model.safetensors").stat().st_size
    facts = json.loads(result.stdout)
    assert facts["made_from"] == ["llama-3.1-8b"]
    assert len(facts["measuring_estimate"]) == 4
