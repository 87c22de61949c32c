"""The texts of RULER's tasks (Hsieh et al. 2024, arXiv 2404.06654, sections 3 and B), of any size, in our own words.

What is hidden and asked for is drawn first, and by the seed alone; how much is put around it, is said later.
"""

from __future__ import annotations

import math
import random
import re
import string
import tomllib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path

from kvsurgery.evaluate.tasks.ruler.questions import Questions

_FILE = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
WORDS = {kind: words.split() for kind, words in _FILE.items()}
NOISE = "Rain taps on the roof. A dog is asleep. The kettle hums. Somebody walks past. It is quiet again."
DEPTHS = [round(100 * place / 39) for place in range(40)]  # percent of the sentences, where needles lie
SHORT_PROMPT = 4096  # tokens below which examples and lists of words are smaller
SENTENCE_END = re.compile(r"(?<=[.!?]) ")

NEEDLE = "Register: {key} has the {kind} {value}."
HIDDEN = (
    "One or more entries of a register are somewhere in the text below, each with a name and its {kind}. Keep them in "
    "mind while you read; the question comes at the end.\n\n{context}\n\n"
    "This was the text. Which {kinds} does the register have for {query}?"
)
FOUND = " For {query} the register has the {kinds}"
TRACK = (
    "Some lines of the text below begin with LET. Each gives a variable a number, or the value that another variable "
    "has.\n\n{context}\n\nQuestion: Which variables have the value {value} after the last line? Name all of them."
)
TRACKED = " Answer: The value {value} is that of {count} variables:"
COMMON = (
    "This is a list of words with numbers before them. Ten of the words are in it more often than the rest.\n\n"
    "{context}\n\nQuestion: Which ten words does the list have most often?"
)
LISTED = " Answer: The list has these ten words most often:"
FREQUENT = (
    "The words of the text below are in code, and there are dots (...) between them. Count how often every word comes."
    "\n\n{context}\n\nQuestion: Which three words come most often, if the dots do not count? Name them, and explain "
    "nothing."
)
COUNTED = " Answer: The three words that come most often are:"
DOCUMENTS = (
    "A question comes after these numbered documents. Most of them have nothing to do with it.\n\n{context}\n\n"
    "Question: {question}\nWrite the answer alone, in a few words."
)

HOPS, CHAIN_LINES, FEW_LINES = 4, 15, 5  # of variable tracking; lines of the example, and where prompts are short
LISTED_WORDS = 10  # that are common
PAIRS = 300_000  # of words, at most, that a list is made of
CODED = 6  # letters of a coded word
LEAST_CODED = 53  # for the fourth word to be there less often than the third


@dataclass(frozen=True)
class Puzzle:
    """What is asked, and text of any size in which the answer is.

    Attributes:
        write: a prompt of a number of units (lines, words, documents), and a number of smaller pieces that fill it up.
        lead: words that the answer begins with.
        answers: what is to be found in it.
        least: units without which it is no puzzle.
        rest: of the smaller units, as many as may come to a unit.
    """

    write: Callable[[int, int], str]
    lead: str
    answers: tuple[str, ...]
    least: int = 1
    rest: int = 0


