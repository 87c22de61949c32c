"""The page that compares several checkpoints and sweeps."""

from dataclasses import replace

import pytest
from matplotlib import image

from kvsurgery.errors import KVSurgeryError
from kvsurgery.report import write_comparison
from kvsurgery.report.comparison import compare
from tests.helpers.command import done, refused, run
from tests.report import builders
from tests.report.builders import needles, saved
from tests.report.reading import Page


@pytest.fixture(scope="module")
def page(compared):
    return Page(compared / "index.html")


def test_checkpoints_side_by_side(page):
    rows = page.table("Heads, memory, speed and scores")
    assert rows[0] == ["", "original", "llama3-duo-50", "llama3-duo-25", "llama3-duo-50-kv4"]
    table = {row[0]: row[1:] for row in rows}
    assert table["full KV heads they keep every token"] == ["256 of 256", "128 of 256", "64 of 256", "128 of 256"]
    assert table["bits of the KV cache"] == ["unquantized", "unquantized", "unquantized", "4"]
    assert table["KV cache one sequence, model in 16 bit"][0].endswith("100% at 128k tokens")
    assert [cell.split()[2] for cell in table["KV cache one sequence, model in 16 bit"]] == [
        "100%",
        "51%",
        "26%",
        "14%",
    ]
    # 11 ms, and 19.7 of the original's cache or 11.8 of ours
    ratio = (0.011 + 3e-7 * 65_536) / (0.011 + 1.8e-7 * 65_536)
    speed = ["1.00×", f"{ratio:.2f}× 65,536 tokens, batch 1", "–", "–"]
    assert table["decode speed relative to the original"] == speed
    assert table["needle rouge1_recall, 440 samples"] == [
        "97.0% 95.0–99.0%",
        "96.5% 94.5–98.5% −0.5 (−2.5 to +1.5) no clear difference",
        "91.0% 89.0–93.0% −6.0 (−8.0 to −4.0) worse",
        "96.0% 94.0–98.0% −1.0 (−3.0 to +1.0) no clear difference",
    ]


def test_a_sweep_has_its_front_marked(page):
    rows = page.table("Settings of budgets")
    assert rows[0] == ["setting", "KV cache", "needle, rouge1_recall", "needle, string_match_all"]
    assert rows[1][0] == "original"
    # with 4 bits, the smallest; one more byte and no better is not on the front
    front = {row[0]: row[2].endswith("○ front") for row in rows[2:-1]}
    assert front == {
        "budget 64, unquantized": False,
        "budget 256, unquantized": True,
        "budget 1024, unquantized": True,
        "budget 64, 4 bits": True,
        "budget 256, 4 bits": True,
    }
    assert rows[-1] == ["budget 1024, 4 bits", "a budget of 1,024 exceeds the prompt"]


def test_the_chart_has_every_checkpoint_series_and_the_original(page, compared):
    [alt, _] = [text for text in page.values("aria-label") if "against KV bytes" in text]
    for words in ("llama3-duo-25: 91.0% at", "budgets: 4 bits: 68.0% at", "The original: 97.0% at 15.00 GiB"):
        assert words in alt
    assert image.imread(compared / "quality.png").std() > 0.05


class TestAnEvaluationAndABenchmarkInTwoFolders:
    def test_of_one_checkpoint_share_a_column(self, tmp_path):
        evaluated, measured = saved(tmp_path / "eval", builders.results()), saved(tmp_path / "bench", builders.bench())
        for folders in ([evaluated, measured], [measured, evaluated]):
            path, comparison = write_comparison(folders, tmp_path / "page")
            [entry] = comparison.entries
            assert (entry.name, entry.folder) == ("llama3-duo", evaluated)
            page = Page(path)
            rows = page.table("Heads, memory, speed and scores")
            assert rows[0] == ["", "original", "llama3-duo"]
            assert {"decode", "needle"} <= {row[0].split(" ")[0] for row in rows}
            assert "llama3-duo: evaluation" in page.text
            assert "llama3-duo: benchmark" in page.text

    def test_of_two_checkpoints_do_not(self, tmp_path):
        options = {**builders.surgery()["options"], "recent": 512}
        other = builders.checkpoint(surgery=builders.surgery(options=options))
        folders = [saved(tmp_path / "a", builders.results()), saved(tmp_path / "b", builders.bench(checkpoint=other))]
        assert [entry.bench is None for entry in compare(folders).entries] == [True, False]

    def test_a_second_benchmark_stays_apart(self, tmp_path):
        both = saved(tmp_path / "a", builders.results())
        builders.bench().save(both)
        first, second = compare([both, saved(tmp_path / "b", builders.bench())]).entries
        assert (first.results is None, second.results is None) == (False, True)


