"""Measure every contender in the environment that this runs in: `run.py` starts it, with its own venv's Python.

    python -m benchmarks.peers.worker FOLDER

FOLDER holds job.json, the texts and the converted models; results.json is written there. Nothing of kvsurgery is
imported: converted models load with transformers alone.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers.utils import logging

from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.entries import Entry, enter
from benchmarks.peers.held import held_bytes

BATCH = 10  # prompts that are asked together
VALUES = 3  # tokens of an answer
AFTER = VALUES + 3 + VALUES  # tokens after a prompt: its answer and a stop, a question of two words, and that answer
REFUSALS = (AssertionError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)


def stated_share(entry: Entry, cache: Any, full_bytes: int) -> float:
    """The share of the full cache that a contender says it keeps."""
    if entry.press:
        return 1 - entry.press.compression_ratio
    if entry.contender.kind == "quantized":
        return entry.contender.options["nbits"] / (8 * entry.model.dtype.itemsize)
    return cache.allocated_bytes() / full_bytes if entry.contender.kind == "converted" else 1.0


def count(entry: Entry, text: torch.Tensor, prompt: int, full_bytes: int) -> dict[str, Any]:
    """Bytes after the prompt of [1, tokens], and after its answer, beside the stock model's `full_bytes`.

    What tells which keys kvpress masks lies beside the cache, in the model.
    """
    cache, _ = entry.read(text[:, :prompt], VALUES)
    cache_bytes = held_bytes(cache)
    facts = {
        "kv_bytes": cache_bytes,
        "of_full": cache_bytes / full_bytes,
        "said": stated_share(entry, cache, full_bytes),
    }
    for position in range(prompt, prompt + VALUES - 1):  # the last word is never fed
        entry.step(cache, text[:, position : position + 1], position)
    masks = [getattr(layer.self_attn, "masked_key_indices", None) for layer in entry.model.model.layers]
    return {**facts, "kv_bytes_after_answer": held_bytes(cache), "mask_bytes": held_bytes(masks)}


def recall(entry: Entry, texts: torch.Tensor, name: str) -> dict[str, float]:
    """Shares of right answers: to the question that a prompt ends in, and to one that comes after its answer.

    Right words are fed, whatever the model says; an answer is right if every word is, so this is what greedy decoding
    would give.

    Args:
        texts: [n, prompt + AFTER].
    """
    prompt = texts.shape[1] - AFTER
    is_right = torch.cat([entry.through(rows, prompt)[1].argmax(-1) == rows[:, prompt:] for rows in texts.split(BATCH)])
    asked_share, later_share = (
        words.all(1).float().mean().item() for words in (is_right[:, :VALUES], is_right[:, -VALUES:])
    )
    return {f"{name}_asked": asked_share, f"{name}_later": later_share}


def perplexity(entry: Entry, texts: torch.Tensor, counted_mask: torch.Tensor, prompt: int) -> dict[str, float]:
    """Of the tokens of `counted_mask` after each prompt [n, tokens], and a sequence's bytes of the cache at the end."""
    cache, logits = entry.through(texts, prompt)
    nats = F.cross_entropy(logits.transpose(1, 2), texts[:, prompt:], reduction="none")[counted_mask[:, prompt:]]
    return {"perplexity": nats.mean().exp().item(), "kv_bytes_at_end": held_bytes(cache) // len(texts)}


def clock(entry: Entry, text: torch.Tensor, prompt: int) -> dict[str, float]:
    """Median milliseconds of CPU time of a prompt [1, tokens] and of every token after it, this time and all before."""
    begin = time.process_time()
    cache, _ = entry.read(text[:, :prompt], text.shape[1] - prompt)
    entry.prefill.append(time.process_time() - begin)
    for position in range(prompt, text.shape[1]):
        begin = time.process_time()
        entry.step(cache, text[:, position : position + 1], position)
        entry.decode.append(time.process_time() - begin)
    return {f"{name}_ms": 1e3 * statistics.median(getattr(entry, name)) for name in ("prefill", "decode")}


def attempt(entry: Entry, part: str, measure: Callable[[Entry], dict[str, Any]]) -> None:
    """Measure a part; where a contender refuses, note why and go on with the others."""
    try:
        entry.results |= measure(entry)
    except REFUSALS as error:
        entry.refused[part] = f"{type(error).__name__}: {error}".splitlines()[0]


@torch.inference_mode()
def measure_all(names: list[str], model: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Every part of every contender; the last, time, in turns."""
    texts = load_file(folder / "texts.safetensors")
    entries, shares, full_bytes, left_out = [], {}, {}, {}
    for contender in (contender for contender in CONTENDERS if contender.name in names):
        try:
            entries.append(enter(contender, model, folder, texts["scores"], shares))
        except ImportError as error:
            left_out[contender.name] = str(error).strip().splitlines()[0]
    short_length, long_length = (texts[part].shape[1] - AFTER for part in ("short", "long"))
    for part, prompt in (("short", short_length), ("long", long_length)):
        for entry in entries:
            if entry.contender.kind in ("stock", "converted"):
                size = held_bytes(entry.read(texts[part][:1, :prompt], 0)[0])
                stock_size = full_bytes.setdefault(prompt, size)  # the stock model is first
                shares[entry.contender.name, prompt] = size / stock_size
    parts = {
        "bytes": partial(count, text=texts["short"][:1], prompt=short_length, full_bytes=full_bytes[short_length]),
        "perplexity": partial(perplexity, texts=texts["story"], counted_mask=texts["counted"], prompt=short_length),
        "recall": partial(recall, texts=texts["short"], name="recall"),
        "long recall": partial(recall, texts=texts["long"], name="long_recall"),
    }
    for number, entry in enumerate(entries, 1):
        begin = time.perf_counter()
        for part, measure in parts.items():
            attempt(entry, part, measure)
        seconds = time.perf_counter() - begin
        print(f"{number} of {len(entries)}, {seconds:.1f} s: {entry.contender.name}", file=sys.stderr, flush=True)
    for _ in range(rounds):
        for entry in entries:
            if "time" not in entry.refused:
                attempt(entry, "time", partial(clock, text=texts["timed"], prompt=long_length))
    return {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "packages": dict(sorted((part.name, part.version) for part in importlib.metadata.distributions())),
        "left_out": left_out,
        "contenders": {entry.contender.name: {**entry.results, "refused": entry.refused} for entry in entries},
    }


def main() -> None:
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    results = measure_all(job["contenders"], Path(job["model"]), folder, job["rounds"])
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
