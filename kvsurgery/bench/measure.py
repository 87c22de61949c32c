"""Measure the contenders: they take turns to read the same prompts and to decode."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from kvsurgery.bench.caches import cache_bytes
from kvsurgery.bench.contenders import Contender, step_weights
from kvsurgery.bench.memory import peak_of
from kvsurgery.bench.results import PHASES, Phase, Row
from kvsurgery.bench.timing import Stopwatch, quartiles
from kvsurgery.bench.workload import WARM, Workload
from kvsurgery.display.progress import Progress
from kvsurgery.errors import KVSurgeryError
from kvsurgery.evaluate.answering import ran_out
from kvsurgery.evaluate.results import CONVERTED, ORIGINAL
from kvsurgery.system.processes import Processes
from kvsurgery.templates.kv_cache import CACHE


def measure(
    contenders: list[Contender],
    work: Workload,
    bandwidth: float,
    progress: Progress,
    processes: Processes = Processes(),
) -> Iterator[tuple[Row, ...]]:
    """Measure all contenders at one batch and length after another: the first process's time, the largest memory.

    Contenders take turns within a round, and each round begins with another one, so that other load on the machine
    affects all alike. A turn holds one cache at a time.

    Args:
        bandwidth: read bandwidth of the device in bytes per second.
        progress: called with the prompt tokens of the turns done, of all turns, and a note.
        processes: the processes that share the models and measure together.

    Raises:
        KVSurgeryError: one of several processes is out of memory, so that the others would wait for it forever.
    """
    done, total = 0, sum(map(math.prod, work.cells)) * (1 + work.rounds) * len(contenders)
    for batch, tokens in work.cells:
        ids = prompts(contenders[0].model, batch, tokens, work.seed)
        turns = [Turns(contender, ids, work, processes) for contender in contenders]
        for number in range(1 + work.rounds):
            start = number % len(turns)
            for turn in turns[start:] + turns[:start]:
                progress(done, total, f"{batch} x {tokens:,} tokens, {turn.contender.name}")
                turn.take(warm=number > 0)
                done += ids.numel()
        yield tuple(fullest(processes.gather([turn.row(bandwidth)])) for turn in turns)
    progress(done, total, "")


def prompts(model: Any, batch: int, tokens: int, seed: int) -> torch.Tensor:
    """Random token ids [batch, tokens]; time and memory do not depend on them."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.get_input_embeddings().num_embeddings
    return torch.randint(vocabulary, (batch, tokens), generator=generator).to(model.device)


def fullest(rows: list[Row]) -> Row:
    """The row of the first process, with the largest memory of all processes."""
    first_row = rows[0]
    if first_row.skipped:
        return first_row
    largest_values = {
        name: max(getattr(row, name) or 0 for row in rows) or None for name in ("kv_bytes", "predicted", "floor")
    }
    peaks = {
        name: replace(phase, peak_bytes=max(getattr(row, name).peak_bytes for row in rows))
        for name in PHASES
        if (phase := getattr(first_row, name))
    }
    return replace(first_row, **largest_values, **peaks)


