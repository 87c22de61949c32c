"""The texts of RULER's tasks (Hsieh et al. 2024, arXiv 2404.06654, sections 3 and B), of any size, as published.

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
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = [round(100 * place / 39) for place in range(40)]  # percent of the sentences, where needles lie
SHORT_PROMPT = 4096  # tokens below which examples and lists of words are smaller
SENTENCE_END = re.compile(r"(?<=[.!?]) ")

# NVIDIA's templates, in which a context comes before what is asked; the spelling is theirs
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
NIAH_CONTEXT = (
    "{some} special magic {kinds} {are} hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {kinds} afterwards.\n{context}"
)
NIAH_QUESTION = "\nWhat {are_all} the special magic {kinds} for {query} mentioned in the provided text?"
NIAH_LEAD = " The special magic {kinds} for {query} mentioned in the provided text {are}"
ONE = {"some": "A", "are": "is", "are_all": "is"}
SEVERAL = {"some": "Some", "are": "are", "are_all": "are all"}
TRACKING_CONTEXT = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}"
TRACKING_QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
TRACKING_LEAD = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assgined the "
    "value {value}, they are:"
)
COMMON_CONTEXT = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}"
)
COMMON_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
COMMON_LEAD = " Answer: The top 10 words that appear most often in the list are:"
FREQUENT_CONTEXT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}"
)
FREQUENT_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text?"
)
FREQUENT_LEAD = " Answer: According to the coded text above, the three most frequently appeared words are:"
ONLY_ANSWER = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
DOCUMENTS_CONTEXT = ONLY_ANSWER + "\n\nThe following are given documents.\n\n{context}"
DOCUMENTS_QUESTION = "\n\n" + ONLY_ANSWER + "\n\nQuestion: {question}"

HOPS, CHAIN_LINES, FEW_LINES = 4, 15, 5  # of variable tracking; lines of the example, and where prompts are short
LISTED_WORDS = 10  # that are common
PAIRS = 300_000  # of words, at most, that a list is made of
CODED_LETTERS = 6  # letters of a coded word
MIN_CODED_WORDS = 53  # for the fourth word to be there less often than the third


@dataclass(frozen=True)
class Puzzle:
    """What is asked, and text of any size in which the answer is.

    Attributes:
        write: the text of a number of units (lines, words, documents), and a number of smaller pieces that fill it up.
        question: what follows the text.
        lead: words that the answer begins with.
        answers: what is to be found in it.
        min_units: units without which it is no puzzle.
        max_fillers: of the smaller units, as many as may come to a unit.
    """

    write: Callable[[int, int], str]
    question: str
    lead: str
    answers: tuple[str, ...]
    min_units: int = 1
    max_fillers: int = 0


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
        keys = _DistinctValues(rng, self.key)
        values = _DistinctValues(rng, self.value)
        values_by_key = {keys.draw(): [values.draw() for _ in range(self.values)] for _ in range(self.keys)}
        queried_keys = rng.sample([*values_by_key], self.queries)
        answers = tuple(value for key in queried_keys for value in values_by_key[key])
        kind = self.value.removesuffix("s")
        needles = [
            NEEDLE.format(kind=kind, key=key, value=value) for key in values_by_key for value in values_by_key[key]
        ]
        rng.shuffle(needles)
        depths = sorted(rng.sample(DEPTHS, len(needles)))
        places = sorted(rng.random() for _ in needles)
        other_needles: list[str] = []

        def context(units: int, fillers: int) -> str:
            if self.haystack == "essay":
                sentences = SENTENCE_END.split(" ".join(islice(cycle(essay), units)))
                return " ".join(_insert(sentences, [len(sentences) * depth // 100 for depth in depths], needles))
            if self.haystack == "needle":
                while len(other_needles) < units:
                    other_needles.append(NEEDLE.format(kind=kind, key=keys.draw(), value=values.draw()))
            lines = other_needles[:units] if self.haystack == "needle" else [NOISE] * units
            context_lines = _insert(lines, [int(place * (units + 1)) for place in places], needles)
            return "\n".join(context_lines + _noise(fillers))

        query = ", ".join(queried_keys[:-1]) + f", and {queried_keys[-1]}" if len(queried_keys) > 1 else queried_keys[0]
        number = SEVERAL if len(answers) > 1 else ONE
        words = {**number, "kinds": self.value if len(answers) > 1 else kind, "query": query}
        return Puzzle(
            write=lambda units, fillers: NIAH_CONTEXT.format(context=context(units, fillers), **words),
            question=NIAH_QUESTION.format(**words),
            lead=NIAH_LEAD.format(**words),
            answers=answers,
            max_fillers=0 if self.haystack == "essay" else 200,
        )


def variable_tracking(rng: random.Random, length: int) -> Puzzle:
    """A chain of variables that are all assigned one value; before it, an example with its answer."""

    def make_chain(letters: int) -> tuple[list[str], str, str, Callable[[int, int], str]]:
        names: dict[str, None] = {}
        while len(names) <= HOPS:
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        value, variables = str(rng.randrange(10_000, 100_000)), [*names]
        origins = [value, *(f"VAR {name} " for name in variables)]
        links = [f"VAR {name} = {origin}" for name, origin in zip(variables, origins, strict=False)]
        places = sorted(rng.random() for _ in links)

        def write(lines: int, fillers: int) -> str:
            noise = [f"{NOISE}\n"] * lines
            context_lines = _insert(noise, [int(place * (lines + 1)) for place in places], links)
            return TRACKING_CONTEXT.format(context=" ".join(context_lines + _noise(fillers)))

        question = TRACKING_QUESTION.format(value=value)
        return variables, question, TRACKING_LEAD.format(count=len(variables), value=value), write

    variables, question, lead, write = make_chain(3)
    example_context = write(FEW_LINES if length < SHORT_PROMPT else CHAIN_LINES, 0)
    example = f"{example_context}{question}{lead} {' '.join(variables)}\n\n\n\n"
    variables, question, lead, write = make_chain(5)
    return Puzzle(
        write=lambda lines, fillers: example + write(lines, fillers),
        question=question,
        lead=lead,
        answers=tuple(variables),
        max_fillers=len(NOISE.split()),
    )


def common_words(rng: random.Random, length: int) -> Puzzle:
    """A numbered list, of words that are there often and words that are not; before it, an example with its answer.

    The longest lists, for which there are not words enough, are of two words each, such as "silver-kettle".
    """
    is_short = length < SHORT_PROMPT
    common_repeats, rare_repeats = (6, 1) if is_short else (30, 3)

    def list_context(
        words: list[str], common_repeats: int, rare_repeats: int, filler_words: Sequence[str], seed: float
    ) -> str:
        words = [*words[:LISTED_WORDS] * common_repeats, *words[LISTED_WORDS:] * rare_repeats, *filler_words]
        random.Random(seed).shuffle(words)
        return COMMON_CONTEXT.format(context=" ".join(f"{number}. {word}" for number, word in enumerate(words, 1)))

    # of these tokens, a list's item takes two at least
    count = length // 2 // rare_repeats
    single_words = sorted(chain(*WORDS.values()))
    pairs = _DistinctValues(rng, "words")
    pool = (
        rng.sample(single_words, len(single_words))
        if count <= len(single_words)
        else [pairs.draw() for _ in range(min(count, PAIRS))]
    )

    words = pool[: 20 if is_short else 40]
    common_list = " ".join(f"{number}. {word}" for number, word in enumerate(words[:LISTED_WORDS], 1))
    example_context = list_context(words, *((3, 1) if is_short else (10, 3)), (), rng.random())
    example = f"{example_context}{COMMON_QUESTION}{COMMON_LEAD} {common_list}\n"
    rng.shuffle(pool)
    words, seed = pool[:count], rng.random()
    return Puzzle(
        write=lambda count, fillers: (
            example
            + list_context(words[:count], common_repeats, rare_repeats, words[count : count + 1] * fillers, seed)
        ),
        question=COMMON_QUESTION,
        lead=COMMON_LEAD,
        answers=tuple(words[:LISTED_WORDS]),
        min_units=LISTED_WORDS,
        max_fillers=rare_repeats - 1,
    )


def frequent_words(rng: random.Random, length: int) -> Puzzle:
    """Coded words, as often as Zipf's law has it; the most frequent is dots, and the three after it are asked for."""
    coded_words: dict[str, None] = {}
    while len(coded_words) < max(5, length // 50):
        coded_words["".join(rng.choices(string.ascii_lowercase, k=CODED_LETTERS))] = None
    words = ["...", *coded_words][: len(coded_words)]
    seed = rng.random()

    def write(count: int, fillers: int) -> str:
        # shares of 1 / rank ** 2, which all in all come to pi ** 2 / 6
        counts = [int(count * 6 / (math.pi * rank) ** 2) for rank in range(1, len(words) + 1)]
        text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)] + words[:1] * fillers
        random.Random(seed).shuffle(text)
        return FREQUENT_CONTEXT.format(context=" ".join(text))

    return Puzzle(
        write, FREQUENT_QUESTION, FREQUENT_LEAD, tuple(words[1:4]), min_units=MIN_CODED_WORDS, max_fillers=100
    )


