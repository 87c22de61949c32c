"""`Recipe`: what it holds, what it refuses, and its file."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.errors import PolicyError, RecipeError
from kvsurgery.recipe import FLAT, TABLES, Budgeted, Cache, Demand, Recipe, ReformSizes
from kvsurgery.system.typed_toml import to_toml
from kvsurgery.templates.kv_layout import Quantization, Selection

TOKENS = st.integers(0, 1 << 40)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SHARE = st.floats(allow_nan=False)
BOTH = "heads that are not full either stream or have budgets; leave one out"


def maybe(strategy):
    return st.none() | strategy


@st.composite
def recipes(draw):
    """Recipes that contradict themselves nowhere."""
    rest = draw(st.sampled_from([None, "streaming", "budgeted"]))
    values = {"rest": rest, "profiles": tuple(draw(st.lists(TEXT, max_size=2))), "tp": draw(TOKENS)}
    values |= {"tp_uneven": draw(st.booleans()), "group_reduce": draw(st.sampled_from(["mean", "max"]))}
    values |= {"ignore_model_code": draw(st.booleans()), "head_unit": draw(st.integers(1, 9))}
    if rest == "streaming":
        values |= {"sink": draw(st.integers(0, 99)), "recent": draw(st.integers(1, 1 << 29))}
    sizes = {name: draw(maybe(TOKENS)) for name in ("chunk", "keep", "query_length")}
    values["reform"] = ReformSizes(**sizes, compressor=draw(st.sampled_from([None, "h2o", "tova", "streaming"])))
    fit = draw(st.booleans())
    if fit:
        context = draw(st.integers(1, 1 << 30))
        values["fit"] = Demand(draw(TOKENS), context, draw(st.integers(1, 9)), draw(st.integers(0, context - 1)))
    else:
        way = draw(st.sampled_from([None, "sparsity", "threshold", "full_heads"]))
        values |= {way: draw(TOKENS if way == "full_heads" else SHARE)} if way else {}
        values["kv_bits"] = draw(st.sampled_from([None, 8, 4, 3, "k3v2", 2, "auto", "source"]))
    if rest == "budgeted":
        values |= {"window": draw(st.integers(1, 1 << 29)), "kernel_size": 2 * draw(st.integers(0, 1 << 20)) + 1}
        values |= {"budget": None if fit else draw(maybe(TOKENS)), "budgets_from": draw(maybe(TEXT))}
        values |= {"beta": draw(maybe(SHARE)), "pool": draw(st.sampled_from(["max", "avg"]))}
    if fit or values["kv_bits"]:
        values |= {"kv_scheme": draw(st.sampled_from(["kivi", "per-token"])), "kv_residual": draw(TOKENS)}
        values |= {"kv_group_size": draw(maybe(TOKENS)), "kv_sink": draw(TOKENS), "kv_measured": draw(maybe(TEXT))}
        if values.get("kv_bits") == "auto":
            values |= {"kv_budget": draw(st.floats(2, 16)), "kv_measured": draw(TEXT)}
        else:
            values |= {"kv_streaming": draw(st.booleans()), "kv_clip": draw(st.sampled_from([None, False, True]))}
            values["kv_rotate"] = draw(st.sampled_from([None, "none", "values", "both"]))
        if values.get("kv_bits") == "source":
            values["kv_measured"] = None
    return Recipe.of(**values)


@given(recipes())
def test_a_file_gives_the_recipe_back(recipe):
    assert Recipe.from_toml(recipe.to_toml()) == recipe


@given(recipes())
def test_a_file_without_tables_gives_the_recipe_back(recipe):
    """As they were written before there were tables."""
    tables = {name: getattr(recipe, name) for name in TABLES}
    flat = {
        name: value
        for name, place in FLAT.items()
        if (table := tables[place.split(".")[0]]) and (value := getattr(table, place.split(".")[1])) is not None
    }
    flat |= {"profiles": recipe.profiles} | ({"rest": recipe.rest} if recipe.rest else {})
    lines = [f"{name} = {to_toml(value)}" for name, value in flat.items()]
    read = Recipe.from_toml("\n".join(lines)) if recipe.fit is None else None
    assert read in (None, replace(recipe, reform=ReformSizes()))


def test_a_file_is_what_one_would_write():
    recipe = Recipe.of(
        ("duo.safetensors",), full_heads=6, rest="streaming", kv_bits=4, reform=ReformSizes(keep=9), tp=2, recent=512
    )
    text = """profiles = ["duo.safetensors"]

