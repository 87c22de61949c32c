"""What the page on heads, the README and the page on SmolLM2's profiles say is what the committed files hold."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import documented_tables
from benchmarks.real_model import heads_report, paired
from kvsurgery.evaluate.results import Interval
from kvsurgery.evaluate.statistics import interval, resampled_means
from kvsurgery.profile.comparison import compare
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.loading import load_scores
from tests.docs.pages import figures, numbers

ROOT = Path(__file__).resolve().parents[2]


def results(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


PAGE, PROFILES = "docs/results/heads.md", "examples/smollm2/README.md"


def test_what_the_docs_say_of_random_heads() -> None:
    rows = {(row.heads, row.share): row for row in heads_report.rows(results("which-heads"), "16+64")}
    for share in (50, 33, 25):
        random = rows["random", share].scores
        assert all(rows[name, share].scores.recall.low > random.recall.high for name in ("gates", "er", "attention"))
    random = rows["random", 75]
    assert [f"{value:.0%}" for value in (random.draws[0], random.draws[-1])] == ["33%", "73%"]
    assert rows["attention", 75].scores.recall.low < random.scores.recall.high < rows["gates", 75].scores.recall.low
    assert all(rows["first layers", share].scores.outside.mean == 0 for share in (75, 50, 33, 25))


def test_what_the_docs_say_of_scores_beside_each_other() -> None:
    found = results("which-heads")
    far = paired.outside_window(found, 16, 64)

    def pair(share: int, one: str, other: str) -> tuple[Interval, Interval]:
        """Recall outside of the window and divergence, of one choice less the other."""
        first, second = (found["results"][f"{name}, {share}% full, 16+64"] for name in (one, other))
        kl = np.subtract(first["kl"], second["kl"])[None]
        more = paired.scores([first], second, found["settings"]["prompts"], far).more
        return more, interval(kl.mean(), resampled_means(kl, 0)[0])

    def points(share: int, one: str, other: str) -> str:
        more = pair(share, one, other)[0]
        return f"{100 * more.mean:.0f} [{100 * more.low:.0f}, {100 * more.high:.0f}]"

    shown = figures(PAGE, "**Compared with each other**")
    for pair_shown in ((75, "gates", "attention"), (75, "er", "attention"), (33, "attention", "er")):
        assert numbers(points(*pair_shown)) <= shown
    less = {
        (one, other, share)
        for one, other in itertools.permutations(("gates", "er", "attention"), 2)
        for share in (75, 50, 33, 25)
        if pair(share, one, other)[1].high < 0
    }
    assert less == {
        *(("gates", "er", share) for share in (75, 33, 25)),
        *(("gates", "attention", share) for share in (75, 33)),
        *(("attention", "er", share) for share in (33, 25)),
    }


MEASURED = ("gates", "gates of longer prompts", "er", "attention")


def rows_by_choice(length: int) -> dict[tuple[str, int | None], heads_report.Row]:
    rows = heads_report.rows(results(f"which-heads-{length}"), "64+256")
    return {(row.heads, row.share): row for row in rows}


@pytest.mark.parametrize("length", [2048, 4096, 8000])
def test_measured_heads_recall_more_than_random_ones_at_every_length(length: int) -> None:
    rows = rows_by_choice(length)
    for share in (50, 33, 25):
        random = rows["random", share]
        assert len(random.draws) == 5
        assert all(rows[heads, share].scores.recall.low > random.scores.recall.high for heads in MEASURED)
        assert rows["first layers", share].scores.outside.mean == 0
    assert all(rows[heads, 75].scores.recall.low < rows["random", 75].scores.recall.high for heads in MEASURED)
    assert all(rows[heads, 75].scores.more.high >= 0 for heads in MEASURED)


def test_the_default_window_keeps_what_the_docs_say() -> None:
    rows = {heads: row for (heads, share), row in rows_by_choice(2048).items() if share in (None, 50)}
    original, random = rows["original"].scores, rows["random"]
    kept = {name: f"{row.scores.recall.mean / original.recall.mean:.0%}" for name, row in rows.items()}
    more = {name: f"{row.scores.ratio.mean - 1:.1%}" for name, row in rows.items()}
    longer, minutes = "gates of longer prompts", "gates of 20 minutes"
    choices = ("gates", "attention", "measured loss", longer, "er")
    shown = figures(PAGE, "**Half of the heads, 2,048 tokens**")
    assert {*(kept[name] for name in choices), *(more[name] for name in choices)} <= shown
    assert {f"{random.draws[0]:.0%}", f"{random.draws[-1]:.0%}"} <= shown
    assert {kept["gates"], more["gates"]} <= figures("README.md", "**Fewer heads**")
    assert {kept[minutes], more[minutes]} <= figures(PAGE, "gates of 20 minutes come from")
    assert all(rows[name].scores.more.low < 0 < rows[name].scores.more.high for name in (*MEASURED, "measured loss"))


def test_a_quarter_of_the_heads_keeps_what_the_readme_says() -> None:
    rows = {heads: row.scores.recall for (heads, share), row in rows_by_choice(2048).items() if share in (None, 25)}
    heads, tokens, window = 90, 2048, 64 + 256
    full = heads - round(0.75 * heads)
    cache = (full * tokens + (heads - full) * window) / (heads * tokens)
    recalled = {f"{rows[heads].mean:.0%}" for heads in ("gates", "original", "random")}
    assert {*recalled, f"{cache:.0%}"} <= figures("README.md", "quarter of the heads that")


def test_other_shares_keep_what_the_docs_say() -> None:
    all_rows = {length: rows_by_choice(length) for length in (2048, 4096, 8000)}
    rows = {choice: row.scores for choice, row in all_rows[2048].items()}
    most = max(rows[heads, 75].ratio.mean - 1 for heads in MEASURED)
    shown = figures(PAGE, "**Other shares**")
    assert f"{most:.1%}" in shown
    quarter = rows["gates", 25]
    kept = f"{quarter.recall.mean / rows['original', None].recall.mean:.0%}"
    more = f"{quarter.ratio.mean - 1:.1%}"
    assert {kept, more, f"{-100 * rows['er', 25].more.mean:.0f}"} <= shown
    assert round(rows["er", 25].more.mean, 2) == round(rows["attention", 25].more.mean, 2)
    assert max(rows["er", 25].more.high, rows["attention", 25].more.high) < 0 < quarter.more.high
    quarters = (*MEASURED, "gates of longer prompts, 400 steps, seed 1")
    least, highest = (
        [
            f"{100 * edge(all_rows[length][heads, 25].scores.recall.mean for heads in quarters):.0f}%"
            for length in (4096, 8000)
        ]
        for edge in (min, max)
    )
    assert {*least, *highest} <= shown
    for length, share in itertools.product((4096, 8000), (50, 33, 25)):
        scores = [all_rows[length][heads, share].scores.recall.mean for heads in ("gates of longer prompts", "gates")]
        assert (scores[0] > scores[1]) == (share == 50)

    def lost(heads: str, share: int) -> list[float]:
        return sorted(-100 * rows[heads, share].scores.more.mean for rows in all_rows.values())

    random = {f"{number:.0f}" for share in (75, 50) for number in lost("random", share)[::2]}
    assert {*random, f"{lost('first layers', 75)[0]:.0f}"} <= figures(PAGE, "**Random heads**")
    assert lost("first layers", 75)[0] == min(lost("first layers", share)[0] for share in (75, 50, 33, 25))


def test_half_of_the_heads_lose_nothing_at_the_end_of_the_context_if_chosen_well() -> None:
    rows = {heads: row.scores for (heads, share), row in rows_by_choice(8000).items() if share in (None, 50)}
    recall = {name: f"{scores.recall.mean:.0%}" for name, scores in rows.items()}
    assert recall["er"] == recall["gates of longer prompts"]
    choices = ("original", "attention", "gates of 20 minutes", "er", "gates")
    assert {recall[name] for name in choices} <= figures(PAGE, "**Half of the heads, 8,000 tokens**")
    assert {name for name in (*MEASURED, "gates of 20 minutes") if rows[name].more.high < 0} == {"gates"}


def test_more_steps_and_other_seeds_change_nothing_that_shows() -> None:
    longer, few = (
        [rows_by_choice(length)[heads, 50] for length in (2048, 4096, 8000)]
        for heads in ("gates of longer prompts, 400 steps", "gates of longer prompts")
    )
    assert {len(row.draws) for row in longer} == {3}

    def recalled(row: heads_report.Row) -> str:
        ends = (row.draws[0], row.draws[-1]) if row.draws else (row.scores.recall.mean,)
        return " to ".join(dict.fromkeys(f"{share:.0%}" for share in ends))

    recalls = " ".join(map(recalled, (*longer, *few)))
    assert numbers(recalls) <= figures(PAGE, "**More steps, other seeds**")
    assert all(
        row.scores.more.low <= other.scores.more.mean <= row.scores.more.high
        for row, other in zip(longer, few, strict=True)
    )


def test_losses_of_single_heads_choose_a_quarter_badly() -> None:
    report = results("which-heads-2048")
    outside, prompts = heads_report.outside_window(report, 64, 256), report["settings"]["prompts"]

    def less_than_others(share: int) -> list[Interval]:
        """Facts outside of the window by other scores, less those by measured losses, in points."""
        own, *others = (report["results"][f"{heads}, {share}% full, 64+256"] for heads in ("measured loss", *MEASURED))
        differences = [paired.scores([other], own, prompts, outside).more for other in others]
        return [Interval(100 * more.mean, 100 * more.low, 100 * more.high) for more in differences]

    quarter = less_than_others(25)
    least, most = (edge(less.mean for less in quarter) for edge in (min, max))
    assert {f"{least:.0f}", f"{most:.0f}"} <= figures(PAGE, "**Measured losses**")
    assert min(less.low for less in quarter) > 0
    assert all(less.low < 0 < less.high for share in (75, 50) for less in less_than_others(share))


def test_half_of_the_heads_lose_more_in_longer_texts() -> None:
    rows = {heads: row.scores for (heads, share), row in rows_by_choice(4096).items() if share in (None, 50)}
    recall = {name: f"{scores.recall.mean:.0%}" for name, scores in rows.items()}
    more = {name: f"{scores.ratio.mean - 1:.1%}" for name, scores in rows.items()}
    choices = (*MEASURED, "gates of 20 minutes")
    shown = figures(PAGE, "**Half of the heads, 4,096 tokens**")
    assert {recall["original"], *(recall[name] for name in choices), more["er"], more["attention"]} <= shown
    assert {name for name in choices if rows[name].more.high < 0} == {"gates"}
    ratios = {name: rows[name].ratio.mean for name in choices}
    assert (min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)) == ("er", "attention")


def test_a_longer_window_costs_what_the_docs_say() -> None:
    rows = heads_report.rows(results("which-heads-windows"), "64+1024")
    assert max(row.scores.ratio.mean for row in rows) < 1.0045


def test_gates_of_20_minutes_are_what_their_readme_says() -> None:
    folder = ROOT / "examples" / "smollm2"
    minutes, gates = (HeadProfile.load(folder / f"{name}.safetensors") for name in ("minutes", "gates"))
    made = minutes.provenance
    assert made["steps_done"] == made["steps"]
    [half] = (overlap for overlap in compare(minutes, gates).overlaps if overlap.sparsity == 0.5)
    shown = {made["steps"], made["data"]["shortest"], made["data"]["longest"], half.full, half.shared}
    assert {str(number) for number in shown} <= figures(PROFILES, "`--minutes 20`")


def test_how_far_profiles_agree_is_what_their_readme_says() -> None:
    folder = ROOT / "examples" / "smollm2"
    names = {path.stem for path in folder.glob("*.safetensors")} - {"reform"}  # which has no scores
    assert names == {*documented_tables.PROFILES}
    profiles = {name: load_scores(folder / f"{name}.safetensors") for name in names}

    def shared(one: str, other: str) -> int:
        return next(each.shared for each in compare(profiles[one], profiles[other]).overlaps if each.sparsity == 0.5)

    long_seeds = ("longer-400", "longer-400-seed-1", "longer-400-seed-2")
    [alike] = {shared(*pair) for pair in itertools.combinations(long_seeds, 2)}
    assert shared("minutes", "seed-1") == 45
    assert {str(alike), str(shared("longer", "longer-seed-1"))} <= figures(PROFILES, "**Seeds**")
    by_steps = [shared(*pair) for pair in itertools.product(("longer", "longer-seed-1"), long_seeds)]
    assert {str(min(by_steps)), str(max(by_steps))} <= figures(PROFILES, "those of 127 steps")
    assert {profiles[name].provenance["steps_done"] for name in long_seeds} == {400}
    assert shared("longer-seed-1", "er") == shared("longer", "er")
    assert shared("minutes", "er") == shared("seed-1", "er")
    shown = {45 - shared("longer", "minutes"), shared("longer", "er"), shared("minutes", "er")}
    assert {str(number) for number in shown} <= figures(PROFILES, "**Longer prompts**")
    agreed = {name: compare(profiles["lm"], profiles[name]).spearman for name in profiles if name != "lm"}
    lowest, second, *_, highest = sorted(agreed, key=lambda name: agreed[name])
    assert (lowest, second, highest) == ("r", "attention", "losses")
    assert str(np.count_nonzero(profiles["r"].scores == 0)) in figures(PROFILES, "**Methods**")
    right = {str(profiles[name].provenance["successes"]) for name in ("er", "r")}
    assert right <= figures(PROFILES, "needles of ER")