class Turns:
    """The repeated measurements of one contender on the prompts `ids` [batch, tokens]."""

    def __init__(self, contender: Contender, ids: torch.Tensor, work: Workload, processes: Processes):
        self.contender, self.ids, self.work, self.processes = contender, ids, work, processes
        self.batch, self.tokens = ids.shape
        self.seconds: dict[str, list[float]] = {}
        self.peaks: dict[str, int] = {}
        self.cache_sizes: list[int] = []  # KV bytes before the first decode step and after the last
        reasons = processes.gather([contender.unreadable_reason(self.batch, self.tokens, work.new)])
        self.skipped = next(filter(None, reasons), None)

    @torch.no_grad()
    def take(self, warm: bool) -> None:
        """Run all phases once, to measure the memory or, after a warm-up, the time. A failure is kept as `skipped`."""
        if self.skipped:
            return
        try:
            if warm:
                self._time()
            else:
                self._find_peaks()
        except Exception as error:
            if ran_out(error) and self.processes.world > 1:
                raise KVSurgeryError(
                    f"out of memory at {self.batch} x {self.tokens:,} tokens; measure shorter prompts"
                ) from error
            if ran_out(error):
                self.skipped = "out of memory"
            elif self.contender.name in (CONVERTED, ORIGINAL):
                raise
            else:  # a backend of another library may not take every shape
                self.skipped = f"{type(error).__name__}: {error}".splitlines()[0]

    def _time(self) -> None:
        if self.contender.reads_at_once(self.tokens):
            if self.tokens > self.work.chunk:
                self._clock("chunked", lambda: self._prefill(self.work.chunk))
            cache, token = self._clock("prefill", self._prefill)
            self.seconds.setdefault("decode", []).extend(self._decode(cache, token)[WARM:])
            del cache
        self._clock("first_token", lambda: self._generate(1))

    def _clock(self, phase: str, work: Callable[[], Any]) -> Any:
        watch = Stopwatch(self.ids.device)
        result = work()
        watch.mark()
        self.seconds.setdefault(phase, []).extend(watch.spans())
        return result

    def _find_peaks(self) -> None:
        with peak_of(self.ids.device) as peak:
            if self.contender.reads_at_once(self.tokens):
                if self.tokens > self.work.chunk:
                    self._prefill(self.work.chunk)
                    self.peaks["chunked"] = peak.take()
                cache, token = self._prefill()
                self.peaks["prefill"] = peak.take()
                self.cache_sizes.append(cache_bytes(cache))
                self._decode(cache, token)
                self.peaks["decode"] = peak.take()
                self.cache_sizes.append(cache_bytes(cache))
                del cache
                peak.take()
                self._generate(1)
            else:
                self.cache_sizes.append(cache_bytes(self._generate(self.work.new)))
            self.peaks["first_token"] = peak.take()

    def _prefill(self, chunk: int | None = None) -> tuple[Any, torch.Tensor]:
        """An empty cache filled with the prompt, in chunks or at once, and the token that follows, [batch, 1]."""
        cache = self.contender.make(self.tokens, self.work.new)
        for part in self.ids.split(chunk or self.tokens, 1):
            output = self.contender.model(part, use_cache=True, logits_to_keep=1, **{CACHE: cache})
        return cache, output.logits[:, -1:].argmax(-1)

    def _decode(self, cache: Any, token: torch.Tensor) -> list[float]:
        """Seconds of each decode step. Steps are greedy, and none waits for the device."""
        watch = Stopwatch(self.ids.device)
        for _ in range(self.work.new):
            token = self.contender.model(token, use_cache=True, **{CACHE: cache}).logits[:, -1:].argmax(-1)
            watch.mark()
        return watch.spans()

    def _generate(self, new: int) -> Any:
        """The cache after `generate` made this many tokens."""
        options = {"max_new_tokens": new, "return_dict_in_generate": True, "attention_mask": torch.ones_like(self.ids)}
        if self.contender.name != CONVERTED:  # the converted model makes its own cache
            options[CACHE] = self.contender.make(self.tokens, new)
        model = self.contender.model
        return model.generate(self.ids, **options)[CACHE]  # ty: ignore[not-callable]  # it is GenerationMixin's

    def row(self, bandwidth: float) -> Row:
        """The row of the results."""
        row = Row(self.contender.name, self.tokens, self.batch, skipped=self.skipped)
        if row.skipped:
            return row
        phases = {
            name: Phase(*quartiles(seconds), count=len(seconds), peak_bytes=self.peaks[name])
            for name, seconds in self.seconds.items()
        }
        return replace(
            row,
            **phases,
            kv_bytes=self.cache_sizes[-1],
            predicted=self.contender.predicted(self.batch, self.tokens, self.work.new),
            floor=self._step_bytes() / bandwidth if "decode" in phases else None,
        )

    def _step_bytes(self) -> float:
        """The minimum bytes that a decode step reads, halfway through the steps: weights, and all keys and values.

        For a converted model these are the bytes that its cache allocates for this many tokens, for others the mean of
        the bytes before and after.
        """
        predicted_bytes = self.contender.predicted(self.batch, self.tokens, self.work.new // 2)
        cache_bytes_read = statistics.fmean(self.cache_sizes) if predicted_bytes is None else predicted_bytes
        return step_weights(self.contender.model, self.batch) + cache_bytes_read