def question(rng: random.Random, questions: Questions, number: int) -> Puzzle:
    """A question and the documents that answer it, among others: first those of the same article."""
    entry = questions.entries[number]
    near_documents = rng.sample(entry.near, len(entry.near))
    used_documents = {*entry.documents, *near_documents}
    far_documents = [document for document in range(len(questions.documents)) if document not in used_documents]
    rng.shuffle(far_documents)
    seed = rng.random()

    def write(count: int, fillers: int) -> str:
        order = chain(entry.documents, near_documents, cycle(far_documents or near_documents or entry.documents))
        texts = [questions.documents[document] for document in islice(order, count + 1)]
        cut_words = texts.pop().split(" ")[:fillers]
        random.Random(seed).shuffle(texts)
        context = "\n\n".join(f"Document {place}:\n{text}" for place, text in enumerate(texts, 1))
        # what is left is less than a document, or than its heading
        context += "\n" * bool(cut_words) + " ".join(cut_words)
        return DOCUMENTS_CONTEXT.format(context=context)

    asked = DOCUMENTS_QUESTION.format(question=entry.question)
    return Puzzle(write, asked, " Answer:", entry.answers, min_units=len(entry.documents), max_fillers=1000)


class _DistinctValues:
    """Words, numbers or ids, none of them twice."""

    def __init__(self, rng: random.Random, kind: str):
        self.rng, self.kind, self.drawn_values = rng, kind, set()

    def draw(self) -> str:
        while (value := self._random_value()) in self.drawn_values:
            pass
        self.drawn_values.add(value)
        return value

    def _random_value(self) -> str:
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
