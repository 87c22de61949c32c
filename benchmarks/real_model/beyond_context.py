"""Texts beyond the context of a real language model: REFORM and other ways to read them, with four facts asked for.

    kvsurgery profile compute MODEL --method reform --context 4K --chunk 512 -o reform.safetensors
    python benchmarks/real_model/beyond_context.py MODEL --profile reform.safetensors --text book.txt --json beyond.json

Facts are single words that stand between the sentences of a text; the beginning of one of them is the end of a
prompt. A text is read once, and each question follows a copy of what was read. Every text goes through all methods in
turns; methods that keep a small cache while every layer reads are slow, so they read fewer texts. Methods
answer from as many tokens, whatever the length. Seconds are of CPU time on one thread, to the first word of an answer,
reading included; on a GPU they are not recorded. A run continues from its JSON file, also with a larger
--recurrent-texts.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from benchmarks.provenance import record_versions
from benchmarks.real_model.models import stock
from benchmarks.real_model.trials import Prompt, chained_prompts, listing_prompts, prompts
from benchmarks.recurrent_methods import (
    BM25,
    Full,
    Gathered,
    InfiniPot,
    InfLLM,
    Method,
    Reading,
    Recurrent,
    Truncation,
    duplicate,
)
from benchmarks.synthetic import dimensions, emitted
from kvsurgery.display import console
from kvsurgery.display.figure import new_figure, save_figure
from kvsurgery.evaluate.results import Interval
from kvsurgery.evaluate.statistics import interval, resampled_means
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.templates.kv_reform import Reform
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.tokens import token_ids

LENGTHS = (4000, 8000, 16000, 32000, 64000)
SETTINGS = Reform((), chunk=512, encode_budget=1024, window=64, keep=64, pool=33, recompute_budget=1024)
FACTS = 4  # of a text
ROOM, LIST = 128, 48  # tokens, for a question and its answer, and for an answer that lists words
ASKED = {"single": prompts, "two-hops": chained_prompts, "list": listing_prompts}
DTYPES = ("bfloat16", "float32")
CATALYST = "\n\nThe secret word of the"  # how all questions begin


def choosing(settings: Reform) -> list[Method]:
    """Methods that answer with a cache of tokens that are chosen when a question is asked."""
    return [Full(), Gathered(settings), BM25(settings), Truncation(settings)]


def recurrent(settings: Reform, catalyst: list[int]) -> list[Method]:
    """Methods that answer with what they kept when they read."""
    return [
        Recurrent(settings, "H2O"),
        Recurrent(replace(settings, compressor="streaming"), "StreamingLLM"),
        Recurrent(settings, "InfiniPot", partial(InfiniPot, catalyst=catalyst)),
        Recurrent(settings, "InfLLM-like blocks", InfLLM),
    ]


def answer(reading: Reading, question: torch.Tensor, count: int) -> tuple[list[int], float]:
    """So many tokens that follow a question, int64 [1, tokens], and seconds to the first of them."""
    begin = time.process_time()
    session, token = reading.ask(question)
    token = session.next(token)
    seconds, tokens = time.process_time() - begin, [int(token)]
    while len(tokens) < count:
        token = session.next(token)
        tokens.append(int(token))
    return tokens, seconds


@torch.inference_mode()
def measure(method: Method, model: PreTrainedModel, prompt: Prompt) -> dict[str, list[float]]:
    """By question whether the answer is right, or by word of a list whether it is there; and on a CPU seconds by
    question."""
    begin = time.process_time()
    reading = method.read(model, torch.from_numpy(prompt.text)[None].to(model.device), ROOM)
    read_seconds, right, all_seconds = time.process_time() - begin, [], []
    for question in prompt.questions:
        question_tokens, answer_tokens = np.split(question.tokens, [len(question.tokens) - question.answer])
        count = LIST if question.listed else len(answer_tokens)
        asked_tokens = torch.from_numpy(question_tokens)[None].to(model.device)
        generated, seconds = answer(duplicate(reading, model), asked_tokens, count)
        right += [holds(generated, word) for word in question.listed] or [generated == answer_tokens.tolist()]
        all_seconds.append(read_seconds + seconds)
    return {"right": right} | ({"seconds": all_seconds} if model.device.type == "cpu" else {})


def holds(tokens: list[int], word: list[int]) -> bool:
    """Whether a word's tokens are among these, one after another."""
    return any(tokens[start : start + len(word)] == word for start in range(len(tokens)))


def recalled(samples: list[dict[str, Any]], name: str, baseline: str | None = None) -> Interval:
    """The share of right answers, or the difference to another method's, over the texts that were read."""
    common_samples = [sample for sample in samples if name in sample and baseline in (None, *sample)]
    recall = np.array(
        [[np.mean(sample[method]["right"]) for sample in common_samples] for method in (name, baseline) if method]
    )
    resampled = resampled_means(recall, 0)
    if baseline is None:
        return interval(recall[0].mean(), resampled[0])
    return interval(recall[0].mean() - recall[1].mean(), resampled[0] - resampled[1])


