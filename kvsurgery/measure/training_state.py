"""`TrainingState`: gates in training, and the file that an interrupted training goes on from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from kvsurgery.errors import OutputError, ProfileError
from kvsurgery.measure.settling import LATEST
from kvsurgery.system.files import differences, write_bytes_whole

FORMAT = "kvsurgery.gate-training"
VERSION = "3"
# columns, of each step: its loss, that without the penalty, and after it the mean gate and the share of gates under 0.5
HISTORY = ("loss", "data_loss", "mean_gate", "sparsity")


@dataclass(frozen=True)
class TrainingState:
    """Everything that the next step depends on, and the way here.

    Attributes:
        gates, mean, square: float32 [gated layers, kv_heads]: the gates, and AdamW's moving averages of their gradient
            and of its square.
        latest: float32 [up to LATEST, gated layers, kv_heads]: the gates after each of the latest steps, which show
            whether they have settled.
        history: float64 [steps done, len(HISTORY)].
    """

    gates: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor
    latest: torch.Tensor
    history: np.ndarray

    @classmethod
    def new(cls, gates: torch.Tensor) -> TrainingState:
        """Before the first step."""
        gates = gates.detach().cpu().clone()
        mean = torch.zeros_like(gates)
        square = torch.zeros_like(gates)
        return cls(gates, mean, square, gates.new_zeros(0, *gates.shape), np.zeros((0, len(HISTORY))))

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.history)

    def after(self, row: tuple[float, ...], gates: torch.Tensor, optimizer: torch.optim.Optimizer) -> TrainingState:
        """The state after another step, whose row joins the history."""
        moments = optimizer.state[gates]
        tensors = gates, moments["exp_avg"], moments["exp_avg_sq"]
        gates, mean, square = (tensor.detach().cpu().clone() for tensor in tensors)
        latest = torch.cat([self.latest, gates[None]])[-LATEST:]
        return TrainingState(gates, mean, square, latest, np.vstack([self.history, row]))

    def restore(self, gates: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Bring gates and AdamW's state to where they were."""
        if not self.step:
            return
        with torch.no_grad():
            gates.copy_(self.gates)
        moments = {"step": torch.tensor(float(self.step)), "exp_avg": self.mean, "exp_avg_sq": self.square}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: moments}})

    def save(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Write the state of the training that `facts` describe; what was there stays until all is written.

        Raises:
            OutputError: it cannot be written.
        """
        tensors = {"gates": self.gates, "mean": self.mean, "square": self.square, "latest": self.latest}
        tensors["history"] = torch.from_numpy(self.history)
        facts_text = json.dumps(facts, sort_keys=True)
        metadata = {
            "format": FORMAT,
            "version": VERSION,
            "facts": facts_text,
            "checksum": _checksum(tensors, facts_text),
        }
        write_bytes_whole(path, save(tensors, metadata), "training checkpoint")

    @classmethod
    def load(cls, path: Path, facts: Mapping[str, Any]) -> TrainingState:
        """Read the state of the training that `facts` describe.

        Raises:
            ProfileError: no such file, a malformed one, or another training's.
        """
        state, saved_facts = cls.require(path)
        mismatches = sorted(differences(saved_facts, json.loads(json.dumps(facts))), key=itemgetter(0))
        if mismatches:
            phrases = [
                f"{' '.join(keys)} is {saved_value} there and {current_value} here"
                for keys, saved_value, current_value in mismatches
            ]
            raise ProfileError(f"{path} belongs to another training: {', '.join(phrases)}")
        return state

    @classmethod
    def require(cls, path: Path) -> tuple[TrainingState, dict[str, Any]]:
        """The state that lies there, and the facts of its training.

        Raises:
            ProfileError: no such file, or a malformed one.
        """
        if not path.is_file():
            raise ProfileError(
                f"there is no training checkpoint {path} to resume; leave out `resume` to start a training"
            )
        return cls._read(path)

    @classmethod
    def refuse_to_replace(cls, path: Path) -> None:
        """Check that a new training may write its checkpoints here.

        Raises:
            OutputError: another training's are there.
            ProfileError: something else is.
        """
        if not path.exists():
            return
        state, _ = cls._read(path)
        if state.step:
            raise OutputError(
                f"{path} contains a training after {state.step} steps; continue it with `resume`, or give another file"
            )

    @classmethod
    def _read(cls, path: Path) -> tuple[TrainingState, dict[str, Any]]:
        """A state and the facts beside it."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
                    raise ProfileError(f"{path} is not a training checkpoint that this tool reads; give another file")
                tensors = {name: file.get_tensor(name) for name in ("gates", "mean", "square", "latest", "history")}
                if metadata["checksum"] != _checksum(tensors, metadata["facts"]):
                    raise ProfileError(f"training checkpoint {path} is damaged; begin again without `resume`")
        except (SafetensorError, OSError, KeyError) as error:
            raise ProfileError(f"{path} is not a training checkpoint: {error}") from error
        return cls(**{**tensors, "history": tensors["history"].numpy()}), json.loads(metadata["facts"])


def _checksum(tensors: Mapping[str, torch.Tensor], facts_text: str) -> str:
    """A hash of all that a file holds: a changed number would train other gates without a word."""
    return blake3(save(dict(tensors)) + facts_text.encode()).hexdigest()
