"""Metrics of completed code (RepoEval), on as many lines as the right code has, without blank lines and indentation."""

from __future__ import annotations


def lines_match(answer: str, reference: str) -> float:
    """1 if an answer begins with the right lines."""
    lines = _lines(reference)
    return float(_lines(answer)[: len(lines)] == lines)


def edit_similarity(answer: str, reference: str) -> float:
    """1 minus the edit distance (Levenshtein) between an answer's lines and the right lines, over the longer length."""
    lines = _lines(reference)
    one = "\n".join(_lines(answer)[: len(lines)])
    other = "\n".join(lines)
    return 1 - _edits(one, other) / max(1, len(one), len(other))


def _lines(text: str) -> list[str]:
    return [stripped for line in text.splitlines() if (stripped := line.strip())]


def _edits(one: str, other: str) -> int:
    """Levenshtein distance: the minimum number of characters to insert, delete or replace."""
    row = list(range(len(other) + 1))
    for i, character in enumerate(one, 1):
        diagonal, row[0] = row[0], i
        for j, other_character in enumerate(other, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (character != other_character))
    return row[-1]
