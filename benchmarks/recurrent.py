"""Prompts far beyond a model's context: REFORM and other ways to read them, on the bundled model, in one run.

    python benchmarks/recurrent.py --json recurrent.json --plot recurrent.png
    python benchmarks/recurrent.py --lengths 1024 4096 --samples 5    # a quick look

Every prompt goes through all methods in turns, so that what else the machine does hits all alike; figures are medians.
Recall is the share of answers with every word right. Seconds are of CPU time on one thread: those to the first word of
the answer, its last pass through the model among them, and those of every further one. Memory is the most that tensors
hold at a time, weights and the prompt aside, of a prompt of its own; and, at the greatest length, what the
high-water mark of a process that does nothing else rises by.

REFORM's heads are ranked by where the recall task's facts end up, on prompts of their own. The best ones of this model
are in layer 0, where a state says no more than its token and no layer runs while the prompt is read. So the best of the
other layers are shown too, the worst, and random ones. What has to hold comes last, and whether it does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks.budgets import HERE
from benchmarks.recurrent_methods import BM25, Full, Gathered, InfiniPot, InfLLM, Method, Recurrent, Truncation
from benchmarks.recurrent_report import ABOVE, OURS, RANDOM, WORST, claimed, plot, show, verdicts
from benchmarks.synthetic import dimensions, emitted
from kvsurgery.bench.memory import LiveBytes
from kvsurgery.display import console
from kvsurgery.system.memory import peak_memory
from kvsurgery.templates.kv_encode import Encoder, EncodingLayer
from kvsurgery.templates.kv_layout import KVLayout
from kvsurgery.templates.kv_reform import Reform
from tests.helpers.encode_bytes import encode_bytes

sys.path.append(str(HERE))
import embedding
import task

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
SETTINGS = replace(Reform(()), **{name.replace("-", "_"): size for name, size in embedding.SETTINGS.items()})
LONG = 8192  # tokens
RANKED = 1024  # tokens of the prompts that heads are ranked by
SEED = 1234
NEW = 8  # tokens that are generated; the answer is the first of them


@dataclass
class Figures:
    """What was measured of one method at one length."""

    exact: list[bool] = field(default_factory=list)
    words: list[float] = field(default_factory=list)  # shares of the answer's
    first: list[float] = field(default_factory=list)  # seconds to the first token
    forward: list[float] = field(default_factory=list)  # those of the pass that it comes from
    token: list[float] = field(default_factory=list)  # seconds of every further one
    peak: int = 0

    def summary(self) -> dict[str, float]:
        """What a row of the results says: means of recall, medians of seconds."""
        recall = {name: statistics.fmean(getattr(self, name)) for name in ("exact", "words")}
        seconds = {f"{name}_s": statistics.median(getattr(self, name)) for name in ("first", "forward", "token")}
        return {"samples": len(self.exact), **recall, **seconds, "new_tokens": NEW, "peak_bytes": self.peak}


@cache
def recall_model() -> PreTrainedModel:
    """The bundled model, converted with every head full."""
    stock_model = LlamaForCausalLM.from_pretrained(HERE / "model", dtype=torch.float32)
    return emitted(stock_model, dimensions(stock_model.config)[0])


@torch.no_grad()
def answer(method: Method, prompt: torch.Tensor, figures: Figures | None = None) -> list[int]:
    """Read a prompt [1, tokens] and go on greedily."""
    start = time.process_time()
    text, question = prompt[:, : -SETTINGS.query_length], prompt[:, -SETTINGS.query_length :]
    session, token = method.read(recall_model(), text, question.shape[1] + NEW).ask(question)
    ends, answer_tokens = [time.process_time()], []
    for _ in range(NEW):
        token = session.next(token)
        answer_tokens.append(int(token))
        ends.append(time.process_time())
    if figures is not None:
        figures.first.append(ends[1] - start)
        figures.forward.append(ends[1] - ends[0])
        figures.token += np.diff(ends[1:]).tolist()
    return answer_tokens


def ranked_heads(count: int, length: int) -> list[tuple[int, str, int]]:
    """All embedding heads of the bundled model, the best at the recall task first."""
    ranking = embedding.measure(SEED + 1, count, length).ranking
    assert ranking is not None  # of a profile that was measured
    return [(head.layer, head.state, head.head) for head in ranking.best("pattern")]


def methods(ranked: list[tuple[int, str, int]], draws: int) -> list[Method]:
    """All that are compared, by budget alike; H2O also with no more than REFORM keeps while it reads."""
    rng, later_heads = np.random.default_rng(SEED), [head for head in ranked if head[0]]
    random = {f"{RANDOM} {draw + 1}": rng.permutation(len(ranked))[:4] for draw in range(draws)}
    heads = {
        OURS: ranked[:4],
        ABOVE: later_heads[:4],
        WORST: ranked[-4:],
        **{name: [ranked[index] for index in places] for name, places in random.items()},
    }
    return [
        Full(),
        Truncation(SETTINGS),
        Recurrent(replace(SETTINGS, compressor="streaming"), "StreamingLLM"),
        Recurrent(SETTINGS, "H2O"),
        Recurrent(replace(SETTINGS, recompute_budget=SETTINGS.encode_budget), "H2O, encode budget"),
        Recurrent(replace(SETTINGS, compressor="tova"), "TOVA"),
        Recurrent(SETTINGS, "InfiniPot", partial(InfiniPot, catalyst=[task.RECALL])),
        Recurrent(SETTINGS, "InfLLM-like blocks", InfLLM),
        BM25(SETTINGS),
        *(Gathered(replace(SETTINGS, heads=tuple(method_heads)), name) for name, method_heads in heads.items()),
    ]


def suitable(compared_methods: list[Method], length: int) -> list[Method]:
    """Those that can read so long a prompt: the model has positions for it, or the method does without."""
    longest = recall_model().config.max_position_embeddings
    return [method for method in compared_methods if length <= longest or not isinstance(method, Full)]


def measure(
    compared_methods: list[Method], length: int, samples: int, fewer: int, progress: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """Let all methods answer the same prompts of a length, in turns; a row of figures each.

    Args:
        samples, fewer: prompts for methods that something is claimed of, and for the others.
        progress: is told after every prompt how many are done, of how many.
    """
    figures = {method.name: Figures() for method in compared_methods}
    questions = task.prompts(SEED, samples + 1, length)
    for number, (prompt, answer_words) in enumerate(zip(*questions, strict=True)):
        first_index = number % len(compared_methods)
        for method in compared_methods[first_index:] + compared_methods[:first_index]:
            method_figures = figures[method.name]
            if number == 0:  # warms up, and shows the memory
                with LiveBytes() as live:
                    answer(method, prompt[None])
                method_figures.peak = live.peak
            elif number <= fewer or claimed(method.name):
                is_right = (
                    torch.tensor(answer(method, prompt[None], method_figures)[: len(answer_words)]) == answer_words
                )
                method_figures.exact.append(bool(is_right.all()))
                method_figures.words.append(is_right.float().mean().item())
        progress(number, samples)
    return [{"method": name, "tokens": length, **method_figures.summary()} for name, method_figures in figures.items()]


def held_bytes(method: Gathered, length: int) -> tuple[int, int]:
    """Bytes that reading a prompt with REFORM has left: counted, and by the formula."""
    model, settings = recall_model(), method.settings
    encoder = Encoder(model.model, KVLayout.from_config(model.config), settings)
    embeddings = encoder.read(input_ids=task.prompts(SEED, 1, length).tokens)
    layers = [layer for layer in encoder.cache.layers if isinstance(layer, EncodingLayer)]
    kept_states = [part for layer in layers for part in (layer.keys, layer.values) if part is not None]
    predicted = encode_bytes(settings, length, model.config.num_key_value_heads, model.config.head_dim, 4)
    return sum(part.untyped_storage().nbytes() for part in (embeddings, *kept_states) if part.numel()), predicted


def process_bytes(compared_methods: list[Method], length: int) -> list[int]:
    """By how much each method's prompt raises the high-water mark of a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        idle_peak, *peaks = pool.map(process_peak, [None, *compared_methods], [length] * (len(compared_methods) + 1))
    return [peak - idle_peak for peak in peaks]


