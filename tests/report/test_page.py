"""The page that `write_report` makes, as a reader without a network has it."""

import json
import math
import re
from dataclasses import replace

import pytest

from kvsurgery.errors import KVSurgeryError, OutputError
from kvsurgery.evaluate.results import Cell, Interval, Results
from kvsurgery.report import write_comparison, write_report
from kvsurgery.report.colors import DARK, LIGHT
from tests.report import builders
from tests.report.reading import Page

EVIL = '"><script>alert(1)</script><img src="http://example.com/x.png">'


# one task without a curve: few pictures to draw
FEW = {"tasks": (builders.task("qa", 0.5, 0.5),)}


@pytest.fixture(scope="module")
def page(report):
    return Page(report / "index.html")


def written(folder, *parts):
    for part in parts:
        part.save(folder)
    return Page(write_report(folder))


def test_it_needs_no_other_file_and_no_script(page):
    assert "script" not in page.tags
    assert not page.values("src")
    links = [*page.values("href"), *page.values("xlink:href")]
    assert links
    assert {f"#{name}" for name in page.values("id")} >= set(links)
    assert "default-src 'none'" in " ".join(page.values("content"))


def test_ids_are_of_one_element_each(page):
    ids = page.values("id")
    assert len(ids) == len(set(ids))


def test_scores_that_are_no_numbers_are_null_in_the_file_and_shown(tmp_path):
    """A model whose losses overflow has them; JSON has no NaN."""
    none = Interval(float("nan"), float("nan"), float("inf"))
    cells = tuple(Cell({"tokens": tokens}, 9, {"original": 8.0, "converted": float("nan")}) for tokens in (100, 200))
    pair = {"original": builders.interval(8.0), "converted": none}
    task = builders.task("perplexity", 8, 8, "perplexity", scores=pair, difference=none, cells=cells)
    page = written(tmp_path, builders.results(tasks=(task,)))
    assert page.table("Scores of each task")[-1][2:] == ["nan nan–nan", "nan nan to nan no clear difference"]
    saved = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)["tasks"][0]
    assert saved["scores"]["converted"] == {"mean": None, "low": None, "high": None}
    assert saved["cells"][0]["scores"] == {"original": 8.0, "converted": None}
    # files of older versions have it bare
    path = tmp_path / "results.json"
    path.write_text(path.read_text().replace('"low": null', '"low": NaN'))
    assert math.isnan(Results.load(tmp_path).tasks[0].scores["converted"].low)
    original = (replace(task, scores={"original": pair["original"]}, difference=None, cells=()),)
    points = [replace(point, tasks=(task,)) for point in builders.sweep().points[:2]]
    found = builders.sweep(original=original, points=tuple(points))
    found.save(builders.saved(tmp_path / "swept"))
    json.loads((tmp_path / "swept/sweep.json").read_text(), parse_constant=pytest.fail)
    write_comparison([tmp_path / "swept"], tmp_path / "page")
    assert "nan" in " ".join(" ".join(row) for row in Page(tmp_path / "page/index.html").table("Settings of swept"))


def test_every_table_has_a_caption_and_every_picture_a_description(page):
    tags = [tag for tag, _ in page.elements]
    assert tags.count("table") == tags.count("caption")
    pictures = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert len(pictures) == tags.count("figure") == tags.count("figcaption")
    assert all(picture["role"] == "img" and picture["aria-label"].strip() for picture in pictures)


def test_scores_with_their_intervals_and_differences(page):
    rows = {row[0]: row[1:] for row in page.table("Scores of each task")}
    assert rows["needle rouge1_recall, 440 samples"] == [
        "97.0% 95.0–99.0%",
        "94.0% 92.0–96.0%",
        "−3.0 −5.0 to −1.0 worse",
    ]
    assert rows["passkey token_accuracy, 200 samples"][2] == "−0.5 −2.5 to +1.5 no clear difference"
    # of perplexities, the lower is the better
    assert rows["perplexity perplexity, 200 samples"][2] == "+0.050 +0.030 to +0.070 worse"


def test_kv_memory_before_and_after(page):
    # of 256 KV heads half keep 128k tokens, half 320; 512 bytes each
    after = 128 * 512 * (131_072 + 320) / 2**30
    assert ["128k", "16.00 GiB", f"{after:.2f} GiB", "0.50"] in page.table("KV cache of one sequence")


def test_lengths_by_name_as_version_0_1_wrote_them(tmp_path):
    rows = [{"tokens": name, "before": 2 << 20, "after": 1 << 20} for name in ("512", "40k")]
    checkpoint = builders.checkpoint(surgery=builders.surgery(kv_bytes=rows))
    old_page = written(tmp_path, builders.results(checkpoint=checkpoint, **FEW))
    assert ["40k", "2.00 MiB", "1.00 MiB", "0.50"] in old_page.table("KV cache of one sequence")


