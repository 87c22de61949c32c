"""`HeadProfile`: what it refuses, and that its file is the same bytes every time."""

import json
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import safe_open
from safetensors.numpy import save_file

from kvsurgery.errors import OutputError, ProfileError
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.methods import SCORE_METHODS
from tests.measure.head_profiles import GQA, SCORES, metadata, profile


def write(path, scores=SCORES, drop=(), **changes):
    """A profile file whose metadata is a good one's with changes."""
    profile().save(path)
    entries = {**metadata(path), **changes}
    save_file({"scores": scores}, path, {key: value for key, value in entries.items() if key not in drop})
    return path


class TestFile:
    @settings(max_examples=30)
    @given(
        scores=hnp.arrays(np.float32, (3, 8), elements=st.floats(0, 2.0**127, width=32)),
        method=st.sampled_from(
            [name for name, method in SCORE_METHODS.items() if method.kind == "importance" and method.most is None]
        ),
        sink=st.none() | st.integers(0, 10**9),
        recent=st.none() | st.integers(1, 10**9),
        revision=st.none() | st.text(st.characters(codec="utf-8", categories=["L", "N"])),
        provenance=st.dictionaries(st.text(), st.none() | st.integers() | st.lists(st.text()), max_size=3),
    )
    def test_round_trip(self, tmp_path_factory, scores, method, sink, recent, revision, provenance):
        path = tmp_path_factory.mktemp("profile") / "p.safetensors"
        saved = profile(
            scores=scores,
            method=method,
            granularity="query",
            sink=sink,
            recent=recent,
            base_revision=revision,
            provenance=provenance,
        )
        saved.save(path)
        loaded = HeadProfile.load(path)
        np.testing.assert_array_equal(loaded.scores, scores)
        for field in ("method", "granularity", "base_model", "base_revision", "model", "sink", "recent", "provenance"):
            assert getattr(loaded, field) == getattr(saved, field)
        assert loaded == saved
        assert loaded.hash == saved.hash

    def test_another_reader_understands_it(self, tmp_path):
        path = tmp_path / "p.safetensors"
        profile(sink=4, recent=32, base_revision="abc").save(path)
        with safe_open(path, "numpy") as file:
            np.testing.assert_array_equal(file.get_tensor("scores"), SCORES)
        assert metadata(path) == {
            "format": "kvsurgery.head-profile",
            "version": "1",
            "method": "duo",
            "granularity": "kv",
            "base_model": "org/model",
            "base_revision": "abc",
            "layers": "3",
            "query_heads": "8",
            "kv_heads": "2",
            "head_dim": "16",
            "sink": "4",
            "recent": "32",
            "provenance": "{}",
        }

    def test_equal_profiles_are_equal_bytes_in_every_process(self, tmp_path):
        here, there = tmp_path / "here", tmp_path / "there"
        profile(provenance={"b": 1, "a": 2}).save(here)
        again = f"from kvsurgery import HeadProfile; HeadProfile.load({str(here)!r}).save({str(there)!r})"
        subprocess.run([sys.executable, "-c", again], check=True)
        assert here.read_bytes() == there.read_bytes()

    def test_spelling_of_the_scores_does_not_matter(self):
        same = profile(scores=np.asfortranarray(SCORES.astype(np.float64)) * -1 * -1, provenance={})
        negative_zero = profile(scores=np.where(SCORES == 0, -0.0, SCORES))
        assert profile() == same == negative_zero
        assert len({profile().hash, same.hash, negative_zero.hash}) == 1

    @pytest.mark.parametrize(
        "change",
        [
            {"scores": SCORES / 2},
            {"method": "ablation"},
            {"base_model": "org/other"},
            {"base_revision": "abc"},
            {"model": replace(GQA, head_dim=32)},
            {"sink": 1},
            {"recent": 1},
            {"provenance": {"seed": 1}},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_everything_counts_in_the_hash(self, change):
        assert profile(**change).hash != profile().hash
        assert profile(**change) != profile()

    def test_scores_belong_to_the_profile(self):
        mine = SCORES.copy()
        made = profile(scores=mine)
        mine[0, 0] = 0.75
        assert made.scores[0, 0] == 0.5
        with pytest.raises(ValueError, match="read-only"):
            made.scores[0, 0] = 0.75


class TestSave:
    def test_replaces_a_profile(self, tmp_path):
        path = tmp_path / "p.safetensors"
        profile().save(path)
        profile(sink=1).save(path)
        assert HeadProfile.load(path).sink == 1
        assert list(tmp_path.iterdir()) == [path]

    def test_keeps_every_other_file(self, tmp_path):
        weights = tmp_path / "model.safetensors"
        save_file({"lm_head.weight": SCORES}, weights)
        before = weights.read_bytes()
        with pytest.raises(OutputError, match=r"model\.safetensors exists and is not a head profile"):
            profile().save(weights)
        with pytest.raises(OutputError, match="exists and is not a head profile"):
            profile().save(tmp_path)
        assert weights.read_bytes() == before
        assert list(tmp_path.iterdir()) == [weights]

    def test_a_folder_that_is_not_there(self, tmp_path):
        with pytest.raises(OutputError, match=r"cannot write head profile .*nowhere/p: No such file"):
            profile().save(tmp_path / "nowhere" / "p")


class TestValidation:
    @pytest.mark.parametrize("value", [np.nan, np.inf, 1e39], ids=["nan", "inf", "beyond float32"])
    def test_not_finite_names_the_head(self, value):
        scores = SCORES.astype(np.float64)
        scores[1, 0] = value
        with pytest.raises(ProfileError, match=r"layer 1, head 0 is (nan|inf)"):
            profile(scores=scores, method="headkv-r")

    @pytest.mark.parametrize(
        ("method", "value"), [("duo", -0.001), ("duo", 1.001), ("headkv-r", -1e-6), ("ablation", -1)]
    )
    def test_out_of_the_method_s_range(self, method, value):
        scores = SCORES.copy()
        scores[2, 1] = value
        with pytest.raises(ProfileError, match=rf"{method} scores are >= 0.*, got .*{value}"):
            profile(scores=scores, method=method)

    def test_copy_scores_may_exceed_one(self):
        assert profile(scores=SCORES * 1.88, method="headkv-r").scores.max() == np.float32(1.88)

    @pytest.mark.parametrize(
        ("shape", "granularity"),
        [
            ((3, 8), "kv"),
            ((3, 2), "query"),
            ((2, 3), "kv"),
            ((3, 2, 1), "kv"),
            ((6,), "kv"),
            ((0, 2), "kv"),
            ((), "kv"),
        ],
        ids=str,
    )
    def test_shape_against_the_model(self, shape, granularity):
        with pytest.raises(ProfileError, match=rf"but org/model has 3 layers of {8 if granularity == 'query' else 2} "):
            profile(scores=np.zeros(shape), granularity=granularity)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"method": "guess"}, "unknown profile method 'guess'; known: duo, "),
            ({"granularity": "layer"}, "granularity must be 'kv' or 'query', got 'layer'"),
            ({"base_model": ""}, "names the model it was measured on"),
            ({"base_model": "a\nb"}, "names the model it was measured on"),
            ({"base_model": "\x1b[31m"}, "names the model it was measured on"),
            ({"base_revision": "a\nb"}, "base_revision must be one line"),
            ({"sink": -1}, "sink must be >= 0"),
            ({"recent": 0}, "recent >= 1"),
            ({"provenance": [1]}, "provenance must be a JSON object, got list"),
            ({"model": replace(GQA, layers=0)}, "cannot be of a model with 0 layers"),
            ({"model": replace(GQA, kv_heads=3)}, "cannot be of a model with .* 3 KV heads"),
        ],
    )
    def test_fields(self, change, message):
        with pytest.raises(ProfileError, match=message):
            profile(**change)


