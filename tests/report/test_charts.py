"""The report's pictures."""

import re
from dataclasses import replace

import pytest
from matplotlib import image
from matplotlib.figure import Figure

from kvsurgery.report.charts import byte_axis, label, looks, perplexity_axis, tokens
from kvsurgery.report.quality_charts import Place
from kvsurgery.report.speed_charts import short_time, speed
from kvsurgery.report.surgery_charts import head_map, kv_memory
from kvsurgery.report.sweep_charts import quality
from tests.report import builders


def squares(svg, color):
    """Rectangles of a color in one path, in the order of the colors' opacities."""
    paths = re.findall(r'd="([^"]*)"[^>]*style="fill: var\((--[\w-]+)\)([^"]*)"', svg)
    return [path.count("M") for path, fill, _ in paths if fill == color and path.count("M") > 1]


def test_contenders_look_different():
    for names in ([f"setting {place}" for place in range(12)], ["original", "converted", *map(str, range(12))]):
        styles = {(style["color"], style["marker"]) for style in looks(names).values()}
        assert len(styles) == len(names)


def test_the_head_map_has_a_square_for_each_head():
    [svg] = head_map(builders.surgery()).svgs()
    assert squares(svg, "--converted") == [128]
    assert squares(svg, "--remaining") == [128]


def test_larger_budgets_are_stronger():
    heads = [["full"] * 3 + [10] * 5 + [80] * 7, ["streaming"] * 15]
    [svg] = head_map(builders.surgery(heads=heads)).svgs()
    drawn = re.findall(r'd="([^"]*)"[^>]*style="fill: var\(--converted\)(?:; opacity: ([\d.]+))?', svg)
    opacity = {path.count("M"): float(value or 1) for path, value in drawn if path.count("M") > 1}
    assert set(opacity) == {3, 5, 7}
    assert opacity[5] < opacity[7] < opacity[3] == 1
    assert "budget 10" in svg
    assert "budget 80" in svg


def test_pictures_are_written_with_their_panels_side_by_side(report):
    _, width, _ = image.imread(report / "needle.png").shape
    # two metrics of two models
    assert width == pytest.approx(2 * 4.6 * 150, abs=2)
    assert {path.stem for path in report.glob("*.png")} == {"bench", "heads", "kv-memory", "lengths", "needle", "tasks"}
    for path in report.glob("*.png"):
        assert image.imread(path).std() > 0.05, path


@pytest.mark.parametrize("base", [2, 4])
@pytest.mark.parametrize("sizes", [[9_300_000, 9_700_000], [1_250_000, 1_500_000], [1 << 20, 1 << 24], [10**6]])
def test_an_axis_of_bytes_has_labels(base, sizes):
    axes = Figure().subplots()
    axes.set_yscale("log", base=2)
    axes.plot([1] * len(sizes), sizes, "o")
    axes.margins(y=0.15)
    byte_axis(axes.yaxis, base)
    low, high = axes.get_ylim()
    assert 2 <= sum(low <= tick <= high for tick in axes.get_yticks()) <= 8


def test_a_sweep_explains_its_rings_and_bars():
    for svg in quality(builders.sweep()).svgs():
        assert ">best at its size<" in svg
        assert ">95% interval<" in svg


@pytest.mark.parametrize(("values", "height"), [([6.2, 6.2 + 1e-6], 6.2 / 50), ([6.0, 9.0], 3.3)])
def test_noise_of_a_perplexity_does_not_fill_its_axis(values, height):
    axes = Figure().subplots()
    axes.plot(values)
    perplexity_axis(axes)
    low, high = axes.get_ylim()
    assert high - low == pytest.approx(height, rel=1e-3)
    assert low < min(values) < max(values) < high


def test_the_same_input_gives_the_same_picture():
    one, other = (speed(builders.bench()).panels[0], speed(builders.bench()).panels[0])
    assert one.alt == other.alt
    chart = head_map(builders.surgery())
    assert chart.svgs() == chart.svgs()


def test_alternative_texts_say_what_is_drawn():
    chart = speed(builders.bench())
    assert [panel.title for panel in chart.panels][:2] == ["Prefill in one pass", "Prefill in chunks"]
    assert "at 65,536 tokens" in chart.alt
    assert chart.note.startswith("Batch 1.")


class TestOneLength:
    """What is known at one length only has bars from zero on, with their values, in place of lone dots."""

    def test_of_a_benchmark(self, tmp_path):
        found = builders.bench()
        chart = speed(replace(found, rows=tuple(row for row in found.rows if row.tokens == 4096)))
        assert "4,096" in chart.note
        assert "logarithmic" not in chart.note
        for panel, svg in zip(chart.panels, chart.svgs(), strict=True):
            axes = Figure().subplots()
            panel.draw(axes)
            bars = [patch.get_width() for patch in axes.patches]
            assert len(bars) == 3
            assert axes.get_xlim()[0] == 0
            assert axes.get_xscale() == "linear"
            values = [float(text) for text in re.findall(r": ([\d.]+) \w+ at 4,096", panel.alt)]
            assert [bar / bars[1] for bar in bars] == pytest.approx([value / values[1] for value in values], rel=0.01)
            for name in (*found.contenders, re.search(r": ([\d.]+ \w+) at", panel.alt)[1]):
                assert name in svg
        chart.save(tmp_path)
        assert image.imread(tmp_path / "bench.png").std() > 0.05

    def test_of_a_short_context(self):
        surgery = builders.surgery()
        [svg] = kv_memory({**surgery, "kv_bytes": [{"tokens": 512, "before": 1 << 30, "after": 1 << 28}]}).svgs()
        for text in ("before", "1 GiB", "after", "256 MiB"):
            assert text in svg


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0123, "12.3 ms"), (2.5, "2.5 s"), (4.2e-5, "42 µs"), (1, "1 s"), (3e-9, "3 ns")]
)
def test_short_times(value, shown):
    assert short_time(value) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(500, "500"), (4096, "4k"), (32_000, "32,000"), (1 << 20, "1M"), ("0k", "0k")]
)
def test_numbers_of_tokens(count, shown):
    assert tokens(count) == shown


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("needle", "needle"),
        ("abcdefgh", "…defgh"),
        ("一二三", "一二三"),
        ("一二三四", "…三四"),
        ("a\nb", "a\N{REPLACEMENT CHARACTER}b"),
        ("_a", "\N{ZERO WIDTH SPACE}_a"),  # matplotlib has no legend for names that begin with an underscore
    ],
)
def test_names_are_as_long_as_there_is_room(name, shown):
    assert label(name, 6) == shown


def test_a_single_sample_has_a_place_without_a_bar():
    place = Place.of(1 << 20, builders.task("needle", 0.9, 0.8, difference=None))
    assert place is not None
    assert (place.score, place.low, place.high) == (0.8, 0.8, 0.8)
    assert Place.of(1 << 20, builders.task("needle", 0.9, 0.8, scores={}, difference=None)) is None
