"""The attention of each head while passkeys are recalled, without training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvsurgery.measure.methods.contexts import PasskeyMethod
from kvsurgery.measure.methods.method import Measurement, Reporter, SampledMethod
from kvsurgery.setting import setting

if TYPE_CHECKING:
    from kvsurgery.measure.mesh import Mesh
    from kvsurgery.measure.model import MeasuredModel


@dataclass(frozen=True)
class Attention(PasskeyMethod, SampledMethod):
    """Attention on the tokens of passkeys.

    Attributes:
        samples: prompts.
    """

    name: str = "attention"
    samples: int = setting(50, "samples", "number of prompts")

    shared = "weights"

    def measure(self, measured: MeasuredModel, mesh: Mesh, reporter: Reporter) -> Measurement:
        from kvsurgery.measure.attention import attention_profile

        prompts = self.passkey_prompts(measured)
        return Measurement(
            attention_profile(
                measured,
                prompts,
                self.samples,
                data=prompts.facts,
                kept=self.kept,
                progress=reporter.progress,
                mesh=mesh,
            )
        )