def process_peak(method: Method | None, length: int) -> int:
    """High-water mark of this process after one prompt; None: before any."""
    torch.set_num_threads(1)
    recall_model()
    prompt = task.prompts(SEED, 1, length).tokens
    if method is not None:
        answer(method, prompt)
    return peak_memory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a prompt")
    parser.add_argument("--samples", type=int, default=20, help="prompts of each length")
    parser.add_argument(
        "--long-samples", type=int, default=5, help=f"of above {LONG:,} tokens, for what nothing is claimed of"
    )
    parser.add_argument("--draws", type=int, default=3, help="of random heads")
    parser.add_argument("--ranking-samples", type=int, default=32, help="prompts that heads are ranked by")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--plot", type=Path, help="write a picture to this file too")
    arguments = parser.parse_args()
    if min(arguments.lengths) <= SETTINGS.recompute_budget:
        parser.error(f"--lengths must be above {SETTINGS.recompute_budget}, the tokens that all of them keep")
    torch.set_num_threads(1)
    compared_methods, results = methods(ranked_heads(arguments.ranking_samples, RANKED), arguments.draws), []
    for length in sorted(arguments.lengths):
        suitable_methods = suitable(compared_methods, length)
        fewer = arguments.samples if length <= LONG else min(arguments.samples, arguments.long_samples)
        with console.step_progress(f"{length:,} tokens") as advance:
            results += measure(suitable_methods, length, arguments.samples, fewer, advance)
    for row, peak in zip(results[-len(suitable_methods) :], process_bytes(suitable_methods, length), strict=True):
        row["process_bytes"] = peak
    sizes = {method.name: held_bytes(method, length) for method in compared_methods if isinstance(method, Gathered)}
    claims = verdicts(results, sizes)
    show(results, claims)
    if arguments.plot:
        plot(results, arguments.plot)
    if arguments.json:
        facts = {"seed": SEED, "settings": asdict(SETTINGS), "ranking_samples": arguments.ranking_samples}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        heads = {method.name: method.settings.heads for method in compared_methods if isinstance(method, Gathered)}
        report = {
            "heads": heads,
            "held_bytes": sizes,
            "claims": [asdict(claim) for claim in claims],
            "results": results,
        }
        arguments.json.write_text(json.dumps({**facts, **versions, **report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
