"""A sweep: every setting is converted once, asked what the original is asked, and thrown away."""

from __future__ import annotations

import csv
import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib import image

from kvsurgery.errors import Interrupted, KVSurgeryError, OutputError, PolicyError
from kvsurgery.evaluate import runner
from kvsurgery.evaluate import sweep as sweeping
from kvsurgery.evaluate.results import Interval, TaskResult
from kvsurgery.evaluate.runner import Options
from kvsurgery.evaluate.sweep import Grid, sweep
from kvsurgery.evaluate.sweep_results import Point, Sweep
from kvsurgery.evaluate.tasks.needle import NeedleTask
from kvsurgery.policy.evidence import Evidence
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe
from kvsurgery.report.folder import is_sweep
from kvsurgery.report.sweep_charts import axis_of, quality, series_of
from tests.evaluate.recall import MODEL, convert
from tests.helpers.shards import tree
from tests.helpers.surgery import random_profile
from tests.helpers.tiny_recall import FOLDER

LENGTH = 330
RECIPE = Recipe.of(sink=4, recent=32, kv_bits=8, kv_residual=16)
# the profile has scores of KV heads, which no group reduces, and the model has 12 of them
AXES = {"full_heads": (2, 13), "kv_bits": (16, 4), "group_reduce": ("mean", "max")}


def run(folder, language, profile=None, axes=AXES, lengths=(200, LENGTH), source=MODEL, **options):
    task = NeedleTask(lengths, (0.3,), str(language / "text.txt"), str(language / "needles.jsonl"))
    profile = profile or HeadProfile.load(FOLDER / "profile.safetensors")
    return sweep(Grid(source, RECIPE, Evidence(profile), axes), {"needle": task}, folder, Options(batch=2), **options)


@pytest.fixture
def done(monkeypatch):
    """What was converted, and what was loaded."""
    converted, loaded = [], []
    write, load = sweeping.convert, runner.load

    def converting(checkpoint, plan, out, files, **options):
        converted.append(plan.policy.hash)
        return write(checkpoint, plan, out, files, **options)

    monkeypatch.setattr(sweeping, "convert", converting)
    monkeypatch.setattr(runner, "load", lambda folder, **options: loaded.append(folder) or load(folder, **options))
    return converted, loaded


@pytest.fixture(scope="module")
def swept(language, tmp_path_factory):
    """One run through: folder and results."""
    folder = tmp_path_factory.mktemp("swept") / "sweep"
    return folder, run(folder, language)


def test_what_is_alike_is_evaluated_once(language, tmp_path, done):
    converted, loaded = done
    found = run(tmp_path / "sweep", language)
    policies = [point.policy for point in found.points if not point.skipped]
    assert len(policies) == 4
    assert converted == list(dict.fromkeys(policies))
    # the original is the first, and the only one that is not in the folder
    assert [folder == MODEL for folder in loaded] == [True, False, False]
    assert found.points[0].tasks == found.points[1].tasks
    assert not [path for path in (tmp_path / "sweep").iterdir() if path.is_dir()]


def test_settings_come_in_order_and_what_cannot_be_says_why(swept):
    _, found = swept
    assert [tuple(point.options.values()) for point in found.points] == [
        (full, bits, reduce) for full in (2, 13) for bits in (16, 4) for reduce in ("mean", "max")
    ]
    for point in found.points[4:]:
        assert "`full_heads` must lie in [0, 12]" in point.skipped
        assert (point.policy, point.kv_bytes, point.tasks) == (None, None, ())


def test_budgets_may_follow_another_profile():
    profile = HeadProfile.load(FOLDER / "profile.safetensors")
    shares = replace(profile, scores=np.random.default_rng(0).random(profile.scores.shape), method="lu-kv")
    recipe = Recipe.of(budgets_from="shares", full_heads=2)
    grid = Grid(MODEL, recipe, Evidence(profile, shares), {"budget": (8, 16), "beta": (1.2,)})
    policies = [setting.prepared.policy for setting in grid.settings()]
    assert [sum(sum(layer.budgets) for layer in policy.layers) for policy in policies] == [80, 160]
    assert {policy.options["budgets_from"] for policy in policies} == {f"lu-kv {shares.hash[:16]}"}


