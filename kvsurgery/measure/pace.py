"""How long a training of gates takes here, and what a number of minutes is enough for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvsurgery.errors import ProfileError
from kvsurgery.measure.gate_options import GateOptions
from kvsurgery.measure.gates import add_gradient, initial_gates
from kvsurgery.measure.mesh import Mesh
from kvsurgery.measure.methods.contexts import PASSKEYS
from kvsurgery.measure.model import MeasuredModel, decoder_of
from kvsurgery.text.lengths import LONGEST_PROMPT, SHORTEST_PROMPT

# steps: the paper's, those that prompts are shortened for, and too few
MOST_STEPS, WANTED_STEPS, LEAST_STEPS = GateOptions.steps, 400, 100
LEAST_CONTEXT = 768  # tokens; prompts are not shortened any further
TIMED_TOKENS = 512  # tokens of the prompt that is timed
PASSKEY_ROOM = 100  # tokens that a passkey takes with the words around it


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
            raise ProfileError(f"the training to resume does not say its {missing}; give another file") from None


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
    for shortest, longest in _candidates(most_tokens, fixed_lengths, window):
        lengths = np.linspace(shortest, longest, 9).astype(int).tolist()
        step = float(np.mean([seconds(length) for length in lengths]))
        steps = int(60 * minutes / step + 1e-6)  # whole steps are not lost to rounding
        if steps >= WANTED_STEPS:
            break
    if steps < LEAST_STEPS:
        minutes_needed = math.ceil(LEAST_STEPS * step / 60)
        raise ProfileError(
            f"in {minutes:g} min there is time for {steps} steps with prompts of {shortest} to {longest} tokens, but "
            f"training gates takes at least {LEAST_STEPS} steps; give {minutes_needed} min"
        )
    passkeys = fixed_lengths.passkeys or min(max(shortest // PASSKEY_ROOM, 1), PASSKEYS)
    return TrainingPlan(min(steps, MOST_STEPS), shortest, longest, passkeys)


def _candidates(most_tokens: int, fixed_lengths: Lengths, window: int) -> Iterator[tuple[int, int]]:
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
    """Time one step, and say how long others take, by tokens of their prompts.

    Longer prompts take more in proportion to their operations: two for each weight of a layer and each token, and for
    each pair of a query and a key that it sees.
    """
    tokens = min(max(TIMED_TOKENS, options.sink + options.recent + 2), measured.max_context)
    weights = sum(weight.numel() for weight in decoder_of(measured.model).layers.parameters())
    width = measured.dimensions.query_width

    def operations(length: int) -> float:
        return 2.0 * weights * length + 2.0 * width * length**2

    ids = torch.arange(tokens)[None] % measured.model.config.get_text_config().vocab_size
    targets = torch.zeros_like(ids, dtype=torch.bool)
    targets[:, -tokens // 16 :] = True
    sizes = {"sink": options.sink, "recent": options.recent}
    for _ in range(2):  # the first one warms up
        gates = initial_gates(measured)
        gates.grad = torch.zeros_like(gates)
        start_time = time.perf_counter()
        add_gradient(measured, gates, ids, targets, options.loss, mesh, **sizes).item()
        seconds = time.perf_counter() - start_time
    seconds = mesh.processes.agree(seconds) * len(mesh.share(options.batch))
    return lambda length: seconds * operations(length) / operations(tokens)