[heads]
full_heads = 6
group_reduce = "mean"
head_unit = 1

[streaming]
sink = 64
recent = 512

[cache]
bits = 4
scheme = "kivi"
residual = 128
streaming = false
sink = 4

[devices]
tp = 2
tp_uneven = false

[reform]
keep = 9
"""
    assert recipe.to_toml() == text
    demand = Recipe.from_toml("[fit]\nmemory = 24_000_000_000\ncontext = 131_072").fit
    assert demand == Demand(24 * 10**9, 131072)


def test_profiles_are_found_from_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()
    absolute = str(tmp_path / "b")
    recipe = Recipe.of(("a", absolute), budgets_from="c", kv_bits=4, kv_measured="d")
    recipe.save("recipes/one.toml")
    assert 'profiles = ["../a", ' in (text := Path("recipes/one.toml").read_text())
    assert 'budgets_from = "../c"' in text
    assert 'measured = "../d"' in text
    assert Recipe.load("recipes/one.toml") == recipe
    os.chdir("recipes")
    loaded = Recipe.load("one.toml")
    assert (loaded.profiles, loaded.budgets_from, loaded.measured) == (("../a", absolute), "../c", "../d")


def test_defaults_are_those_of_the_emitted_code():
    assert Budgeted().selection == Selection()
    assert Cache(4).quantization == Quantization(4)
    assert Cache().quantization is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sparcity = 0.5", "unknown key `sparcity`; did you mean `heads.sparsity`?"),
        ("head = 3", "unknown key `head`; did you mean `heads`?"),
        ("[heads]\nsparcity = 0.5", "unknown key `heads.sparcity`; did you mean `heads.sparsity`?"),
        ("sink = 4\nstreaming = 3", "`streaming` is a table, got 3"),
        ("[streaming]\n[budgeted]", "`rest` streaming and `rest` budgeted exclude each other, as " + BOTH),
        ("sink = 4\nwindow = 9", "`streaming.sink` and `budgeted.window` exclude each other, as " + BOTH),
        ("[cache]", "`cache` requires `cache.bits`"),
        ("[reform]\nchunks = 9", "unknown key `reform.chunks`; did you mean `reform.chunk`?"),
        ("[fit]\nbytes = 9", "unknown key `fit.bytes`; known are memory, context, batch, new_tokens, chunk"),
        ("[fit]\nmemory = 9", "`fit.context` is missing"),
        ("sink = '4'", "`streaming.sink` is a whole number, got '4'"),
        ("sink = '2K'", "`streaming.sink` is a whole number, got '2K'; write 2048"),
        ("sink = true", "`streaming.sink` is a whole number, got True"),
        ("sink = 4.0", "`streaming.sink` is a whole number, got 4.0"),
        ("sparsity = 'half'", "`heads.sparsity` is a number, got 'half'"),
        ("rest = 'stream'", "`rest` is streaming or budgeted, got 'stream'"),
        ("profiles = 'duo'", "`profiles` is a list of strings, got 'duo'"),
        ("budgets_from = 3", "`budgeted.budgets_from` is a text, got 3"),
        (
            "rest = 'streaming'\nbudgets_from = 'x'",
            "`rest` streaming and `budgeted.budgets_from` exclude each other, as " + BOTH,
        ),
        ("profiles = [1]", "`profiles` is a list of strings, got (1,)"),
        ("reform = 9", "`reform` is a table, got 9"),
        ("[reform]\nkeep = 'all'", "`reform.keep` is a whole number, got 'all'"),
        ("[fit]\nmemory = '24GB'\ncontext = 9", "`fit.memory` is a whole number, got '24GB'; write 24000000000"),
        ("[fit]\nmemory = 9\ncontext = 0", "`fit.context` must lie in [1, 1073741824] tokens, got 0"),
        ("sparsity = 0.5\nfull_heads = 3", "`heads.sparsity` and `heads.full_heads` exclude each other; give one"),
        ("rest = 'streaming'\nbudget = 9", "`rest` streaming and `budgeted.budget` exclude each other, as " + BOTH),
        ("kv_residual = 9", "`cache.residual` requires `cache.bits`"),
        (
            "kv_bits = 4\n[fit]\nmemory = 9\ncontext = 9",
            "fitting a memory budget decides `cache.bits`; leave out what it decides",
        ),
        ("sink = ", "not TOML: Invalid value (at end of document)"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path, text, words):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        Recipe.load(path)
    assert str(error.value) == f"{path}: {words}"


def test_a_number_of_thousands_of_digits(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(f"sink = {'1' * 5000}")
    with pytest.raises(RecipeError, match="not TOML: Exceeds the limit"):
        Recipe.load(path)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(RecipeError, match=r"cannot read nowhere\.toml: No such file"):
        Recipe.load("nowhere.toml")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(RecipeError, match="bytes: not TOML: "):
        Recipe.load(tmp_path / "bytes")


class TestChanged:
    FIT = Demand(1, 1)

    def test_another_way_to_choose_full_heads_takes_the_place_of_the_first(self):
        for way in ({"sparsity": 0.5}, {"threshold": 1.0}, {"full_heads": 3}, {"fit": self.FIT}):
            for other in ({"sparsity": 0.25}, {"threshold": 2.0}, {"full_heads": 4}, {"fit": Demand(2, 2)}):
                assert Recipe.of(**way).changed(**other) == Recipe.of(**other)
        assert Recipe.of(sparsity=0.5).changed(sink=4) == Recipe.of(sparsity=0.5, sink=4)

    def test_what_a_value_rules_out_is_gone(self):
        whole = Recipe.of(rest="budgeted", budget=9, kv_bits=4, kv_residual=0)
        assert whole.changed(rest="streaming") == Recipe.of(rest="streaming", kv_bits=4, kv_residual=0)
        assert whole.changed(kv_bits=None) == Recipe.of(rest="budgeted", budget=9)
        assert whole.changed(fit=self.FIT) == Recipe.of(rest="budgeted", fit=self.FIT, kv_residual=0)

    def test_bits_of_layers_give_way_to_one_width_and_the_other_way_round(self):
        auto = Recipe.of(kv_bits="auto", kv_budget=3.0, kv_measured="d")
        assert auto.changed(kv_bits=4) == Recipe.of(kv_bits=4, kv_measured="d")
        assert auto.changed(kv_bits=None) == Recipe()
        assert auto.changed(fit=self.FIT) == Recipe.of(fit=self.FIT, kv_measured="d")
        assert auto.changed(kv_budget=4.0) == Recipe.of(kv_bits="auto", kv_budget=4.0, kv_measured="d")
        one = Recipe.of(kv_bits=4, kv_rotate="both", kv_clip=True, kv_streaming=True, kv_measured="d")
        assert one.changed(kv_bits="auto", kv_budget=3.0) == auto

    def test_values_that_contradict_each_other_are_refused(self):
        for values in ({"sparsity": 0.5, "fit": self.FIT}, {"rest": "streaming", "budget": 9}, {"sink": "4"}):
            with pytest.raises(PolicyError):
                Recipe().changed(**values)


def test_nothing_heavy_is_loaded():
    script = "import sys, kvsurgery.recipe; print({'torch', 'numpy', 'blake3', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
