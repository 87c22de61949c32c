"""Prompts beyond the context of a real language model: REFORM and other ways to read them, with one fact asked for.

    kvsurgery profile compute MODEL --method reform --context 4K --chunk 512 -o reform.safetensors
    python benchmarks/real_model/beyond_context.py MODEL --profile reform.safetensors --text book.txt --json beyond.json

Facts are single words that stand between the sentences of a text; the beginning of one of them is the end of the
prompt. Every prompt goes through all methods in turns, in bfloat16. Methods answer from as many tokens, whatever the
length. Seconds are of CPU time on one thread, to the first word of the answer. A run continues from its JSON file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from models import stock
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging
from trials import Prompt, prompts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recurrent_methods import BM25, Full, Gathered, Method, Recurrent, Truncation
from synthetic import dimensions, emitted

from kvsurgery import __version__, console
from kvsurgery.evaluate.statistics import interval, resampled_means
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.templates.kv_reform import Reform
from kvsurgery.text.haystack import Haystack

LENGTHS = (4000, 8000, 16000, 32000)
SETTINGS = Reform((), chunk=512, encode_budget=1024, window=64, keep=64, pool=33, recompute_budget=1024)
FACTS = 4


def methods(settings: Reform) -> list[Method]:
    """All that are compared, by budget alike."""
    return [
        Full(),
        Gathered(settings),
        BM25(settings),
        Truncation(settings),
        Recurrent(settings, "H2O"),
        Recurrent(replace(settings, compressor="streaming"), "StreamingLLM"),
    ]


@torch.inference_mode()
def answer(method: Method, model: PreTrainedModel, prompt: torch.Tensor, count: int) -> tuple[list[int], float]:
    """So many tokens that follow a prompt, int64 [1, tokens], and seconds to the first of them."""
    begin = time.process_time()
    session, token = method.read(model, prompt, count)
    token = session.next(token)
    seconds, found = time.process_time() - begin, [int(token)]
    while len(found) < count:
        token = session.next(token)
        found.append(int(token))
    return found, seconds


def measure(model: PreTrainedModel, settings: Reform, number: int, prompt: Prompt) -> dict[str, dict[str, float]]:
    """By method: whether every token of the answer is right, and seconds."""
    question = prompt.questions[number % len(prompt.questions)]
    asked, expected = question.tokens[: -question.answer], question.tokens[-question.answer :]
    tokens = torch.from_numpy(np.concatenate([prompt.text, asked]))[None]
    every, found = methods(replace(settings, query_length=len(asked))), {}
    turn = number % len(every)
    for method in every[turn:] + every[:turn]:
        if isinstance(method, Full) and tokens.shape[1] > model.config.max_position_embeddings:
            continue
        given, seconds = answer(method, model, tokens, len(expected))
        found[method.name] = {"right": given == expected, "seconds": seconds}
    return found


def table(found: dict[str, Any]) -> list[str]:
    """Lines of a Markdown table: the share of right answers by length, and seconds to the first word at the last."""
    lengths = [length for length, samples in found["results"].items() if samples]
    heads = ["method", *(f"{int(length):,} tokens" for length in lengths), f"seconds at {int(lengths[-1]):,}"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method in methods(SETTINGS):
        cells, last = [method.name], "-"
        for length in lengths:
            own = [sample[method.name] for sample in found["results"][length] if method.name in sample]
            right = np.array([[float(each["right"]) for each in own]])
            if own:
                around = interval(right.mean(), resampled_means(right, 0)[0])
                cells.append(f"{around.mean:.0%} [{around.low:.0%}, {around.high:.0%}]")
                last = f"{np.median([each['seconds'] for each in own]):.1f}"
            else:
                cells.append("-")
                last = "-"
        lines.append(f"| {' | '.join([*cells, last])} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock Llama checkpoint with a tokenizer")
    parser.add_argument("--profile", type=Path, required=True, help="its embedding heads")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text that facts are hidden in")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a prompt")
    parser.add_argument("--samples", type=int, default=20, help="prompts of each length")
    parser.add_argument("--json", type=Path, required=True, help="results; those there are not measured again")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    heads = tuple((head.layer, head.state, head.head) for head in HeadProfile.load(arguments.profile).embedding_heads)
    tokenizer, plain = AutoTokenizer.from_pretrained(arguments.model), stock(arguments.model, dtype=torch.bfloat16)
    settings = replace(SETTINGS, heads=heads)
    assert tokenizer is not None  # for the checker: transformers' types say it may be
    assert isinstance(plain, LlamaForCausalLM)
    model = emitted(plain, dimensions(plain.config)[0])
    facts = {
        "text": arguments.text.name,
        "samples": arguments.samples,
        "settings": json.loads(json.dumps(asdict(settings))),
    }
    found = json.loads(arguments.json.read_text()) if arguments.json.exists() else facts
    if {name: found[name] for name in facts} != facts:
        parser.error(f"{arguments.json} was measured with other settings; give it another name")
    found["versions"] = {"kvsurgery": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    results = found.setdefault("results", {})
    for length in arguments.lengths:
        own = results.setdefault(str(length), [])
        haystack = Haystack.read(str(arguments.text), tokenizer, length)
        for number, prompt in enumerate(prompts(tokenizer, haystack, length, FACTS, arguments.samples, 0)):
            if number < len(own):
                continue
            own.append(measure(model, settings, number, prompt))
            arguments.json.write_text(json.dumps(found) + "\n")
            console.stderr.print(f"{length:,} tokens, {number + 1} of {arguments.samples}: {own[-1]}", markup=False)
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
