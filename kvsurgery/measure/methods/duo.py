"""DuoAttention's gates, trained to recall passkeys with as few full heads as possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from kvsurgery.measure.methods.contexts import PasskeyMethod
from kvsurgery.measure.methods.gates import GateMethod
from kvsurgery.measure.methods.method import Reporter

if TYPE_CHECKING:
    from kvsurgery.measure.mesh import Mesh
    from kvsurgery.measure.model import MeasuredModel
    from kvsurgery.measure.passkeys import Passkeys
    from kvsurgery.measure.prompts import Passages


@dataclass(frozen=True)
class Duo(PasskeyMethod, GateMethod):
    """Gates that passkeys are recalled with, or with the loss "lm" the next token of a text."""

    name: str = "duo"

    paced = ("steps", "min_context", "max_context", "passkeys")

    def check_passkeys(self) -> None:
        if self.loss == "distill":
            super().check_passkeys()

    def planned(
        self, measured: MeasuredModel, mesh: Mesh, reporter: Reporter, saved_facts: Mapping[str, Any] | None
    ) -> Self:
        from kvsurgery.measure.pace import Lengths, TrainingPlan, paced, step_seconds
        from kvsurgery.measure.passkeys import passkey_words

        if self.minutes is None:
            return self
        if saved_facts is not None:
            plan = TrainingPlan.of(saved_facts)
        else:
            if self.loss == "distill":
                passkey_words(measured, self.count)
            reporter.note("timing some steps of the training")
            lengths = Lengths(self.min_context, self.max_context, self.passkeys)
            seconds = step_seconds(measured, self.options(), mesh)
            plan = paced(self.minutes, seconds, measured.max_context, lengths, self.sink + self.recent)
            if self.loss == "distill":
                plan = replace(plan, passkeys=self.fitting_passkeys(measured, plan.min_context))
            chosen_text = " ".join(f"`{name}` {value}" for name, value in vars(plan).items())
            reporter.note(f"chosen for {self.minutes:g} min: {chosen_text}")
        settings = {name: value for name in vars(plan) if (value := getattr(self, name)) is not None}
        return replace(self, minutes=None, until_settled=True, **(vars(plan) | settings))

    def prompts(self, measured: MeasuredModel, mesh: Mesh, reporter: Reporter) -> Passkeys | Passages:
        from kvsurgery.measure.prompts import Passages

        if self.loss == "distill":
            return self.passkey_prompts(measured)
        contexts = self.contexts(measured)
        return Passages(contexts, contexts.read(self.text, measured.text))
