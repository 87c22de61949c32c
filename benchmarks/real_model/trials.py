"""What models are asked on a real text, and how well they answer through their KV caches.

Facts are single words ("The secret word of the castle is walnut.") between sentences of a text, asked for at its end
with the beginning of the sentence. A text goes through the cache once; every question and its right answer follow in
one forward on a copy of the cache. An answer is right where each of its tokens is the most likely one: exactly then
greedy decoding says it. Converted models give the same logits in one forward as token by token, unless their cache is
quantized, so this is what they answer when deployed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvsurgery.measure.cache_trial import next_token_logs
from kvsurgery.text.haystack import Haystack, even_pieces
from kvsurgery.text.needle_sets import read_set
from kvsurgery.text.tokens import token_ids

SAME = " The {} has the same secret word as the {}."


@dataclass(frozen=True)
class Question:
    """What follows a text, and which of its last tokens are the answer.

    Attributes:
        listed: instead of an answer, the words that a generated one has to hold, as tokens.
    """

    tokens: list[int]
    answer: int
    listed: tuple[list[int], ...] = ()


@dataclass(frozen=True)
class Prompt:
    """A text that holds facts.

    Attributes:
        text: int64 [tokens].
        questions: about the facts, in their order.
        following: how the text goes on, int64 [new + 1] or empty.
        places: of the last token of each fact.
    """

    text: np.ndarray
    questions: tuple[Question, ...]
    following: np.ndarray
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class Window:
    """A piece of text, int64 [prompt + new + 1]: what the cache holds, and what follows."""

    tokens: np.ndarray
    prompt: int


def prompts(
    tokenizer: PreTrainedTokenizerBase, haystack: Haystack, length: int, facts: int, count: int, seed: int, new: int = 0
) -> list[Prompt]:
    """Prompts of `length` tokens at most, questions not counted, with facts at random depths; words are shuffled.

    With `new`, this many tokens of the text that follow it are to be predicted.
    """
    needles, rng, result = read_set("word"), np.random.default_rng([seed, length]), []
    for _ in range(count):
        drawn_facts = needles_of(rng, needles, facts)
        text_length = length - sum(map(len, stated(tokenizer, drawn_facts)))
        text, following = np.split(haystack.piece(rng, text_length + (new and new + 1)), [text_length])
        result.append(hide(tokenizer, text, following, drawn_facts, rng))
    return result


def needles_of(rng: np.random.Generator, needles: tuple, facts: int) -> list[tuple[str, str]]:
    """The beginning of some facts and the word that ends each, drawn apart from each other."""
    cues = [needles[place].cue for place in rng.permutation(len(needles))[:facts]]
    words = [needles[place].answer for place in rng.permutation(len(needles))[:facts]]
    return list(zip(cues, words, strict=True))


def stated(tokenizer: PreTrainedTokenizerBase, facts: list[tuple[str, str]]) -> list[list[int]]:
    """Facts as sentences."""
    return [token_ids(tokenizer, f" {cue} {word}.") for cue, word in facts]


def hide(
    tokenizer: PreTrainedTokenizerBase,
    text: np.ndarray,
    following: np.ndarray,
    facts: list[tuple[str, str]],
    rng: np.random.Generator,
) -> Prompt:
    """A text with facts at random depths, questions about them, and how the text goes on."""
    tokens, places = placed(text, stated(tokenizer, facts), rng)
    return Prompt(tokens, questions(tokenizer, facts), following.astype(np.int64), places)


def placed(
    text: np.ndarray, sentences: list[list[int]], rng: np.random.Generator
) -> tuple[np.ndarray, tuple[int, ...]]:
    """A text, int64 [tokens], with sentences at random depths in their order, and where the last token of each is."""
    parts = np.split(text, np.sort(rng.integers(0, len(text) + 1, len(sentences))))
    pieces = [piece for part, sentence in zip(parts, [*sentences, []], strict=True) for piece in (part, sentence)]
    ends = np.cumsum([len(piece) for piece in pieces])[1:-1:2] - 1
    return np.concatenate(pieces).astype(np.int64), tuple(ends.tolist())


def chained_prompts(
    tokenizer: PreTrainedTokenizerBase, haystack: Haystack, length: int, facts: int, count: int, seed: int
) -> list[Prompt]:
    """Prompts like those of `prompts` whose questions take two hops: one fact says which place has the same secret word
    as the place that is asked about, another one says that word. Both stand in random order."""
    needles, rng, result = read_set("word"), np.random.default_rng([seed, length]), []
    for _ in range(count):
        all_facts = needles_of(rng, needles, 2 * facts)
        stated_facts, asked_cues = all_facts[:facts], [cue for cue, _ in all_facts[facts:]]
        links = [
            SAME.format(*map(_subject, pair)) for pair in zip(asked_cues, (cue for cue, _ in stated_facts), strict=True)
        ]
        sentences = [*stated(tokenizer, stated_facts), *(token_ids(tokenizer, link) for link in links)]
        sentences = [sentences[index] for index in rng.permutation(len(sentences))]
        text, places = placed(haystack.piece(rng, length - sum(map(len, sentences))), sentences, rng)
        chained = [(cue, word) for cue, (_, word) in zip(asked_cues, stated_facts, strict=True)]
        result.append(Prompt(text, questions(tokenizer, chained), np.zeros(0, np.int64), places))
    return result


def listing_prompts(
    tokenizer: PreTrainedTokenizerBase, haystack: Haystack, length: int, facts: int, count: int, seed: int
) -> list[Prompt]:
    """The texts of `prompts`, each with one question about all of its facts: it names their places, and begins the list
    of their words."""
    needles, rng, result = read_set("word"), np.random.default_rng([seed, length]), []
    for _ in range(count):
        stated_facts = needles_of(rng, needles, facts)
        sentences = stated(tokenizer, stated_facts)
        text, places = placed(haystack.piece(rng, length - sum(map(len, sentences))), sentences, rng)
        *subjects, last_subject = (_subject(cue) for cue, _ in stated_facts)
        question = f"\n\nThe secret words of the {', the '.join(subjects)} and the {last_subject}, one after another:"
        words = tuple(token_ids(tokenizer, f" {word}") for _, word in stated_facts)
        list_question = Question(token_ids(tokenizer, f"{question}\n\n{stated_facts[0][0]}"), 0, words)
        result.append(Prompt(text, (list_question,), np.zeros(0, np.int64), places))
    return result


def _subject(cue: str) -> str:
    """What the beginning of a fact is about."""
    return cue.removeprefix("The secret word of the ").removesuffix(" is")


def questions(tokenizer: PreTrainedTokenizerBase, facts: list[tuple[str, str]]) -> tuple[Question, ...]:
    """The beginnings of facts, each in a paragraph of its own, with the words that end them."""
    result = []
    for cue, word in facts:
        answer = token_ids(tokenizer, f" {word}")
        result.append(Question(token_ids(tokenizer, f"\n\n{cue}") + answer, len(answer)))
    return tuple(result)


def asked_at_end(prompt: Prompt) -> list[Prompt]:
    """A prompt for each question, whose text ends with the question up to its last token. So a cache knows the question
    when it is compressed, and every token of the answer comes from the compressed cache."""
    result = []
    for question in prompt.questions:
        before, last = np.split(question.tokens, [len(question.tokens) - question.answer - 1])
        text = np.concatenate([prompt.text, before])
        result.append(Prompt(text, (Question(last.tolist(), question.answer),), prompt.following))
    return result


def windows(haystack: Haystack, prompt: int, new: int, count: int) -> list[Window]:
    """Pieces at even distances."""
    return [Window(piece, prompt) for piece in even_pieces(haystack.tokens, prompt + new + 1, count)]


@torch.inference_mode()
def correct_answers(model: PreTrainedModel, prompt: Prompt) -> list[bool]:
    """Which questions have the right answer."""
    text = torch.from_numpy(prompt.text)[None].to(model.device)
    return answered_correctly(model, model(text, logits_to_keep=1).past_key_values, prompt)


@torch.inference_mode()
def answered_correctly(model: PreTrainedModel, cache: Any, prompt: Prompt, tokens_after: int = 0) -> list[bool]:
    """Which questions have the right answer after a cache of the prompt's text, and `tokens_after` that follow it; the
    cache stays as it is."""
    results = []
    for question in prompt.questions:
        tokens = torch.tensor(question.tokens, device=model.device)
        logits = continued(model, cache_copy(cache), tokens, len(prompt.text) + tokens_after, question.answer + 1)
        results.append(torch.equal(logits[:-1].argmax(-1), tokens[-question.answer :]))
    return results


def cache_copy(cache: Any) -> Any:
    """A cache to go on with, while the given one stays as it is.

    Converted models write to their storage. transformers' layers replace their tensors, of which some kinds refuse to
    be copied.
    """
    if hasattr(cache, "allocated_bytes"):
        return copy.deepcopy(cache)
    duplicate = copy.copy(cache)
    duplicate.layers = [copy.copy(layer) for layer in cache.layers]
    return duplicate


@torch.inference_mode()
def continued(model: PreTrainedModel, cache: Any, tokens: torch.Tensor, position: int, keep: int = 0) -> torch.Tensor:
    """Logits [tokens or `keep`, vocabulary] of int64 [tokens] at `position`, which evicted tokens count in."""
    positions = torch.arange(position, position + len(tokens), device=tokens.device)[None]
    output = model(tokens[None], past_key_values=cache, position_ids=positions, logits_to_keep=keep)
    return output.logits[0]


def next_tokens(model: PreTrainedModel, window: Window) -> torch.Tensor:
    """Log-probabilities of the next token, float32 [new, vocabulary], after each token that follows the prompt."""
    tokens = torch.from_numpy(window.tokens)[None].to(model.device)
    return next_token_logs(model, tokens[:, : window.prompt], tokens[:, window.prompt : -1])


def nats(logs: torch.Tensor, window: Window) -> float:
    """Mean negative log-likelihood of what follows the prompt."""
    return F.nll_loss(logs, torch.from_numpy(window.tokens[window.prompt + 1 :]).to(logs.device)).item()
