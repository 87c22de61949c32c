"""Texts beyond the context of a real language model: REFORM and other ways to read them, with four facts asked for.

    kvsurgery profile compute MODEL --method reform --context 4K --chunk 512 -o reform.safetensors
    python benchmarks/real_model/beyond_context.py MODEL --profile reform.safetensors --text book.txt --json beyond.json

Facts are single words that stand between the sentences of a text; the beginning of one of them is the end of a
prompt. A text is read once, and each question follows a copy of what was read. Every text goes through all methods in
turns; methods that keep a small cache while every layer reads are slow, so they read fewer texts. Methods
answer from as many tokens, whatever the length. Seconds are of CPU time on one thread, to the first word of an answer,
reading included. A run continues from its JSON file, also with a larger --recurrent-texts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import stock
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging
from trials import Prompt, chained_prompts, listing_prompts, prompts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from provenance import record_versions
from recurrent_methods import BM25, Full, Gathered, InfiniPot, InfLLM, Method, Reading, Recurrent, Truncation, duplicate
from synthetic import dimensions, emitted

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
    seconds, found = time.process_time() - begin, [int(token)]
    while len(found) < count:
        token = session.next(token)
        found.append(int(token))
    return found, seconds


@torch.inference_mode()
def measure(method: Method, model: PreTrainedModel, prompt: Prompt) -> dict[str, list[float]]:
    """By question whether the answer is right, or by word of a list whether it is there; and seconds by question."""
    begin = time.process_time()
    reading = method.read(model, torch.from_numpy(prompt.text)[None], ROOM)
    read, found = time.process_time() - begin, {"right": [], "seconds": []}
    for question in prompt.questions:
        asked, expected = np.split(question.tokens, [len(question.tokens) - question.answer])
        count = LIST if question.listed else len(expected)
        given, seconds = answer(duplicate(reading, model), torch.from_numpy(asked)[None], count)
        found["right"] += [holds(given, word) for word in question.listed] or [given == expected.tolist()]
        found["seconds"].append(read + seconds)
    return found


def holds(tokens: list[int], word: list[int]) -> bool:
    """Whether a word's tokens are among these, one after another."""
    return any(tokens[start : start + len(word)] == word for start in range(len(tokens)))


def recalled(samples: list[dict[str, Any]], name: str, than: str | None = None) -> Interval:
    """The share of right answers, or the difference to another method's, over the texts that were read."""
    own = [sample for sample in samples if name in sample and than in (None, *sample)]
    right = np.array([[np.mean(sample[each]["right"]) for sample in own] for each in (name, than) if each])
    resampled = resampled_means(right, 0)
    if than is None:
        return interval(right[0].mean(), resampled[0])
    return interval(right[0].mean() - right[1].mean(), resampled[0] - resampled[1])