def test_commands_of_every_run(page):
    assert page.text.count("kvsurgery eval") == 3
    assert page.text.count("kvsurgery bench") == 1
    assert page.text.count("kvsurgery sweep") == 1


class TestRefused:
    def test_other_samples_name_the_setting(self, tmp_path):
        one = saved(tmp_path / "one", needles("a", 0.9, 0.5))
        fewer = {**builders.results().settings, "limit": 3}
        other = saved(tmp_path / "other", needles("b", 0.9, 0.5, settings=fewer), samples="fewer")
        with pytest.raises(KVSurgeryError, match=r"different samples: limit is 3 and –; evaluate both"):
            compare([one, other])

    def test_another_original(self, tmp_path):
        one = saved(tmp_path / "one", needles("a", 0.9, 0.5))
        for number, part in enumerate((needles("b", 0.9, 0.5), builders.sweep())):
            other = saved(tmp_path / str(number), part, weights="others")
            with pytest.raises(KVSurgeryError, match="different originals"):
                compare([one, other])

    def test_a_benchmark_of_another_original(self, tmp_path):
        facts = builders.checkpoint(surgery=builders.surgery(base_model="elsewhere/model"))
        folders = [saved(tmp_path / "a", builders.bench()), saved(tmp_path / "b", builders.bench(checkpoint=facts))]
        with pytest.raises(KVSurgeryError, match=r"different originals \(elsewhere/model and meta-llama"):
            compare(folders)

    def test_weights_tell_whatever_the_names_are(self, tmp_path):
        named = builders.checkpoint(surgery=builders.surgery(base_model="model"))
        bench = saved(tmp_path / "bench", builders.bench(checkpoint=named, original="ab"))
        swept = replace(builders.sweep(), source="/home/somebody/of the same/model")
        compare([bench, saved(tmp_path / "same", replace(swept, source="elsewhere"), original="ab")])
        with pytest.raises(KVSurgeryError, match="different originals"):
            compare([bench, saved(tmp_path / "other", swept, original="cd")])

    def test_a_folders_path_and_its_name_where_no_weights_are_recorded(self, tmp_path):
        named = builders.checkpoint(surgery=builders.surgery(base_model="model"))
        bench = saved(tmp_path / "bench", builders.bench(checkpoint=named))
        (bench / "settings.json").unlink()
        compare([bench, saved(tmp_path / "same", replace(builders.sweep(), source="a/model"))])
        with pytest.raises(KVSurgeryError, match="different originals"):
            compare([bench, saved(tmp_path / "other", replace(builders.sweep(), source="model/other"))])

    def test_bytes_of_another_dtype(self, tmp_path):
        one = needles("a", 0.9, 0.5)
        folders = [
            saved(tmp_path / "a", one),
            saved(tmp_path / "b", replace(needles("b", 0.9, 0.5), dense_bytes=2 * one.dense_bytes)),
        ]
        with pytest.raises(KVSurgeryError, match="different dtypes"):
            compare(folders)

    def test_an_original_alone(self, tmp_path):
        folder = saved(tmp_path / "a", builders.results(checkpoint=builders.checkpoint(surgery=None)))
        with pytest.raises(KVSurgeryError, match="results of an original alone"):
            compare([folder, folder])

    def test_results_without_their_settings(self, tmp_path):
        (tmp_path / "a").mkdir()
        needles("a", 0.9, 0.5).save(tmp_path / "a")
        with pytest.raises(KVSurgeryError, match=r"settings\.json cannot be read.*give the whole folder"):
            compare([tmp_path / "a"])

    def test_values_of_another_kind_leave_nothing_behind(self, tmp_path):
        facts = builders.checkpoint(surgery="much")
        folder = saved(tmp_path / "a", needles("a", 0.9, 0.5, checkpoint=facts))
        with pytest.raises(KVSurgeryError, match="cannot be shown"):
            write_comparison([folder, folder], tmp_path / "page")
        assert not (tmp_path / "page").exists()


