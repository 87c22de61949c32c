"""Pictures of profiles, by their pixels."""

import numpy as np
import pytest
from matplotlib import image

from kvsurgery.errors import OutputError, ProfileError
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.comparison import compare
from kvsurgery.profile.embedding_heads import EmbeddingHead, Ranking
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.plots import BLUES, FRAME, plot, plot_comparison, plot_training

# the ends of viridis
DARK, BRIGHT = "#440154", "#fde725"


def kv(scores, base_model="org/model"):
    layers, heads = np.shape(scores)
    return HeadProfile(np.array(scores), "duo", "kv", base_model, ModelDimensions(layers, 2 * heads, heads, 8))


def query(scores, kv_heads):
    layers, heads = np.shape(scores)
    return HeadProfile(np.array(scores), "headkv-r", "query", "org/model", ModelDimensions(layers, heads, kv_heads, 8))


def chessboard(layers, heads):
    return np.indices((layers, heads)).sum(axis=0) % 2


def pixels(path, *colors):
    """Places [count, (down, across)] of the pixels of each color, outside the color bars."""
    picture = np.rint(image.imread(path)[..., :3] * 255).astype(np.int16)
    # the lowest map is the widest thing that is not white, and color bars stand right of it
    white = (picture[int(0.75 * len(picture))] > 252).all(-1)
    edge = max(np.split(np.arange(len(white)), np.flatnonzero(np.diff(white)) + 1), key=len)[-1]
    wanted = [[int(color[at : at + 2], 16) for at in (1, 3, 5)] for color in colors]
    return [np.argwhere(np.abs(picture[:, : edge + 1] - color).max(-1) < 3) for color in np.int16(wanted)]


def cells(path):
    """(widths, heights) in pixels of the cells of a chessboard, along its first head and its first layer."""
    dark, bright = pixels(path, DARK, BRIGHT)
    kind = np.zeros(np.max([dark.max(0), bright.max(0)], axis=0) + 1, dtype=int)
    kind[tuple(dark.T)], kind[tuple(bright.T)] = 1, 2
    top, left = np.argwhere(kind)[0] + 3, np.argwhere(kind.T)[0][::-1] + 3
    return tuple(
        [len(part) for part in np.split(line, np.flatnonzero(np.diff(line)) + 1) if part[0]]
        for line in (kind[top[0]], kind[:, left[1]])
    )


class TestPlot:
    @pytest.mark.parametrize("granularity", ["kv", "query"])
    def test_layers_run_across_and_heads_down(self, tmp_path, granularity):
        scores = np.zeros((4, 2))
        scores[0, 1] = 1
        plot(kv(scores) if granularity == "kv" else query(scores, 1), tmp_path / "heads.png")
        dark, bright = pixels(tmp_path / "heads.png", DARK, BRIGHT)
        assert len(dark) == pytest.approx(7 * len(bright), rel=0.1)
        assert bright[:, 0].min() > dark[:, 0].min()
        assert bright[:, 0].max() == dark[:, 0].max()
        assert bright[:, 1].min() == dark[:, 1].min()
        assert bright[:, 1].max() < dark[:, 1].max() / 2

    @pytest.mark.parametrize(("layers", "heads"), [(3, 4), (32, 8), (80, 64)])
    def test_every_head_has_a_cell_to_see_on_a_picture_of_a_page(self, tmp_path, layers, heads):
        plot(kv(chessboard(layers, heads)), tmp_path / "heads.png")
        height, width, _ = image.imread(tmp_path / "heads.png").shape
        assert max(height, width) <= 2100
        widths, heights = cells(tmp_path / "heads.png")
        assert (len(widths), len(heights)) == (layers, heads)
        assert min(*widths, *heights) >= 20

    def test_bars_are_the_full_heads_of_each_layer(self, tmp_path):
        # of 8 heads 6, 4 and 2 are full: 4, 4, 2 of the first layer and 2, 0, 0 of the second
        plot(kv([[1, 1, 0.9, 0.9], [0.1, 0.1, 0, 0]]), tmp_path / "heads.png")
        at_25, at_50, at_75 = pixels(tmp_path / "heads.png", *BLUES)
        across = (at_25[:, 1].max() + at_75[:, 1].min()) / 2
        assert at_25[:, 1].min() > across - 2
        assert at_50[:, 1].max() < across + 2
        assert len(at_50) == pytest.approx(len(at_75), rel=0.1)
        assert len(at_25) == pytest.approx(len(at_75), rel=0.1)
        assert at_75[:, 0].max() == pytest.approx(at_25[:, 0].max(), abs=2)
        assert at_50[:, 0].max() < at_75[:, 0].min() + 2

    def test_all_zero(self, tmp_path):
        plot(query(np.zeros((1, 1)), 1), tmp_path / "heads.png")
        assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize("name", [r"a$\frac{$b_c", "/home/" + "a-long-folder/" * 20], ids=["mathematics", "path"])
    def test_names_do_not_break_it(self, tmp_path, name):
        plot(kv(np.eye(2), name), tmp_path / "heads.png")
        plot(kv(np.eye(2)), tmp_path / "plain.png")
        assert image.imread(tmp_path / "heads.png").shape == image.imread(tmp_path / "plain.png").shape

    @pytest.mark.parametrize("name", ["heads.safetensors", "nowhere/heads.png", "folder.png"])
    def test_where_no_picture_can_go(self, tmp_path, name):
        (tmp_path / "folder.png").mkdir()
        with pytest.raises(OutputError, match="cannot write"):
            plot(kv(np.eye(2)), tmp_path / name)

    def test_neither_scores_nor_ranks(self, tmp_path):
        model = ModelDimensions(2, 4, 2, 8)
        reform = HeadProfile(None, "reform", None, "org/model", model, embedding_heads=(EmbeddingHead(0, "q", 0),))
        with pytest.raises(ProfileError, match="this reform profile has embedding heads and no ranks to plot"):
            plot(reform, tmp_path / "heads.png")
        assert not (tmp_path / "heads.png").exists()

    @pytest.mark.parametrize("head", [EmbeddingHead(0, "q", 1), EmbeddingHead(3, "v", 0)], ids=str)
    def test_an_embedding_head_is_framed_where_its_rank_is(self, tmp_path, head):
        model, columns = ModelDimensions(4, 4, 2, 8), {"q": 4, "k": 2, "v": 2, "hidden": 1, "attention": 4}
        ranks = {kind: np.ones((4, count)) for kind, count in columns.items()}
        ranks[head.state][head.layer, head.head] = 0.01
        reform = HeadProfile(
            None, "reform", None, "org/model", model, embedding_heads=(head,), ranking=Ranking({"pattern": ranks})
        )
        plot(reform, tmp_path / "heads.png")
        dark, bright, frame = pixels(tmp_path / "heads.png", DARK, BRIGHT, FRAME)
        assert (frame.min(0) < bright.min(0)).all()
        assert (frame.max(0) > bright.max(0)).all()
        # queries above keys above values, layers from left to right
        place = (bright.mean(0) - dark.min(0)) / (dark.max(0) - dark.min(0))
        row = {"q": 0, "k": 4, "v": 6}[head.state] + head.head
        assert place == pytest.approx([(row + 0.5) / 8, (head.layer + 0.5) / 4], abs=0.02)


