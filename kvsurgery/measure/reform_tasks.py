"""What REFORM's embedding heads are ranked by: facts hidden in long text, and a question about one or two of them.

The tasks are those of Song et al. 2025: pattern matching on synthetic pairs of an id and a value, and multi-hop
questions, here over people: one fact leads to a person, another one says what is asked about that person.
"""

from __future__ import annotations

import string
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from kvsurgery.errors import ProfileError
from kvsurgery.measure.reform import RankedPrompt
from kvsurgery.profile.embedding_heads import RANKING_TASKS
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.needles import Needle, Prompt, needle_place
from kvsurgery.text.tokens import token_ids

PAIRS, CHAINS = 8, 4  # in a context; one of them is asked about
CHARACTERS = 10  # of an id or a value
PAIR = "The value corresponding to the id {} is {}."
ASK_PAIR = "What is the value corresponding to the id {}?"

# a fact that leads from one person to another, and how it names the other
LINKS = (
    ("{a} works at the same desk as {b}.", "the person who works at the same desk as {a}"),
    ("{a} was taught to swim by {b}.", "the person who taught {a} to swim"),
    ("{a} bought an old piano from {b}.", "the person who sold {a} an old piano"),
    ("{a} rents a room in the house of {b}.", "the person in whose house {a} rents a room"),
    ("{a} sings in a choir led by {b}.", "the person who leads the choir that {a} sings in"),
    ("{a} was visited in hospital by {b}.", "the person who visited {a} in hospital"),
    ("{a} plays chess on Sundays against {b}.", "the person whom {a} plays chess against on Sundays"),
    ("{a} lost a bicycle race to {b}.", "the person who won the bicycle race against {a}"),
)
# a fact about the other, what is asked about it, and the answers
TRAITS = (
    ("{b} lives in {c}.", "In which town does {who} live?", ("Lisbon", "Krakow", "Bergen", "Porto", "Ghent", "Turin")),
    ("{b} earns a living as a {c}.", "What is the work of {who}?", ("baker", "nurse", "tailor", "pilot", "potter")),
    ("{b} keeps a {c} at home.", "Which animal does {who} keep?", ("parrot", "tortoise", "ferret", "rabbit", "gecko")),
    ("{b} is allergic to {c}.", "What is {who} allergic to?", ("peanuts", "pollen", "shellfish", "wool", "mustard")),
    ("{b} drives a {c} car.", "Of which colour is the car of {who}?", ("yellow", "silver", "green", "purple", "brown")),
    ("{b} speaks fluent {c}.", "Which language does {who} speak?", ("Finnish", "Turkish", "Korean", "Greek", "Hindi")),
)
GIVEN_NAMES = (
    "Ada", "Bruno", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kamala", "Leo", "Mira",
    "Nils", "Olga", "Pablo", "Rosa", "Stefan", "Tamar", "Viktor",
)  # fmt: skip
FAMILY_NAMES = (
    "Abbott", "Barros", "Conti", "Dahl", "Eriksen", "Fontaine", "Gruber", "Hartley", "Ivanov", "Jensen", "Kowalski",
    "Lindgren", "Moreau", "Novak", "Okafor", "Petrov", "Quinn", "Rossi", "Sato", "Varga",
)  # fmt: skip


@dataclass(frozen=True)
class Riddle:
    """Facts to hide, and a question: the first `gold` of them are needed to answer."""

    facts: tuple[str, ...]
    gold: int
    question: str
    answer: str


def ranked_prompts(
    task: str, tokenizer: PreTrainedTokenizerBase, haystack: Haystack, *, count: int, length: int, seed: int
) -> list[RankedPrompt]:
    """Samples of a task.

    "pattern": sentences pair ten random letters and digits with ten others; one is asked for. "multihop": "A works at
    the same desk as B.", "B lives in C."; where does that person live? Both facts are gold; facts of other kinds about
    other people lie between them.

    Args:
        tokenizer: of the model that is measured; its chat template is used where it has one.
        haystack: text to hide the facts in.
        count: how many; of one seed, fewer are the first of more.
        length: tokens of each, question and all.
        seed: of everything that is drawn.

    Raises:
        ProfileError: the facts do not fit, the text is too short, or the tokenizer cannot spell them.
        UnsupportedModel: the tokenizer or its chat template cannot be used.
    """
    riddle = {"pattern": _pairs, "multihop": _chains}[task]
    # a generator for each sample, so that their number changes none of them
    rngs = [np.random.default_rng([RANKING_TASKS.index(task), seed, number]) for number in range(count)]
    return [_sample(tokenizer, haystack, riddle(rng), length, rng) for rng in rngs]