class TestBadFile:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"format": "pt"}, "is not a head profile; make one with"),
            ({"version": "2"}, "has head profile version 2; this tool reads 1"),
            ({"method": "guess"}, "unknown profile method"),
            ({"granularity": "query"}, "3 layers of 8 query heads"),
            ({"layers": "many"}, "bad metadata: .*'many'"),
            ({"layers": "-3"}, "cannot be of a model with -3 layers"),
            ({"kv_heads": "9" * 5000}, "bad metadata"),
            ({"query_heads": "32.0"}, "bad metadata"),
            ({"sink": "-1"}, "sink must be >= 0"),
            ({"recent": "wide"}, "bad metadata"),
            ({"provenance": "{"}, "bad metadata"),
            ({"provenance": "[1]"}, "provenance must be a JSON object, got list"),
            ({"provenance": "[" * 200_000}, "bad metadata"),
        ],
        ids=lambda value: "=".join(next(iter(value.items())))[:24] if isinstance(value, dict) else "",
    )
    def test_metadata(self, tmp_path, changes, message):
        path = write(tmp_path / "p.safetensors", **changes)
        with pytest.raises(ProfileError, match=message) as raised:
            HeadProfile.load(path)
        assert str(path) in str(raised.value)

    @pytest.mark.parametrize("name", ["method", "granularity", "base_model", "layers", "head_dim"])
    def test_missing_metadata(self, tmp_path, name):
        with pytest.raises(ProfileError, match=f"lacks the metadata '{name}'"):
            HeadProfile.load(write(tmp_path / "p", drop=[name]))

    def test_optional_metadata(self, tmp_path):
        assert HeadProfile.load(write(tmp_path / "p", drop=["provenance"])) == profile()

    @pytest.mark.parametrize("dtype", ["float64", "float16", "int32"])
    def test_scores_of_another_type(self, tmp_path, dtype):
        with pytest.raises(ProfileError, match=r"scores are [FI][0-9]+, not F32"):
            HeadProfile.load(write(tmp_path / "p", SCORES.astype(dtype)))

    def test_scores_that_numpy_cannot_hold(self, tmp_path):
        path = tmp_path / "p"
        profile().save(path)
        header = {
            "__metadata__": metadata(path),
            "scores": {"dtype": "BF16", "shape": [3, 2], "data_offsets": [0, 12]},
        }
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))
        with pytest.raises(ProfileError, match="scores are BF16, not F32"):
            HeadProfile.load(path)

    def test_no_scores(self, tmp_path):
        path = write(tmp_path / "p")
        save_file({"marks": SCORES}, path, metadata(path))
        with pytest.raises(ProfileError, match='holds no "scores"'):
            HeadProfile.load(path)

    def test_nan_in_a_file(self, tmp_path):
        with pytest.raises(ProfileError, match=r"p: profile score of layer 0, head 1 is nan"):
            HeadProfile.load(write(tmp_path / "p", np.where(SCORES == 1, np.float32(np.nan), SCORES)))

    def test_model_weights(self, tmp_path):
        save_file({"lm_head.weight": SCORES}, tmp_path / "model.safetensors")
        with pytest.raises(ProfileError, match="is not a head profile; make one with"):
            HeadProfile.load(tmp_path / "model.safetensors")

    @pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 64, b'{"0-0": [0.5]}'], ids=range(4))
    def test_garbage(self, tmp_path, content):
        path = tmp_path / "p"
        path.write_bytes(content)
        with pytest.raises(ProfileError, match="head profile"):
            HeadProfile.load(path)

    def test_truncated_anywhere(self, tmp_path):
        path = tmp_path / "p"
        profile().save(path)
        whole = path.read_bytes()
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            with pytest.raises(ProfileError):
                HeadProfile.load(path)

    def test_not_a_file(self, tmp_path):
        for path in (tmp_path, tmp_path / "nowhere"):
            with pytest.raises(ProfileError, match="cannot read head profile"):
                HeadProfile.load(path)


@pytest.mark.parametrize("file", [None, 3, "duo.safetensors", "hf://org/scores/duo.safetensors@1\n# A card"])
def test_only_an_address_in_one_line_is_one(file):
    address = "hf://org/scores/duo.safetensors@1"
    assert profile(provenance={"file": address}).address == address
    assert profile(provenance={} if file is None else {"file": file}).address is None
