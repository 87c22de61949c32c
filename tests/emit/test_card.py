import json
import re
import tomllib
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import yaml

from kvsurgery.checkpoint.model import Model
from kvsurgery.emit.card import kv_table, model_card, with_section
from kvsurgery.emit.config import converted_config
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.heads.lengths import length_name
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.version import HOME, how_to_install
from tests.helpers.deciding import decided

MODEL = ModelDimensions(2, 8, 4, 16)
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 128,
    "max_position_embeddings": 4096,
}
CODE = {"kv_cache.py": b"class Cache: ...", "kv_attention.py": b"def attend(): ..."}
ORIGINAL = """---
license: other
license_name: llama3
language:
- en
- de
tags:
- chat
base_model: someone/else
---
# The original
"""


@pytest.fixture(scope="module")
def decision():
    profile = HeadProfile(np.linspace(0, 1, 8).reshape(2, 4), "duo", "kv", "org/base", MODEL)
    policy = decided(profile)
    return profile, policy, converted_config(Model.of(CONFIG), policy)


def front_matter(card):
    return yaml.safe_load(card.split("---")[1])


def test_card_states_what_was_done(decision):
    profile, policy, config = decision
    card = model_card("org/base", config, profile, policy, CODE, ORIGINAL)
    assert front_matter(card) == {
        "library_name": "transformers",
        "base_model": "org/base",
        "tags": ["kvsurgery", "long-context", "kv-cache"],
        "license": "other",
        "license_name": "llama3",
        "language": ["en", "de"],
    }
    assert "$" not in card
    assert "[org/base](https://huggingface.co/org/base)" in card
    assert "| streaming heads | 4 |" in card
    assert policy.hash[:16] in card
    assert profile.hash[:16] in card
    for row in kv_table(config):
        assert f"| {length_name(row['tokens'])} |" in card
        assert f"{row['after'] / row['before']:.2f}" in card


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        ("language: no", {"language": "no"}),
        ("language: [en,\n  no]", {"language": ["en", "no"]}),
        ("license_name: 3.10\nlicense_link:", {"license_name": "3.10"}),
        ("language:\n- en\n\n# spoken too\n- de", {"language": ["en", "de"]}),
        ("license: [mit", {}),
        ("- license", {}),
    ],
)
def test_card_keeps_metadata_as_it_was_written(decision, lines, kept):
    profile, policy, config = decision
    card = model_card("org/base", config, profile, policy, CODE, f"---\n{lines}\n---\n# The original\n")
    added = front_matter(model_card("org/base", config, profile, policy, CODE))
    assert front_matter(card) == added | kept


def test_card_says_how_to_load_code_safely(decision):
    profile, policy, config = decision
    card = model_card("org/base", config, profile, policy, CODE)
    snippet = card.split("```python\n")[1].split("```")[0]
    compile(snippet, "card", "exec")
    assert 'revision="' in snippet
    assert "transformers 5.3 or newer" in card
    listed = dict(line.split()[::-1] for line in card.split("```text\n")[1].split("\n```")[0].splitlines())
    assert listed == {name: sha256(content).hexdigest() for name, content in CODE.items()}


def test_card_says_in_what_order_to_read_the_code(decision):
    profile, policy, config = decision
    code = {"kv_b.py": b'"""What comes first.\n\nMore of it.\n"""', "kv_a.py": b'"""What follows."""'}
    table = "| `kv_b.py` | What comes first. |\n| `kv_a.py` | What follows. |\n"
    assert table in model_card("org/base", config, profile, policy, code)


def test_a_local_base_model_is_no_link(decision):
    profile, policy, config = decision
    card = model_card("llama3", config, profile, policy, CODE)
    assert "base_model" not in front_matter(card)
    assert "huggingface.co" not in card


