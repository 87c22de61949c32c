"""What the page on Qwen2.5-Coder-1.5B says of caches is what the committed file holds."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.real_model import cache_report, repository
from kvsurgery.evaluate.results import Interval
from kvsurgery.evaluate.statistics import interval, resampled_means
from tests.docs.pages import ROOT, figures

PAGE = "docs/results/qwen.md"
ROWS = {
    row.name: row
    for row in cache_report.rows(json.loads((ROOT / "benchmarks/results/which-cache-qwen.json").read_text()))
}


def recall(name: str) -> str:
    return f"{ROWS[name].scores.recall.mean:.0%}"


def kl(name: str) -> str:
    return f"{ROWS[name].scores.kl.mean:.4f}"


def test_four_bits() -> None:
    ours, quanto = "kvsurgery, all heads full, 4 bits", "QuantizedCache, quanto, 4 bits"
    shown = {recall(name) for name in ("original", ours, quanto)} | {kl(ours), kl(quanto)}
    shown |= {f"{ROWS[name].share:.0%}" for name in (ours, quanto)}
    assert shown <= figures(PAGE, "**4 bits**")
    assert ROWS[ours].scores.kl.high < ROWS[quanto].scores.kl.low
    for name in (ours, quanto):
        assert ROWS[name].scores.more.low <= 0 <= ROWS[name].scores.more.high


LONG = {
    losses: json.loads((ROOT / f"benchmarks/results/which-cache-qwen-8192{losses}.json").read_text())
    for losses in ("", "-measured")
}
LONG_ROWS = {losses: {row.name: row for row in cache_report.rows(found)} for losses, found in LONG.items()}


def long_recall(name: str, losses: str = "") -> str:
    return f"{LONG_ROWS[losses][name].scores.recall.mean:.0%}"


def test_two_bits_need_a_measurement() -> None:
    two, four = (f"kvsurgery, all heads full, {bits} bits" for bits in (2, 4))
    rotated = f"{two}, keys and values rotated"
    plain = LONG_ROWS[""]
    assert {long_recall(four), long_recall("original"), f"{plain[four].share:.0%}"} <= figures(
        PAGE, "**4 bits** recall 9"
    )
    best = {long_recall(two, "-measured"), f"{LONG_ROWS['-measured'][two].share:.0%}"}
    assert {long_recall(two), long_recall(rotated)} | best <= figures(PAGE, "**2 bits as by default**")
    shown = {long_recall(two), long_recall(two, "-measured"), long_recall("original")}
    assert shown <= figures("docs/quantized-caches.md", "**At 2 bits, measure.**")
    assert plain[four].scores.more.low <= 0 <= plain[four].scores.more.high
    assert plain[two].scores.more.high < plain[rotated].scores.more.mean
    assert plain[rotated].scores.more.high < 0
    assert plain[rotated].scores.more.mean < LONG_ROWS["-measured"][two].scores.more.mean
    assert {"72", "8,192"} <= figures(PAGE, "Six texts of twice the length") | figures(PAGE, "With texts of 8,192")
    assert len(LONG[""]["results"]["original"]["right"]) == 72


def test_both_files_of_longer_texts_have_one_original() -> None:
    plain, measured = LONG.values()
    assert plain["places"] == measured["places"]
    assert plain["results"]["original"] == measured["results"]["original"]


def test_half_of_the_heads_lose_more_in_longer_texts() -> None:
    half = "kvsurgery, 50% of heads full by er"
    row = LONG_ROWS["-measured"][half]
    shown = {long_recall(half, "-measured"), f"{row.share:.0%}", recall(half), recall("original")}
    assert shown <= figures(PAGE, "**Half of the heads streaming** recall 56%")
    assert row.scores.more.mean < ROWS[half].scores.more.mean


def test_bits_come_before_heads() -> None:
    heads, bits = (f"kvsurgery, {name}" for name in ("50% of heads full by er", "all heads full, 4 bits"))
    shown = {recall(name) for name in (heads, bits)} | {f"{ROWS[name].share:.0%}" for name in (heads, bits)}
    shown |= {long_recall(heads, "-measured"), long_recall(bits), long_recall("original")}
    assert shown <= figures("docs/results.md", "**On Qwen2.5-Coder, bits come before heads")
    assert ROWS[heads].share > ROWS[bits].share
    assert ROWS[heads].scores.more.high < 0


def test_three_bits_are_smaller_and_nearer_than_four_of_quanto() -> None:
    three, quanto = ROWS["kvsurgery, all heads full, 3 bits"], ROWS["QuantizedCache, quanto, 4 bits"]
    assert three.share < quanto.share
    assert three.scores.kl.high < quanto.scores.kl.low
    assert {f"{three.share:.0%}", recall(three.name), kl(three.name)} <= figures(PAGE, "**3 bits**")


def test_two_bits_and_streaming_heads() -> None:
    two, streaming = "kvsurgery, all heads full, 2 bits", "kvsurgery, 50% of heads full by er"
    assert {f"{ROWS[two].share:.0%}", recall(two), kl(two)} <= figures(PAGE, "**2 bits**")
    assert {f"{ROWS[streaming].share:.0%}", recall(streaming)} <= figures(PAGE, "**Half of the heads streaming**")
    assert ROWS[streaming].scores.more.high < ROWS[two].scores.more.mean


def test_with_another_novel() -> None:
    report = json.loads((ROOT / "benchmarks/results/which-cache-qwen-moby-dick.json").read_text())
    rows = {row.name: row for row in cache_report.rows(report)}
    recalled = {name: f"{row.scores.recall.mean:.0%}" for name, row in rows.items()}
    kl = {name: row.scores.kl.mean for name, row in rows.items()}
    bits = [f"kvsurgery, all heads full, {bits} bits" for bits in (4, 2)]
    assert {recalled[name] for name in ("original", *bits)} <= figures(PAGE, "**Bits** again")
    assert all(rows[name].scores.more.low <= 0 <= rows[name].scores.more.high for name in bits)
    streaming, budgets = "kvsurgery, 50% of heads full by er", "kvsurgery, budgets of 1024 by er, 4 bits"
    snapkv, kvzip = "SnapKVPress, 35%", "KVzipPress, 35%"
    assert {recalled[name] for name in (streaming, budgets, snapkv)} <= figures(PAGE, "**Heads and budgets** again")
    assert kl[snapkv] < min(kl[streaming], kl[budgets])
    assert kl[kvzip] > max(kl[snapkv], kl[budgets])
    assert {recalled[kvzip], f"{kl[kvzip]:.4f}"} <= figures(PAGE, "**KVzip** with")
    assert rows[kvzip].share == 1


def more(after: np.ndarray, before: np.ndarray) -> Interval:
    """By how much a cache's shares, of tasks or of answers, are larger than the original's on average."""
    shares = np.stack([before, after]).astype(np.float64)
    means, resampled = shares.mean(1), resampled_means(shares, 0)
    return interval(means[1] - means[0], resampled[1] - resampled[0])


def test_programs() -> None:
    results = json.loads((ROOT / "benchmarks/results/human-eval.json").read_text())["results"]
    four, two = (f"kvsurgery, {bits} bits, measured" for bits in (4, 2))
    quanto, streaming = "QuantizedCache, quanto, 4 bits", "kvsurgery, 50% of heads full, window 16 + 64"
    rolling = "kvsurgery, rolling budgets of 120, blocks of 32"
    tasks = results["original"]["tasks"]
    passed = {name: np.array([result["tasks"][task]["passed"] for task in tasks]) for name, result in results.items()}
    same = {
        name: f"{np.mean([result['tasks'][task]['sha256'] == tasks[task]['sha256'] for task in tasks]):.0%}"
        for name, result in results.items()
    }
    share = {name: f"{answers.mean():.0%}" for name, answers in passed.items()}
    gain = {name: more(answers, passed["original"]) for name, answers in passed.items()}
    shown = {share[name] for name in ("original", four, two, quanto)} | {same[four], same[two], str(len(tasks))}
    assert shown <= figures(PAGE, "**4 and 2 bits** pass")
    assert {share[streaming], same[streaming]} <= figures(PAGE, "**Half of the heads streaming**, in windows")
    assert {share[rolling], f"{-100 * gain[rolling].mean:.1f}"} <= figures(PAGE, "**Rolling budgets** of 120")
    for name in (four, two, quanto, streaming):
        assert gain[name].low <= 0 <= gain[name].high
    assert gain[rolling].high < 0


def test_completed_lines() -> None:
    rows = repository.scores(json.loads((ROOT / "benchmarks/results/repository.json").read_text()))
    original, bm25 = rows["original"], rows[repository.RETRIEVAL]
    claims = {
        "**With the files in the cache**": ["original", repository.WITHOUT],
        "**SnapKV** with 20% of the tokens completes": ["SnapKVPress, 20%"],
        "**BM25** knows": [repository.RETRIEVAL],
    }
    for start, names in claims.items():
        assert {f"{rows[name].right.mean:.0%}" for name in names} <= figures(PAGE, start)
    ours = {
        "**A cache in 4 bits**": "kvsurgery, all heads full, 4 bits",
        "**2 bits** complete": "kvsurgery, all heads full, 2 bits",
        "**Half of the heads streaming** complete": "kvsurgery, 50% of heads full by er",
        "**Budgets** of 1,024 tokens a head in 4 bits complete": "kvsurgery, budgets of 1024 by er, 4 bits",
    }
    for start, row in ((start, rows[name]) for start, name in ours.items()):
        assert {f"{share:.0%}" for share in (row.right.mean, row.share, row.named.mean)} <= figures(PAGE, start)
        assert row.more.low <= 0 <= row.more.high
    assert f"{original.named.mean:.0%}" in figures(PAGE, "**A cache in 4 bits**")
    assert bm25.more.high < 0


@pytest.mark.parametrize("share", ["35%", "20%"])
def test_presses_lose_facts_that_are_asked_for_later(share: str) -> None:
    presses = [name for name in ROWS if name.endswith(f"Press, {share}")]
    assert {recall(name) for name in presses} <= figures(PAGE, "**Presses**")
    assert all(ROWS[name].scores.more.high < 0 for name in presses)


def test_budgets() -> None:
    budgets, press = "kvsurgery, budgets of 1024 by er, 4 bits", "SnapKVPress, 35%"
    shown = {f"{ROWS[budgets].share:.0%}", recall(budgets), kl(budgets), kl(press)}
    assert shown <= figures(PAGE, "**Budgets**")
    assert recall(budgets) == recall(press)


def right_lines(name: str) -> dict[str, np.ndarray]:
    """By cache, whether each line of each answer is right."""
    report = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    return {cache: np.array(result["right"]) for cache, result in report["results"].items()}


ROTATED, MEASURED = (f"kvsurgery, 2 bits, {kind}" for kind in ("keys and values rotated", "measured"))


def test_balances() -> None:
    short, quanto = right_lines("running-balances"), "QuantizedCache, quanto, 2 bits"
    assert {answers.shape for answers in short.values()} == {(6, 40)}
    assert {"40", "240"} <= figures(PAGE, "With 40 transactions")
    assert f"{short[ROTATED].mean():.0%}" == f"{short['original'].mean():.0%}"
    assert f"{short[ROTATED].mean():.0%}" in figures(PAGE, "**2 bits** lose in long answers")
    gain = more(short[ROTATED].mean(1), short["original"].mean(1))
    assert gain.low <= 0 <= gain.high
    last = {name: f"{answers[:, 30:].mean():.0%}" for name, answers in short.items()}
    assert {f"{short[quanto].mean():.0%}", last[quanto], last["original"]} <= figures(PAGE, "**quanto's 2 bits**")


def test_balances_in_long_answers() -> None:
    right, bits, quanto = right_lines("running-balances-100"), "kvsurgery, 4 bits", "QuantizedCache, quanto, 4 bits"
    assert {answers.shape for answers in right.values()} == {(6, 100)}
    assert {"100", "600"} <= figures(PAGE, "With 100 transactions")
    share = {name: f"{answers.mean():.0%}" for name, answers in right.items()}
    assert share[bits] == share["original"]
    without_loss = bits, "kvsurgery, 3 bits, measured", quanto
    assert {share[name] for name in without_loss} <= figures(PAGE, "**4 bits** write")
    assert {share[name] for name in ("original", ROTATED, MEASURED)} <= figures(PAGE, "**2 bits** lose in long answers")
    gain = {name: more(answers.mean(1), right["original"].mean(1)) for name, answers in right.items()}
    assert all(gain[name].high < 0 for name in (ROTATED, MEASURED))
    assert all(gain[name].low <= 0 <= gain[name].high for name in without_loss)
    assert {share[MEASURED], share[bits]} <= figures("docs/quantized-caches.md", "In answers of 2,100 tokens, even")
    shown = {share[name] for name in ("original", ROTATED, MEASURED)}
    assert shown <= figures("docs/quantized-caches.md", "Published results say that plain rotations")