@dataclass(frozen=True)
class Niah:
    """Needles in a haystack: keys with values among noise, an essay, or more needles.

    Attributes:
        haystack: "noise", "essay" or "needle".
        key, value: "words", "numbers" or "uuids".
        keys, values, queries: how many keys there are, values of each, and keys that are asked for.
    """

    haystack: str
    key: str
    value: str
    keys: int = 1
    values: int = 1
    queries: int = 1

    def puzzle(self, rng: random.Random, essay: Sequence[str]) -> Puzzle:
        """One of them.

        Args:
            essay: words of a text, which is begun anew where it ends.
        """
        keys, values = _Distinct(rng, self.key), _Distinct(rng, self.value)
        told = {keys.draw(): [values.draw() for _ in range(self.values)] for _ in range(self.keys)}
        asked = rng.sample([*told], self.queries)
        answers = tuple(value for key in asked for value in told[key])
        kind = self.value.removesuffix("s")
        needles = [NEEDLE.format(kind=kind, key=key, value=value) for key in told for value in told[key]]
        rng.shuffle(needles)
        depths, places = sorted(rng.sample(DEPTHS, len(needles))), sorted(rng.random() for _ in needles)
        others: list[str] = []

        def context(units: int, rest: int) -> str:
            if self.haystack == "essay":
                sentences = SENTENCE_END.split(" ".join(islice(cycle(essay), units)))
                return " ".join(_insert(sentences, [len(sentences) * depth // 100 for depth in depths], needles))
            if self.haystack == "needle":
                while len(others) < units:
                    others.append(NEEDLE.format(kind=kind, key=keys.draw(), value=values.draw()))
            lines = others[:units] if self.haystack == "needle" else [NOISE] * units
            hidden = _insert(lines, [int(place * (units + 1)) for place in places], needles)
            return "\n".join(hidden + _noise(rest))

        query = ", ".join(asked[:-1]) + f", and {asked[-1]}" if len(asked) > 1 else asked[0]
        words = {"kind": kind, "kinds": self.value if len(answers) > 1 else kind, "query": query}
        return Puzzle(
            write=lambda units, rest: HIDDEN.format(context=context(units, rest), **words),
            lead=FOUND.format(**words),
            answers=answers,
            rest=0 if self.haystack == "essay" else 200,
        )


def variable_tracking(rng: random.Random, length: int) -> Puzzle:
    """A chain of variables that are all assigned one value; before it, an example with its answer."""

    def chained(letters: int) -> tuple[list[str], str, Callable[[int, int], str]]:
        names: dict[str, None] = {}
        while len(names) <= HOPS:
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        value, variables = str(rng.randrange(10_000, 100_000)), [*names]
        origins = [value, *variables]
        links = [f"LET {name} = {origin}" for name, origin in zip(variables, origins, strict=False)]
        places = sorted(rng.random() for _ in links)

        def write(lines: int, rest: int) -> str:
            hidden = _insert([NOISE] * lines, [int(place * (lines + 1)) for place in places], links)
            return TRACK.format(context="\n".join(hidden + _noise(rest)), value=value)

        return variables, TRACKED.format(count=len(variables), value=value), write

    variables, lead, write = chained(3)
    example = f"{write(FEW_LINES if length < SHORT_PROMPT else CHAIN_LINES, 0)}{lead} {' '.join(variables)}\n\n"
    variables, lead, write = chained(5)
    return Puzzle(lambda lines, rest: example + write(lines, rest), lead, tuple(variables), rest=len(NOISE.split()))


def common_words(rng: random.Random, length: int) -> Puzzle:
    """A numbered list, of words that are there often and words that are not; before it, an example with its answer.

    The longest lists, for which there are not words enough, are of two words each, such as "silver-kettle".
    """
    short = length < SHORT_PROMPT
    often, seldom = (6, 1) if short else (30, 3)

    def listed(words: list[str], often: int, seldom: int, rest: Sequence[str], seed: float) -> str:
        words = [*words[:LISTED_WORDS] * often, *words[LISTED_WORDS:] * seldom, *rest]
        random.Random(seed).shuffle(words)
        return COMMON.format(context=" ".join(f"{number}. {word}" for number, word in enumerate(words, 1)))

    # of these tokens, a list's item takes two at least
    count = length // 2 // seldom
    single, pairs = sorted(chain(*WORDS.values())), _Distinct(rng, "words")
    pool = rng.sample(single, len(single)) if count <= len(single) else [pairs.draw() for _ in range(min(count, PAIRS))]

    words = pool[: 20 if short else 40]
    common = " ".join(f"{number}. {word}" for number, word in enumerate(words[:LISTED_WORDS], 1))
    example = f"{listed(words, *((3, 1) if short else (10, 3)), (), rng.random())}{LISTED} {common}\n\n"
    rng.shuffle(pool)
    words, seed = pool[:count], rng.random()
    return Puzzle(
        write=lambda count, rest: example + listed(words[:count], often, seldom, words[count : count + 1] * rest, seed),
        lead=LISTED,
        answers=tuple(words[:LISTED_WORDS]),
        least=LISTED_WORDS,
        rest=seldom - 1,
    )


def frequent_words(rng: random.Random, length: int) -> Puzzle:
    """Coded words, as often as Zipf's law has it; the most frequent is dots, and the three after it are asked for."""
    coded: dict[str, None] = {}
    while len(coded) < max(5, length // 50):
        coded["".join(rng.choices(string.ascii_lowercase, k=CODED))] = None
    words, seed = ["...", *coded][: len(coded)], rng.random()

    def write(count: int, rest: int) -> str:
        # shares of 1 / rank ** 2, which all in all come to pi ** 2 / 6
        counts = [int(count * 6 / (math.pi * rank) ** 2) for rank in range(1, len(words) + 1)]
        text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)] + words[:1] * rest
        random.Random(seed).shuffle(text)
        return FREQUENT.format(context=" ".join(text))

    return Puzzle(write, COUNTED, tuple(words[1:4]), least=LEAST_CODED, rest=100)


def question(rng: random.Random, questions: Questions, number: int) -> Puzzle:
    """A question and the documents that answer it, among others: first those of the same article."""
    asked = questions.asked[number]
    near = rng.sample(asked.near, len(asked.near))
    known = {*asked.documents, *near}
    far = [document for document in range(len(questions.documents)) if document not in known]
    rng.shuffle(far)
    seed = rng.random()

    def write(count: int, rest: int) -> str:
        order = chain(asked.documents, near, cycle(far or near or asked.documents))
        texts = [questions.documents[document] for document in islice(order, count + 1)]
        begun = texts.pop().split(" ")[:rest]
        random.Random(seed).shuffle(texts)
        context = "\n\n".join(f"[{place}]\n{text}" for place, text in enumerate(texts, 1))
        # what is left is less than a document, or than its heading
        context += "\n" * bool(begun) + " ".join(begun)
        return DOCUMENTS.format(context=context, question=asked.question)

    return Puzzle(write, " Answer:", asked.answers, least=len(asked.documents), rest=1000)


class _Distinct:
    """Words, numbers or ids, none of them twice."""

    def __init__(self, rng: random.Random, kind: str):
        self.rng, self.kind, self.drawn = rng, kind, set()

    def draw(self) -> str:
        while (made := self._made()) in self.drawn:
            pass
        self.drawn.add(made)
        return made

    def _made(self) -> str:
        if self.kind == "numbers":
            return str(self.rng.randrange(10**6, 10**7))
        if self.kind == "uuids":
            return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))
        return f"{self.rng.choice(WORDS['adjectives'])}-{self.rng.choice(WORDS['nouns'])}"


def _insert(lines: Sequence[str], places: Sequence[int], needles: Sequence[str]) -> list[str]:
    """Lines with a needle before each place; the places rise."""
    result, start = [], 0
    for place, needle in zip(places, needles, strict=True):
        result += [*lines[start:place], needle]
        start = place
    return [*result, *lines[start:]]


def _noise(words: int) -> list[str]:
    """A line of this many words of noise, if any."""
    return [" ".join(islice(cycle(NOISE.split()), words))] if words else []