class TestNotices:
    def notices(self, folder, *parts):
        return compare([saved(folder / str(place), part) for place, part in enumerate(parts)]).notices

    def test_nothing_differs(self, tmp_path):
        assert self.notices(tmp_path, needles("a", 0.9, 0.5), builders.sweep()) == ()

    def test_settings_and_versions(self, tmp_path):
        versions = {**builders.RUN["versions"], "device": "cuda"}
        settings = {**builders.results().settings, "batch": 8}
        other = needles("b", 0.9, 0.5, versions=versions, settings=settings)
        assert self.notices(tmp_path, needles("a", 0.9, 0.5), other) == (
            "The evaluations differ in device: a has cpu, b has cuda.",
            "The evaluations differ in batch: a has 4, b has 8.",
        )

    def test_scores_over_other_numbers_of_samples(self, tmp_path):
        fewer = (
            builders.task("needle", 0.98, 0.9, "rouge1_recall", count=400, skipped={"converted: out of memory": 40}),
        )
        [notice] = self.notices(tmp_path, needles("a", 0.9, 0.5), needles("b", 0.9, 0.5, tasks=fewer))
        assert "440 samples: a" in notice
        assert "400 samples: b" in notice

    def test_files_without_bytes_or_without_an_original(self, tmp_path):
        old = replace(needles("a", 0.9, 0.5), tokens=None, kv_bytes=None, dense_bytes=None)
        alone = replace(needles("b", 0.9, 0.5), models={"converted": "b"})
        first, second = self.notices(tmp_path, old, alone)
        assert "a is missing in the chart" in first
        assert "b was evaluated without the original" in second

    def test_one_name_twice_is_told_apart_by_folder(self, tmp_path):
        folders = [saved(tmp_path / name, needles("a", 0.9, 0.5)) for name in ("x", "y")]
        assert [entry.name for entry in compare(folders).entries] == [f"a ({folder})" for folder in folders]


class TestCommand:
    def test_several_folders(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for name in ("a", "b"):
            saved(tmp_path / name, needles(name, 0.9, 0.5))
        said = done("report", "a", "b")
        assert said.err.strip() == "wrote comparison/index.html"
        assert done("report", "a", "b").err.strip() == "replaced comparison/index.html"
        assert {path.name for path in (tmp_path / "comparison").iterdir()} == {"index.html", "quality.png"}

    def test_one_folder_is_written_again_where_it_is(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        saved(tmp_path / "a", needles("a", 0.9, 0.5))
        assert done("report", "a").err.strip() == "wrote a/index.html"
        result = run("report", "a", "--out", "page")
        assert result.code == 2
        assert "--out is for a comparison" in result.err
        assert not (tmp_path / "page").exists()
        assert not (tmp_path / "comparison").exists()

    def test_a_page_of_own_results_stays(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for name in ("a", "b"):
            saved(tmp_path / name, needles(name, 0.9, 0.5))
        assert "a: it has a page of its own results" in refused("report", "a", "b", "--out", "a")
        saved(tmp_path / "c", needles("c", 0.9, 0.5))
        assert "c: it has a page of its own results" in refused("report", "a", "b", "--out", "c")
        assert not (tmp_path / "c/index.html").exists()

    def test_one_sweep(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        saved(tmp_path / "swept", builders.sweep())
        done("report", "swept", "--out", "page")
        assert "Settings of swept" in (tmp_path / "page" / "index.html").read_text()

    def test_the_page_of_a_sweep_lies_in_its_folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        saved(tmp_path / "swept", builders.sweep())
        assert done("report", "swept").err.strip() == "wrote swept/index.html"
        assert (tmp_path / "swept/sweep.png").exists()
        assert "<h1>Sweep of Llama-3.1-8B-Instruct</h1>" in (tmp_path / "swept/index.html").read_text()
        assert not (tmp_path / "comparison").exists()
        # no other page takes its place
        saved(tmp_path / "a", needles("a", 0.9, 0.5))
        assert "swept: it has a page of its own" in refused("report", "swept", "a", "--out", "swept")

    def test_a_comparison_names_the_original(self, tmp_path):
        folders = [saved(tmp_path / name, needles(name, 0.9, 0.5)) for name in ("a", "b")]
        path, _ = write_comparison(folders, tmp_path / "page")
        assert "<h1>Llama-3.1-8B-Instruct: 2 checkpoints compared</h1>" in path.read_text()

    def test_a_sweep_whose_setting_lacks_a_task(self, tmp_path):
        points = builders.sweep().points
        incomplete_point = replace(points[0], tasks=points[0].tasks[:1])
        folder = saved(tmp_path / "swept", builders.sweep(points=(incomplete_point, *points[1:])))
        line = refused("report", folder, "--out", tmp_path / "page")
        assert f"the results in {folder} cannot be shown" in line
        assert "the setting budget 64, unquantized has no string_match_all of needle" in line

    def test_a_folder_without_results(self, tmp_path):
        assert "neither results.json nor bench.json" in refused("report", tmp_path, tmp_path)

    def test_a_checkpoint_is_no_folder_for_results(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        saved(tmp_path / "a", needles("a", 0.9, 0.5))
        (tmp_path / "duo").mkdir()
        (tmp_path / "duo/config.json").write_text("{}")
        assert "duo is a checkpoint; run `kvsurgery eval duo --out report`" in refused("report", "duo")
        for command in (("report", "a", "a"), ("eval", "duo"), ("bench", "duo"), ("sweep", "duo", "--kv-bits", 4)):
            assert "duo is a checkpoint; give results a folder of their own" in refused(*command, "--out", "duo")
        assert [path.name for path in (tmp_path / "duo").iterdir()] == ["config.json"]