def test_grids_and_curves_are_there_as_tables(page):
    grid = page.table("needle, rouge1_recall: converted")
    assert grid[0][:3] == ["depth", "8,192", "24,576"]
    assert grid[6] == ["50%", *["100.0%"] * 4, *["40.0%"] * 4]
    # the mean of five tasks that are 3 points apart
    assert page.table("ruler, string_match_all, mean of 5 tasks")[1] == ["4,096", "89.0%", "88.0%"]


def test_skipped_samples_with_their_reasons(page):
    assert ["longbench/hotpotqa", "3", "converted: out of memory"] in page.table("Samples that were skipped")


def test_skipped_samples_of_tasks_with_several_scores(tmp_path):
    """Those of a task with two metrics stand there once."""
    tasks = [
        builders.task("qa", 0.5, 0.5, metric, skipped={"original: long": 2}) for metric in ("qa_f1", "lines_match")
    ]
    found = builders.results(tasks=tuple(tasks))
    assert written(tmp_path, found).table("Samples that were skipped")[1:] == [["qa", "2", "original: long"]]
    assert "No sample was skipped." in written(tmp_path, builders.results(**FEW)).text


def test_speed_with_what_did_not_run(page):
    rows = page.table("Batch 4")
    assert rows[-1] == ["original, quanto int4", "out of memory"]
    converted = next(row for row in rows if row[0] == "converted")
    assert converted[1] == "49.7 ms 48.2 ms to 52.1 ms"  # 2e-5 x 0.6 x 4,096 x 1.01024 s
    assert converted[2] == "–"
    assert converted[6].endswith("as predicted")
    assert page.table("Contenders that could not run") == [["original, hqq int4", "hqq is not installed"]]


def test_how_to_reproduce_it(page):
    for run in (builders.results(), builders.bench()):
        assert run.command in page.text
    settings = [row for name, rows in page.tables.items() if name == "Settings" for row in rows]
    assert ["tasks.needle.lengths", "8192, 122880"] in settings
    assert ["seed", "0"] in settings
    assert ["torch", "2.13.0"] in page.table("Versions")
    assert ["recent", "256"] in page.table("Options of the conversion")


def test_what_to_know_first(page):
    lead = page.text[: page.text.index("KV heads by kind")]
    for words in (
        "128 of 256 KV heads",
        "8.02 GiB of KV cache at 128k tokens, 50% of 16.00 GiB",
        "scores clearly worse",
    ):
        assert words in " ".join(lead.split())
    # 11 ms, and 19.7 of the original's cache or 11.8 of ours
    assert f"{(0.011 + 3e-7 * 65_536) / (0.011 + 1.8e-7 * 65_536):.2f}×" in lead


def test_names_are_text_and_nothing_else(tmp_path):
    task = builders.task(EVIL, 0.5, 0.5, EVIL, skipped={EVIL: 1})
    facts = builders.checkpoint(
        name=EVIL, model_type=EVIL, surgery=builders.surgery(base_model=EVIL, options={EVIL: EVIL})
    )
    told = {"models": {EVIL: EVIL, "converted": EVIL}, "command": EVIL, "versions": {EVIL: EVIL}, "checkpoint": facts}
    results = builders.results(**told, tasks=(task,), settings={EVIL: {EVIL: [EVIL]}})
    row = builders.row(EVIL, 1024, 1, 1.0, 1.0)
    bench = builders.bench(
        **told, settings={}, contenders=(EVIL,), rows=(row, replace(row, skipped=EVIL)), left_out={EVIL: EVIL}
    )
    page = written(tmp_path, results, bench)
    assert not {"script", "img"} & page.tags
    assert page.text.count("<script>alert(1)</script>") > 10


@pytest.mark.filterwarnings("ignore:Glyph")
def test_names_do_not_break_pictures(tmp_path):
    cells = builders.by_length("", 0.5, 0.5, 0).cells
    names = (EVIL, "a$\\frac{$b_c", "nul\0 and \udc80", "長い名前" * 30)
    page = written(
        tmp_path, builders.results(tasks=tuple(builders.task(name, 0.5, 0.5, cells=cells) for name in names))
    )
    assert not {"script", "img"} & page.tags
    # the head map, the KV cache, the tasks, and a curve each
    assert [tag for tag, _ in page.elements].count("svg") == 3 + len(names)


