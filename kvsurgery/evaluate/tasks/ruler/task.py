"""RULER: thirteen tasks of long context, made from scratch at any length (Hsieh et al. 2024, arXiv 2404.06654).

What is asked, in which words, how much is hidden and where it lies, is as published. Words that are hidden are our
own, essays are generated or the user's (published scores are of Paul Graham's), and what is left of a length, less than
a line, is filled up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product

import numpy as np

from kvsurgery.errors import TextError
from kvsurgery.evaluate.sample import Reader, Sample
from kvsurgery.evaluate.tasks.ruler.puzzles import (
    Niah,
    Puzzle,
    common_words,
    frequent_words,
    question,
    variable_tracking,
)
from kvsurgery.evaluate.tasks.ruler.questions import read_hotpot, read_squad
from kvsurgery.setting import ask_later_setting, samples_setting, setting, text_setting
from kvsurgery.system.files import check_readable
from kvsurgery.text.chat import turn_tokens, turn_with_context
from kvsurgery.text.haystack import MAX_UNKNOWN, Haystack, check_text
from kvsurgery.text.tokens import text_of

NIAH = {
    "niah_single_1": Niah("noise", "words", "numbers"),
    "niah_single_2": Niah("essay", "words", "numbers"),
    "niah_single_3": Niah("essay", "words", "uuids"),
    "niah_multikey_1": Niah("essay", "words", "numbers", keys=4),
    "niah_multikey_2": Niah("needle", "words", "numbers"),
    "niah_multikey_3": Niah("needle", "uuids", "uuids"),
    "niah_multivalue": Niah("essay", "words", "numbers", values=4),
    "niah_multiquery": Niah("essay", "words", "numbers", keys=4, queries=4),
}
LISTS = {"vt": variable_tracking, "cwe": common_words, "fwe": frequent_words}
QUESTIONS = ("qa_1", "qa_2")
TASKS = (*NIAH, *LISTS, *QUESTIONS)
LIMITS = {**dict.fromkeys(NIAH, 128), "vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}  # tokens of an answer
TOLERANCE_DIVISOR = 200  # this part of a length may be left
FIRST_STEP = 64  # units more, at first, to see what a unit takes

Draw = Callable[[random.Random, int, int], Puzzle]  # from a length and a number


@dataclass(frozen=True)
class RulerTask:
    """Tasks of RULER under their published names.

    Attributes:
        lengths: of prompt and answer, in tokens; what is made is at most 1% shorter.
        tasks: None: all but those that `left_out` says.
        count: samples of each task and length; questions are asked again, among other documents, if there are fewer.
        text: for essays, as `Haystack.read` takes it.
        squad, hotpot: files of questions for qa_1 and qa_2, as SQuAD and HotpotQA publish them.
        ask_later: read the text before the question is known.
    """

    lengths: tuple[int, ...] = setting((4096,), "lengths", "prompt lengths in tokens", tokens=True)
    tasks: tuple[str, ...] | None = setting(
        None, "ruler_tasks", "tasks such as niah_single_1,vt", default="all that can be made"
    )
    count: int = samples_setting(20, None)
    text: str | None = text_setting()
    squad: str | None = setting(None, "squad", "SQuAD file for qa_1")
    hotpot: str | None = setting(None, "hotpot", "HotpotQA file for qa_2")
    ask_later: bool = ask_later_setting()

    @property
    def left_out(self) -> Mapping[str, str]:
        """Tasks that cannot be made, and why; those that are asked for are an error instead."""
        files = {"qa_1": (self.squad, "SQuAD (`squad`)"), "qa_2": (self.hotpot, "HotpotQA (`hotpot`)")}
        return {
            task: f"there are no questions without a file of {benchmark}"
            for task, (path, benchmark) in files.items()
            if path is None
        }

    def check(self) -> None:
        """Check the tasks' names, and that texts and files of questions can be read.

        Raises:
            KVSurgeryError: a task is unknown or cannot be made, or a file cannot be read.
        """
        check_text(self.text)
        for path in filter(None, (self.squad, self.hotpot)):
            check_readable(path)
        for task in self.tasks or ():
            if task not in TASKS:
                raise TextError(f"RULER has no {task}; it has {', '.join(TASKS)}")
            if task in self.left_out:
                raise TextError(f"RULER's {task} cannot be made: {self.left_out[task]}")

    def samples(self, reader: Reader, limit: int | None = None) -> Iterator[Sample]:
        """Task by task, of each the first sample of every length, then the second.

        Raises:
            TextError: a task is unknown, or a file for it is missing or of another layout; a length is too short for a
                task, or beyond the model; the text is too short, or unknown to the tokenizer.
        """
        self.check()
        for length in self.lengths:
            if length > reader.max_context:
                raise TextError(
                    f"RULER at {length} tokens does not fit into {reader.max_context} positions; give shorter `lengths`"
                )
        draws = self._draws(reader)
        for task, length in product(draws, self.lengths):
            _Room(reader, task, length, self.ask_later).smallest(draws[task](_rng(reader, task, length, 0), length, 0))
        for task, draw in draws.items():
            for number, length in islice(product(range(self.count), self.lengths), limit):
                puzzle = draw(_rng(reader, task, length, number), length, number)
                room = _Room(reader, task, length, self.ask_later)
                tokens = room.fill(puzzle)
                yield Sample(
                    task=f"ruler/{task}",
                    name=f"{length}/{number}",
                    tokens=tokens,
                    metric="string_match_part" if task in QUESTIONS else "string_match_all",
                    answers=puzzle.answers,
                    limit=LIMITS[task],
                    context=len(tokens) - room.question_tokens(puzzle) if self.ask_later else 0,
                    facts={"tokens": length},
                )

    def _draws(self, reader: Reader) -> dict[str, Draw]:
        """What makes the puzzles of each task."""
        tasks = self.tasks or [task for task in TASKS if task not in self.left_out]
        essay: list[str] = []
        if any(task in NIAH and NIAH[task].haystack == "essay" for task in tasks):
            haystack = Haystack.read(self.text, reader.tokenizer, max(self.lengths, default=1), reader.seed)
            essay = text_of(reader.tokenizer, haystack.tokens, clean_up_tokenization_spaces=False).split()

        def draw(task: str) -> Draw:
            if task in NIAH:
                return lambda rng, length, number: NIAH[task].puzzle(rng, essay)
            if task in LISTS:
                return lambda rng, length, number: LISTS[task](rng, length)
            path = self.squad if task == "qa_1" else self.hotpot
            assert path is not None  # without a file, the task is left out
            questions = read_squad(path) if task == "qa_1" else read_hotpot(path)
            return lambda rng, length, number: question(rng, questions, number % len(questions.entries))

        return {task: draw(task) for task in tasks}


@dataclass(frozen=True)
class _Room:
    """The tokens that a prompt may have."""

    reader: Reader
    task: str
    length: int
    ask_later: bool

    @property
    def tokens(self) -> int:
        return self.length - LIMITS[self.task]

    def smallest(self, puzzle: Puzzle) -> np.ndarray:
        """int64 [tokens]: the prompt with no more text than it needs.

        Raises:
            TextError: that is too much.
        """
        tokens = self._prompt(puzzle, puzzle.min_units, 0)
        if len(tokens) > self.tokens:
            needed_tokens = len(tokens) + LIMITS[self.task]
            raise TextError(
                f"RULER's {self.task} takes {needed_tokens} tokens or more, not {self.length}; give longer `lengths`"
            )
        return tokens

    def fill(self, puzzle: Puzzle) -> np.ndarray:
        """int64 [tokens]: the prompt with as much text as it may have.

        Raises:
            TextError: there is no room for the puzzle, or it is unknown to the tokenizer.
        """
        tokens = self.smallest(puzzle)
        units, tokens = self._largest_fitting(
            lambda units: self._prompt(puzzle, units, 0), tokens, puzzle.min_units, self.length
        )
        _, tokens = self._largest_fitting(
            lambda fillers: self._prompt(puzzle, units, fillers), tokens, 0, puzzle.max_fillers
        )
        unknown = (tokens == self.reader.tokenizer.unk_token_id).mean()
        if unknown > MAX_UNKNOWN:
            raise TextError(f"{unknown:.0%} of RULER's {self.task} is unknown to the tokenizer; leave the task out")
        return tokens

    def _prompt(self, puzzle: Puzzle, units: int, fillers: int) -> np.ndarray:
        text = puzzle.write(units, fillers)
        if self.ask_later:
            return np.concatenate(turn_with_context(self.reader.tokenizer, text, puzzle.question, puzzle.lead))
        return turn_tokens(self.reader.tokenizer, text + puzzle.question, puzzle.lead)

    def question_tokens(self, puzzle: Puzzle) -> int:
        """The number of tokens after the text, where the question comes later."""
        return len(turn_with_context(self.reader.tokenizer, "", puzzle.question, puzzle.lead)[1])

    def _largest_fitting(
        self, make: Callable[[int], np.ndarray], tokens: np.ndarray, low: int, high: int
    ) -> tuple[int, np.ndarray]:
        """The largest number from `low` to `high` whose prompt has room, or one that leaves little; and the prompt.

        A long text takes seconds to tokenize, so numbers are guessed from those that were tried.

        Args:
            tokens: the prompt of `low`.
        """
        tolerance = self.length // TOLERANCE_DIVISOR
        first_low, first_tokens = low, len(tokens)
        upper, upper_tokens, tries = high + 1, None, 0
        while low + 1 < upper and (remaining := self.tokens - len(tokens)) > tolerance:
            aim, tries = remaining - tolerance // 2, tries + 1
            if upper_tokens is None:
                gained_tokens = len(tokens) - first_tokens
                step = aim * (low - first_low) // gained_tokens if gained_tokens else max(FIRST_STEP, low)
            else:
                step = aim * (upper - low) // (upper_tokens - len(tokens)) if tries % 2 else (upper - low) // 2
            number = min(max(low + step, low + 1), upper - 1)
            prompt_tokens = make(number)
            if len(prompt_tokens) <= self.tokens:
                low, tokens = number, prompt_tokens
            else:
                upper, upper_tokens = number, len(prompt_tokens)
        return low, tokens


def _rng(reader: Reader, task: str, length: int, number: int) -> random.Random:
    return random.Random(f"{reader.seed}/{task}/{length}/{number}")
