"""Realistic results of an evaluation and of a benchmark: half of Llama-3-8B's KV heads stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvsurgery.bench.results import Bench, Phase, Row
from kvsurgery.evaluate.results import Cell, Interval, Results, TaskResult
from kvsurgery.evaluate.sweep_results import Point, Sweep

LAYERS, HEADS = 32, 8
TOKEN = 2 * 2 * 128  # bytes of a head's key and value
LENGTHS = (2_048, 8_192, 32_768, 131_072)
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
                "tokens": length,
                "before": LAYERS * HEADS * TOKEN * length,
                "after": TOKEN * (count * length + (LAYERS * HEADS - count) * 320),
            }
            for length in LENGTHS
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
    facts = {"name": FOLDER, "model_type": "llama", "dimensions": dimensions, "surgery": surgery(), "shared": 0}
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


def sweep(**changes: Any) -> Sweep:
    """Three budgets with 16 and with 4 bits; the last one is refused."""
    dense = LAYERS * HEADS * TOKEN * 122_912
    scores = {(64, 16): 0.71, (256, 16): 0.9, (1024, 16): 0.955, (64, 4): 0.68, (256, 4): 0.86}
    points = []
    for (budget, bits), mean in scores.items():
        pair = {"original": interval(0.97), "converted": interval(mean)}
        found = tuple(
            task("needle", 0.97, mean, metric, scores=pair, count=440)
            for metric in ("rouge1_recall", "string_match_all")
        )
        held = int(dense * (0.1 + budget / 2048) * bits / 16)
        points.append(Point({"budget": budget, "kv_bits": bits}, f"{budget}-{bits}", held, found))
    points.append(Point({"budget": 1024, "kv_bits": 4}, skipped="a budget of 1,024 exceeds the prompt"))
    fields = {
        "source": SOURCE,
        "command": f"kvsurgery sweep {SOURCE} --profile r2.safetensors --budget 64,256,1024 --kv-bits 16,4",
        "settings": {**results().settings, "profile": "0" * 64, "conversion": {"window": 8}},
        "versions": RUN["versions"],
        "axes": {"budget": (64, 256, 1024), "kv_bits": (16, 4)},
        "tokens": 122_912,
        "dense_bytes": dense,
        "original": tuple(
            task("needle", 0.97, 0, metric, scores={"original": interval(0.97)}, difference=None, count=440)
            for metric in ("rouge1_recall", "string_match_all")
        ),
        "points": tuple(points),
    }
    return Sweep(**fields | changes)


def needles(name: str, score: float, share: float, full: int = 128, bits: int | None = None, **changes: Any) -> Results:
    """An evaluation of a checkpoint on the samples of `sweep`, with a share of the original's KV bytes."""
    dense = LAYERS * HEADS * TOKEN * 122_912
    heads = [
        ["full" if (HEADS * layer + head) < full else "streaming" for head in range(HEADS)] for layer in range(LAYERS)
    ]
    facts = {
        "heads": heads,
        "full_heads": [layer.count("full") for layer in heads],
        "streaming": LAYERS * HEADS - full,
        "quantization": bits and {"bits": bits, "scheme": "kivi"},
        "kv_bytes": [{"tokens": 131_072, "before": dense, "after": int(share * dense)}],
    }
    fields = {
        "models": {"original": SOURCE, "converted": f"models/{name}"},
        "checkpoint": checkpoint(name=f"models/{name}", surgery=surgery(**facts)),
        "tasks": tuple(
            task("needle", 0.97, score, metric, count=440) for metric in ("rouge1_recall", "string_match_all")
        ),
        "tokens": 122_912,
        "kv_bytes": int(share * dense),
        "dense_bytes": dense,
    }
    return results(**fields | changes)


def saved(
    folder: Path, *parts: Any, samples: str = "samples", weights: str = "weights", original: str | None = None
) -> Path:
    """A folder of results, with the settings that `eval` and `sweep` leave beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        part.save(folder)
    known = {
        "samples": samples,
        "models": {"original": {"path": "org/model", "fingerprint": weights, "original": original, "checkpoint": {}}},
        "versions": {},
    }
    (folder / "settings.json").write_text(json.dumps(known))
    return folder
