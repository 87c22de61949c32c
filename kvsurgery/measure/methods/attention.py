"""The attention of each head while passkeys are recalled, without training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvsurgery.measure.methods.contexts import PasskeyMethod
from kvsurgery.measure.methods.method import Measurement, Reporter, SampledMethod
from kvsurgery.setting import setting

if TYPE_CHECKING:
    from kvsurgery.measure.mesh import Mesh
    from kvsurgery.measure.model import MeasuredModel


SAMPLES, LEAST_SAMPLES = 50, 10


@dataclass(frozen=True)
class Attention(PasskeyMethod, SampledMethod):
    """Attention on the tokens of passkeys.

    Attributes:
        samples: prompts.
    """

    name: str = "attention"
    samples: int | None = setting(None, "samples", "number of prompts", default=SAMPLES)

    paced = ("samples", "min_context", "max_context", "passkeys")
    shared = "weights"

    def measure(self, measured: MeasuredModel, mesh: Mesh, reporter: Reporter) -> Measurement:
        from kvsurgery.measure.attention import attention_profile

        method = self.fitting(measured, mesh, reporter)
        prompts = method.passkey_prompts(measured)
        return Measurement(
            attention_profile(
                measured,
                prompts,
                SAMPLES if method.samples is None else method.samples,
                data=prompts.facts,
                kept=self.kept,
                progress=reporter.progress,
                mesh=mesh,
            )
        )

    def plan(self, measured: MeasuredModel, mesh: Mesh) -> dict[str, Any]:
        import torch

        from kvsurgery.measure.attention import attention_mass
        from kvsurgery.measure.pace import (
            Candidate,
            Lengths,
            fitted,
            length_pairs,
            mean_seconds,
            scaled_seconds,
            timed_ids,
        )

        tokens = torch.from_numpy(timed_ids(measured))[None]
        passkeys = torch.zeros_like(tokens)
        passkeys[:, 1] = passkeys[:, -1] = 1
        targets = torch.zeros_like(tokens, dtype=torch.bool)
        targets[:, -1] = True
        seconds = scaled_seconds(
            measured, tokens.shape[1], lambda: attention_mass(measured, tokens, targets, passkeys, mesh), mesh
        )
        candidates = (
            Candidate(
                {"min_context": shortest, "max_context": longest},
                mean_seconds(seconds, shortest, longest) / mesh.groups,
            )
            for shortest, longest in length_pairs(measured.max_context, Lengths(self.min_context, self.max_context), 0)
        )
        least, most = (LEAST_SAMPLES, SAMPLES) if self.samples is None else (self.samples, self.samples)
        plan = fitted(self.minutes or 0, candidates, "samples", least, most, mesh.groups)
        return {**plan, "passkeys": self.fitting_passkeys(measured, plan["min_context"])}