def test_bytes_are_what_a_generation_allocates(swept, tmp_path):
    _, found = swept
    [quantized] = (point for point in found.points[:4] if tuple(point.options.values()) == (2, 4, "mean"))
    out = convert(tmp_path / "same", sparsity=None, full_heads=2, sink=4, recent=32, kv_bits=4, kv_residual=16)
    model = runner.load(out, device="cpu")
    new = found.tokens - LENGTH
    assert new > 0
    prompt = torch.full((1, LENGTH), 20)
    output = model.generate(prompt, max_new_tokens=new, min_new_tokens=new, return_dict_in_generate=True)
    assert output.past_key_values.allocated_bytes() == quantized.kv_bytes
    # 3 layers, 4 heads, keys and values of 32 float32 channels; 10 heads keep 4 + 32 tokens
    assert found.dense_bytes == 3 * 4 * 2 * 32 * 4 * found.tokens
    assert found.points[0].kv_bytes == (2 * found.tokens + 10 * 36) * 2 * 32 * 4
    assert quantized.kv_bytes < found.points[0].kv_bytes


def test_scores_are_those_of_the_original_and_the_converted_model(swept):
    _, found = swept
    for whole in found.original:
        assert whole.scores["original"].mean == 1
        for point in found.points[:4]:
            result = point.result(whole.task, whole.metric)
            assert result.scores["original"] == whole.scores["original"]
            assert result.difference.mean == result.scores["converted"].mean - result.scores["original"].mean


def test_measured_heads_beat_random_ones_of_as_many_bytes(swept, language, tmp_path):
    profile = random_profile(MODEL, seed=0)
    bad = run(tmp_path / "sweep", language, profile, {"full_heads": (2,), "kv_bits": (16,)}).points[0]
    good = swept[1].points[0]
    assert bad.kv_bytes == good.kv_bytes
    for result in good.tasks:
        assert result.scores["converted"].mean == 1
        assert bad.result(result.task, result.metric).difference.high < 0


def test_the_same_again_computes_nothing(swept, language, done):
    folder, found = swept
    assert run(folder, language) == found
    assert done == ([], [])


def test_another_value_computes_no_more_than_that(swept, language, done):
    folder, found = swept
    more = run(folder, language, axes={"full_heads": (4, 2), "kv_bits": (16,)})
    assert done[0] == [more.points[0].policy]
    assert more.points[1].tasks == found.points[0].tasks
    run(folder, language)
    assert Sweep.load(folder) == found


def test_a_run_that_was_cut_off_goes_on(swept, language, tmp_path, done, monkeypatch):
    """Ctrl-C while the second policy answers: the first is not converted again."""
    answer = runner.Evaluation.answer

    def interrupted(self, name, checkpoint, progress=None):
        if len(done[0]) == 2:
            raise KeyboardInterrupt
        answer(self, name, checkpoint, progress)

    monkeypatch.setattr(runner.Evaluation, "answer", interrupted)
    with pytest.raises(Interrupted):
        run(tmp_path / "sweep", language)
    monkeypatch.setattr(runner.Evaluation, "answer", answer)
    assert not (tmp_path / "sweep" / "sweep.json").exists()
    assert is_sweep(tmp_path / "sweep")
    resumed = run(tmp_path / "sweep", language)
    assert resumed == swept[1]
    first, second = dict.fromkeys(point.policy for point in resumed.points[:4])
    assert done[0] == [first, second, second]
    assert not [path for path in (tmp_path / "sweep").iterdir() if path.is_dir()]


def test_progress_counts_all_models(language, tmp_path):
    seen = []
    axes = {"full_heads": (2,), "kv_bits": (16, 4), "group_reduce": ("mean", "max")}
    run(tmp_path / "sweep", language, axes=axes, progress=lambda done, total, note: seen.append((done, total, note)))
    answering = [step for step in seen if step[1] is not None]
    # 4 samples of the original and two policies
    *counts, note = answering[-1]
    assert counts == [12, 12]
    assert re.fullmatch(r"4 bits, group reduce mean: needle, \d+% right", note)
    assert [done for done, _, _ in answering] == sorted(done for done, _, _ in answering)
    assert (4, 12, "unquantized, group reduce mean: converting, 100%") in answering


def test_where_nothing_can_be_nothing_is_written(language, tmp_path):
    with pytest.raises(PolicyError, match="no setting gives a policy: `full_heads` must lie in"):
        run(tmp_path / "sweep", language, axes={"full_heads": (13, 14)})
    assert not (tmp_path / "sweep").exists()


def test_a_folder_that_conversions_do_not_fit_into_is_refused_before_anything_is_asked(
    language, tmp_path, done, monkeypatch
):
    source = shutil.copytree(MODEL, tmp_path / "model")
    before = tree(source)
    with pytest.raises(OutputError, match="is the original's folder or inside it"):
        run(source / "sweep", language, source=source)
    assert tree(source) == before
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(OutputError, match=r"needs .* MiB, but only 1\.00 MiB are free there"):
        run(tmp_path / "sweep", language)
    assert done == ([], [])


