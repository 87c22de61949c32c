"""Needles: statements to hide in long text, and the prompts that ask for them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvsurgery.errors import TextError, UnsupportedModel, short
from kvsurgery.system.files import parse_json, reading_text
from kvsurgery.text.chat import around_turn
from kvsurgery.text.tokens import first_tokens, special_ids, text_of, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEYS = ("answer", "needle", "real_needle", "question")
Kind = Literal["retrieval", "reasoning"]
NEEDLE_KINDS = ("retrieval", "reasoning")
LARGEST_NEEDLES_FILE = 1 << 24

PLAIN_QUESTION = "Question: {question}\nAnswer:"
CHAT_QUESTION = "Answer from the text above, in as few words as possible. {question}"

SENTENCE_END = re.compile(r"""[.!?]['"”’)\]]*$""")
UNSPACED_END = re.compile(r"[。！？][”’」』）]*$")
ENDING = re.compile(r"""[.!?'"”’)\]。！？」』）]$""")  # the last character of either
ENDING_TOKENS = 3  # tokens that a sentence's end is spelt by, at most
REACH = 0.05  # of the text: how far a needle moves to the end of a sentence


@dataclass(frozen=True)
class Needle:
    """A statement to hide in text, and the question about it.

    A retrieval-reasoning needle (Fu et al. 2024, section 3.1) is k = (r, c1, c2): a reason r, a wrong answer c1 that
    distracts, and the right one c2, which only the reason tells from the other; c2 is its `real_needle`.

    Attributes:
        needle: the statement.
        real_needle: the part of the statement that answers the question.
        question: the question.
        answer: the right answer.
        kind: "retrieval", "reasoning", or None if unknown, as in published files.
        cue: the first words of the answer, which are given so that the model only has to complete them; "" for none.

    Raises:
        TextError: a field is empty, or `real_needle` does not occur exactly once in `needle`.
    """

    needle: str
    real_needle: str
    question: str
    answer: str
    kind: Kind | None = None
    cue: str = ""

    def __post_init__(self) -> None:
        for key in KEYS:
            if not getattr(self, key).strip():
                raise TextError(f'"{key}" is empty')
        places = self.needle.count(self.real_needle)
        if places != 1:
            occurrence = "not a part" if not places else f"{places} times a part"
            raise TextError(f'"real_needle" {short(self.real_needle)} is {occurrence} of "needle"; it must be once')
        if self.kind not in (None, *NEEDLE_KINDS):
            raise TextError(f'"kind" is {" or ".join(NEEDLE_KINDS)}, got {short(self.kind)}')


def read_needles(path: str | Path) -> tuple[Needle, ...]:
    """Read needles from JSONL, one per line: `{"answer": ..., "needle": ..., "real_needle": ..., "question": ...}`.

    This is HeadKV's layout; `"kind"` and `"cue"` are optional (see `Needle`), other keys are ignored.

    Raises:
        TextError: the file cannot be read, a line is not a needle, or there are no needles.
    """
    path = Path(path)
    with reading_text(path, "needles"):
        if path.stat().st_size > LARGEST_NEEDLES_FILE:
            raise TextError(f"{path} is over {LARGEST_NEEDLES_FILE >> 20} MiB; this is not a file of needles")
        text = path.read_text(encoding="utf-8-sig")
    needles = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                needles.append(_parse(line))
            except TextError as error:
                raise TextError(f"{path}, line {number}: {error}") from error
    if not needles:
        raise TextError(f"{path} holds no needles")
    return tuple(needles)


def _parse(line: str) -> Needle:
    try:
        fields = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise TextError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise TextError(f"not a JSON object with the keys {', '.join(KEYS)}")
    for key in KEYS:
        if key not in fields:
            raise TextError(f'"{key}" is missing')
        if not isinstance(fields[key], str):
            raise TextError(f'"{key}" must be text, got {short(fields[key])}')
    cue = fields.get("cue", "")
    if not isinstance(cue, str):
        raise TextError(f'"cue" must be text, got {short(cue)}')
    return Needle(**{key: fields[key].strip() for key in KEYS}, kind=fields.get("kind"), cue=cue.strip())


@dataclass(frozen=True, eq=False)
class Prompt:
    """The prompt of a needle in token ids: `opening`, text with the needle inside, `request`.

    Special tokens are only in `opening` and `request`, where the tokenizer or its chat template puts them.

    Attributes:
        opening: the tokens before the text: the start of the user's turn, or the tokenizer's first tokens.
        needle: the statement, as tokenized inside a text.
        real: the positions of `real_needle` in `needle`.
        request: the tokens after the text, up to the answer: the question and the end of the user's turn.
    """

    opening: np.ndarray
    needle: np.ndarray
    real: range
    request: np.ndarray

    @classmethod
    def of(cls, needle: Needle, tokenizer: PreTrainedTokenizerBase) -> Prompt:
        """Build the prompt for a tokenizer: with its chat template, or as plain text if it has none.

        Raises:
            TextError: the tokenizer does not know the words, or takes some for a special token.
            UnsupportedModel: the tokenizer or its chat template cannot be used.
        """
        if not tokenizer.is_fast:
            raise UnsupportedModel("needles are found by character, for which the model needs a tokenizer.json")
        for key in KEYS:
            _check_spelling(getattr(needle, key), tokenizer)
        ids, spans = _inside_text(" " + needle.needle, tokenizer)
        start = 1 + needle.needle.index(needle.real_needle)
        end = start + len(needle.real_needle)
        covering_places = [place for place, (first, last) in enumerate(spans) if first < end and last > start]
        if needle.cue:
            _check_spelling(needle.cue, tokenizer)
        opening, request = _frame(needle.question, needle.cue, tokenizer)
        return cls(
            np.array(opening, int), np.array(ids), range(covering_places[0], covering_places[-1] + 1), np.array(request)
        )

    @property
    def overhead(self) -> int:
        """Number of tokens besides the text."""
        return len(self.opening) + len(self.needle) + len(self.request)

    def around(self, text: np.ndarray, place: int) -> tuple[np.ndarray, range]:
        """The prompt with the needle before `text[place]`, int64 [tokens], and the positions of `real_needle` in it."""
        start = len(self.opening) + place
        parts = self.opening, text[:place], self.needle, text[place:], self.request
        return np.concatenate(parts), range(start + self.real.start, start + self.real.stop)


def needle_place(text: np.ndarray, depth: float, tokenizer: PreTrainedTokenizerBase) -> int:
    """The place for a needle: the token after the end of the sentence that is nearest to a depth.

    If no sentence ends nearby (within a twentieth of the text), the needle goes exactly to the depth.

    Args:
        text: token ids, int64 [tokens].
        depth: from 0 to 1.
        tokenizer: the tokenizer of the ids. A period ends a sentence, alone or in a token with other characters, if
            only closing quotes and brackets follow it in its word.
    """
    target = depth * len(text)
    reach = REACH * len(text)
    low = max(1, int(target - reach))
    high = min(len(text) - 1, int(target + reach) + 1)
    return min(_ends(text, low, high, tokenizer), key=lambda place: abs(place - target), default=round(target))


def _ends(text: np.ndarray, low: int, high: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    """Places from `low` to `high` at which a sentence ends."""
    last_tokens = text[low - 1 : high]
    ending_tokens = [token for token in np.unique(last_tokens).tolist() if ENDING.search(_decode([token], tokenizer))]
    for place in (low + np.flatnonzero(np.isin(last_tokens, ending_tokens))).tolist():
        nearby_tokens = text[max(0, place - ENDING_TOKENS) : place + 1].tolist()
        text_before = _decode(nearby_tokens[:-1], tokenizer)
        text_after = _decode(nearby_tokens, tokenizer)[len(text_before) :]
        if UNSPACED_END.search(text_before) or (SENTENCE_END.search(text_before) and text_after[:1].isspace()):
            yield place


def _decode(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return text_of(tokenizer, tokens, clean_up_tokenization_spaces=False)


def _check_spelling(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = token_ids(tokenizer, text)
    if not ids or tokenizer.unk_token_id in ids:
        raise TextError(
            f"the tokenizer does not know all words of {short(text)}; give needles in words that it knows (`needles`)"
        )
    special_tokens = set(ids).intersection(special_ids(tokenizer))
    if special_tokens:
        raise TextError(
            f"{short(text)} spells the special token {_decode([min(special_tokens)], tokenizer)}; reword it"
        )


def _frame(question: str, cue: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The token ids before and after the text; the cue comes last, as the start of the answer."""
    question_text = (CHAT_QUESTION if tokenizer.chat_template else PLAIN_QUESTION).format(question=question)
    # a small vocabulary may not have the words around the question; then the question stands alone
    if tokenizer.unk_token_id in token_ids(tokenizer, question_text):
        question_text = question
    frame = around_turn(tokenizer)
    before, after = frame or ("", "")
    opening = first_tokens(tokenizer) if frame is None else token_ids(tokenizer, before)
    request = f"\n\n{question_text}{after}"
    if cue:
        request += cue if request[-1].isspace() else " " + cue
    return opening, _inside_text(request, tokenizer)[0]


def _inside_text(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of text that follows other text, without marks of a beginning, and the characters of each token."""
    for other_text in ("a", ""):
        encoding = tokenizer(other_text + text, add_special_tokens=False, return_offsets_mapping=True)
        start = len(other_text)
        token_spans = [
            (token, (first - start, last - start))
            for token, (first, last) in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
            if last > start
        ]
        # a token also spans the end of the other text: use the tokens of the text alone
        if token_spans[0][1][0] >= 0:
            break
    ids, spans = zip(*token_spans, strict=True)
    return list(ids), list(spans)
