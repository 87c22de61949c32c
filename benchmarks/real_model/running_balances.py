"""Whether long answers through a quantized cache stay right to their end: running balances of an account.

    pip install optimum-quanto    # without it, transformers' QuantizedCache is left out
    python benchmarks/real_model/running_balances.py MODEL --measured losses.safetensors --json running-balances.json

In its chat template, an instruct model is given the transactions of an account, and writes a line for each: the balance
before it, its amount and the balance after it. Answers are greedy. A line is right where it begins with the balance
that the line before it ends with, has the amount of its transaction, and its sum is right; where all lines are right,
so is the last balance. Every cache begins with the original's states of the prompts. A forward reads the right next
lines at once, as a draft, and what greedy decoding would not have written is taken back. Bytes are those of a cache
that has read 2,048 tokens at once. An interrupted run continues from its JSON file, which has a hash of each answer;
`--answers` keeps their text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from benchmarks.provenance import record_versions
from benchmarks.real_model.batches import Batch, drafted, read
from benchmarks.real_model.sessions import checked_bytes
from benchmarks.real_model.which_cache import ORIGINAL, Contender, Converted, Quantized
from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.source import read_config
from kvsurgery.display import console
from kvsurgery.evaluate.statistics import interval, resampled_means
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe
from kvsurgery.text.chat import turn_tokens
from kvsurgery.text.tokens import end_tokens, text_of, token_ids

HELD = 2048  # tokens
FIRST, LOW, HIGH = 5000, 2000, 9000  # the first balance, and those between which the balances of most lines stay
REQUEST = """An account starts with {first}. These are its {count} transactions, in order:
{transactions}
Work out the balance after each transaction, one line for each of all {count}, in this form:
001. {first} + 250 = {example}
Write nothing else."""
LINE = re.compile(r"(\d+)\. (\d+) ([+-]) (\d+) = (\d+)")
LINE_TOKENS = 24  # more than a line takes


@dataclass(frozen=True)
class Account:
    """Transactions of an account: amounts that are added to its balance, in order."""

    amounts: tuple[int, ...]

    @classmethod
    def random(cls, count: int, seed: int) -> Account:
        """An account of so many transactions, of three digits each, with a balance that keeps four digits."""
        generator, balance, amounts = np.random.default_rng(seed), FIRST, []
        for _ in range(count):
            amount, up = int(generator.integers(100, 1000)), generator.random() < 0.5
            deposited = balance < LOW or (up and balance < HIGH)
            amounts.append(amount if deposited else -amount)
            balance += amounts[-1]
        return cls(tuple(amounts))

    @property
    def request(self) -> str:
        """What the model is asked for."""
        transactions = "\n".join(
            f"{number:03}. {'deposit' if amount > 0 else 'withdraw'} {abs(amount)}"
            for number, amount in enumerate(self.amounts, 1)
        )
        return REQUEST.format(first=FIRST, count=len(self.amounts), transactions=transactions, example=FIRST + 250)

    def right_lines(self, answer: str) -> list[int]:
        """By transaction, whether an answer's line for it is right: 1 or 0."""
        balance, right = FIRST, []
        lines = answer.strip().splitlines()
        for number, amount in enumerate(self.amounts, 1):
            match = LINE.fullmatch(lines[number - 1].strip()) if number <= len(lines) else None
            if match is None:
                right.append(0)
                continue
            written_number, before, sign, size, after = match.groups()
            written_amount = int(size) if sign == "+" else -int(size)
            found = int(written_number), int(before), written_amount, int(after)
            right.append(int(found == (number, balance, amount, balance + amount)))
            balance = int(after)
        return right

    def draft(self, answer: str) -> str:
        """How an answer may go on: two right lines, or what a line that is begun lacks to the right one."""
        *written, begun = answer.split("\n")
        before = LINE.fullmatch(written[-1]) if written else None
        last, balance, lines = (int(before[1]), int(before[5]), "") if before else (len(written), FIRST, "")
        for number, amount in enumerate(self.amounts[last:][: 1 if begun else 2], last + 1):
            lines += f"{number:03}. {balance} {'+' if amount > 0 else '-'} {abs(amount)} = {balance + amount}\n"
            balance += amount
        return lines[len(begun) :]


def contenders(profile: HeadProfile, measured: str | None) -> list[Contender]:
    """All that are compared, those first whose comparison says most.

    Args:
        profile: any scores of the model, as all heads stay full.
        measured: file of losses of the model, which says what to rotate and clip, and how to round.
    """

    def ours(name: str, **options: Any) -> Converted:
        recipe = Recipe.of(sparsity=0, rest="streaming", **options)
        return Converted(f"kvsurgery, {name}", "kvsurgery", recipe=recipe, profile=profile)

    def quanto(bits: int) -> Quantized:
        return Quantized(f"QuantizedCache, quanto, {bits} bits", "QuantizedCache", backend="quanto", bits=bits)

    with_losses = partial(ours, kv_measured=measured)
    return [
        Contender(),
        *([with_losses("2 bits, measured", kv_bits=2)] if measured else []),
        ours("2 bits, keys and values rotated", kv_bits=2, kv_rotate="both"),
        quanto(2),
        *([with_losses("3 bits, measured", kv_bits=3)] if measured else []),
        *(ours(f"{bits} bits", kv_bits=bits) for bits in (2, 3, 4)),
        quanto(4),
    ]


def ended(ends: list[int], most: int, answer: list[int]) -> bool:
    """Whether an answer has come to an end token, or has the most tokens."""
    return answer[-1] in ends or len(answer) == most


