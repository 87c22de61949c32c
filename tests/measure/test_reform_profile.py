"""`HeadProfile` of embedding heads: its file, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from kvsurgery.errors import ProfileError
from kvsurgery.profile.embedding_heads import RANKED_KINDS, EmbeddingHead, Ranking, columns_of
from kvsurgery.profile.head_profile import HeadProfile
from tests.measure.head_profiles import GQA, SCORES, metadata, profile

HEADS = (EmbeddingHead(0, "q", 7), EmbeddingHead(2, "v", 1))
MNR = {kind: np.linspace(0, 1, 3 * columns_of(kind, GQA)).reshape(3, -1) for kind in RANKED_KINDS}


def reform(**changes):
    fields = {"scores": None, "method": "reform", "granularity": None, "embedding_heads": HEADS}
    return profile(**{**fields, "ranking": Ranking({"pattern": MNR}), **changes})


@pytest.mark.parametrize("ranking", [None, Ranking({"pattern": MNR, "multihop": MNR})], ids=["published", "measured"])
def test_round_trip(tmp_path, ranking):
    path = tmp_path / "p.safetensors"
    saved = reform(ranking=ranking, provenance={"seed": 1})
    saved.save(path)
    loaded = HeadProfile.load(path)
    assert loaded == saved
    assert (loaded.scores, loaded.granularity, loaded.embedding_heads) == (None, None, HEADS)
    assert metadata(path)["embedding_heads"] == '[[0, "q", 7], [2, "v", 1]]'
    assert "granularity" not in metadata(path)
    if ranking is not None:
        with safe_open(path, "numpy") as file:
            assert set(file.keys()) == {f"mnr.{task}.{kind}" for task in ranking.mnr for kind in RANKED_KINDS}
            np.testing.assert_array_equal(file.get_tensor("mnr.multihop.k"), MNR["k"].astype(np.float32))
    saved.save(path)
    assert HeadProfile.load(path).hash == saved.hash


def test_order_of_heads_does_not_matter():
    assert reform(embedding_heads=HEADS[::-1]) == reform()


@pytest.mark.parametrize(
    "change",
    [
        {"embedding_heads": HEADS[:1]},
        {"ranking": None},
        {"ranking": Ranking({"multihop": MNR})},
        {"ranking": Ranking({"pattern": {**MNR, "attention": MNR["attention"] / 2}})},
    ],
    ids=["heads", "no ranking", "task", "ranks"],
)
def test_everything_counts_in_the_hash(change):
    assert reform(**change).hash != reform().hash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": SCORES}, "a reform profile has embedding heads, and no scores"),
        ({"granularity": "kv"}, "a reform profile has embedding heads, and no scores"),
        ({"embedding_heads": ()}, "names embedding heads; this one has none"),
        ({"embedding_heads": (*HEADS, HEADS[0])}, "the embedding head q0.7 is named twice"),
        (
            {"embedding_heads": (EmbeddingHead(0, "k", 2),)},
            "embedding head k0.2 does not exist in org/model, which has 3 layers",
        ),
        ({"embedding_heads": (EmbeddingHead(3, "q", 0),)}, "embedding head q3.0 does not exist in org/model"),
        ({"model": replace(GQA, layers=4)}, r"mnr.pattern.q has shape \[3, 8\], \[4, 8\] is needed"),
        (
            {"method": "duo", "scores": SCORES, "granularity": "kv"},
            "embedding heads is of method 'reform', not 'duo'",
        ),
        ({"method": "duo", "embedding_heads": (), "ranking": None}, 'the duo profile holds no "scores"'),
    ],
    ids=range(9),
)
def test_contradictions(change, message):
    with pytest.raises(ProfileError, match=message):
        reform(**change)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_heads": "["}, "bad metadata"),
        ({"embedding_heads": "[" * 200_000}, "bad metadata"),
        ({"embedding_heads": "{}"}, r"embedding heads are a list of \[layer, state, head\]"),
        ({"embedding_heads": '[[0, "q"]]'}, r"embedding heads are a list of \[layer, state, head\]"),
        ({"embedding_heads": '[[0, "x", 0]]'}, "an embedding head is a layer, one of q, k and v"),
        ({"embedding_heads": '[[9, "q", 0]]'}, "embedding head q9.0 does not exist"),
        ({"embedding_heads": "[]"}, "names embedding heads; this one has none"),
        ({"granularity": "kv"}, "a reform profile has embedding heads, and no scores"),
        ({"method": "duo"}, "lacks the metadata 'granularity'"),
        ({"method": "duo", "granularity": "kv"}, "embedding heads is of method 'reform'"),
    ],
    ids=lambda value: "=".join(next(iter(value.items())))[:24] if isinstance(value, dict) else "",
)
def test_bad_metadata(tmp_path, changes, message):
    path = tmp_path / "p"
    reform().save(path)
    tensors = reform().ranking.tensors()
    save_file(tensors, path, {**metadata(path), **changes})
    with pytest.raises(ProfileError, match=message) as raised:
        HeadProfile.load(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mnr.pattern.k": None}, "the pattern ranking is of q, k, v, hidden, attention, got"),
        ({"mnr.recall.k": SCORES}, "a ranking is over pattern or multihop, got"),
        ({"marks": SCORES}, "unknown tensor 'marks'"),
        ({"scores": SCORES}, "a reform profile has embedding heads, and no scores"),
        ({"mnr.pattern.k": SCORES * 2}, r"ranks of pattern.k are not .* in \[0, 1\]"),
        ({"mnr.pattern.k": SCORES[:, :1]}, r"mnr.pattern.k has shape \[3, 1\], \[3, 2\] is needed"),
        ({"mnr.pattern.k": SCORES.astype(np.float64)}, "mnr.pattern.k are F64, not F32"),
    ],
    ids=range(7),
)
def test_bad_tensors(tmp_path, change, message):
    path = tmp_path / "p"
    reform().save(path)
    tensors = {**reform().ranking.tensors(), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, metadata(path))
    with pytest.raises(ProfileError, match=message) as raised:
        HeadProfile.load(path)
    assert str(path) in str(raised.value)
