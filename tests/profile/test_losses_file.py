"""The file of measured cache losses: what it keeps, and what it refuses."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace

import numpy as np
import pytest

from kvsurgery.errors import OutputError, ProfileError
from kvsurgery.profile.cache_losses import CacheLosses, Combination, WholeCacheLoss
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.loading import load_losses, load_scores
from kvsurgery.profile.query_factors import QueryFactors
from kvsurgery.profile.tensor_file import to_bytes
from tests.docs.pages import ROOT, figures
from tests.helpers.losses import MODEL, losses


def test_a_file_gives_the_losses_back(tmp_path) -> None:
    made, path = losses(), tmp_path / "losses.safetensors"
    made.save(path)
    found = CacheLosses.load(path)
    assert found.hash == made.hash
    assert {**vars(found), "heads": None} == {**vars(made), "heads": None}
    assert all(np.array_equal(found.heads[name], made.heads[name]) for name in made.heads)
    before = path.read_bytes()
    found.save(path)
    assert path.read_bytes() == before


def test_factors_of_rounding_come_back(tmp_path) -> None:
    made, path = losses(rounded=True), tmp_path / "losses.safetensors"
    made.save(path)
    found = CacheLosses.load(path)
    assert found.hash == made.hash
    assert found.best(2) == WholeCacheLoss("both", False, 0.04, "queries")
    assert found.best(2, rounding="nearest") == WholeCacheLoss("both", False, 0.08)
    for rotate in ("values", "both"):
        for name in ("order", "feedback"):
            assert np.array_equal(getattr(found.rounding[rotate], name), getattr(made.rounding[rotate], name))


def test_wrong_factors_of_rounding_are_refused() -> None:
    made = losses(rounded=True)
    factors = made.rounding["both"]
    for order, feedback, words in (
        (factors.order[:, :1], factors.feedback, "are not of"),
        (factors.order, factors.feedback.astype(np.float32), "are int16 and float16"),
        (np.zeros_like(factors.order), factors.feedback, "no order of the channels"),
        (factors.order, np.full_like(factors.feedback, np.inf), "finite shares"),
    ):
        with pytest.raises(ProfileError, match=words):
            replace(made, rounding={**made.rounding, "both": QueryFactors(order, feedback)})
    with pytest.raises(ProfileError, match="factors are missing"):
        replace(made, rounding={"values": factors})


def test_the_best_setting_is_that_with_the_least_loss() -> None:
    made = losses()
    assert made.best(4) == WholeCacheLoss("both", False, 0.001)
    assert made.best(4, rotate="values") == WholeCacheLoss("values", False, 0.002)
    assert made.best(4, clip=True) == WholeCacheLoss("both", True, 0.003)
    with pytest.raises(ProfileError, match="rotate none was not measured at 4 bits"):
        made.best(4, rotate="none")
    with pytest.raises(ProfileError, match="2 bits were not measured, only 8"):
        losses(replace(MODEL, head_dim=2)).best(2)


def test_losses_of_heads_are_scaled_to_the_whole(tmp_path) -> None:
    made = losses()
    assert made.heads["4"].sum() != pytest.approx(0.001)
    assert made.expected("4").sum() == pytest.approx(0.001)
    assert np.array_equal(made.expected("streaming"), made.heads["streaming"])
    nothing = replace(made, heads={**made.heads, "8": np.zeros_like(made.heads["8"])})
    assert not nothing.expected("8").any()


def test_losses_of_streaming_heads_are_head_scores(tmp_path) -> None:
    made, path = losses(windows=(None, 64)), tmp_path / "losses.safetensors"
    made.save(path)
    scores = load_scores(path)
    assert np.array_equal(scores.head_scores, made.heads["streaming"])
    assert (scores.method, scores.granularity, scores.sink, scores.recent) == ("kv-bits", "kv", 4, 16)
    assert (scores.model, scores.base_model, scores.windows) == (made.model, made.base_model, (None, 64))
    scores.save(tmp_path / "scores.safetensors")
    assert load_scores(tmp_path / "scores.safetensors") == HeadProfile.load(tmp_path / "scores.safetensors") == scores


def test_losses_of_streaming_heads_are_scaled_to_what_several_lose() -> None:
    made = losses(windows=[None, 32], model=replace(MODEL, kv_heads=4, query_heads=4))
    heads = made.heads | {"streaming": np.float32([[4, 1, 3, 2], [0, 0, 0, 0]])}
    several = (Combination("2", 3, 6, 2), Combination("4", 10, 7, 4), Combination("others", 1, 100))
    found = replace(made, heads=heads, combinations=several).expected("streaming")
    assert found.tolist() == [[pytest.approx(4 / 7), 2, pytest.approx(3 / 7), 4], [0, 0, 0, 0]]
    fewer = (Combination("2", 3, 6, 2), Combination("4", 10, 5, 4))
    assert replace(made, heads=heads, combinations=fewer).expected("streaming")[0].tolist() == [0, 2, 0, 4]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": {}}, "are of 8, 4, 3, 2, streaming, got"),
        ({"settings": {}}, "are of 8, 4, 3, k3v2 and 2 bits"),
        ({"settings": {5: (WholeCacheLoss("none", False, 0.1),)}}, "are of 8, 4, 3, k3v2 and 2 bits"),
        ({"settings": {8: (WholeCacheLoss("keys", False, 0.1),)}}, "unknown setting"),
        ({"settings": {8: (WholeCacheLoss("none", False, float("nan")),)}}, "unknown setting"),
        ({"settings": {8: (WholeCacheLoss("none", False, "0.1"),)}}, "unknown setting"),
        ({"settings": {8: (WholeCacheLoss("none", False, 10**400),)}}, "unknown setting"),
        ({"sink": "4"}, "are numbers of tokens"),
        ({"recent": 0}, "are numbers of tokens"),
        ({"combinations": (Combination("all", 0.1, float("nan")),)}, "losses of several heads"),
        ({"combinations": (Combination("all", 0.1, 0.1, 9),)}, "losses of several heads"),
        ({"provenance": {"data": "book.txt"}}, "must be a JSON object"),
    ],
    ids=[
        *("heads", "no width", "width", "rotation", "nan", "loss", "beyond floats", "sink", "recent"),
        *("several", "streaming", "provenance"),
    ],
)
def test_contradictions(changes: dict, words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        replace(losses(), **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_model": None}, "names the model it was measured on; base_model is None"),
        ({"base_model": ["org/model"]}, "names the model it was measured on"),
        ({"base_model": ""}, "names the model it was measured on"),
        ({"base_model": "a\nb"}, "names the model it was measured on"),
        ({"base_revision": 3}, "base_revision must be one line, got 3"),
        ({"base_revision": "a\nb"}, "base_revision must be one line"),
        ({"model": {**asdict(MODEL), "layers": "2"}}, "cannot be of a model with 2 layers"),
        ({"model": {**asdict(MODEL), "layers": 2.0}}, "cannot be of a model with 2.0 layers"),
        ({"model": {**asdict(MODEL), "head_dim": None}}, "cannot be of a model with"),
        ({"model": {**asdict(MODEL), "query_heads": 7}}, "cannot be of a model with 2 layers, 7 query heads"),
        ({"windows": [None]}, r"windows must be 2 sizes in tokens, or null for full attention, got \[None\]"),
        ({"windows": [None, "64"]}, "windows must be 2 sizes"),
        ({"windows": {"0": 1, "1": 2}}, "windows must be 2 sizes"),
        ({"windows": 64}, "bad metadata"),
        ({"model": [2, 6, 3, 16]}, "bad metadata"),
    ],
)
def test_a_file_of_what_is_no_model(tmp_path, changes: dict, words: str) -> None:
    metadata, heads = losses().content()
    path = tmp_path / "losses"
    path.write_bytes(to_bytes({**metadata, "content": json.dumps(json.loads(metadata["content"]) | changes)}, heads))
    with pytest.raises(ProfileError, match=f"^{re.escape(str(path))}.*{words}") as raised:
        CacheLosses.load(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_losses_that_are_none(value: float) -> None:
    made = losses()
    heads = {name: array.copy() for name, array in made.heads.items()}
    heads["3"][1, 2] = value
    with pytest.raises(ProfileError, match="losses of 3 are not"):
        replace(made, heads=heads)


def test_files_that_are_none(tmp_path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ProfileError, match="--method kv-bits"):
        CacheLosses.load(path)
    with pytest.raises(ProfileError, match="cannot read"):
        CacheLosses.load(tmp_path / "missing")
    with pytest.raises(ProfileError, match="not a regular file"):
        CacheLosses.load(tmp_path)
    assert not CacheLosses.recognizes(tmp_path)
    with pytest.raises(OutputError, match="exists and is not a file of measured cache losses"):
        losses().save(path)
    assert path.read_bytes() == b"nothing of the kind"
    losses().save(tmp_path / "losses")
    content = (tmp_path / "losses").read_bytes()
    (tmp_path / "losses").write_bytes(content.replace(b'\\"rotate\\"', b'\\"rotatd\\"'))
    with pytest.raises(ProfileError, match="bad metadata"):
        CacheLosses.load(tmp_path / "losses")


def prices(found: CacheLosses) -> Iterator[tuple[float, float]]:
    """Of each measured combination with quantized heads, what `fit` expects and what was measured."""
    expected = {name: found.expected(name) for name in found.heads}
    layers = [layer for layer, window in enumerate(found.windows or [None] * found.model.layers) if window is None]
    heads = [(layer, head) for layer in layers for head in range(found.model.kv_heads)]
    ranking = sorted(heads, key=lambda place: found.heads["streaming"][place])
    for entry in found.combinations:
        match entry.name.split(" bits")[0].replace(",", "").split():
            case [count, _, "streaming", "the", "others", "in", bits]:
                widths = dict.fromkeys(ranking[: int(count)], "streaming") | dict.fromkeys(ranking[int(count) :], bits)
            case [_, _, "streaming"]:
                continue  # these scale the losses
            case in_turn:
                widths = dict(zip(heads, itertools.cycle(in_turn), strict=False))
        yield sum(expected[width][place] for place, width in widths.items()), entry.measured


def test_expected_losses_of_many_heads_are_as_near_to_the_measured_ones_as_the_docs_say() -> None:
    files = [load_losses(ROOT / "examples" / model / "losses.safetensors") for model in ("smollm2", "gemma3")]
    ratios = [measured / expected for found in files for expected, measured in prices(found)]
    assert len(ratios) == 8
    shown = {f"{min(ratios):.2f}", f"{max(ratios):.2f}"}
    assert shown <= figures("docs/memory-budget.md", "On SmolLM2 and Gemma 3")
