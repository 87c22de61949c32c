"""`Operation`: everything about one conversion that is decided before a byte moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.checkpoint.turns import user_marker
from kvsurgery.decide.fit import Demand, Fit, fit
from kvsurgery.decide.footprint import Footprint
from kvsurgery.decide.policy import Policy, decide
from kvsurgery.decide.reform import with_reform
from kvsurgery.emit.files import emitted_files
from kvsurgery.errors import ProfileError
from kvsurgery.plan.family import Family
from kvsurgery.plan.surgery import SurgeryPlan, plan_surgery
from kvsurgery.score.profile import HeadProfile


@dataclass(frozen=True)
class Operation:
    """A checkpoint, what becomes of its heads, where every byte goes, and the files that are emitted beside them.

    `fit` says what else its heads could have become, where a memory decided.
    """

    checkpoint: Checkpoint
    policy: Policy
    plan: SurgeryPlan
    files: dict[str, bytes]
    fit: Fit | None = None

    @classmethod
    def prepare(
        cls,
        folder: Path,
        profile: HeadProfile,
        *,
        name: str | None = None,
        revision: str | None = None,
        demand: Demand | None = None,
        reform: HeadProfile | None = None,
        sizes: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Operation:
        """Read a checkpoint's headers and plan its conversion.

        Args:
            folder: the checkpoint.
            profile: measured on a model of the same dimensions; where it has no scores, every head stays full.
            name, revision: what the checkpoint is called, and its commit, if it comes from the Hub.
            demand: what has to fit, which decides full heads, budget and bits.
            reform: a profile of embedding heads, by which prompts beyond the context are read.
            sizes: of that, as `with_reform` takes them.
            options: as `decide` takes them, or `fit` where there is a demand.

        Raises:
            KVSurgeryError: every reason why the conversion cannot be done that headers can show.
        """
        checkpoint = Checkpoint.open(folder, name, revision)
        family = Family.of(checkpoint.config)
        dimensions = family.dimensions(checkpoint.config)
        for measured in (profile, reform or profile):
            if dimensions != measured.model:
                found = f"{measured.base_model} ({measured.model})"
                raise ProfileError(f"the profile is of {found}, but {checkpoint.name} has {dimensions}")
        windows, fitted = family.windows(checkpoint.config), None
        if demand is not None:
            fitted = fit(profile, windows, Footprint.of(checkpoint, family, options.get("tp", 1)), demand, **options)
            options |= fitted.choice.options
        policy = decide(profile, windows, **options)
        if reform is not None:
            positions = checkpoint.text_config.get("max_position_embeddings")
            policy = with_reform(policy, reform, positions, user_marker(folder), **(sizes or {}))
        plan = plan_surgery(checkpoint, policy, profile.hash)
        return cls(checkpoint, policy, plan, emitted_files(checkpoint, policy, profile), fitted)
