"""Time measurement on a device, and its read bandwidth."""

from __future__ import annotations

import itertools
import statistics
import time

import numpy as np
import torch

READ = {"cpu": 1 << 28, "cuda": 1 << 32}  # bytes, far more than caches hold
REPEATS = 20


class Stopwatch:
    """A stopwatch that marks points in the course of some work.

    On CUDA these are events in the stream. Only `spans` waits for the device, so Python runs ahead of it as usual.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list = []
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # earlier work is not counted
        self.mark()

    def mark(self) -> None:
        """Mark the end of the work so far."""
        if self.device.type == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record(torch.cuda.current_stream(self.device))
        else:
            self.marks.append(time.perf_counter())

    def spans(self) -> list[float]:
        """Seconds from each mark to the next, beginning at the creation of the watch."""
        pairs = itertools.pairwise(self.marks)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
        return [end - begin for begin, end in pairs]


def quartiles(seconds: list[float]) -> tuple[float, float, float]:
    """Median, first and third quartile."""
    low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
    return median, low, high


def read_bandwidth(device: torch.device) -> float:
    """The read bandwidth in bytes per second of a sum over a large tensor: the median of `REPEATS` runs."""
    states = torch.ones(READ[device.type] // 4, device=device)
    states.sum()
    watch = Stopwatch(device)
    for _ in range(REPEATS):
        states.sum()
        watch.mark()
    return states.nbytes / statistics.median(watch.spans())
