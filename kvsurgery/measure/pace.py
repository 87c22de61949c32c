"""How long measurements take here, and what a number of minutes is enough for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvsurgery.errors import ProfileError, TooLittleTime
from kvsurgery.measure.gate_options import GateOptions
from kvsurgery.measure.gates import add_gradient, initial_gates
from kvsurgery.measure.mesh import Mesh
from kvsurgery.measure.methods.contexts import PASSKEYS, roomy_passkeys
from kvsurgery.measure.model import MeasuredModel, decoder_of
from kvsurgery.text.lengths import LONGEST_PROMPT, SHORTEST_PROMPT

# steps: the paper's, those that prompts are shortened for, and too few
MOST_STEPS, WANTED_STEPS, LEAST_STEPS = GateOptions.steps, 400, 100
LEAST_CONTEXT = 768  # tokens; prompts are not shortened any further
TIMED_TOKENS = 512  # tokens of the prompt that is timed


@dataclass(frozen=True)
class Lengths:
    """Tokens of the shortest and of the longest prompt, and the passkeys in each; None: to be chosen."""

    min_context: int | None = None
    max_context: int | None = None
    passkeys: int | None = None


@dataclass(frozen=True)
class TrainingPlan:
    """A training that fits a time: settings of `Duo`."""

    steps: int
    min_context: int
    max_context: int
    passkeys: int

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> TrainingPlan:
        """The plan of a training to resume, from the facts beside its state.

        Raises:
            ProfileError: they have no lengths of prompts.
        """
        try:
            data = facts["data"]
            return cls(facts["steps"], data["shortest"], data["longest"], data.get("passkeys", PASSKEYS))
        except KeyError as missing:
            raise ProfileError(f"the training checkpoint does not record {missing}; give another file") from None


def paced(
    minutes: float,
    seconds: Callable[[int], float],
    most_tokens: int,
    fixed_lengths: Lengths = Lengths(),
    window: int = 0,
) -> TrainingPlan:
    """The longest prompts, up to 32,000 tokens, that leave time for 400 steps; then as many steps as fit, up to 2,000.

    Args:
        seconds: of a step, by tokens of its prompts.
        most_tokens: positions of the model.
        fixed_lengths: lengths that are kept.
        window: tokens that streaming heads see; every prompt is longer, and the longest twice as long.

    Raises:
        ProfileError: there is time for fewer than 100 steps of the shortest prompts.
    """
    for shortest, longest in length_pairs(most_tokens, fixed_lengths, window):
        step = mean_seconds(seconds, shortest, longest)
        steps = int(60 * minutes / step + 1e-6)  # whole steps are not lost to rounding
        if steps >= WANTED_STEPS:
            break
    if steps < LEAST_STEPS:
        minutes_needed = math.ceil(LEAST_STEPS * step / 60)
        raise TooLittleTime(
            f"in {minutes:g} min there is time for {steps} steps with prompts of {shortest} to {longest} tokens, but "
            f"training gates takes at least {LEAST_STEPS} steps; give {minutes_needed} min",
            minutes_needed,
        )
    passkeys = fixed_lengths.passkeys or roomy_passkeys(shortest)
    return TrainingPlan(min(steps, MOST_STEPS), shortest, longest, passkeys)


@dataclass(frozen=True)
class Candidate:
    """Settings that could be measured with.

    Attributes:
        settings: by name.
        each: seconds of a sample.
        ahead: seconds that pass before the first one.
    """

    settings: Mapping[str, Any]
    each: float
    ahead: float = 0.0


def fitted(
    minutes: float,
    candidates: Iterable[Candidate],
    count_name: str,
    least: int,
    most: int,
    groups: int = 1,
) -> dict[str, Any]:
    """The settings of the first candidate with time for the most samples, or else of the last, and how many fit.

    Args:
        candidates: one or more, each faster than the one before.
        count_name: the setting that is the number of samples.
        least, most: of them.
        groups: of processes that share the samples, each as many; a number that is given is not changed for them.

    Raises:
        TooLittleTime: fewer than the least fit.
    """
    if least < most:
        least, most = -(-least // groups) * groups, max(most // groups, 1) * groups
    for candidate in candidates:
        count = int((60 * minutes - candidate.ahead) / candidate.each + 1e-6)
        if count >= most:
            break
    if count < least:
        minutes_needed = math.ceil((candidate.ahead + least * candidate.each) / 60)
        raise TooLittleTime(
            f"in {minutes:g} min there is time for {max(count, 0)} {count_name}, and the minimum is {least}; "
            f"give {minutes_needed} min",
            minutes_needed,
        )
    return {**candidate.settings, count_name: min(count - count % groups, most) if least < most else most}


def mean_seconds(seconds: Callable[[int], float], shortest: int, longest: int) -> float:
    """Seconds of a prompt on average, where lengths go from the shortest to the longest."""
    return float(np.mean([seconds(length) for length in np.linspace(shortest, longest, 9).astype(int).tolist()]))


def length_pairs(most_tokens: int, fixed_lengths: Lengths, window: int) -> Iterator[tuple[int, int]]:
    """Shortest and longest prompt, each pair half as long as the one before."""
    longest = fixed_lengths.max_context or min(LONGEST_PROMPT, most_tokens)
    min_longest = (
        longest if fixed_lengths.max_context else max(LEAST_CONTEXT, fixed_lengths.min_context or 0, 2 * window)
    )
    while True:
        yield fixed_lengths.min_context or min(max(min(SHORTEST_PROMPT, longest // 2), window + 1, 2), longest), longest
        if longest <= min_longest:
            return
        longest = max(longest // 2, min_longest)


def step_seconds(measured: MeasuredModel, options: GateOptions, mesh: Mesh = Mesh()) -> Callable[[int], float]:
    """Time one step, and say how long others take, by tokens of their prompts."""
    tokens = min(max(TIMED_TOKENS, options.sink + options.recent + 2), measured.max_context)
    ids = torch.arange(tokens)[None] % measured.model.config.get_text_config().vocab_size
    targets = torch.zeros_like(ids, dtype=torch.bool)
    targets[:, -tokens // 16 :] = True
    sizes = {"sink": options.sink, "recent": options.recent}

    def step() -> None:
        gates = initial_gates(measured)
        gates.grad = torch.zeros_like(gates)
        add_gradient(measured, gates, ids, targets, options.loss, mesh, **sizes).item()

    seconds = scaled_seconds(measured, tokens, step, mesh)
    share = len(mesh.share(options.batch))
    return lambda length: share * seconds(length)


def scaled_seconds(
    measured: MeasuredModel, tokens: int, work: Callable[[], object], mesh: Mesh = Mesh()
) -> Callable[[int], float]:
    """Time some work on a prompt, and say how long it takes on others, by their tokens."""
    operations = operations_of(measured)
    work()  # warms up
    start_time = time.perf_counter()
    work()
    seconds = mesh.processes.agree(time.perf_counter() - start_time)
    return lambda length: seconds * operations(length) / operations(tokens)


def operations_of(measured: MeasuredModel) -> Callable[[int], float]:
    """How many operations a prompt takes, by its tokens.

    There are two for each weight of a layer and each token, and for each pair of a query and a key that it sees."""
    weights = sum(weight.numel() for weight in decoder_of(measured.model).layers.parameters())
    width = measured.dimensions.query_width
    return lambda length: 2.0 * weights * length + 2.0 * width * length**2


def timed_ids(measured: MeasuredModel) -> np.ndarray:
    """int64 [tokens]: a prompt to time."""
    tokens = min(TIMED_TOKENS, measured.max_context)
    return np.arange(tokens) % measured.model.config.get_text_config().vocab_size