def test_kv_table_by_hand(decision):
    _, _, config = decision
    table = kv_table(json.loads(json.dumps(config)))
    rows = {row["tokens"]: (row["before"], row["after"]) for row in table}
    # two layers of 4 heads of 16 elements; keys and values of 2 bytes; half of the heads keep 64 + 256 tokens
    assert rows[4096] == (2 * 2 * 4 * 4096 * 16 * 2, 2 * (4 * 4096 + 4 * 320) * 16 * 2)
    assert [*rows] == [512, 2048, 4096]


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_kv_table_in_the_dtype_of_the_model(decision, key):
    profile, policy, config = decision
    plain = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}
    wide = {**plain, key: "float32"}
    halves = [
        {**row, "before": 2 * row["before"], "after": 2 * row["after"]} for row in kv_table({**plain, key: "bfloat16"})
    ]
    assert kv_table(wide) == halves
    assert "for a model in float32:" in model_card("org/base", wide, profile, policy, CODE)


def test_a_report_has_one_section_wherever_its_owner_moves_it(decision):
    profile, policy, config = decision
    card = model_card("org/base", config, profile, policy, CODE)
    once = with_section(card, "## Evaluation\n\nthe first")
    assert once.startswith(card.rstrip())
    moved = once[len(card.rstrip()) :].strip() + "\n\n" + card
    twice = with_section(moved, "## Evaluation\n\nnew")
    assert "the first" not in twice
    assert twice.count("## Evaluation") == 1
    assert twice.endswith(card)
    assert with_section(twice, "## Evaluation\n\nnew") == twice


@pytest.mark.parametrize("card", ["", "# Mine", "# Mine\n<!-- kvsurgery report -->\nan end that is missing"])
def test_other_cards_keep_all_of_their_text(card):
    with_report = with_section(card, "scores")
    assert with_report.startswith(card)
    assert with_report.count("scores") == 1


@pytest.mark.parametrize("quantized", [{}, {"kv_bits": 4}], ids=str)
def test_card_says_how_to_ask_about_vllm_and_freezes_no_forecast(decision, quantized):
    profile, _, _ = decision
    policy = decided(profile, **quantized)
    config = converted_config(Model.of(CONFIG), policy)
    served = model_card("org/base", config, profile, policy, CODE).split("## vLLM")[1].split("\n## ")[0]
    assert "`kvsurgery inspect DIR`" in served
    assert not re.search(r"\d (B|KiB|MiB|GiB)\b|vllm serve DIR", served)


@pytest.mark.parametrize("home", ["", "https://example.org/kvsurgery"])
def test_card_links_to_where_kvsurgery_is_or_says_that_it_is_nowhere(decision, monkeypatch, home):
    profile, policy, config = decision
    monkeypatch.setattr("kvsurgery.emit.card.HOME", home)
    for base_model in ("org/base", "base"):
        card = model_card(base_model, config, profile, policy, CODE)
        assert ("(https://example.org/kvsurgery)" in card) == bool(home)
        assert ("not on a package index" in card) != bool(home)
        assert "pip install" not in card


def test_metadata_links_to_where_kvsurgery_is():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project.get("urls", {}).get("Homepage", "") == HOME


@pytest.mark.parametrize("home", ["", "https://example.org/kvsurgery"])
def test_extras_are_installed_from_where_kvsurgery_is(monkeypatch, home):
    monkeypatch.setattr("kvsurgery.version.HOME", home)
    assert ("pip install 'kvsurgery[eval]'" in how_to_install("eval")) == bool(home)
    assert ("pip install '.[eval]'" in how_to_install("eval")) != bool(home)


def test_no_text_sends_people_to_an_index():
    root = Path(__file__).parents[2]
    texts = [path for folder in ("kvsurgery", "templates") for path in (root / folder).rglob("*.*") if path.is_file()]
    sources = [path for path in texts if path.suffix in (".py", ".jinja", ".toml") and path.name != "version.py"]
    assert len(sources) > 100
    assert not [path for path in sources if re.search(r"install\S* '?kvsurgery", path.read_text())]
