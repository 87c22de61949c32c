"""Realistic results of an evaluation and of a benchmark: half of Llama-3-8B's KV heads stream."""

from __future__ import annotations

from typing import Any

from kvsurgery.bench.results import Bench, Phase, Row
from kvsurgery.evaluate.results import Cell, Interval, Results, TaskResult

LAYERS, HEADS = 32, 8
TOKEN = 2 * 2 * 128  # bytes of a head's key and value
LENGTHS = {"8k": 8_192, "32k": 32_768, "128k": 131_072, "1M": 1_048_576}
SOURCE, FOLDER = "meta-llama/Llama-3.1-8B-Instruct", "models/llama3-duo"
RUN = {
    "models": {"original": SOURCE, "converted": FOLDER},
    "versions": {"kvsurgery": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "device": "cpu"},
}


def surgery(**changes: Any) -> dict[str, Any]:
    """What `inspection.Surgery` says of it."""
    full = [[(7 * layer + 3 * head) % 16 < 8 for head in range(HEADS)] for layer in range(LAYERS)]
    count = sum(map(sum, full))
    facts = {
        "full_heads": [sum(layer) for layer in full],
        "heads": [["full" if kept else "streaming" for kept in layer] for layer in full],
        "streaming": LAYERS * HEADS - count,
        "budgeted": 0,
        "quantization": None,
        "reform": None,
        "kv_bytes": [
            {
                "tokens": name,
                "before": LAYERS * HEADS * TOKEN * length,
                "after": TOKEN * (count * length + (LAYERS * HEADS - count) * 320),
            }
            for name, length in LENGTHS.items()
        ],
        "base_model": SOURCE,
        "base_revision": None,
        "options": {"sparsity": 0.5, "method": "duo", "rest": "streaming", "sink": 64, "recent": 256},
        "tool": "0.1.0",
        "revertible": True,
    }
    return facts | changes


def checkpoint(**changes: Any) -> dict[str, Any]:
    """`inspection.Facts.to_json()`, of what a report reads."""
    dimensions = {"layers": LAYERS, "query_heads": 32, "kv_heads": HEADS, "head_dim": 128}
    facts = {"name": FOLDER, "model_type": "llama", "dimensions": dimensions, "surgery": surgery()}
    return facts | changes


def interval(mean: float, half: float = 0.02) -> Interval:
    return Interval(mean, mean - half, mean + half)


def task(name: str, original: float, converted: float, metric: str = "string_match_all", **changes: Any) -> TaskResult:
    """A task without cells."""
    fields = {
        "task": name,
        "metric": metric,
        "count": 200,
        "skipped": {},
        "scores": {"original": interval(original), "converted": interval(converted)},
        "difference": interval(converted - original),
        "cells": (),
    }
    return TaskResult(**fields | changes)


def needle(metric: str = "rouge1_recall") -> TaskResult:
    """A grid with a hole in the middle of long texts."""
    cells = tuple(
        Cell(
            {"tokens": tokens, "depth": depth / 10},
            5,
            {"original": 1.0, "converted": 0.4 if tokens > 60_000 and 3 <= depth <= 7 else 1.0},
        )
        for tokens in range(8_192, 131_072, 16_384)
        for depth in range(11)
    )
    return task("needle", 0.97, 0.94, metric, cells=cells, count=440)


def by_length(
    name: str, original: float, converted: float, slope: float, metric: str = "string_match_all"
) -> TaskResult:
    """A task at six lengths."""
    cells = tuple(
        Cell({"tokens": 4096 << step}, 50, {"original": original + slope * step, "converted": converted + slope * step})
        for step in range(6)
    )
    return task(name, original, converted, metric, cells=cells)


def results(**changes: Any) -> Results:
    """All kinds of tasks."""
    ruler = ("niah_single_1", "niah_multikey_3", "vt", "cwe", "qa_2")
    fields = {
        **RUN,
        "command": f"kvsurgery eval {FOLDER} --source {SOURCE} --tasks needle,passkey,ruler,longbench,perplexity",
        "settings": {"seed": 0, "batch": 4, "limit": None, "tasks": {"needle": {"lengths": [8192, 122_880]}}},
        "checkpoint": checkpoint(),
        "tasks": (
            needle(),
            needle("string_match_all"),
            by_length("passkey", 0.98, 0.975, -0.01, "token_accuracy"),
            *(by_length(f"ruler/{name}", 0.95 - 0.03 * at, 0.94 - 0.03 * at, -0.02) for at, name in enumerate(ruler)),
            task("longbench/hotpotqa", 0.512, 0.47, "qa_f1", skipped={"converted: out of memory": 3}),
            by_length("perplexity", 8.31, 8.36, -0.3, "perplexity"),
        ),
    }
    return Results(**fields | changes)


def phase(seconds: float, peak: int) -> Phase:
    return Phase(seconds, 0.97 * seconds, 1.05 * seconds, 9, peak)


def row(contender: str, tokens: int, batch: int, speed: float, share: float) -> Row:
    """A contender that is so many times as slow as the original, and has such a share of its cache."""
    size = int(share * 131_072 * tokens * batch)
    prefill = 2e-5 * speed * tokens * batch * (1 + tokens / 1e5)
    return Row(
        contender,
        tokens,
        batch,
        prefill=phase(prefill, 3 * size),
        chunked=phase(1.1 * prefill, 2 * size) if tokens > 2048 else None,
        first_token=phase(1.02 * prefill, 3 * size),
        decode=phase(0.011 + 3e-7 * speed * tokens * batch, size),
        kv_bytes=size,
        predicted=size if contender == "converted" else None,
        floor=0.004 + size / 30e9,
    )


def bench(**changes: Any) -> Bench:
    """Three contenders at four lengths and two batches; one of them runs out of memory at the end."""
    kinds = {"converted": (0.6, 0.53), "original": (1.0, 1.0), "original, quanto int4": (1.8, 0.29)}
    rows = [
        row(name, tokens, batch, *kind)
        for batch in (1, 4)
        for tokens in (1024, 4096, 16_384, 65_536)
        for name, kind in kinds.items()
    ]
    rows[-1] = Row("original, quanto int4", 65_536, 4, skipped="out of memory")
    fields = {
        **RUN,
        "command": f"kvsurgery bench {FOLDER} --source {SOURCE} --out report",
        "settings": {"lengths": [1024, 4096, 16_384, 65_536], "batches": [1, 4], "chunk": 2048, "rounds": 9},
        "checkpoint": checkpoint(),
        "weights": 15 << 30,
        "bandwidth": 21.3e9,
        "contenders": tuple(kinds),
        "left_out": {"original, hqq int4": "hqq is not installed"},
        "rows": tuple(rows),
    }
    return Bench(**fields | changes)
