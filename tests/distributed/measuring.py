"""What profiles a process measures, alone or as one of several."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvsurgery.measure.attention import attention_profile
from kvsurgery.measure.mesh import Mesh
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.measure.reform import RankedPrompt, embedding_ranking
from kvsurgery.measure.retrieval import Trials, retrieval_scores
from kvsurgery.measure.training import GateOptions, KeptState, train_gates
from kvsurgery.system.processes import Processes
from kvsurgery.templates.kv_reform import Reform
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.needles import Needle
from tests.helpers.families import tokens
from tests.helpers.tiny_recall import FOLDER, task
from tests.measure.test_gate_training import DATA, OPTIONS, prompts, recalls


def measure(measured: MeasuredModel, mesh: Mesh) -> dict[str, np.ndarray]:
    """Scores by every method that these processes can share, and how training went."""
    found = {"attention": attention_profile(measured, recalls, 4, data=DATA, mesh=mesh).scores}
    for loss in ("distill", "lm"):
        options = GateOptions(**OPTIONS, loss=loss)
        profile, history = train_gates(measured, prompts, options, data=DATA, mesh=mesh)
        found |= {f"{loss} scores": profile.scores, f"{loss} history": history}
    return found if mesh.tp < mesh.processes.world or measured.no_reform else found | rank_heads(measured, mesh)


def resume(measured: MeasuredModel, mesh: Mesh, checkpoint: Path) -> np.ndarray:
    """Gates of a training that was interrupted halfway and goes on."""

    def stopping(step: int, place: int) -> tuple:
        if step == OPTIONS["steps"] // 2:
            raise KeyboardInterrupt
        return prompts(step, place)

    given = {"data": DATA, "mesh": mesh}
    with suppress(KeyboardInterrupt):
        train_gates(measured, stopping, GateOptions(**OPTIONS), kept=KeptState(checkpoint), **given)
    return train_gates(measured, prompts, GateOptions(**OPTIONS), kept=KeptState(checkpoint, resume=True), **given)[
        0
    ].scores


def rank_heads(measured: MeasuredModel, mesh: Mesh) -> dict[str, np.ndarray]:
    """Mean normalized ranks of the states of all heads."""
    gold = range(9, 12), range(30, 32)
    samples = [RankedPrompt(tokens(1, 60, seed)[0].numpy(), range(1, 55), range(55, 58), gold) for seed in range(3)]
    recurrence = Reform((), chunk=16, encode_budget=12, keep=2, window=4)
    ranking = embedding_ranking(measured, {"pattern": samples}, recurrence=recurrence, mesh=mesh).ranking
    return {f"reform {kind}": ranks for kind, ranks in ranking.mnr["pattern"].items()}


def retrieve(measured: MeasuredModel, mesh: Mesh) -> np.ndarray:
    """Retrieval scores of the bundled model, which answers."""
    rng, words = np.random.default_rng(0), task.vocabulary()
    haystack = Haystack(task.filler(rng, 1, 400)[0], "filler")
    key, *values = (words[token] for token in task.facts(rng, 1, 1)[0][0])
    value = " ".join(values)
    needle = Needle(f"remember {key} {value} .", value, f"recall {key}", value)
    trials = Trials((60, 200), (0.1, 0.6))
    return retrieval_scores(measured, haystack, [needle], trials, method="headkv-r", mesh=mesh).scores


def work(processes: Processes, cases: list[tuple[Path, int, int]], out: Path) -> list[tuple[Any, ...]]:
    """Of models and sizes of a mesh: what is measured, how much of the layers lies here, what a model is known by."""
    found = []
    for number, (folder, tp, sp) in enumerate(cases):
        mesh = Mesh(processes, tp, sp)
        if folder == FOLDER / "model":
            measured = mesh.load(str(folder), sharded=False)
            found.append(({"headkv-r": retrieve(measured, mesh), **rank_heads(measured, mesh)}, 0, ""))
            continue
        measured = mesh.load(str(folder))
        weights = list(measured.model.get_decoder().layers.parameters())
        held = sum((weight.to_local() if hasattr(weight, "to_local") else weight).numel() for weight in weights)
        results = measure(measured, mesh)
        if not number:
            results["resumed"] = resume(measured, mesh, out / "training.state")
        found.append((results, held, measured.fingerprint))
    return found
