"""`PreparedConversion`: everything about one conversion that is decided before a byte moves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvsurgery.checkpoint.model_code import check_stock
from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.conversion.plan import SurgeryPlan, plan_surgery
from kvsurgery.emit.files import Emitted, emit
from kvsurgery.policy.decision import Decision, decide
from kvsurgery.policy.evidence import Evidence
from kvsurgery.policy.policy import Policy
from kvsurgery.recipe import Recipe


@dataclass(frozen=True)
class PreparedConversion:
    """A checkpoint, what becomes of its heads, where every byte goes, and the files that are emitted beside them."""

    checkpoint: Checkpoint
    decision: Decision
    plan: SurgeryPlan
    emitted: Emitted

    @property
    def policy(self) -> Policy:
        """What every head becomes."""
        return self.decision.policy

    @classmethod
    def prepare(
        cls,
        folder: Path,
        recipe: Recipe,
        evidence: Evidence,
        *,
        name: str | None = None,
        revision: str | None = None,
    ) -> PreparedConversion:
        """Read a checkpoint's headers and plan its conversion.

        Args:
            folder: the checkpoint.
            recipe, evidence: as `decide` takes them.
            name, revision: what the checkpoint is called, and its commit, if it comes from the Hub.

        Raises:
            KVSurgeryError: every reason why the conversion cannot be done that headers can show.
        """
        checkpoint = Checkpoint.open(folder, name, revision)
        check_stock(folder, checkpoint.config, recipe.code.ignore_model_code)
        decision = decide(recipe, evidence, checkpoint)
        policy, profile = decision.policy, decision.profile
        plan = plan_surgery(checkpoint, policy, profile.hash if profile else None)
        return cls(checkpoint, decision, plan, emit(checkpoint, policy, profile, evidence.losses))