def table(report: dict[str, Any]) -> list[str]:
    """Lines of a Markdown table: texts, of each length where these differ, the share of right answers by length, and
    seconds to the first word at the last, of texts that were read on a CPU. Methods that read no text have no row."""
    lengths = sorted((length for length, samples in report["results"].items() if samples), key=int)
    heads = ["method", "texts", *(f"{int(length):,} tokens" for length in lengths), f"seconds at {int(lengths[-1]):,}"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method in [*choosing(SETTINGS), *recurrent(SETTINGS, [])]:
        texts = [sum(method.name in sample for sample in report["results"][length]) for length in lengths]
        text_counts = [str(count) for count in texts if count]
        cells, last_seconds = [method.name, ", ".join(text_counts if len({*text_counts}) > 1 else text_counts[:1])], "-"
        for length in lengths:
            method_samples = [sample for sample in report["results"][length] if method.name in sample]
            if method_samples:
                recall = recalled(method_samples, method.name)
                cells.append(f"{recall.mean:.0%} [{recall.low:.0%}, {recall.high:.0%}]")
            else:
                cells.append("-")
            seconds = [sample[method.name]["seconds"] for sample in method_samples if "seconds" in sample[method.name]]
            last_seconds = f"{np.median(seconds):.1f}" if seconds else "-"
        if any(texts):
            lines.append(f"| {' | '.join([*cells, last_seconds])} |")
    return lines


def plot(report: dict[str, Any], path: Path) -> None:
    """Recall over the length of the text, a line for each method, bars for 95% intervals."""
    figure = new_figure(8, 4.5)
    axis = figure.subplots()
    for method in [*choosing(SETTINGS), *recurrent(SETTINGS, [])]:
        recall_by_length = {
            int(length): recalled(method_samples, method.name)
            for length, samples in report["results"].items()
            if (method_samples := [sample for sample in samples if method.name in sample])
        }
        if not recall_by_length:
            continue
        means = [recall.mean for recall in recall_by_length.values()]
        bars = np.array(
            [[recall.mean - recall.low, recall.high - recall.mean] for recall in recall_by_length.values()]
        ).T
        axis.errorbar([*recall_by_length], means, yerr=bars, marker="o", markersize=4, capsize=2, label=method.name)
    lengths = [*map(int, report["results"])]
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.set(xlabel="tokens of a text", ylabel="facts recalled", ylim=(0, 1))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize="small", ncols=2)
    save_figure(figure, path)


def loaded(
    folder: Path, profile: Path, dtype: str, device: str = "cpu"
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel, Reform]:
    """A checkpoint's tokenizer, its emitted model, and the settings of all methods with a profile's embedding heads."""
    heads = tuple((head.layer, head.state, head.head) for head in HeadProfile.load(profile).embedding_heads)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = stock(folder, dtype=getattr(torch, dtype), device=device)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer, emitted(model, dimensions(model.config)[0]), replace(SETTINGS, heads=heads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock checkpoint with a tokenizer")
    parser.add_argument("--profile", type=Path, required=True, help="its embedding heads")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text that facts are hidden in")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a prompt")
    parser.add_argument(
        "--questions",
        choices=ASKED,
        default="single",
        help="about a fact each, two facts, or all of a text",
    )
    parser.add_argument("--texts", type=int, default=25, help="texts of each length")
    parser.add_argument("--recurrent-texts", type=int, default=5, help="of which all methods read so many")
    parser.add_argument("--only", action="append", help="methods by name, such as REFORM")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="float32: for CPUs that lack bfloat16")
    parser.add_argument("--device", default="cpu", help="where models run, such as cuda")
    parser.add_argument("--json", type=Path, required=True, help="results; those there are not measured again")
    parser.add_argument("--plot", type=Path, help="draw them as a PNG")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    tokenizer, model, settings = loaded(arguments.model, arguments.profile, arguments.dtype, arguments.device)
    facts: dict[str, Any] = {
        "text": arguments.text.name,
        "texts": arguments.texts,
        "settings": json.loads(json.dumps(asdict(settings))),
        "questions": arguments.questions,
        "dtype": arguments.dtype,
    }
    report = json.loads(arguments.json.read_text()) if arguments.json.exists() else facts
    old_defaults = {"questions": "single", "dtype": DTYPES[0]}  # of files that do not say so
    if old_defaults | {name: report[name] for name in facts if name in report} != facts:
        parser.error(f"{arguments.json} was measured with other settings; give it another name")
    results, choosing_methods = report.setdefault("results", {}), choosing(settings)
    all_methods = choosing_methods + recurrent(settings, token_ids(tokenizer, CATALYST))
    for length in arguments.lengths:
        samples = results.setdefault(str(length), [])
        haystack = Haystack.read(str(arguments.text), tokenizer, length)
        texts = ASKED[arguments.questions](tokenizer, haystack, length, FACTS, arguments.texts, 0)
        for number, prompt in enumerate(texts):
            methods = all_methods if number < arguments.recurrent_texts else choosing_methods
            if length + ROOM > model.config.max_position_embeddings:
                methods = [method for method in methods if not isinstance(method, Full)]
            samples.extend([{}] * (number == len(samples)))
            offset = number % len(methods)
            remaining = [
                method
                for method in methods[offset:] + methods[:offset]
                if method.name in (arguments.only or [method.name]) and method.name not in samples[number]
            ]
            if not remaining:
                continue
            new_results = {method.name: measure(method, model, prompt) for method in remaining}
            samples[number] = samples[number] | new_results
            for name in new_results:
                record_versions(report, f"{name}, {length} tokens, text {number + 1}", arguments.device)
            arguments.json.write_text(json.dumps(report) + "\n")
            summary = ", ".join(f"{name} {sum(answers['right'])}" for name, answers in new_results.items())
            console.stderr.print(f"{length:,} tokens, {number + 1} of {arguments.texts}: {summary} right")
    print("\n".join(table(report)))
    if arguments.plot:
        plot(report, arguments.plot)


if __name__ == "__main__":
    main()
