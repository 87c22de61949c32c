"""`WideTable`: a table that fits the terminal or the file without truncating a number."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

USUAL = 80  # columns of a terminal, and of lines in a file
NARROWEST = 40  # columns; terminals with fewer get longer lines
SHORTEST = 8  # columns that a text is folded to at least
STEP = 2  # columns that one text is folded by before the others are looked at
EDGES = 2  # columns beside a table, one on each side
WIDE, COMPACT = 3, 2  # columns between two of a table
# where a text may go on in the next line: not inside of an interval, [1.0, 5.0]
BREAKS = re.compile(r"(?<=[/_])(?=.)|(?<=[^\W\d]-)(?=.)|(?<= )(?![^\[\]]*\])")


@dataclass(frozen=True)
class Column:
    """A heading and the cells below it, each of one line or several.

    Attributes:
        is_text: whether the column is text, which is aligned left and may be folded; numbers are never folded.
    """

    heading: str
    cells: tuple[str, ...]
    is_text: bool = False

    @property
    def width(self) -> int:
        """The width of its longest line."""
        return max(cell_len(line) for text in (self.heading, *self.cells) for line in text.split("\n"))

    def compact(self) -> Column:
        """The column with each word of its heading on a line of its own; a column of texts does not change."""
        return self if self.is_text else replace(self, heading=self.heading.replace(" ", "\n"))

    def folded(self, width: int, *, breaks_words: bool = False) -> Column:
        """The column with its texts folded to a width, as far as the lengths of their words allow."""
        texts = ["\n".join(_folded(text, width, breaks_words)) for text in (self.heading, *self.cells)]
        return replace(self, heading=texts[0], cells=tuple(texts[1:]))


@dataclass(frozen=True)
class WideTable:
    """A table as wide as it has to be, and no wider than the terminal, or than `USUAL` columns in a file.

    A table that is too wide first gets narrow gaps, and headings with each word on a line of its own. Then its texts
    are folded. Then its columns continue in further blocks below, each of which begins with the same first columns.

    Attributes:
        title: the line above the table.
        columns: all with the same number of cells.
        keys: number of first columns that every block repeats.
    """

    title: str
    columns: tuple[Column, ...]
    keys: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = room_of(console)
        # a title may begin with an empty line
        for line in self.title.split("\n"):
            for part in textwrap.wrap(line, room) or [""]:
                yield Text(part, style="bold")
        yield from self.blocks(room)

    def blocks(self, room: int) -> list[Table]:
        """The table, split into as many blocks as its width requires."""
        if _total(self.columns, gap=WIDE) <= room:
            return [_drawn(self.columns, gap=WIDE)]
        columns = [column.compact() for column in self.columns]
        if _total(columns, gap=COMPACT) <= room:
            return [_drawn(columns, gap=COMPACT)]
        narrow_columns = _fit(columns, room)
        if _total(narrow_columns, gap=COMPACT) <= room:
            return [_drawn(narrow_columns, gap=COMPACT)]
        return [
            _drawn(_fit(_fit(block, room), room, breaks_words=True), gap=COMPACT)
            for block in self._split(columns, room)
        ]

    def _split(self, columns: Sequence[Column], room: int) -> Iterator[list[Column]]:
        """Split the columns into blocks that can fit, each with the key columns and at least one more."""
        keys = list(columns[: self.keys])
        block = list[Column]()
        for column in columns[self.keys :]:
            if block and _total(_fit([*keys, *block, column], room), gap=COMPACT) > room:
                yield [*keys, *block]
                block = []
            block.append(column)
        yield [*keys, *block]


def room_of(console: Console) -> int:
    """The available width: the terminal's; in a file `USUAL`, unless COLUMNS is set."""
    if console.file.isatty():
        return max(console.width, NARROWEST)
    columns = os.environ.get("COLUMNS", "")
    return max(int(columns), NARROWEST) if columns.isdecimal() else USUAL


def _fit(columns: Sequence[Column], room: int, *, breaks_words: bool = False) -> list[Column]:
    """Fold the widest texts until all columns fit the available width, or no text can be folded further."""
    narrowed = list(columns)
    while (excess := _total(narrowed, gap=COMPACT) - room) > 0:
        texts = [place for place, column in enumerate(narrowed) if column.is_text]
        for place in sorted(texts, key=lambda place: narrowed[place].width, reverse=True):
            width = narrowed[place].width
            # step by step, so that texts of equal width are folded alike
            folded = columns[place].folded(max(width - min(excess, STEP), SHORTEST), breaks_words=breaks_words)
            if folded.width < width:
                narrowed[place] = folded
                break
        else:
            return narrowed
    return narrowed


def _folded(text: str, width: int, breaks_words: bool) -> Iterator[str]:
    """Break a text into lines at spaces, and inside words after slashes, underscores and hyphens; never in numbers."""
    line = ""
    for piece in BREAKS.split(text):
        if line and cell_len(line + piece.rstrip()) > width:
            yield line.rstrip()
            line = ""
        line += piece
        while breaks_words and cell_len(line.rstrip()) > width and not re.search(r"\d", line):
            yield line[:width]
            line = line[width:]
    yield line.rstrip()


def _total(columns: Sequence[Column], gap: int) -> int:
    return sum(column.width for column in columns) + gap * (len(columns) - 1) + EDGES


def _drawn(columns: Sequence[Column], gap: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=gap == COMPACT)
    for column in columns:
        table.add_column(column.heading, justify="left" if column.is_text else "right", no_wrap=True)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, row))
    table.width = _total(columns, gap)
    return table
