"""What `kvsurgery profile compute` measures by each method, with the options that it was given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from kvsurgery.measure.mesh import Mesh
    from kvsurgery.measure.model import MeasuredModel
    from kvsurgery.measure.passkeys import Passkeys
    from kvsurgery.measure.prompts import Contexts
    from kvsurgery.measure.training import GateOptions
    from kvsurgery.profile.cache_losses import CacheLosses
    from kvsurgery.profile.head_profile import HeadProfile

    Measurement = tuple[HeadProfile | CacheLosses, np.ndarray | None]  # a training has a history

KV_BITS, RLKV_LITE = "kv-bits", "rlkv-lite"


def _gates(
    method: str, measured: MeasuredModel, mesh: Mesh, advance: Callable[..., None], options: dict
) -> Measurement:
    from kvsurgery.measure.own_answers import OwnAnswers
    from kvsurgery.measure.prompts import Passages
    from kvsurgery.measure.training import KeptState, Progress, train_gates

    gates = _gate_options(measured, mesh, options)
    contexts = _contexts(measured, options)
    if method == RLKV_LITE:
        count, kept = options["samples"], options["answers"]
        prompts = OwnAnswers.of(
            measured, contexts, count, kept, lambda done: advance(done, None, f"of {count} answers generated"), mesh
        )
    elif gates.loss == "lm":
        prompts = Passages(contexts, contexts.read(options["text"], measured.text))
    else:
        prompts = _passkeys(measured, options)

    def progress(step: Progress) -> None:
        advance(step.step, step.steps, f"loss {step.loss:.4f}, {step.sparsity:.0%} of gates under 0.5")

    if mesh.processes.rank == 0 and not options["resume"]:
        advance(0, gates.steps)  # the time until here says nothing of the steps
    return train_gates(
        measured,
        prompts,
        gates,
        data=prompts.facts,
        method=method,
        kept=KeptState(options["checkpoint"], resume=options["resume"]) if options["checkpoint"] else None,
        progress=progress,
        mesh=mesh,
    )


def _gate_options(measured: MeasuredModel, mesh: Mesh, options: dict) -> GateOptions:
    """How gates are trained. Lengths of prompts that follow from the time are added to `options`."""
    from dataclasses import replace

    from kvsurgery import console
    from kvsurgery.measure.pace import Lengths, TrainingPlan, paced, penalty, step_seconds
    from kvsurgery.measure.training import GateOptions
    from kvsurgery.measure.training_state import TrainingState

    gates = GateOptions(**{name: options[name] for name in ("loss", "steps", "lr", "sink", "recent", "batch")})
    begun = TrainingState.require(options["checkpoint"])[1] if options["resume"] else None
    if (minutes := options["minutes"]) is not None:
        if begun is None:
            if mesh.processes.rank == 0:
                console.stderr.print("timing some steps of the training")
            given = Lengths(options["min_context"], options["max_context"], options["passkeys"])
            seconds, window = step_seconds(measured, gates, mesh), gates.sink + gates.recent
            plan = paced(minutes, seconds, measured.max_context, given, window)
        else:
            plan = TrainingPlan.of(begun)
        gates = replace(gates, steps=plan.steps, until_settled=True)
        chosen = {"min_context": plan.shortest, "max_context": plan.longest, "passkeys": plan.passkeys}
        options |= {name: options[name] or value for name, value in chosen.items()}
    gates = replace(gates, reg=penalty(gates.steps) if options["reg"] is None else options["reg"])
    if begun is not None:
        return replace(gates, until_settled=begun.get("until_settled", False))
    if minutes is not None and mesh.processes.rank == 0:
        console.stderr.print(f"chosen for {minutes:g} min: {plan.flags} --reg {gates.reg:g}")
    return gates


def _attention(measured: MeasuredModel, mesh: Mesh, advance: Callable[..., None], options: dict) -> Measurement:
    from kvsurgery.measure.attention import attention_profile

    prompts = _passkeys(measured, options)
    shared = {"data": prompts.facts, "progress": advance, "mesh": mesh}
    return attention_profile(measured, prompts, options["samples"], **shared), None


def _headkv(
    method: str, measured: MeasuredModel, mesh: Mesh, advance: Callable[..., None], options: dict
) -> Measurement:
    from kvsurgery import console
    from kvsurgery.measure.needle_trial import choose_needles
    from kvsurgery.measure.retrieval import Trials, retrieval_scores
    from kvsurgery.text.haystack import Haystack
    from kvsurgery.text.lengths import DEPTHS, default_lengths
    from kvsurgery.text.needle_sets import AUTO, read_set

    lengths = options["lengths"] or default_lengths(measured.max_context)
    haystack = Haystack.read(options["text"], measured.text, max(lengths), options["seed"])
    trials = Trials(lengths, options["depths"] or DEPTHS, seed=options["seed"])
    choice = None
    if options["needles"] == AUTO:
        choice = choose_needles(measured, haystack, method, trials, mesh=mesh)
        if mesh.processes.rank == 0:
            console.stderr.print(str(choice))
    profile = retrieval_scores(
        measured,
        haystack,
        read_set(choice.name if choice else options["needles"]),
        trials,
        method=method,
        choice=choice,
        progress=lambda done, of, right: advance(done, of, f"{right} right"),
        mesh=mesh,
    )
    return profile, None


def _reform(measured: MeasuredModel, mesh: Mesh, advance: Callable[..., None], options: dict) -> Measurement:
    from dataclasses import replace

    from kvsurgery.measure.reform import PAPER, embedding_ranking
    from kvsurgery.measure.reform_tasks import key_value_samples, multihop_samples
    from kvsurgery.text.haystack import Haystack, tokens_needed

    needed = tokens_needed(options["text"], options["context"])
    haystack = Haystack.read(options["text"], measured.text, needed, options["seed"])
    drawn = {"count": options["samples"], "length": options["context"], "seed": options["seed"]}
    profile = embedding_ranking(
        measured,
        {
            "pattern": key_value_samples(measured.text, haystack, **drawn),
            "multihop": multihop_samples(measured.text, haystack, **drawn),
        },
        recurrence=replace(PAPER, chunk=options["chunk"]) if options["chunk"] else PAPER,
        data={"text": haystack.name, "seed": options["seed"]},
        progress=advance,
        mesh=mesh,
    )
    return profile, None


def _kv_bits(measured: MeasuredModel, mesh: Mesh, advance: Callable[..., None], options: dict) -> Measurement:
    from kvsurgery.measure.cache_losses import TrialSizes, cache_losses
    from kvsurgery.text.haystack import Haystack
    from kvsurgery.text.tokens import first_tokens

    names = {"passages": "samples", "context": "context", "sink": "sink", "recent": "recent"}
    sizes = TrialSizes(**{name: options[option] for name, option in names.items()})
    sizes.check()
    text = Haystack.read(options["text"], measured.text, sizes.passages * sizes.length, options["seed"])
    first, data = first_tokens(measured.text), {"text": text.name}
    return cache_losses(measured, text.tokens, sizes, first=first, data=data, progress=advance, mesh=mesh), None


def _contexts(measured: MeasuredModel, options: dict) -> Contexts:
    from kvsurgery.measure.prompts import Contexts

    return Contexts.of(measured, options["min_context"], options["max_context"], options["seed"])


def _passkeys(measured: MeasuredModel, options: dict) -> Passkeys:
    from kvsurgery.measure.passkeys import Passkeys

    drawn = {"count": options["passkeys"], "size": options["passkey_tokens"]}
    return Passkeys.of(measured, _contexts(measured, options), options["text"], **drawn)


MEASUREMENTS = {
    **{method: partial(_gates, method) for method in ("duo", RLKV_LITE)},
    "attention": _attention,
    **{method: partial(_headkv, method) for method in ("headkv-r", "headkv-er", "headkv-r2")},
    "reform": _reform,
    KV_BITS: _kv_bits,
}
