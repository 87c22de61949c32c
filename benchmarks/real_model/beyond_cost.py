"""What answering about a text beyond the context costs: time to read it, time of a token, and memory that is held.

    python benchmarks/real_model/beyond_cost.py MODEL --profile reform.safetensors --text book.txt --json cost.json

The methods, the texts and their questions are those of `beyond_context.py`, on one thread, and methods take
turns. Bytes are those of all tensors that a method holds beside the model, while a text waits for questions and
while one is answered. A run continues from its JSON file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from benchmarks.peers.held import held_bytes
from benchmarks.provenance import record_versions
from benchmarks.real_model.beyond_context import CATALYST, DTYPES, FACTS, ROOM, SETTINGS, choosing, loaded, recurrent
from benchmarks.real_model.trials import Prompt, prompts
from benchmarks.recurrent_methods import Full, Method
from kvsurgery.display import console
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.tokens import token_ids

NEW = 32  # tokens that are generated


def tensor_bytes(thing: Any, model: PreTrainedModel) -> int:
    """Bytes of all tensors in an object but those of the model."""
    counted_ids = {id(module) for module in model.modules()}
    counted_ids |= {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    return held_bytes(thing, counted_ids)


@torch.inference_mode()
def measure(method: Method, model: PreTrainedModel, prompt: Prompt) -> dict[str, float]:
    """CPU seconds to read, from a question to the first word, and for a token after it; and the bytes that are held."""
    question = prompt.questions[0]
    start = time.process_time()
    reading = method.read(model, torch.from_numpy(prompt.text)[None], ROOM)
    read_seconds, waiting_bytes = time.process_time() - start, tensor_bytes(reading, model)
    start = time.process_time()
    session, token = reading.ask(torch.tensor([question.tokens[: -question.answer]]))
    token = session.next(token)
    first_seconds, token_seconds = time.process_time() - start, []
    for _ in range(NEW):
        start = time.process_time()
        token = session.next(token)
        token_seconds.append(time.process_time() - start)
    answering_bytes = tensor_bytes((reading, session), model)
    return {
        "read": read_seconds,
        "first": first_seconds,
        "token": statistics.median(token_seconds),
        "waiting": waiting_bytes,
        "answering": answering_bytes,
    }


def table(report: dict[str, Any]) -> list[str]:
    """Lines of a Markdown table: a row for each length and method, medians over the texts."""
    heads = ["tokens", "method", "seconds to read", "to the first word", "ms a token", "MiB waiting", "MiB answering"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for length, texts in report["results"].items():
        for method in [*choosing(SETTINGS), *recurrent(SETTINGS, [])]:
            if measurements := [text[method.name] for text in texts if method.name in text]:
                read_seconds, first_seconds, token_seconds, waiting_bytes, answering_bytes = (
                    statistics.median(text[name] for text in measurements)
                    for name in ("read", "first", "token", "waiting", "answering")
                )
                times = f"{read_seconds:.1f} | {first_seconds:.2f} | {1000 * token_seconds:.0f}"
                memory = f"{waiting_bytes / 2**20:.1f} | {answering_bytes / 2**20:.1f}"
                lines.append(f"| {int(length):,} | {method.name} | {times} | {memory} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock Llama checkpoint with a tokenizer")
    parser.add_argument("--profile", type=Path, required=True, help="its embedding heads")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text that facts are hidden in")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8000, 32000], help="tokens of a prompt")
    parser.add_argument("--texts", type=int, default=2, help="texts of each length")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="float32: for CPUs that lack bfloat16")
    parser.add_argument("--json", type=Path, required=True, help="results; those there are not measured again")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    tokenizer, model, settings = loaded(arguments.model, arguments.profile, arguments.dtype)
    methods = choosing(settings) + recurrent(settings, token_ids(tokenizer, CATALYST))
    facts = {"text": arguments.text.name, "dtype": arguments.dtype}
    report: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.exists() else facts
    if {name: report.get(name) for name in facts} != facts:
        parser.error(f"{arguments.json} was measured with other settings; give it another name")
    results = report.setdefault("results", {})
    for length in arguments.lengths:
        samples = results.setdefault(str(length), [])
        haystack = Haystack.read(str(arguments.text), tokenizer, length)
        exceeds_context = length + ROOM > model.config.max_position_embeddings
        for number, prompt in enumerate(prompts(tokenizer, haystack, length, FACTS, arguments.texts, 0)):
            samples.extend([{}] * (number == len(samples)))
            offset = number % len(methods)
            for method in methods[offset:] + methods[:offset]:
                if method.name in samples[number] or (exceeds_context and isinstance(method, Full)):
                    continue
                samples[number] = samples[number] | {method.name: measure(method, model, prompt)}
                record_versions(report, f"{method.name}, {length} tokens, text {number + 1}")
                arguments.json.write_text(json.dumps(report, indent=1) + "\n")
                console.stderr.print(
                    f"{length:,} tokens, text {number + 1}, {method.name}: {samples[number][method.name]}"
                )
    print("\n".join(table(report)))


if __name__ == "__main__":
    main()
