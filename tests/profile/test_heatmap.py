"""What people see of a profile in the terminal: every score at its place, every count the policy's own."""

import numpy as np
import pytest
from rich.style import Style

from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.comparison import compare
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.heatmap import COLORS, SHADES, draw, draw_comparison


def duo(scores):
    layers, heads = np.shape(scores)
    return HeadProfile(np.array(scores), "duo", "kv", "org/model", ModelDimensions(layers, 2 * heads, heads, 8))


def headkv(scores, kv_heads):
    layers, heads = np.shape(scores)
    model = ModelDimensions(layers, heads, kv_heads, 8)
    return HeadProfile(np.array(scores), "headkv-r", "query", "org/model", model)


def layer_lines(text):
    """(layer, cells of each map, what stands beside) of every row, block by block."""
    lines = [line.split("|") for line in text.plain.splitlines() if line[:5].strip().isdigit()]
    return [(int(label), maps, beside.split()) for label, *maps, beside in lines]


def rows(text, which=0):
    """The cells of each layer's row, blocks of heads joined."""
    cells = {}
    for layer, maps, _ in layer_lines(text):
        cells[layer] = cells.get(layer, "") + maps[which]
    return [cells[layer] for layer in sorted(cells)]


def counts(text):
    return [list(map(int, beside)) for _, _, beside in layer_lines(text)]


class TestDraw:
    def test_by_hand(self):
        text = draw(duo([[0, 0.05, 0.15, 0.5], [0.95, 1, 0.999, 0.1]]), 80, color=False)
        assert rows(text) == ["    ..++", "@@@@@@.."]
        assert counts(text) == [[2, 1, 0], [4, 3, 2]]
        assert "| .:-=+*#%@| 0 to 1" in text.plain

    def test_a_method_without_a_bound_is_scaled_to_its_largest(self):
        made = headkv([[0, 0.02], [0.04, 0.01]], kv_heads=1)
        assert rows(draw(made, 80, color=False)) == ["  ++", "@@::"]
        assert "| 0 to 0.04" in draw(made, 80, color=False).plain

    def test_scores_of_a_few_heads_do_not_leave_the_others_blank(self):
        text = draw(headkv([[0, 0, 0.001, 0.002, 0.003, 0.003, 0.004, 0.005, 0.5, 0.8]], kv_heads=10), 80, color=False)
        assert rows(text) == ["    ::--====**##%%@@"]
        assert text.plain.endswith("| 0 to 1, the share of heads that score less")

    @pytest.mark.parametrize("top", [0, 1e-45, 3e38])
    def test_extremes(self, top):
        assert rows(draw(headkv([[0, top]], kv_heads=2), 80, color=False)) == ["  @@" if top else "    "]

    @pytest.mark.parametrize("heads", [1, 7, 8, 32, 64, 100, 128])
    @pytest.mark.parametrize("width", [1, 40, 80, 200])
    def test_every_head_once_within_the_width(self, heads, width):
        levels = np.random.default_rng(0).integers(0, 10, (3, heads))
        scores = (levels + 0.5) / 10
        levels[2, -1], scores[2, -1] = 9, 1
        text = draw(headkv(scores, kv_heads=heads), width, color=False)
        drawn = rows(text)
        cell = len(drawn[0]) // heads
        assert drawn == ["".join(SHADES[level] * cell for level in row) for row in levels]
        map_lines = text.plain.splitlines()[2:]
        assert max(map(len, map_lines)) <= max(width, 27)

    def test_columns_stand_under_their_titles(self):
        *_, title, first, _, _, _ = draw(duo(np.eye(2, 16)), 80, color=False).plain.splitlines()
        assert len(title) == len(first)
        for count in ("25", "50", "75"):
            end = title.rindex(count) + len(count)
            assert first[end - 1].isdigit()
            assert first[end : end + 1] in (" ", "")

    @pytest.mark.parametrize("kv_heads", [8, 64])
    def test_64_heads_fit_a_terminal_of_80_columns(self, kv_heads):
        text = draw(headkv(np.full((80, 64), 0.5), kv_heads), 80, color=False)
        assert len(layer_lines(text)) == 80
        assert max(map(len, text.plain.splitlines()[2:])) == 80

    def test_color(self):
        text = draw(duo([[0.25, 1]]), 80, color=True)
        assert not set(text.plain) & set("-=+*#@")
        found = [span.style for span in text.spans[:2]]
        assert found == [Style(bgcolor=COLORS[2]), Style(bgcolor=COLORS[9])]

    def test_says_how_query_heads_are_reduced(self):
        assert "query heads averaged" in draw(headkv(np.eye(2), 1), 80, color=False).plain
        assert "query heads averaged" not in draw(duo(np.eye(2)), 80, color=False).plain


class TestDrawComparison:
    def test_by_hand(self):
        found = compare(duo([[0, 0.5], [1, 1]]), duo([[0, 0.8], [1, 0]]))
        text = draw_comparison(found, 80, color=False)
        assert rows(text) == ["  ++", "@@@@"]
        assert rows(text, 1) == ["  %%", "@@  "]
        assert [beside for _, _, beside in layer_lines(text)] == [["15%"], ["50%"]]

    def test_one_scale_for_scores_of_one_method(self):
        found = compare(headkv([[0, 0.5]], 2), headkv([[0.25, 1]], 2))
        text = draw_comparison(found, 80, color=False)
        assert (rows(text), rows(text, 1)) == (["  ++"], ["::@@"])
        assert "| 0 to 1" in text.plain
        assert layer_lines(text)[0][2] == ["38%"]

    def test_ranks_of_two_methods(self):
        found = compare(duo([[0, 0.1, 0.2, 0.3]]), headkv([[0.01] * 4 + [0] * 4], 4))
        text = draw_comparison(found, 80, color=False)
        assert text.plain.startswith("ranks of KV heads")
        # 1/4 to 4/4; of two equal pairs 3.5/4 and 1.5/4
        assert (rows(text), rows(text, 1)) == (["::++##@@"], ["%%%%----"])

    @pytest.mark.parametrize("heads", [1, 8, 32, 33, 64])
    @pytest.mark.parametrize("width", [1, 80, 200])
    def test_every_head_once_within_the_width(self, heads, width):
        rng = np.random.default_rng(0)
        levels = rng.integers(0, 10, (2, 3, heads))
        text = draw_comparison(compare(*map(duo, (levels + 0.5) / 10)), width, color=False)
        for which in (0, 1):
            drawn = rows(text, which)
            cell = len(drawn[0]) // heads
            assert drawn == ["".join(SHADES[level] * cell for level in row) for row in levels[which]]
        assert max(map(len, text.plain.splitlines()[2:])) <= max(width, 29)