def _pairs(rng: np.random.Generator) -> Riddle:
    alphabet = list(string.ascii_letters + string.digits)
    words = ["".join(rng.choice(alphabet, CHARACTERS)) for _ in range(2 * PAIRS)]
    facts = tuple(PAIR.format(*pair) for pair in zip(words[::2], words[1::2], strict=True))
    return Riddle(facts, 1, ASK_PAIR.format(words[0]), words[1])


def _chains(rng: np.random.Generator) -> Riddle:
    given_names = rng.permutation(GIVEN_NAMES)[: 2 * CHAINS]
    family_names = rng.permutation(FAMILY_NAMES)[: 2 * CHAINS]
    people = [f"{first} {last}" for first, last in zip(given_names, family_names, strict=True)]
    links = rng.permutation(len(LINKS))[:CHAINS]
    traits = rng.permutation(len(TRAITS))[:CHAINS]
    facts: list[str] = []
    for chain in range(CHAINS):
        (link, description_template), (trait, question_template, answers) = LINKS[links[chain]], TRAITS[traits[chain]]
        names = {"a": people[2 * chain], "b": people[2 * chain + 1], "c": rng.choice(answers)}
        facts += [link.format(**names), trait.format(**names)]
        if chain == 0:
            question = question_template.format(who=description_template.format(**names))
            answer = str(names["c"])
    return Riddle(tuple(facts), 2, question, answer)


def _sample(
    tokenizer: PreTrainedTokenizerBase, haystack: Haystack, riddle: Riddle, length: int, rng: np.random.Generator
) -> RankedPrompt:
    """A riddle's facts at random sentences' ends of a text, then its question."""
    for text in (*riddle.facts, riddle.question):
        if tokenizer.unk_token_id in token_ids(tokenizer, text):
            raise ProfileError(
                f"the tokenizer does not know all words of {text!r}; this task needs one that spells any"
            )
    prompts = [Prompt.of(Needle(fact, fact, riddle.question, riddle.answer), tokenizer) for fact in riddle.facts]
    opening, request, facts = prompts[0].opening, prompts[0].request, [prompt.needle for prompt in prompts]
    room = length - len(opening) - len(request) - sum(map(len, facts))
    if room < 1:
        raise ProfileError(
            f"{len(facts)} facts and a question take {length - room} tokens of {length}; give more context"
        )
    text = haystack.piece(rng, room)
    places = [needle_place(text, depth, tokenizer) for depth in rng.random(len(facts))]
    pieces, gold, text_place = [opening], [], 0
    for fact in sorted(range(len(facts)), key=places.__getitem__):
        pieces += [text[text_place : places[fact]], facts[fact]]
        text_place = places[fact]
        if fact < riddle.gold:
            stop = sum(map(len, pieces))
            gold.append(range(stop - len(facts[fact]), stop))
    context = range(len(opening), length - len(request))
    question_span = _place_of(riddle.question, request, tokenizer)
    question = range(context.stop + question_span.start, context.stop + question_span.stop)
    return RankedPrompt(np.concatenate([*pieces, text[text_place:], request]), context, question, tuple(gold))


def _place_of(question: str, request: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> range:
    """The tokens of a question in what is said after the text: the answer's beginning and a template's end follow."""

    def lacks(first: int, stop: int) -> bool:
        return question not in tokenizer.decode(request[first:stop], clean_up_tokenization_spaces=False)

    ends = range(len(request) + 1)
    start = bisect_left(ends, True, key=lambda first: lacks(first, len(request))) - 1
    stop = bisect_left(ends, True, key=lambda stop: not lacks(max(start, 0), stop))
    if start < 0 or stop > len(request):
        raise ProfileError(f"the question {question!r} reads differently once it is in tokens; its place is unknown")
    return range(start, stop)
