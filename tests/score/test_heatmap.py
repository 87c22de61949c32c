"""What people see of a profile: every score at its place, every count the policy's own."""

import numpy as np
import pytest
from rich.style import Style

from kvsurgery.decide.policy import decide
from kvsurgery.dimensions import ModelDimensions
from kvsurgery.errors import OutputError
from kvsurgery.score.heatmap import COLOURS, SHADES, describe, draw, facts, plot
from kvsurgery.score.profile import HeadProfile


def duo(scores):
    layers, heads = np.shape(scores)
    return HeadProfile(np.array(scores), "duo", "kv", "org/model", ModelDimensions(layers, 2 * heads, heads, 8))


def headkv(scores, kv_heads):
    layers, heads = np.shape(scores)
    model = ModelDimensions(layers, heads, kv_heads, 8)
    return HeadProfile(np.array(scores), "headkv-r", "query", "org/model", model)


def rows(text):
    """The cells of each layer's row, blocks of heads joined."""
    cells = {}
    for line in text.plain.splitlines():
        if line[:5].strip().isdigit():
            label, drawn, _ = line.split("|")
            cells[int(label)] = cells.get(int(label), "") + drawn
    return [cells[layer] for layer in sorted(cells)]


def counts(text):
    return [
        list(map(int, line.split("|")[2].split())) for line in text.plain.splitlines() if line[:5].strip().isdigit()
    ]


class TestDraw:
    def test_by_hand(self):
        text = draw(duo([[0, 0.05, 0.15, 0.5], [0.95, 1, 0.999, 0.1]]), 80, colour=False)
        assert rows(text) == ["    ..++", "@@@@@@.."]
        assert counts(text) == [[2, 1, 0], [4, 3, 2]]
        assert "| .:-=+*#%@| 0 to 1" in text.plain

    def test_a_method_without_a_bound_is_scaled_to_its_largest(self):
        made = headkv([[0, 0.02], [0.04, 0.01]], kv_heads=1)
        assert rows(draw(made, 80, colour=False)) == ["  ++", "@@::"]
        assert "| 0 to 0.04" in draw(made, 80, colour=False).plain

    @pytest.mark.parametrize("top", [0, 1e-45, 3e38])
    def test_extremes(self, top):
        assert rows(draw(headkv([[0, top]], kv_heads=2), 80, colour=False)) == ["  @@" if top else "    "]

    @pytest.mark.parametrize("heads", [1, 7, 8, 32, 64, 100, 128])
    @pytest.mark.parametrize("width", [1, 40, 80, 200])
    def test_every_head_once_within_the_width(self, heads, width):
        levels = np.random.default_rng(0).integers(0, 10, (3, heads))
        scores = (levels + 0.5) / 10
        levels[2, -1], scores[2, -1] = 9, 1
        text = draw(headkv(scores, kv_heads=heads), width, colour=False)
        drawn = rows(text)
        cell = len(drawn[0]) // heads
        assert drawn == ["".join(SHADES[level] * cell for level in row) for row in levels]
        map_lines = text.plain.splitlines()[2:]
        assert max(map(len, map_lines)) <= max(width, 28)

    def test_colour(self):
        text = draw(duo([[0.25, 1]]), 80, colour=True)
        assert not set(text.plain) & set("-=+*#@")
        found = [span.style for span in text.spans[:2]]
        assert found == [Style(bgcolor=COLOURS[2]), Style(bgcolor=COLOURS[9])]

    def test_says_how_query_heads_are_reduced(self):
        assert "query heads averaged" in draw(headkv(np.eye(2), 1), 80, colour=False).plain
        assert "query heads averaged" not in draw(duo(np.eye(2)), 80, colour=False).plain


def test_facts():
    made = duo([[0, 1, 1, 0.5], [0.25, 0.75, 1, 0]])
    found = facts(made)
    assert (found["shape"], found["score_min"], found["score_max"], found["at_max"]) == ([2, 4], 0, 1, 3)
    for sparsity, full in found["full_heads_per_layer"].items():
        assert full == [layer.full for layer in decide(made, [None] * 2, sparsity=float(sparsity)).layers]
    assert found["hash"] == made.hash


def test_describe():
    assert describe(duo([[0, 1, 1, 0.5], [0.25, 0.75, 1, 0]])) == (
        "org/model (2 layers, 8 query heads, 4 KV heads of 8)\n"
        "duo scores of 2 x 4 KV heads: 0 to 1, mean 0.5625, 3 of 8 at the maximum"
    )


class TestPlot:
    @pytest.mark.parametrize("granularity", ["kv", "query"])
    def test_layers_run_across_and_heads_down(self, tmp_path, granularity):
        image = pytest.importorskip("matplotlib.image")
        scores = np.zeros((4, 2))
        scores[0, 1] = 1
        plot(duo(scores) if granularity == "kv" else headkv(scores, 1), tmp_path / "heads.png")
        pixels = image.imread(tmp_path / "heads.png")[..., :3]
        height, width, _ = pixels.shape
        # the ends of viridis, left of the colour bar
        dark, bright = (
            np.argwhere(np.abs(pixels[:, : int(0.85 * width)] - np.array(colour) / 255).max(-1) < 0.01)
            for colour in ([0x44, 0x01, 0x54], [0xFD, 0xE7, 0x25])
        )
        assert len(dark) == pytest.approx(7 * len(bright), rel=0.1)
        assert len(bright) > 0.05 * height * width
        assert bright[:, 0].min() > dark[:, 0].min()
        assert bright[:, 0].max() == dark[:, 0].max()
        assert bright[:, 1].min() == dark[:, 1].min()
        assert bright[:, 1].max() < dark[:, 1].max() / 2

    def test_all_zero(self, tmp_path):
        pytest.importorskip("matplotlib")
        plot(headkv(np.zeros((1, 1)), 1), tmp_path / "heads.png")
        assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")

    def test_names_with_mathematics_are_names(self, tmp_path):
        pytest.importorskip("matplotlib")
        made = HeadProfile(np.eye(2), "duo", "kv", r"a$\frac{$b_c", ModelDimensions(2, 2, 2, 8))
        plot(made, tmp_path / "heads.png")
        assert (tmp_path / "heads.png").stat().st_size > 1000

    @pytest.mark.parametrize("name", ["heads.safetensors", "nowhere/heads.png", "folder.png"])
    def test_where_no_picture_can_go(self, tmp_path, name):
        pytest.importorskip("matplotlib")
        (tmp_path / "folder.png").mkdir()
        with pytest.raises(OutputError, match="cannot write"):
            plot(duo(np.eye(2)), tmp_path / name)
