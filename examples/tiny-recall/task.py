"""The recall task: facts are stated once, far apart in other text, and asked for later.

    remember tafo miku besi rapo .      a fact: key, then three values
    ... filler ...
    recall tafo                         a query; the model answers: miku besi rapo .

Keys and values are drawn anew for every sequence, so an answer can only come from the context. Filler continues itself
from at most four tokens back: all of it can be predicted from a short window, and none of it tells a fact.
Whatever is random comes from the seed or generator that a function is given.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import torch

PAD, BOS, EOS, UNK, REMEMBER, RECALL, STOP = range(7)
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "remember", "recall", ".")
SYMBOLS, FILLERS = 192, 96
FIRST_SYMBOL = len(SPECIAL)
FIRST_FILLER = FIRST_SYMBOL + SYMBOLS
LANGUAGE_SEED = 7  # of the words and of how filler continues: the same in every run

VALUES = 3
FACT = VALUES + 3  # tokens of a fact or an answered query: the word, the key, the values, the stop
MAX_FACTS = SYMBOLS // (1 + VALUES)  # in one sequence, without using a symbol twice

# filler copies the token 1, 2 or 4 back through a fixed permutation, or is random (offset 0)
OFFSETS = np.array([1, 2, 4, 0])
SHARES = (0.45, 0.30, 0.15, 0.10)

# what a token is, for losses: filler, part of a fact or of a question, or a value that has to be recalled
FILLER, GIVEN, RECALLED = range(3)


class Batch(NamedTuple):
    """`tokens` and `kind` (FILLER, GIVEN or RECALLED), both int64 [batch, length]."""

    tokens: torch.Tensor
    kind: torch.Tensor


class Prompts(NamedTuple):
    """`tokens`, int64 [batch, length], ending in an unanswered query; `answers`, int64 [batch, VALUES]."""

    tokens: torch.Tensor
    answers: torch.Tensor


def vocabulary() -> list[str]:
    """Special tokens, then two-syllable symbols (keys and values), then three-syllable fillers."""
    rng = random.Random(LANGUAGE_SEED)
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    pairs = [first + second for first in syllables for second in syllables]
    triples = [pair + third for pair in pairs for third in syllables]
    return [*SPECIAL, *rng.sample(pairs, SYMBOLS), *rng.sample(triples, FILLERS)]


def filler(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """int64 [batch, length]: local text."""
    fixed = np.random.default_rng(LANGUAGE_SEED)
    table = np.stack([*(fixed.permutation(FILLERS) for _ in range(3)), np.arange(FILLERS)])
    before = OFFSETS.max()  # random tokens for the first ones to continue
    text = rng.integers(0, FILLERS, (batch, before + length))
    choice = rng.choice(len(OFFSETS), p=SHARES, size=text.shape)
    rows = np.arange(batch)
    for t in range(before, text.shape[1]):
        text[:, t] = table[choice[:, t], text[rows, t - OFFSETS[choice[:, t]]]]
    return text[:, before:] + FIRST_FILLER


def facts(rng: np.random.Generator, batch: int, count: int) -> np.ndarray:
    """int64 [batch, count, 1 + VALUES]: key and values, all symbols of a sequence distinct."""
    shuffled = rng.random((batch, SYMBOLS)).argsort(axis=1)
    return shuffled[:, : count * (1 + VALUES)].reshape(batch, count, 1 + VALUES) + FIRST_SYMBOL


def texts(
    rng: np.random.Generator, batch: int, length: int, facts_each: int, queries_each: int, *, at_end: bool = False
) -> Batch:
    """Filler with facts and answered queries at random places, every query after its fact.

    Args:
        facts_each, queries_each: how many a sequence holds; fewer where they do not fit.
        at_end: put the queries together, up to the last token, where every fact is known and most are far away.
    """
    tokens = np.concatenate([np.full((batch, 1), BOS), filler(rng, batch, length - 1)], axis=1)
    kind = np.full((batch, length), FILLER)
    slots = (length - 1) // FACT
    facts_each = min(facts_each, MAX_FACTS, max(1, slots // 2))
    queries_each = min(queries_each, slots - facts_each)
    events = facts_each + queries_each
    spare = length - slots * FACT  # tokens before the first slot, at least <bos>
    first = np.full((batch, 1), spare) if at_end else rng.integers(1, spare + 1, (batch, 1))

    # [batch, events] in the order of the text: the slot of each event, and whether it is a query
    if at_end:
        place = rng.random((batch, slots - queries_each)).argsort(axis=1)[:, :facts_each]
        place = np.concatenate([place, np.tile(np.arange(slots - queries_each, slots), (batch, 1))], axis=1)
        asks = np.tile(np.arange(events) >= facts_each, (batch, 1))
    else:
        place = rng.random((batch, slots)).argsort(axis=1)[:, :events]
        order = rng.random((batch, events))
        order[:, 0] = -1  # a fact comes first
        asks = order.argsort(axis=1).argsort(axis=1) >= facts_each
    place.sort(axis=1)
    known = np.cumsum(~asks, axis=1)
    which = np.where(asks, rng.integers(0, known), known - 1)

    # [batch, events, FACT]: the words of each event, and where they go
    words = np.full((batch, events, FACT), STOP)
    words[:, :, 0] = np.where(asks, RECALL, REMEMBER)
    words[:, :, 1:-1] = np.take_along_axis(facts(rng, batch, facts_each), which[:, :, None], axis=1)
    at = (first + place * FACT)[:, :, None] + np.arange(FACT)
    rows = np.arange(batch)[:, None, None]
    tokens[rows, at] = words
    kind[rows, at] = GIVEN
    # the stop after an answer counts as filler: it is learnt, so that an answer ends
    kind[rows, at[:, :, 2:]] = np.where(asks[:, :, None], [RECALLED] * VALUES + [FILLER], GIVEN)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(kind))


def repeated_blocks(rng: np.random.Generator, batch: int, length: int) -> Batch:
    """Distinct symbols, then pieces of them repeated: what followed a symbol the last time follows it again."""
    tokens = np.full((batch, length), BOS)
    kind = np.full((batch, length), GIVEN)
    for row in range(batch):
        size = int(rng.integers(length // 4, length // 2 + 1))
        block = rng.permutation(SYMBOLS)[:size] + FIRST_SYMBOL
        tokens[row, 1 : 1 + size] = block
        at = 1 + size
        while at < length:
            start = int(rng.integers(0, size - 2))
            piece = block[start : start + int(rng.integers(3, 12))][: length - at]
            tokens[row, at : at + len(piece)] = piece
            kind[row, at + 1 : at + len(piece)] = RECALLED
            at += len(piece)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(kind))


def prompts(seed: int, count: int, length: int, facts_each: int = 4) -> Prompts:
    """Sequences of `length` tokens that end in one query; its fact lies anywhere before."""
    tokens, _ = texts(np.random.default_rng(seed), count, length + VALUES + 1, facts_each, 1, at_end=True)
    return Prompts(*tokens[:, :-1].split([length, VALUES], dim=1))


def answered(questions: Prompts) -> tuple[torch.Tensor, torch.Tensor]:
    """Teacher-forced form: tokens with the answers appended and the mask of the answers, [batch, length + VALUES]."""
    tokens = torch.cat(questions, dim=1)
    targets = torch.zeros_like(tokens, dtype=torch.bool)
    targets[:, -VALUES:] = True
    return tokens, targets


@torch.no_grad()
def exact_match(model: torch.nn.Module, questions: Prompts, batch: int = 8) -> float:
    """Share of queries whose greedy answer, by plain `generate`, has every value right."""
    right = 0
    for tokens, answers in zip(*(part.split(batch) for part in questions), strict=True):
        tokens = tokens.to(model.device)
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=VALUES,
            min_new_tokens=VALUES,
            do_sample=False,
            pad_token_id=PAD,
        )
        right += (output[:, tokens.shape[1] :].cpu() == answers).all(dim=1).sum().item()
    return right / len(questions.tokens)


def main() -> None:
    """Print sequences as text, one a line."""
    words = vocabulary()
    for tokens in texts(np.random.default_rng(0), 16, 1200, 16, 32).tokens[:, 1:].tolist():
        print(*(words[token] for token in tokens))


if __name__ == "__main__":
    main()
