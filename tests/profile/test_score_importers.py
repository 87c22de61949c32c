"""Scores, rankings and lists of heads that others publish become profiles."""

import json
import random

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery import __version__
from kvsurgery.errors import ProfileError
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.policy.evidence import Evidence
from kvsurgery.profile.importers.flexicache import import_flexicache
from kvsurgery.profile.importers.headkv import import_headkv
from kvsurgery.profile.importers.kvzip import import_kvzip
from kvsurgery.profile.importers.reform import import_reform
from kvsurgery.profile.importers.rtpurbo import import_rtpurbo
from kvsurgery.profile.profiled_model import ProfiledModel
from tests.helpers.profile_files import GQA, MODEL, dump, trials


class TestHeadKV:
    def test_by_key_whatever_the_order(self, tmp_path):
        shuffled = list(trials().items())
        random.Random(0).shuffle(shuffled)
        made = import_headkv(dump(tmp_path / "R.json", dict(shuffled)), ProfiledModel("org/model", GQA, "abc"))
        assert made.scores.tolist() == [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]]
        assert (made.method, made.granularity, made.model) == ("headkv-r", "query", GQA)
        assert (made.base_model, made.base_revision) == ("org/model", "abc")

    @given(st.lists(st.lists(st.floats(0, 2), min_size=1, max_size=9), min_size=12, max_size=12))
    def test_mean_over_trials(self, tmp_path_factory, lists):
        path = dump(tmp_path_factory.mktemp("headkv") / "R.json", dict(zip(trials(), lists, strict=True)))
        made = import_headkv(path, MODEL)
        means = np.array([np.mean(np.array(values, np.float64)) for values in lists]).reshape(3, 4)
        np.testing.assert_allclose(made.scores, means, rtol=2e-7, atol=1e-45)
        assert made.provenance["trials"] == [min(map(len, lists)), max(map(len, lists))]

    def test_provenance(self, tmp_path):
        path = dump(tmp_path / "R.json", trials())
        assert import_headkv(path, MODEL).provenance == {
            "source": "R.json",
            "blake3": blake3(path.read_bytes()).hexdigest(),
            "origin": "HeadKV",
            "tool": f"kvsurgery {__version__}",
            "trials": [3, 3],
        }

    def test_method_is_said_not_guessed(self, tmp_path):
        path = dump(tmp_path / "model_R2.json", trials())
        assert import_headkv(path, MODEL).method == "headkv-r"
        assert import_headkv(path, MODEL, method="headkv-r2").method == "headkv-r2"
        with pytest.raises(ProfileError, match="unknown HeadKV method 'duo'; known: headkv-r, headkv-er, headkv-r2"):
            import_headkv(path, MODEL, method="duo")

    @pytest.mark.parametrize(
        ("rename", "message"),
        [
            ({"2-3": None}, "holds 11 heads, but org/model has 3 layers of 4 query heads; was another model measured"),
            ({"2-3": "3-0"}, r"lacks head '2-3' \(layer-head\), but org/model has 3 layers of 4 query heads"),
            ({"0-1": "0-01"}, "lacks head '0-1'"),
            ({"1-2": "2_1"}, "lacks head '1-2'"),
        ],
        ids=["missing", "other layer", "padded", "misspelt"],
    )
    def test_heads_that_do_not_fit(self, tmp_path, rename, message):
        content = {rename.get(key, key): value for key, value in trials().items() if rename.get(key, key) is not None}
        with pytest.raises(ProfileError, match=message):
            import_headkv(dump(tmp_path / "R.json", content), MODEL)

    def test_one_head_too_many(self, tmp_path):
        with pytest.raises(ProfileError, match="holds 13 heads, but org/model has 3 layers of 4 query heads"):
            import_headkv(dump(tmp_path / "R.json", {**trials(), "3-0": [1]}), MODEL)

    def test_a_head_given_twice(self, tmp_path):
        text = json.dumps(trials()).replace('"0-1"', '"0-0"')
        with pytest.raises(ProfileError, match=r"R.json is not JSON: a key is given twice"):
            import_headkv(dump(tmp_path / "R.json", text), MODEL)

    @pytest.mark.parametrize("value", [[], 0.5, None, {}, "0.5"], ids=repr)
    def test_a_head_without_trials_has_no_score(self, tmp_path, value):
        with pytest.raises(ProfileError, match="head 1-2 has no list of trials, so no score; measure it again"):
            import_headkv(dump(tmp_path / "R.json", {**trials(), "1-2": value}), MODEL)

    @pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf"), 10**400, "1", None, True, [1]], ids=range(8))
    def test_a_trial_that_is_no_score(self, tmp_path, value):
        with pytest.raises(ProfileError, match=r"head 1-2 has the trial .{1,40}; scores are numbers from 0 up"):
            import_headkv(dump(tmp_path / "R.json", {**trials(), "1-2": [1, value]}), MODEL)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "is not JSON"),
            ("0.5\t0.5\n", "is not JSON"),
            ('{"0-0": [0', "is not JSON"),
            ("[" * 200_000, "is not JSON"),
            ('{"0-0": [' + "9" * 5000 + "]}", "is not JSON"),
            ("[[0.5]]", "holds no JSON object"),
            ("{}", "holds 0 heads"),
        ],
        ids=range(7),
    )
    def test_not_such_a_file(self, tmp_path, content, message):
        with pytest.raises(ProfileError, match=rf"R.json {message}"):
            import_headkv(dump(tmp_path / "R.json", content), MODEL)

    def test_a_model_of_absurd_dimensions(self, tmp_path):
        absurd = ModelDimensions(1 << 20, 1 << 20, 1, 8)
        with pytest.raises(ProfileError, match="holds 12 heads, but org/model has 1048576 layers"):
            import_headkv(dump(tmp_path / "R.json", trials()), ProfiledModel("org/model", absurd))

    def test_nothing_there(self, tmp_path):
        for path in (tmp_path, tmp_path / "R.json"):
            with pytest.raises(ProfileError, match="cannot read"):
                import_headkv(path, MODEL)


