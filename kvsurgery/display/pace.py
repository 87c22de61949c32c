"""Time estimates for long work, and progress as plain lines where no bar can be drawn."""

from __future__ import annotations

import threading
from collections.abc import Callable

EVERY = 30.0  # seconds between two lines; what takes less than that needs no estimate


class Pace:
    """The time that counted work takes, estimated from what has been done so far.

    Args:
        clock: a clock in seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self.start = clock()
        self.base: int | None = None  # what was done at `start`

    def estimate(self, done: int, total: int | None) -> tuple[float, float] | None:
        """Seconds of the whole work and seconds left; None before the first step is done.

        Work that continues an earlier run starts with several steps done, which do not count for the pace. While
        the total is unknown, work is being prepared, and its time is not counted.
        """
        now = self.clock()
        if total is None:
            self.start, self.base = now, None
            return None
        if self.base is None:
            self.base = 0 if done == 1 else done
            self.start = self.start if done == 1 else now
        if done <= self.base:
            return None
        seconds_per_step = (now - self.start) / (done - self.base)
        return seconds_per_step * (total - self.base), seconds_per_step * (total - done)


class ProgressLines:
    """Progress as plain lines: one at the start, one every half minute, and one at the end.

    Args:
        label: the name of the work.
        count: formats a count for people.
        say: prints a line.
        clock: a clock in seconds.
        announce: whether the first step is followed by an estimate of the whole.
        grace: seconds without a line; work that ends within them has none.
    """

    def __init__(
        self,
        label: str,
        count: Callable[[int], str],
        say: Callable[[str], None],
        clock: Callable[[], float],
        announce: bool,
        grace: float = 0.0,
    ):
        self.label, self.count, self.say, self.announce, self.grace = label, count, say, announce, grace
        self.start, self.is_silent = clock(), grace > 0
        self.pace = Pace(clock)
        self.last_line_time = self.pace.start
        self.last: tuple[int, int | None, str] | None = None
        self.lock = threading.Lock()

    def update(self, done: int, total: int | None, note: str = "") -> None:
        """Report progress: the amount done, the total, and a note; from any thread."""
        with self.lock:
            is_beginning = self.is_silent or (self.last is None and done == 0)
            self.last = done, total, note
            estimate = self.pace.estimate(done, total)
            now = self.pace.clock()
            if now - self.start < self.grace:
                return
            if done == total:  # `close` prints the last line
                return
            if self.announce and estimate and (text := whole_time(estimate[0])):
                self._say(f"{self._line(*self.last)}, {text}", now)
            elif is_beginning or now - self.last_line_time >= EVERY:
                self._say(f"{self._line(*self.last)}{f', {duration(estimate[1])} left' if estimate else ''}", now)
            self.announce = self.announce and not estimate

    def close(self) -> None:
        """Print the last line, if any work is done."""
        if self.last is not None and self.last[0] and not self.is_silent:
            self.say(self._line(*self.last))

    def _say(self, line: str, now: float) -> None:
        self.say(line)
        self.last_line_time, self.is_silent = now, False

    def _line(self, done: int, total: int | None, note: str) -> str:
        if not done and total is None:
            return f"{self.label}: {note}"
        counts = self.count(done) if total is None else f"{self.count(done)}/{self.count(total)}"
        return f"{self.label} {counts}{note and ', '}{note}"


def whole_time(seconds: float) -> str:
    """An estimate of the whole time as text; empty if it is too short to need one."""
    return f"about {duration(seconds)} in all" if seconds >= EVERY else ""


def duration(seconds: float) -> str:
    """A duration as text: 45 s, 12 min, 3 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"