def test_other_samples_in_the_folder_are_refused(swept, language):
    with pytest.raises(OutputError, match="`lengths` of needle is 200,330 there"):
        run(swept[0], language, lengths=(LENGTH,))


def test_files_hold_what_was_found(swept):
    folder, found = swept
    assert Sweep.load(folder) == found
    with open(folder / "sweep.csv", newline="") as file:
        rows = [*csv.DictReader(file)]
    # two metrics of the original and four settings, and a row for each that cannot be
    assert len(rows) == 2 + 4 * 2 + 4
    assert (rows[0]["model"], int(rows[0]["kv_bytes"]), rows[0]["full_heads"]) == ("original", found.dense_bytes, "")
    row = rows[2]
    assert (row["model"], row["full_heads"], row["kv_bits"], row["group_reduce"]) == ("converted", "2", "16", "mean")
    assert int(row["kv_bytes"]) == found.points[0].kv_bytes
    assert float(row["difference_low"]) == found.points[0].tasks[0].difference.low
    assert rows[-1]["skipped"] == found.points[-1].skipped


@pytest.mark.parametrize("change", [{"format": "other"}, {"axes": 3}, {"points": [{}]}, {"original": [{"task": "a"}]}])
def test_another_file_is_refused(swept, tmp_path, change):
    content = json.loads((swept[0] / "sweep.json").read_text())
    (tmp_path / "sweep.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(KVSurgeryError, match="is not what this version of `kvsurgery sweep` writes"):
        Sweep.load(tmp_path)
    with pytest.raises(KVSurgeryError, match="run `kvsurgery sweep` first"):
        Sweep.load(tmp_path / "nowhere")


def made(axes, points, metric="qa_f1"):
    """A sweep with points of these options, bytes and scores."""

    def result(score):
        same = Interval(score, score, score)
        scores = {"original": Interval(0.9, 0.9, 0.9), "converted": same}
        return TaskResult("task", metric, 1, {}, scores, Interval(score - 0.9, score - 0.9, score - 0.9), ())

    found = tuple(Point(options, str(options), size, (result(score),)) for options, size, score in points)
    return Sweep("model", "", {}, {}, axes, 10, 100, (result(0.9),), found)


def test_a_score_that_is_no_number_is_not_on_the_front():
    points = [({"budget": place}, place, score) for place, score in enumerate((float("nan"), 0.5, 0.7))]
    front = made({"budget": tuple(range(3))}, points).front("task", "qa_f1")
    assert [point.options["budget"] for point in front] == [1, 2]


def test_the_front_has_what_nothing_beats():
    sizes, scores = (30, 10, 20, 20, 40, 50), (0.5, 0.3, 0.3, 0.4, 0.5, 0.6)
    points = [({"budget": place}, *pair) for place, pair in enumerate(zip(sizes, scores, strict=True))]
    front = made({"budget": tuple(range(6))}, points).front("task", "qa_f1")
    assert [point.options["budget"] for point in front] == [1, 3, 0, 5]
    front = made({"budget": tuple(range(6))}, points, "perplexity").front("task", "perplexity")
    assert [point.options["budget"] for point in front] == [1]


def grid(**axes):
    names, values = [*axes], np.stack(np.meshgrid(*axes.values(), indexing="ij"), -1).reshape(-1, len(axes)).tolist()
    return made(axes, [(dict(zip(names, row, strict=True)), 10, 0.5) for row in values])


def test_lines_go_along_the_size_and_the_other_axes_tell_them_apart():
    one = grid(kv_bits=(16, 8, 4), budget=(64, 128), sink=(4,))
    assert axis_of(one) == "budget"
    assert {name: len(points) for name, points in series_of(one).items()} == {
        "unquantized": 2,
        "8 bits": 2,
        "4 bits": 2,
    }
    assert axis_of(grid(kv_bits=(16, 8))) == "kv_bits"
    assert [*series_of(grid(kv_bits=(16, 8)))] == ["converted"]
    # 3 x 4 lines are too many
    many = grid(recent=(8, 16, 32, 64, 128), sink=(1, 2, 4), full_heads=(1, 2, 3, 4))
    assert {name: len(points) for name, points in series_of(many).items()} == {f"sink {sink}": 20 for sink in (1, 2, 4)}


def test_the_picture_has_a_panel_for_each_metric(swept, tmp_path):
    chart = quality(swept[1])
    assert [panel.title for panel in chart.panels] == ["needle, rouge1_recall", "needle, string_match_all"]
    assert "unquantized, group reduce max: 100.0% at" in chart.alt
    assert "The original: 100.0% at" in chart.alt
    [svg, _] = chart.svgs()
    assert ">original, " in svg
    chart.save(tmp_path)
    assert image.imread(tmp_path / "sweep.png").std() > 0.05