class TestPlotComparison:
    def test_a_above_b_above_their_difference(self, tmp_path):
        a, b = np.zeros((2, 4, 4))
        a[0], b[3] = 1, 1
        plot_comparison(compare(kv(a), kv(b)), tmp_path / "heads.png")
        bright, lower, higher = pixels(tmp_path / "heads.png", BRIGHT, "#053061", "#67001f")  # the ends of RdBu_r
        middle = (bright[:, 0].min() + bright[:, 0].max()) / 2
        upper, under = bright[bright[:, 0] < middle], bright[bright[:, 0] > middle]
        assert upper[:, 1].max() < under[:, 1].min()
        assert len(upper) == pytest.approx(len(under), rel=0.1)
        assert lower[:, 0].min() > under[:, 0].max()
        assert higher[:, 0].min() > under[:, 0].max()
        # B - A: lower in the first layer, higher in the last
        assert lower[:, 1].max() < higher[:, 1].min()

    @pytest.mark.parametrize(("layers", "heads"), [(3, 4), (80, 64)])
    def test_every_head_has_a_cell_to_see(self, tmp_path, layers, heads):
        board = chessboard(layers, heads)
        plot_comparison(compare(kv(board), kv(1 - board)), tmp_path / "heads.png")
        widths, heights = cells(tmp_path / "heads.png")
        assert len(widths) == layers
        assert len(heights) == 2 * heads
        assert min(*widths, *heights) >= 9

    def test_profiles_that_are_all_alike(self, tmp_path):
        alike = kv(np.zeros((2, 2)))
        plot_comparison(compare(alike, alike), tmp_path / "heads.png")
        assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")


class TestPlotTraining:
    def test_losses_above_gates(self, tmp_path):
        falling, rising = np.linspace(1, 0.1, 50), np.linspace(0, 0.9, 50)
        plot_training(np.stack([falling, falling / 2, falling, rising], 1), tmp_path / "curve.png")
        picture = np.rint(image.imread(tmp_path / "curve.png")[..., :3] * 255)
        picture = picture[:, : picture.shape[1] // 2]  # the legends are at the right
        # the loss and the mean gate fall; the share of small gates, in the lower half, rises
        for color, lower, rises in ((BLUES[2], False, False), (BLUES[2], True, False), (BLUES[1], True, True)):
            half = picture[int(0.55 * len(picture)) :] if lower else picture[: int(0.4 * len(picture))]
            line = np.argwhere(np.abs(half - [int(color[at : at + 2], 16) for at in (1, 3, 5)]).max(-1) < 10)
            start, end = (line[line[:, 1] == edge, 0].mean() for edge in (line[:, 1].min(), line[:, 1].max()))
            assert (end < start - 20) if rises else (end > start + 20)

    def test_a_single_step(self, tmp_path):
        plot_training(np.ones((1, 4)), tmp_path / "curve.png")
        assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
