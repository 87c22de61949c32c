"""Facts of a long text that are among the tokens which REFORM, BM25 and both together gather for a question.

    python benchmarks/real_model/gathered.py MODEL --profile reform.safetensors --text book.txt --json gathered.json

Twelve facts stand between the sentences of a text. Two questions ask for each: one has the words of the fact, the
other shares no word with it but "of". A fact counts as gathered where all of its tokens are, and ranks first where no
other fact has a token with as high a score. Nothing is answered, so a model that cannot answer such questions shows too
which tokens its heads find. A run continues from its JSON file.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from benchmarks.provenance import record_versions
from benchmarks.real_model.beyond_context import DTYPES, SETTINGS
from benchmarks.real_model.models import stock
from benchmarks.real_model.paraphrases import FACTS, WORDS, Facts, texts
from benchmarks.recurrent_methods import BM25, duplicate, part_scores
from benchmarks.synthetic import dimensions, emitted
from kvsurgery.display import console
from kvsurgery.evaluate.results import Interval
from kvsurgery.evaluate.statistics import interval, resampled_means
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.templates.kv_encode import Encoder
from kvsurgery.templates.kv_gather import gather, mixed, similarity
from kvsurgery.templates.kv_layout import KVLayout
from kvsurgery.templates.kv_reform import Reform
from kvsurgery.text.haystack import Haystack

LENGTH = 16384  # tokens of a text, whole chunks: a question is read by itself
BUDGETS = (512, 1024, 2048, 4096)
RETRIEVER = "BM25 retrieval"


@torch.inference_mode()
def measure(model: PreTrainedModel, profiles: dict[str, Reform], facts: Facts) -> dict[str, dict[str, Any]]:
    """By method and words of the questions: which facts are gathered, by budget, and each one's rank by its best token
    among the facts, of which equal ones share the last place."""
    head_dim = dimensions(model.config)[1]
    all_heads = tuple(head for settings in profiles.values() for head in settings.heads)
    encoder = Encoder(model.model, KVLayout.from_config(model.config), replace(SETTINGS, heads=all_heads))
    text, start = torch.from_numpy(facts.text)[None], len(facts.text)
    text_embeddings = encoder.read(input_ids=text)
    found: dict[str, dict[str, Any]] = {}
    for words, questions in facts.questions.items():
        for span, question in zip(facts.spans, questions, strict=True):
            tokens = torch.tensor([question])
            prompt = torch.cat([text, tokens], 1)
            embeddings = torch.cat([text_embeddings, duplicate(encoder, model).read(input_ids=tokens)])
            parts = embeddings.split([head_dim * len(settings.heads) for settings in profiles.values()], 1)
            by_words = retrieved(prompt[0].tolist(), start)
            scores = {RETRIEVER: by_words}
            for name, part in zip(profiles, parts, strict=True):
                scores[f"REFORM, {name}"] = similarity(part, part[start:])
                scores[f"REFORM with BM25, {name}"] = mixed(scores[f"REFORM, {name}"], by_words)
            for name, values in scores.items():
                results = found.setdefault(name, {}).setdefault(words, {"gathered": {}, "ranks": []})
                best = torch.stack([values[fact.start : fact.stop].max() for fact in facts.spans])
                results["ranks"].append(int((best >= values[span.start : span.stop].max()).sum()))
                for budget in BUDGETS:
                    settings = replace(SETTINGS, recompute_budget=budget)
                    if name == RETRIEVER:
                        places = BM25(settings).choose(prompt, start)
                    else:
                        places = gather(values, start, settings)
                    is_gathered = bool(torch.isin(torch.tensor(span), places).all())
                    results["gathered"].setdefault(str(budget), []).append(is_gathered)
    return found


def retrieved(prompt: list[int], question: int) -> torch.Tensor:
    """BM25's score of the part that each token of a prompt lies in, float32 [tokens]."""
    size = BM25(SETTINGS).part
    scores = part_scores(prompt, question, size).repeat_interleave(size)
    return torch.nn.functional.pad(scores, (0, len(prompt) - len(scores)))


def share(samples: list[dict[str, Any]], name: str, words: str, budget: int | None = None) -> Interval:
    """The share of facts that are gathered, or that rank first without a budget, over the texts."""
    results = [sample[name][words] for sample in samples]
    rights = [np.equal(each["ranks"], 1) if budget is None else each["gathered"][str(budget)] for each in results]
    means = np.mean(rights, 1)
    return interval(means.mean(), resampled_means(means[None], 0)[0])


def table(report: dict[str, Any]) -> list[str]:
    """Lines of a Markdown table: a row for each method and the words of its questions."""
    budgets = [*map(int, report["samples"][0][RETRIEVER][WORDS[0]]["gathered"])]
    lines = [f"| method | question in | {' | '.join(f'{budget:,} tokens' for budget in budgets)} | ranks first |"]
    lines.append("|---" * (len(budgets) + 3) + "|")
    for name in report["samples"][0]:
        for words in WORDS:
            columns = budgets if name == RETRIEVER else (*budgets, None)  # it ranks parts, which may hold two facts
            shares = [share(report["samples"], name, words, budget) for budget in columns]
            cells = [f"{part.mean:.0%} [{part.low:.0%}, {part.high:.0%}]" for part in shares]
            cells.extend("-" * (len(budgets) + 1 - len(cells)))
            lines.append(f"| {' | '.join([name, words, *cells])} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock checkpoint with a tokenizer")
    parser.add_argument("--profile", type=Path, action="append", required=True, help="its embedding heads; repeatable")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text that facts are hidden in")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a text, a multiple of 512")
    parser.add_argument("--texts", type=int, default=9, help=f"how many, of {FACTS} facts each")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="float32: for CPUs that lack bfloat16")
    parser.add_argument("--json", type=Path, required=True, help="results; those there are not measured again")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if arguments.length % SETTINGS.chunk:
        parser.error(f"--length is a multiple of {SETTINGS.chunk}, got {arguments.length}")
    profiles = {}
    for path in arguments.profile:
        heads = HeadProfile.load(path).embedding_heads
        profiles[path.stem] = replace(SETTINGS, heads=tuple((head.layer, head.state, head.head) for head in heads))
    settings: dict[str, Any] = {
        "text": arguments.text.name,
        "length": arguments.length,
        "settings": json.loads(json.dumps(asdict(SETTINGS))),
        "heads": {name: json.loads(json.dumps(settings.heads)) for name, settings in profiles.items()},
        "dtype": arguments.dtype,
    }
    report = json.loads(arguments.json.read_text()) if arguments.json.exists() else settings
    if {name: report[name] for name in settings} != settings:
        parser.error(f"{arguments.json} was measured with other settings; give it another name")
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    model = stock(arguments.model, dtype=getattr(torch, arguments.dtype))
    model = emitted(model, dimensions(model.config)[0])
    haystack = Haystack.read(str(arguments.text), tokenizer, arguments.length)
    samples = report.setdefault("samples", [])
    for number, facts in enumerate(texts(tokenizer, haystack, arguments.length, arguments.texts)):
        if number < len(samples):
            continue
        samples.append(measure(model, profiles, facts))
        record_versions(report, f"text {number + 1}")
        arguments.json.write_text(json.dumps(report) + "\n")
        console.stderr.print(f"text {number + 1} of {arguments.texts}")
    print("\n".join(table(report)))


if __name__ == "__main__":
    main()