class TestReform:
    @pytest.mark.parametrize(
        ("name", "heads"),
        [
            ("mistralai/Mistral-Nemo-Instruct-2407", "q15.9 v19.5 v27.0 v27.7"),
            ("Qwen/Qwen2.5-7B-Instruct", "v7.3 k14.0 k14.3 v19.0"),
            ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "q8.3 v11.1 k14.0 v15.0"),
            ("Qwen/Qwen2.5-Coder-7B-Instruct", "v13.2 k14.0 q14.4 v14.3"),
            ("mistralai/Pixtral-12B-2409", "v10.3 v19.5 v27.0 v27.7"),
        ],
    )
    def test_the_paper_s_choices(self, name, heads):
        made = import_reform(name)
        assert " ".join(map(str, sorted(made.embedding_heads, key=lambda head: (head.layer, head.state)))) == heads
        assert (made.method, made.base_model, made.scores, made.ranking) == ("reform", name, None, None)
        assert made == import_reform(name.partition("/")[2].lower())
        # the paper's rule: at least two lie below 70% of depth; those it names all do
        assert all(10 * head.layer < 7 * made.model.layers for head in made.embedding_heads)

    def test_provenance(self):
        assert import_reform("Qwen/Qwen2.5-7B-Instruct").provenance == {
            "source": "arXiv:2506.01215",
            "origin": "REFORM",
            "tool": f"kvsurgery {__version__}",
        }

    def test_another_model(self):
        with pytest.raises(
            ProfileError, match=r"chose no heads for 'Qwen/Qwen3-8B'; it did for mistralai/Mistral-Nemo"
        ):
            import_reform("Qwen/Qwen3-8B")


class TestKvzip:
    SCORES = ((0.25, 1.5), (0.5, 0.0), (0.125, 2.0))

    @pytest.mark.parametrize("shape", [(3, 2), (3, 1, 2), (1, 3, 2)])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_axes_of_one_and_every_dtype(self, tmp_path, shape, dtype):
        torch.save(torch.tensor(self.SCORES, dtype=dtype).reshape(shape), tmp_path / "llama-qa.pt")
        made = import_kvzip([tmp_path / "llama-qa.pt"], MODEL)
        assert made.scores.tolist() == [list(row) for row in self.SCORES]
        assert (made.method, made.granularity, Evidence(made).rest) == ("kvzip", "kv", "streaming")

    def test_a_head_gets_its_largest_score(self, tmp_path):
        one = torch.tensor(self.SCORES)
        torch.save(one, tmp_path / "a.pt")
        torch.save(one.flip(1), tmp_path / "b.pt")
        made = import_kvzip([tmp_path / "a.pt", tmp_path / "b.pt"], MODEL)
        assert made.scores.tolist() == torch.maximum(one, one.flip(1)).tolist()
        assert [file["source"] for file in made.provenance["files"]] == ["a.pt", "b.pt"]

    def test_one_kv_head(self, tmp_path):
        torch.save(torch.tensor([[0.5], [0.25], [1.0]]), tmp_path / "a.pt")
        model = ProfiledModel("org/model", ModelDimensions(layers=3, query_heads=4, kv_heads=1, head_dim=8))
        assert import_kvzip([tmp_path / "a.pt"], model).scores.tolist() == [[0.5], [0.25], [1.0]]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (torch.zeros(2, 3), "holds 2 x 3 scores, but org/model has 3 layers of 2 KV heads"),
            (torch.zeros(3, 2, dtype=torch.int64), "holds no tensor of scores"),
            ({"scores": torch.zeros(3, 2)}, "holds no tensor of scores"),
            (torch.full((3, 2), float("nan")), "measure it again"),
            (ProfiledModel, "is not a tensor that torch loads without running code"),
        ],
        ids=["shape", "integers", "a dict", "nan", "code"],
    )
    def test_other_contents(self, tmp_path, content, message):
        torch.save(content, tmp_path / "a.pt")
        with pytest.raises(ProfileError, match=message):
            import_kvzip([tmp_path / "a.pt"], MODEL)

    @pytest.mark.parametrize(
        "raw", [b"", b"PK\x03\x04", b"0.5\t0.5\n", b"\x80\x02}."], ids=["empty", "zip", "tsv", "old"]
    )
    def test_no_tensor(self, tmp_path, raw):
        (tmp_path / "a.pt").write_bytes(raw)
        with pytest.raises(ProfileError, match=r"a\.pt"):
            import_kvzip([tmp_path / "a.pt"], MODEL)


