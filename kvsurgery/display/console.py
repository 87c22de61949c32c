"""Console output: tables on stdout, progress and hints on stderr."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars
from rich.table import Column as TableColumn

from kvsurgery.display.pace import Pace, ProgressLines, whole_time
from kvsurgery.display.progress import Progress
from kvsurgery.display.table import Column, WideTable, room_of
from kvsurgery.system.sizes import size

MOST_BLOCKS = 3  # of a table that is printed whole

BAR_SHARE, SHORTEST_BAR = 6, 8  # a bar's part of the terminal, and its fewest columns
# takes the room that is left, so that neither counts nor times are cut
NOTE = TextColumn("{task.fields[note]}", table_column=TableColumn(ratio=1, no_wrap=True))

# file names and results are printed literally, without markup
stdout = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def colored() -> bool:
    """Whether stdout shows colors."""
    return stdout.is_terminal and stdout.color_system is not None and not stdout.no_color


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    left: int = 1,
    notes: int = 0,
    keys: int | None = None,
) -> WideTable:
    """A table whose first `left` and last `notes` columns are text and the rest numbers, aligned right.

    Args:
        keys: number of first columns that identify a row; they are repeated if the table is printed in several blocks.
            By default `left`.
    """
    texts = [[str(cell) for cell in row] for row in rows]
    return WideTable(
        title,
        tuple(
            Column(heading, tuple(row[place] for row in texts), not left <= place < len(columns) - notes)
            for place, heading in enumerate(columns)
        ),
        keys=max(left if keys is None else keys, 1),
    )


def fits(content: WideTable) -> bool:
    """Whether a table fits stdout in few blocks."""
    return len(content.blocks(room_of(stdout))) <= MOST_BLOCKS


GRACE = 2.0  # seconds that people wait without a word


@contextmanager
def drawing_progress() -> Generator[Progress]:
    """Show progress while the pictures of a page are drawn, if that takes longer than a moment."""
    with step_progress("drawing", grace=GRACE) as advance:
        yield advance


@contextmanager
def byte_progress(
    label: str, total: int, clock: Callable[[], float] = time.monotonic
) -> Generator[Callable[[int], None]]:
    """Progress on stderr, with rate and time left: a bar, or lines where stderr is not a terminal.

    It appears with the first byte: a refusal stands alone.

    Yields:
        A function to call with the number of bytes done, from any thread.
    """
    if not draws_bars():
        done, lock = 0, threading.Lock()
        with _lines(ProgressLines(label, size, _say, clock, announce=False)) as lines:

            def count_up(count: int) -> None:
                nonlocal done
                with lock:
                    done += count
                    lines.update(done, total)

            yield count_up
        return
    with _bar(label, total, DownloadColumn(binary_units=True), TransferSpeedColumn()) as (bar, task):

        def advance(count: int) -> None:
            bar.start()
            bar.advance(task, count)

        yield advance


@contextmanager
def step_progress(label: str, clock: Callable[[], float] = time.monotonic, grace: float = 0.0) -> Generator[Progress]:
    """Show the progress of counted steps, each with a note.

    After the first step of long work, an estimate of the whole time is shown.

    Args:
        grace: seconds before anything is shown; work that ends within them shows nothing.

    Yields:
        A function to call with the steps done, their total, and the note.
    """
    if not draws_bars():
        with _lines(ProgressLines(label, str, _say, clock, announce=True, grace=grace)) as lines:
            yield lines.update
        return
    start = clock()
    pace = Pace(clock)
    announced = False
    with _bar(label, None, MofNCompleteColumn(), NOTE) as (bar, task):

        def advance(done: int, total: int | None, note: str = "") -> None:
            nonlocal announced
            if clock() - start >= grace:
                bar.start()
            bar.update(task, completed=done, total=total, note=note)
            if not announced and (estimate := pace.estimate(done, total)):
                announced = True
                if text := whole_time(estimate[0]):
                    _say(f"{label}: {text}")

        yield advance


def draws_bars() -> bool:
    """Whether stderr is a terminal, which can redraw a line, regardless of the environment's color settings."""
    return stderr.file.isatty() and not stderr.is_dumb_terminal


def _say(line: str) -> None:
    stderr.print(line)


@contextmanager
def _lines(lines: ProgressLines) -> Generator[ProgressLines]:
    try:
        yield lines
    finally:
        lines.close()


@contextmanager
def _bar(label: str, total: int | None, *columns: ProgressColumn) -> Generator[tuple[Bars, TaskID]]:
    bar = Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=max(stderr.width // BAR_SHARE, SHORTEST_BAR)),
        *columns,
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=stderr,
        expand=NOTE in columns,
    )
    task = bar.add_task(label, total=total, note="")
    try:
        yield bar, task
    finally:
        if bar.live.is_started:
            bar.stop()