def drafted_tokens(tokenizer: PreTrainedTokenizerBase, account: Account, answer: list[int]) -> list[int]:
    """How an answer may go on, as tokens."""
    return token_ids(tokenizer, account.draft(text_of(tokenizer, answer)))


def table(report: Mapping[str, Any]) -> list[str]:
    """Lines of a Markdown table; brackets are 95% bootstrap intervals over the answers."""
    columns = ["cache", "bytes", "lines right", "difference to the original, points", "of the first quarter"]
    columns += ["of the last quarter", "answers without an error"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    results = report["results"]
    original = np.array(results[ORIGINAL]["right"])
    for name, result in sorted(results.items(), key=lambda pair: -pair[1]["kv_bytes"]):
        if len(result["right"]) < len(original):  # its run was interrupted
            continue
        right = np.array(result["right"])
        shares = np.stack([original.mean(1), right.mean(1)])
        means, resampled = shares.mean(1), resampled_means(shares, 0)
        share = interval(means[1], resampled[1])
        more = interval(means[1] - means[0], resampled[1] - resampled[0])
        cells = [name, f"{result['kv_bytes'] / results[ORIGINAL]['kv_bytes']:.0%}"]
        cells += [f"{share.mean:.1%} [{share.low:.1%}, {share.high:.1%}]"]
        low, mean, high = (f"{100 * value:+.1f}" for value in (more.low, more.mean, more.high))
        cells.append("" if name == ORIGINAL else f"{mean} [{low}, {high}]")
        quarters = np.array_split(right, 4, 1)
        cells += [f"{quarters[0].mean():.0%}", f"{quarters[-1].mean():.0%}"]
        cells.append(f"{right.all(1).sum()} of {len(right)}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock checkpoint with a tokenizer")
    parser.add_argument("--measured", type=Path, help="losses of the model, of `profile compute --method kv-bits`")
    parser.add_argument("--accounts", type=int, default=8, help="whose balances are worked out")
    parser.add_argument("--transactions", type=int, default=100, help="of each account")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of models and caches")
    parser.add_argument("--only", action="append", help="caches by name, in this order, after the original")
    parser.add_argument("--answers", type=Path, metavar="DIR", help="write the answers there")
    parser.add_argument("--json", type=Path, required=True, help="results; those there are not computed again")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    settings = {name: getattr(arguments, name) for name in ("accounts", "transactions", "dtype")}
    settings |= {"threads": torch.get_num_threads()}
    settings |= {"measured": arguments.measured.name} if arguments.measured else {}
    report = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    if report.setdefault("settings", settings) != settings:
        parser.error(f"{arguments.json} was measured with {report['settings']}; give it another name")
    shape = Model.of(read_config(arguments.model)).dimensions
    scores = np.ones((shape.layers, shape.kv_heads), dtype=np.float32)
    profile = HeadProfile(scores, "ablation", "kv", str(arguments.model), shape)
    measured = str(arguments.measured) if arguments.measured else None
    by_name = {each.name: each for each in contenders(profile, measured)}
    names = [ORIGINAL, *arguments.only] if arguments.only else [*by_name]
    if unknown := [name for name in names if name not in by_name]:
        parser.error(f"there is no cache {unknown[0]!r}; there are {', '.join(map(repr, by_name))}")
    if arguments.answers:
        arguments.answers.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    assert tokenizer is not None  # for the checker: transformers' types say it may be
    accounts = [Account.random(arguments.transactions, seed) for seed in range(arguments.accounts)]
    batches = [Batch.of([turn_tokens(tokenizer, account.request)]) for account in accounts]
    most = LINE_TOKENS * arguments.transactions
    results = report.setdefault("results", {})
    for contender in [by_name[name] for name in names]:
        name = contender.name
        if name in results and len(results[name]["right"]) == len(accounts) and name != ORIGINAL:
            continue
        model = contender.load(arguments.model, getattr(torch, arguments.dtype), "cpu")
        try:
            with torch.inference_mode():
                cache = contender.read(model, torch.arange(HELD)[None] % model.config.vocab_size)
        except ImportError as error:
            console.stderr.print(f"left out: {name} ({error})")
            continue
        lists: dict[str, Any] = {part: [] for part in ("right", "tokens", "sha256")}
        result = results.setdefault(name, {"kv_bytes": checked_bytes(model, cache, HELD), "cpu_seconds": 0, **lists})
        answer_ended = partial(ended, end_tokens(model.generation_config), most)
        for number, (account, batch) in enumerate(zip(accounts, batches, strict=True)):
            if number < len(result["right"]):
                if name == ORIGINAL:  # others begin with its states
                    read(contender, model, batch)
                continue
            begin = time.process_time()
            answer = drafted(contender, model, batch, partial(drafted_tokens, tokenizer, account), answer_ended)
            text = text_of(tokenizer, answer, skip_special_tokens=True)
            if arguments.answers:
                (arguments.answers / f"{number} {name}.txt").write_text(text, encoding="utf-8")
            result["right"].append(account.right_lines(text))
            result["tokens"].append(len(answer))
            result["sha256"].append(hashlib.sha256(text.encode()).hexdigest()[:16])
            result["cpu_seconds"] += time.process_time() - begin
            record_versions(report, name)
            arguments.json.write_text(json.dumps(report) + "\n")
            console.stderr.print(f"{name}: {number + 1} of {len(accounts)} accounts")
        right = np.array(result["right"]).mean()
        console.stderr.print(f"{name}: {right:.0%} of the lines right, {result['cpu_seconds']:.0f} s of CPU time")
        del model, cache  # before the next one is loaded
    print("\n".join(table(report)))


if __name__ == "__main__":
    main()