HEAD_LISTS = {"Llama": {"mixed": [[0, 1], [2, 0]], "code": [[1, 1]]}, "Qwen": {"mixed": []}}


class TestFlexicache:
    def test_listed_heads_are_full(self, tmp_path):
        path = dump(tmp_path / "heads.json", HEAD_LISTS)
        made = import_flexicache(path, MODEL, "Llama", "mixed")
        assert made.scores.tolist() == [[0, 1], [0, 0], [1, 0]]
        assert (made.provenance["entry"], made.provenance["heads"]) == ("Llama", "mixed")
        named = import_flexicache(dump(tmp_path / "named.json", {"a": {"b": []}, "org/model": {"b": [[2, 1]]}}), MODEL)
        assert (named.provenance["entry"], named.scores.sum()) == ("org/model", 1)
        assert import_flexicache(dump(tmp_path / "one.json", {"Qwen": {"all": [[0, 0]]}}), MODEL).scores.sum() == 1

    @pytest.mark.parametrize(
        ("content", "chosen", "message"),
        [
            (HEAD_LISTS, (), "has the model: Llama, Qwen; say which"),
            (HEAD_LISTS, ("Gemma",), "has the model: Llama, Qwen; not Gemma"),
            (HEAD_LISTS, ("Llama",), "has the list of Llama: mixed, code; say which"),
            ({}, (), "holds no model"),
            ({"a": [1]}, (), "holds no list of a"),
            ({"a": {"b": 3}}, (), "b of a is not a list of heads"),
            ({"a": {"b": [[3, 0]]}}, (), "names head 0 of layer 3, but org/model has 3 layers of 2 KV heads"),
            ({"a": {"b": [[0, -1]]}}, (), "names head -1 of layer 0"),
            ({"a": {"b": [[0, 1.0]]}}, (), r"\[0, 1.0\] is not a head; a head is \[layer, KV head\]"),
            ({"a": {"b": [7]}}, (), "7 is not a head"),
        ],
    )
    def test_other_contents(self, tmp_path, content, chosen, message):
        with pytest.raises(ProfileError, match=message):
            import_flexicache(dump(tmp_path / "heads.json", content), MODEL, *chosen)


HEADWISE = {"sink_token_num": 4, "swa_token_num": 8192, "seqlen_threshold": 16384, "0": [0, 1, 0, 0], "2": [1, 0, 0, 1]}


class TestRTPurbo:
    def test_retrieval_heads_are_chosen(self, tmp_path):
        path = dump(tmp_path / "config.json", {"headwise_config": {**HEADWISE, "1": [0, 0, 0, 0]}})
        made = import_rtpurbo(path, MODEL)
        assert made.scores.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1]]
        assert (made.granularity, made.sink, made.recent) == ("query", 4, 8192)

    def test_layers_without_full_attention_may_be_left_out(self, tmp_path):
        path = dump(tmp_path / "config.json", {"headwise_config": HEADWISE})
        made = import_rtpurbo(path, ProfiledModel("org/model", GQA, windows=(None, 0, None)))
        assert made.scores[1].tolist() == [0, 0, 0, 0]

    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            (None, "headwise_config"),
            (HEADWISE, "layer 1"),
            ({**HEADWISE, "1": [0, 0]}, "layer 1"),
            ({**HEADWISE, "1": [0, 2, 0, 0]}, "layer 1"),
            ({**HEADWISE, "1": [0] * 4, "3": [0] * 4}, "layer 3"),
            ({**HEADWISE, "1": [0] * 4, "sink_token_num": -1}, "sink_token_num"),
            ({**HEADWISE, "1": [0] * 4, "swa_token_num": 0}, "swa_token_num"),
        ],
    )
    def test_other_contents(self, tmp_path, settings, named):
        with pytest.raises(ProfileError, match=named):
            import_rtpurbo(dump(tmp_path / "config.json", {"headwise_config": settings}), MODEL)