def table(found: dict[str, Any]) -> list[str]:
    """Lines of a Markdown table: texts, of each length where these differ, the share of right answers by length, and
    seconds to the first word at the last. Methods that read no text have no row."""
    lengths = sorted((length for length, samples in found["results"].items() if samples), key=int)
    heads = ["method", "texts", *(f"{int(length):,} tokens" for length in lengths), f"seconds at {int(lengths[-1]):,}"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method in [*choosing(SETTINGS), *recurrent(SETTINGS, [])]:
        texts = [sum(method.name in sample for sample in found["results"][length]) for length in lengths]
        read = [str(count) for count in texts if count]
        cells, last = [method.name, ", ".join(read if len({*read}) > 1 else read[:1])], "-"
        for length in lengths:
            own = [sample for sample in found["results"][length] if method.name in sample]
            if own:
                around = recalled(own, method.name)
                cells.append(f"{around.mean:.0%} [{around.low:.0%}, {around.high:.0%}]")
                last = f"{np.median([sample[method.name]['seconds'] for sample in own]):.1f}"
            else:
                cells.append("-")
                last = "-"
        if any(texts):
            lines.append(f"| {' | '.join([*cells, last])} |")
    return lines


def plot(found: dict[str, Any], path: Path) -> None:
    """Recall over the length of the text, a line for each method, bars for 95% intervals."""
    figure = new_figure(8, 4.5)
    axis = figure.subplots()
    for method in [*choosing(SETTINGS), *recurrent(SETTINGS, [])]:
        read = {
            int(length): recalled(own, method.name)
            for length, samples in found["results"].items()
            if (own := [sample for sample in samples if method.name in sample])
        }
        means = [each.mean for each in read.values()]
        bars = np.array([[each.mean - each.low, each.high - each.mean] for each in read.values()]).T
        axis.errorbar([*read], means, yerr=bars, marker="o", markersize=4, capsize=2, label=method.name)
    lengths = [*map(int, found["results"])]
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.set(xlabel="tokens of a text", ylabel="facts recalled", ylim=(0, 1))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize="small", ncols=2)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock Llama checkpoint with a tokenizer")
    parser.add_argument("--profile", type=Path, required=True, help="its embedding heads")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text that facts are hidden in")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a prompt")
    parser.add_argument(
        "--questions", choices=ASKED, default="single", help="about a fact each, two facts together, or all of a text"
    )
    parser.add_argument("--texts", type=int, default=25, help="texts of each length")
    parser.add_argument("--recurrent-texts", type=int, default=5, help="of which all methods read so many")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="float32: for CPUs that lack bfloat16")
    parser.add_argument("--json", type=Path, required=True, help="results; those there are not measured again")
    parser.add_argument("--plot", type=Path, help="draw them as a PNG")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    heads = tuple((head.layer, head.state, head.head) for head in HeadProfile.load(arguments.profile).embedding_heads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    plain = stock(arguments.model, dtype=getattr(torch, arguments.dtype))
    settings = replace(SETTINGS, heads=heads)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    assert isinstance(plain, LlamaForCausalLM)
    model = emitted(plain, dimensions(plain.config)[0])
    facts: dict[str, Any] = {
        "text": arguments.text.name,
        "texts": arguments.texts,
        "settings": json.loads(json.dumps(asdict(settings))),
        "questions": arguments.questions,
        "dtype": arguments.dtype,
    }
    found = json.loads(arguments.json.read_text()) if arguments.json.exists() else facts
    before = {"questions": "single", "dtype": DTYPES[0]}  # of files that do not say so
    if before | {name: found[name] for name in facts if name in found} != facts:
        parser.error(f"{arguments.json} was measured with other settings; give it another name")
    results, few = found.setdefault("results", {}), choosing(settings)
    every = few + recurrent(settings, token_ids(tokenizer, CATALYST))
    for length in arguments.lengths:
        own = results.setdefault(str(length), [])
        haystack = Haystack.read(str(arguments.text), tokenizer, length)
        made = ASKED[arguments.questions](tokenizer, haystack, length, FACTS, arguments.texts, 0)
        for number, prompt in enumerate(made):
            here = every if number < arguments.recurrent_texts else few
            if length + ROOM > model.config.max_position_embeddings:
                here = [method for method in here if not isinstance(method, Full)]
            own.extend([{}] * (number == len(own)))
            turn = number % len(here)
            left = [method for method in here[turn:] + here[:turn] if method.name not in own[number]]
            if not left:
                continue
            read = {method.name: measure(method, model, prompt) for method in left}
            own[number] = own[number] | read
            for name in read:
                record_versions(found, f"{name}, {length} tokens, text {number + 1}")
            arguments.json.write_text(json.dumps(found) + "\n")
            right = ", ".join(f"{name} {sum(answers['right'])}" for name, answers in read.items())
            console.stderr.print(f"{length:,} tokens, {number + 1} of {arguments.texts}: {right} right")
    print("\n".join(table(found)))
    if arguments.plot:
        plot(found, arguments.plot)


if __name__ == "__main__":
    main()
