"""Train the gates of a model: DuoAttention's optimization, as a resumable loop over one or many processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvsurgery.display.progress import Progress, silent
from kvsurgery.errors import KVSurgeryError, ProfileError
from kvsurgery.measure.gate_options import GateOptions
from kvsurgery.measure.gates import WARM_UP, add_gradient, gate_scores, initial_gates, rate
from kvsurgery.measure.mesh import Mesh
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.measure.settling import LATEST, MOST_MOVED, SHARES, settled
from kvsurgery.measure.training_state import HISTORY, TrainingState
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.system.processes import Processes
from kvsurgery.version import TOOL

# (step, place in the step's batch) -> tokens int64 [batch, tokens], targets bool [batch, tokens], and more or nothing
Prompts = Callable[[int, int], tuple[torch.Tensor, ...]]

HIGH = 0.8  # a gate that has not moved far


@dataclass(frozen=True)
class KeptState:
    """Where the state of a training is kept.

    Attributes:
        path: the file, written every `every` steps, after the last, and on Ctrl-C.
        resume: go on from it.
    """

    path: Path
    every: int = 50
    resume: bool = False


def train_gates(
    measured: MeasuredModel,
    prompts: Prompts,
    options: GateOptions,
    *,
    data: Mapping[str, Any],
    method: str = "duo",
    kept: KeptState | None = None,
    progress: Progress = silent,
    mesh: Mesh = Mesh(),
) -> tuple[HeadProfile, np.ndarray]:
    """Train the gates and make a profile of them.

    On a CPU, equal arguments give equal bits, and so does a training that was interrupted and resumed.

    Args:
        measured: the model; its weights stay as they are.
        prompts: called for every step and every place in its batch; what it gives depends on these two alone.
        data: what the prompts are, for the provenance and to know a training again.
        method: of the profile, a key of `SCORE_METHODS`.
        kept: where the state is kept; None: nowhere.
        progress: of the steps, with the loss of each and the share of gates under 0.5 after it.
        mesh: the processes that share the prompts of a step.

    Returns:
        A profile, and its history: float64 [steps done, 4], with the columns `training_state.HISTORY`.

    Raises:
        ProfileError: the loss is not finite, a prompt has nothing outside sink and recent, or the state to resume is of
            another training.
        OutputError: the state cannot be written, or its file holds a training that this is not to resume.
        UnsupportedModel: no layer has full attention.
    """
    share = mesh.share(options.batch)
    facts = {
        "model": measured.name,
        "revision": measured.revision,
        "weights": mesh.processes.agree(measured.fingerprint),
        "data": dict(data),
        **asdict(options),
    }
    gates = initial_gates(measured)
    state = _first_state(gates, facts, kept, mesh.processes)
    optimizer = torch.optim.AdamW([gates], lr=options.lr, weight_decay=0.0)
    state.restore(gates, optimizer)

    def save() -> None:
        if kept is not None and mesh.processes.rank == 0:
            state.save(kept.path, facts)

    save()  # a path that cannot be written fails before the work
    try:
        while state.step < options.steps and not _has_settled(state, options, mesh.processes):
            local_prompts = [prompts(state.step, place) for place in share]
            losses = training_step(measured, gates, optimizer, local_prompts, options, state.step, mesh)
            sparsity = (gates < 0.5).double().mean().item()
            state = state.after((*losses, gates.mean().item(), sparsity), gates, optimizer)
            if kept is not None and state.step % kept.every == 0:
                save()
            progress(state.step, options.steps, f"loss {losses[0]:.4f}, {sparsity:.0%} of gates under 0.5")
    except KeyboardInterrupt:
        save()
        raise
    save()
    profile = measured.profile(
        gate_scores(measured, gates),
        method,
        "kv",
        sink=options.sink,
        recent=options.recent,
        provenance={
            **{name: value for name, value in facts.items() if name not in ("model", "revision", "sink", "recent")},
            "steps_done": state.step,
            "final_loss": state.history[-1][0],
            "tool": TOOL,
        },
    )
    return profile, state.history


def training_step(
    measured: MeasuredModel,
    gates: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    local_prompts: list[tuple[torch.Tensor, ...]],
    options: GateOptions,
    step: int,
    mesh: Mesh = Mesh(),
) -> tuple[float, float]:
    """Move the gates by the mean gradient over all processes' prompts, of which `local_prompts` are this one's.

    Returns:
        The loss of the gates as they were, with and without the penalty.

    Raises:
        ProfileError: the loss is not finite, or a prompt has nothing outside sink and recent.
    """
    gates.grad = torch.zeros_like(gates)
    data_loss = torch.zeros((), device=gates.device)
    for tokens, targets, *_ in local_prompts:
        if tokens.shape[1] <= options.sink + options.recent:
            raise ProfileError(
                f"a prompt of {tokens.shape[1]} tokens has nothing outside sink {options.sink} and recent "
                f"{options.recent}; give longer contexts, or a smaller window"
            )
        data_loss += add_gradient(
            measured, gates, tokens, targets, options.loss, mesh, sink=options.sink, recent=options.recent
        )
    # processes that share heads alone have the same loss
    gradient_and_loss = torch.cat([gates.grad.flatten() / mesh.copies(measured), data_loss[None] / mesh.tp])
    mesh.processes.add(gradient_and_loss)
    gradient_and_loss /= options.batch
    if not gradient_and_loss.isfinite().all():
        raise ProfileError(
            f"the loss is {gradient_and_loss[-1].item():g} in step {step + 1}, or its gradient is not a number; "
            "try bfloat16 or float32 weights, or a lower learning rate"
        )
    # the mean gate's gradient is the same for every gate
    gates.grad = gradient_and_loss[:-1].view_as(gates) + options.reg / gates.numel()
    mean_data_loss = gradient_and_loss[-1].item()
    loss = mean_data_loss + options.reg * gates.mean().item()
    for group in optimizer.param_groups:
        group["lr"] = options.lr * rate(step, options.steps)
    optimizer.step()
    with torch.no_grad():
        gates.clamp_(0, 1)
    return loss, mean_data_loss


def outcome(profile: HeadProfile, history: np.ndarray) -> list[str]:
    """Lines on how a training went: whether its gates settled before the last step, separated, or collapsed to 0.

    Args:
        profile, history: of `train_gates`.
    """
    lines = []
    steps, steps_done = profile.provenance["steps"], profile.provenance["steps_done"]
    if steps_done < steps:
        lines.append(
            f"gates settled after {steps_done} of {steps} steps: more steps would hardly change which heads are full"
        )
    gates = profile.head_scores[profile.eligible]
    high_count = int((gates >= HIGH).sum())
    if high_count > gates.size / 2:
        still_fall = steps_done == steps and _gates_still_fall(profile, history)
        advice = "train longer, or raise `reg`" if still_fall else "raise `reg`"
        lines.append(f"{high_count} of {gates.size} gates are {HIGH} or more: they have not separated; {advice}")
    ranked_count = int((gates > 0).sum())
    if ranked_count < max(SHARES) * gates.size:
        lines.append(
            f"{gates.size - ranked_count} of {gates.size} gates are 0: they have collapsed and rank alike; "
            f"to keep more than {ranked_count} heads full, lower `reg` or train fewer steps"
        )
    return lines


def _gates_still_fall(profile: HeadProfile, history: np.ndarray) -> bool:
    """Whether the mean gate fell over the second half of the steps, by `MOST_MOVED` of what the learning rate allows or
    more. True of trainings that are too short to tell."""
    half = len(history) // 2
    mean_gates = history[half:, HISTORY.index("mean_gate")]
    largest_fall = profile.provenance["lr"] * sum(
        rate(step, profile.provenance["steps"]) for step in range(half + 1, len(history))
    )
    return mean_gates[0] - mean_gates[-1] >= MOST_MOVED * largest_fall


def _has_settled(state: TrainingState, options: GateOptions, processes: Processes) -> bool:
    """Whether the training stops here, before its last step: not in the warm-up, nor by the gates of the warm-up."""
    if not options.until_settled or state.step < WARM_UP * options.steps + LATEST:
        return False
    return processes.agree(settled(state.latest.flatten(1).numpy(), options.lr))


def _first_state(
    gates: torch.Tensor, facts: dict[str, Any], kept: KeptState | None, processes: Processes
) -> TrainingState:
    """The state to begin with: of a file, which the first process reads, or of no steps."""
    state = TrainingState.new(gates)
    if kept is None:
        return state
    error = None
    try:
        if processes.rank == 0 and kept.resume:
            state = TrainingState.load(kept.path, facts)
        elif processes.rank == 0:
            TrainingState.refuse_to_replace(kept.path)
    except KVSurgeryError as problem:
        error = problem
    state, error = processes.agree((state, error))
    if error is not None:
        raise error
    return state
