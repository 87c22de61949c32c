"""`kvsurgery profile` and what it reads, for the tests of its commands."""

import json

import pytest
from click.testing import CliRunner

from kvsurgery.cli.profile import profile
from kvsurgery.errors import KVSurgeryError

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GATES = "1.0\t-0.001\n0.25\t1.0\n"


@pytest.fixture(name="here")
def working_folder(tmp_path, monkeypatch):
    """A working folder with a model's config, DuoAttention's files and HeadKV's."""
    for name in ("llama", "gates"):
        (tmp_path / name).mkdir()
    (tmp_path / "llama/config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "gates/full_attention_heads.tsv").write_text(GATES)
    (tmp_path / "gates/config.json").write_text('{"sink_size": 8, "recent_size": 16}')
    heads = {f"{layer}-{head}": [layer / 2, head / 8] for layer in (1, 0) for head in (2, 3, 1, 0)}
    (tmp_path / "R.json").write_text(json.dumps(heads))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments):
    """What a successful command prints."""
    result = CliRunner().invoke(profile, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refusal(*arguments):
    """The one line of a command that fails."""
    with pytest.raises(KVSurgeryError) as raised:
        CliRunner().invoke(profile, list(map(str, arguments)), catch_exceptions=False, standalone_mode=False)
    line = str(raised.value)
    assert "\n" not in line
    return line
