"""Sentences of the report: a description of the checkpoint, and one line for each finding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsurgery.bench.results import Bench
from kvsurgery.emit.cache_description import describe_widths
from kvsurgery.evaluate.results import CONVERTED, ORIGINAL, PERPLEXITY, Results, TaskResult
from kvsurgery.heads.kinds import BUDGETED, FULL, KINDS, decided_kinds, kinds_of
from kvsurgery.report.charts import tokens
from kvsurgery.report.findings import (
    FEWEST_SAMPLES,
    FINDINGS,
    UNCLEAR,
    WORSE,
    against_original,
    titles,
    verdict,
)
from kvsurgery.system.sizes import size

MOST_OPEN = 5.0  # points that a score may have lost where a model is called still good


@dataclass(frozen=True)
class Tile:
    """A figure at the top of the page, with its meaning."""

    figure: str
    text: str


def lead(checkpoint: Mapping[str, Any], results: Results | None, bench: Bench | None) -> str:
    """The first sentences of the page: a description of the checkpoint and of the results shown."""
    runs = " and ".join([*["evaluation"] * (results is not None), *["benchmark"] * (bench is not None)])
    runs_sentence = f"This page shows its {runs}."
    surgery = checkpoint["surgery"]
    if not surgery:
        return f"A stock checkpoint. {runs_sentence}"
    origin = f" from {surgery['base_model']}" if surgery["base_model"] else ""
    return f"Converted{origin} to a head-level KV cache. {runs_sentence}"


def conversion(checkpoint: Mapping[str, Any]) -> str:
    """Model, kinds of heads and bits."""
    surgery, shape = checkpoint["surgery"], checkpoint["dimensions"]
    own_layers = surgery["heads"][: len(surgery["heads"]) - checkpoint["shared"]]  # the last ones share their cache
    counts = kinds_of(own_layers)
    parts = [f"{counts[kind]:,} {kind.keeps}" for kind in KINDS if counts[kind]]
    text = f"Of {counts.total():,} KV heads, {', '.join(parts)}."
    if shape:
        text = f"{checkpoint['model_type']} with {shape['layers']} layers of {shape['kv_heads']} KV heads. {text}"
    if quantization := surgery["quantization"]:
        quantized_heads = "full heads" if surgery.get("hold") else "full and budgeted heads"
        widths = describe_widths(quantization["bits"])
        text += f" The cache of {quantized_heads} is stored in {widths} ({quantization['scheme']})."
    if surgery["reform"]:
        budget_text = f"{surgery['reform']['recompute_budget']:,} tokens"
        text += f" For prompts over {budget_text}, REFORM gathers the tokens that the question needs."
    if not surgery["revertible"]:
        text += " save_pretrained has saved this checkpoint again, so it cannot be reverted."
    return text


def layers(heads: Sequence[Sequence[str | int]]) -> list[dict[str, str | int]]:
    """Per layer, the number of KV heads of each kind in the model, and the range of budgets."""
    present_kinds, rows = kinds_of(heads), []
    for layer in heads:
        counts = kinds_of([layer])
        row: dict[str, str | int] = {kind.label: counts[kind] for kind in KINDS if kind in present_kinds}
        budgets = [head for head in layer if isinstance(head, int)]
        if BUDGETED in present_kinds:
            row["budgets"] = f"{min(budgets):,} to {max(budgets):,}" if budgets else ""
        rows.append(row)
    return rows


def tiles(checkpoint: Mapping[str, Any], results: Results | None, bench: Bench | None) -> list[Tile]:
    """The figures at the top of the page: full heads and KV bytes, scores, and decode speed."""
    return [*_surgery(checkpoint["surgery"]), *_scores(results), *_speed(bench)]


def _surgery(surgery: Mapping[str, Any] | None) -> Iterator[Tile]:
    if not surgery:
        return
    counts = decided_kinds(surgery["heads"], surgery["full_heads"])
    yield Tile(f"{counts[FULL]:,} of {counts.total():,}", f"KV heads {FULL.keeps}")
    row = surgery["kv_bytes"][-1]  # at the model's own maximum
    ratio = row["after"] / row["before"]
    share_text = f"{ratio:.0%} of {size(row['before'])}"
    yield Tile(size(row["after"]), f"of KV cache at {tokens(row['tokens'])} tokens, {share_text}")


def _scores(results: Results | None) -> Iterator[Tile]:
    verdicts = [verdict(task) for task in results.tasks if task.difference] if results else []
    findings = [finding for finding in verdicts if finding in FINDINGS]
    if not findings:
        return
    yield Tile(
        f"{findings.count(WORSE)} of {len(findings)}",
        f"score{'s' * (len(findings) > 1)} clearly worse than the original's",
    )


def conclusion(results: Results) -> str:
    """One sentence on whether the converted model is still good; empty unless it was compared with the original."""
    names = titles(results.tasks)
    compared = {
        names[task.task, task.metric]: task for task in results.tasks if {ORIGINAL, CONVERTED} <= {*task.scores}
    }
    if not compared:
        return ""
    cache = ""
    if results.kv_bytes and results.dense_bytes:
        cache = f", with {results.kv_bytes / results.dense_bytes:.0%} of the original's KV cache"
        if results.kv_bytes >= results.dense_bytes:
            cache += f" at {results.tokens:,} tokens, so evaluate longer `lengths` too"
    losses = {name: task for name, task in compared.items() if _is_loss(task)}
    if losses:
        worst = max(losses, key=lambda name: _loss(losses[name]))
        detail = f"{'most of all ' * (len(losses) > 1)}{worst}: {against_original(losses[worst])}"
        return f"Not as good: {_worse(len(losses), len(compared))} ({detail}){cache}."
    judged = [task for task in compared.values() if verdict(task) in FINDINGS]
    if not judged:
        return (
            f"Cannot tell: no score has {FEWEST_SAMPLES} samples or more and an original that answers any of them; "
            "evaluate more `samples`."
        )
    text = f"{_worse(0, len(judged))}{cache}"
    if len(judged) < len(compared):
        text += f" ({len(compared) - len(judged)} inconclusive)"
    reserve = max((-100 * task.difference.low for task in judged if task.difference and _is_open(task)), default=0)
    if reserve > MOST_OPEN:
        return (
            f"No clear loss: {text}; but a loss of up to {reserve:.1f} points is possible, so evaluate more `samples`."
        )
    return f"Still good: {text}."


def _worse(count: int, total: int) -> str:
    return f"{count} of {total} score{'s' * (total != 1)} clearly worse"


def _is_loss(task: TaskResult) -> bool:
    """Whether a task's score is clearly worse, or NaN while the original's is a number."""
    converted, original = task.scores[CONVERTED].mean, task.scores[ORIGINAL].mean
    return verdict(task) == WORSE or (math.isnan(converted) and not math.isnan(original))


def _loss(task: TaskResult) -> float:
    """The lost part of a score, on a scale that compares different kinds of scores roughly."""
    original, converted = task.scores[ORIGINAL].mean, task.scores[CONVERTED].mean
    if not math.isfinite(converted):
        return math.inf
    return math.log(converted / original) if task.metric == PERPLEXITY else original - converted


def _is_open(task: TaskResult) -> bool:
    """Whether the interval allows that a share is smaller than the original's."""
    return task.metric != PERPLEXITY and verdict(task) == UNCLEAR


def decode_ratios(bench: Bench | None) -> dict[tuple[int, int], float]:
    """The converted model's decode speed, 1 being the original's, by (tokens, batch) where both decode."""
    decode = {
        (row.tokens, row.batch, row.contender): row.decode.seconds
        for row in (bench.rows if bench else ())
        if row.decode
    }
    return {
        (tokens, batch): decode[tokens, batch, ORIGINAL] / seconds
        for (tokens, batch, name), seconds in decode.items()
        if name == CONVERTED and (tokens, batch, ORIGINAL) in decode
    }


def longest_place(places: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The (tokens, batch) with the longest prompts, of these the smallest batch."""
    return max(places, key=lambda place: (place[0], -place[1]))


def _speed(bench: Bench | None) -> Iterator[Tile]:
    """The decode speed at the longest prompts for which both models were measured."""
    if ratios := decode_ratios(bench):
        tokens, batch = place = longest_place(ratios)
        yield Tile(f"{ratios[place]:.2f}×", f"the original's decode speed at {tokens:,} tokens, batch {batch}")
