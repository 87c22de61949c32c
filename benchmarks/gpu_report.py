"""What gpu.py prints and writes, and the time that its sections have."""

from __future__ import annotations

import csv
import gc
import json
import re
import statistics
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch

GIB = 1 << 30


class Report:
    """Rows of all sections, what was skipped and why, in a JSON and a CSV file.

    Args:
        path: of the files, without a suffix.
        facts: what holds for the whole run.
    """

    def __init__(self, path: Path, facts: dict):
        self.path, self.facts = path, facts
        self.rows: list[dict] = []
        self.skipped: list[dict] = []
        self.section, self.columns, self.deadline = "", {}, float("inf")
        self.failed = False

    @property
    def left(self) -> float:
        """Seconds until the section's time is over."""
        return self.deadline - time.monotonic()

    def table(self, section: str, columns: dict[str, str]) -> None:
        """Begin a section or a part of one; each column has the format of its values, which begins with a width."""
        self.section, self.columns = section, columns
        print(f"\n{section}\n" + " ".join(_cell(name, _text(spec)) for name, spec in columns.items()), flush=True)

    def add(self, **values) -> dict:
        """Note and print a row. None: was not measured."""
        row = {"section": self.section, **values}
        self.rows.append(row)
        print(" ".join(_cell(row.get(name), spec) for name, spec in self.columns.items()), flush=True)
        return row

    def skip(self, name: str, reason: str) -> None:
        """Note that something was not measured."""
        self.skipped.append({"section": self.section, "what": name, "why": reason})
        print(f"skipped {name}: {reason}", flush=True)

    def allows(self, name: str, seconds: float) -> bool:
        """Whether there is time for something that takes about so long; notes it as skipped otherwise."""
        if self.left < seconds:
            self.skip(name, f"takes about {seconds:.0f} s, {max(self.left, 0):.0f} s are left")
        return self.left >= seconds

    @contextmanager
    def attempt(self, name: str) -> Generator[None]:
        """Try to measure something: whatever keeps it from working is noted, and the rest goes on."""
        try:
            yield
        except torch.OutOfMemoryError:
            self.skip(name, "out of memory")
        except Exception as error:
            reason = f"failed: {type(error).__name__}: {error}".splitlines()[0][:200]
            if all(skip["why"] != reason for skip in self.skipped):
                traceback.print_exc()
            self.skip(name, reason)
            self.failed = True
        free_memory()

    def write(self) -> None:
        """Write everything so far."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        report = {**self.facts, "rows": self.rows, "skipped": self.skipped}
        self.path.with_name(self.path.name + ".json").write_text(json.dumps(report, indent=1) + "\n")
        with open(self.path.with_name(self.path.name + ".csv"), "w", newline="") as file:
            writer = csv.DictWriter(file, dict.fromkeys(name for row in self.rows for name in row))
            writer.writeheader()
            writer.writerows(self.rows)


def _text(spec: str) -> str:
    """The format of a column's name: as wide as its values."""
    width = re.match(r"([<>]?)(\d+)", spec)
    assert width is not None  # which every column has
    return f"{width[1] or '>'}{width[2]}"


def _cell(value, spec: str) -> str:
    return format("-", _text(spec)) if value is None else format(value, spec)


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Median time of some work on the device, which has been done before."""
    spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in spans:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in spans)


def free_memory() -> None:
    """Give memory that nothing refers to back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