class TestParts:
    def test_an_evaluation_alone(self, tmp_path):
        page = written(tmp_path, builders.results(**FEW))
        assert "Speed and memory" not in page.text
        assert page.table("Scores of each task")

    def test_a_benchmark_alone(self, tmp_path):
        page = written(tmp_path, builders.bench(rows=builders.bench().rows[:6]))
        assert "Quality" not in page.text
        assert page.table("Batch 1")

    def test_a_benchmark_over_several_processes(self, tmp_path, page):
        assert "4 processes" not in page.text
        alone = builders.bench()
        shared = replace(alone, rows=alone.rows[:6], settings={**alone.settings, "processes": 4})
        assert "4 processes" in written(tmp_path, shared).text

    def test_of_an_original_alone(self, tmp_path):
        task = builders.task("needle", 0.97, 0)
        task = replace(task, scores={"original": task.scores["original"]}, difference=None)
        one = {
            "models": {"original": builders.SOURCE},
            "checkpoint": builders.checkpoint(surgery=None),
            "tasks": (task,),
        }
        page = written(tmp_path, builders.results(**one))
        assert page.table("Scores of each task")[0] == ["task", "original"]
        assert "Converted heads" not in page.text

    def test_no_sample_was_answered(self, tmp_path):
        task = builders.task(
            "needle", 0, 0, count=0, scores={}, difference=None, skipped={"original: out of memory": 9}
        )
        page = written(tmp_path, builders.results(tasks=(task,)))
        assert page.table("Scores of each task")[1][1:3] == ["–", "–"]
        assert ["needle", "9", "original: out of memory"] in page.table("Samples that were skipped")

    def test_budgets_windows_and_bits(self, tmp_path):
        heads = [["full", 120, 16, 64], ["window"] * 4]
        kinds = {"heads": heads, "full_heads": [1, None], "streaming": 0, "budgeted": 3}
        quantization = {"bits": 4, "scheme": "kivi", "group_size": None, "residual": 128}
        facts = builders.surgery(**kinds, quantization=quantization, revertible=False, base_model=None, options=None)
        page = written(tmp_path, builders.results(checkpoint=builders.checkpoint(surgery=facts), **FEW))
        assert page.table("Kinds of KV heads") == [
            ["layer", "full", "own window", "budgeted", "budgets"],
            ["0", "1", "0", "3", "16 to 120"],
            ["1", "0", "4", "0", ""],
        ]
        assert "stored in 4 bits (kivi)" in page.text
        assert "1 of 4 KV heads" in " ".join(page.text.split())

    def test_layers_that_share_a_cache(self, tmp_path):
        """Their heads have no keys and values of their own: nowhere do they count."""
        heads = [["full", "streaming"], ["window"] * 2, ["full", "streaming"]]
        facts = builders.surgery(heads=heads, full_heads=[1, None, None], streaming=1)
        page = written(tmp_path, builders.results(checkpoint=builders.checkpoint(surgery=facts, shared=1), **FEW))
        text = " ".join(page.text.split())
        assert "1 of 2 KV heads" in text
        assert "Of 4 KV heads, 1 " in text


class TestRefused:
    def test_nothing_was_evaluated(self, tmp_path):
        with pytest.raises(KVSurgeryError, match=r"neither results\.json nor bench\.json: run `kvsurgery eval "):
            write_report(tmp_path)

    @pytest.mark.parametrize(
        "path", ["tasks.0.scores.original.mean", "tasks.0.cells.0.facts.depth", "checkpoint.surgery"]
    )
    def test_values_of_another_kind(self, tmp_path, path):
        builders.results().save(tmp_path)
        file = tmp_path / "results.json"
        content = json.loads(file.read_text())
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        place = content
        for part in parents:
            place = place[part]
        place[last] = "much"
        file.write_text(json.dumps(content))
        with pytest.raises(KVSurgeryError, match="cannot be shown"):
            write_report(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["results.json"]

    def test_results_of_two_checkpoints(self, tmp_path):
        builders.results().save(tmp_path)
        other = builders.checkpoint(surgery=builders.surgery(options={"sparsity": 0.75}))
        builders.bench(checkpoint=other).save(tmp_path)
        with pytest.raises(KVSurgeryError, match="two checkpoints"):
            write_report(tmp_path)

    def test_where_no_page_can_go(self, tmp_path):
        builders.results(**FEW).save(tmp_path)
        (tmp_path / "index.html").mkdir()
        with pytest.raises(OutputError, match="cannot write"):
            write_report(tmp_path)


def luminance(color):
    """WCAG 2.1's relative luminance of #rrggbb."""
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_colors_stand_out_from_the_paper(scheme):
    def contrast(one, other):
        low, high = sorted((luminance(scheme[one]), luminance(scheme[other])))
        return (high + 0.05) / (low + 0.05)

    for text in ("ink", "muted", "converted", "good", "bad"):
        assert min(contrast(text, "paper"), contrast(text, "panel")) >= 4.5, text
    for line in ("original", *(name for name in scheme if name.startswith("series"))):
        assert contrast(line, "paper") >= 3, line
    assert contrast("remaining", "converted") >= 1.5


def test_pictures_take_their_colors_from_the_style_sheet(report):
    text = (report / "index.html").read_text()
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    for scheme in (LIGHT, DARK):
        assert used <= {f"--{name}" for name in scheme}
    pictures = "".join(re.findall("<svg.*?</svg>", text, re.DOTALL))
    assert not [color for color in LIGHT.values() if color in pictures]
    # the colors of heat maps and of the numbers in them, and nothing else
    fixed = set(re.findall("(?:fill|stroke): (#[0-9a-f]{6})", pictures))
    needles = "".join(svg for svg in re.findall("<svg.*?</svg>", text, re.DOTALL) if 'id="needle' in svg)
    assert fixed == set(re.findall("(?:fill|stroke): (#[0-9a-f]{6})", needles))
