"""What every method of measurement is: a frozen dataclass of its settings, which checks them and measures."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from kvsurgery.display.progress import Progress, silent
from kvsurgery.errors import KVSurgeryError, ProfileError
from kvsurgery.setting import setting, settings_of, text_setting

if TYPE_CHECKING:
    import numpy as np

    from kvsurgery.measure.mesh import Mesh
    from kvsurgery.measure.model import MeasuredModel
    from kvsurgery.profile.cache_losses import CacheLosses
    from kvsurgery.profile.head_profile import HeadProfile


class Measurement(NamedTuple):
    """What was measured; of a training also its history, as `train_gates` gives it, and where to plot that."""

    result: HeadProfile | CacheLosses
    history: np.ndarray | None = None
    curve: Path | None = None


@dataclass(frozen=True)
class Reporter:
    """Who is told how a measurement goes.

    Attributes:
        progress: of its prompts, steps or tokens.
        note: called with a line about what was chosen; it names settings in backticks.
    """

    progress: Progress = silent
    note: Callable[[str], None] = silent


CPU_MINUTES = 20  # of a measurement whose sizes nobody gives


@dataclass(frozen=True)
class Method(ABC):
    """How heads are measured.

    Attributes:
        name: a key of `METHODS`, which the profile records.
        seed: of everything that is drawn.
        minutes: time for the measurement, which chooses those settings of `paced` that are None.
        text: that is read, or around what is hidden: as `Haystack.read` takes it.
        paced: settings that the time chooses.
        shared: what several processes can share besides prompts: nothing, the heads of layers, or also all weights
            and the tokens of a prompt, for which all have to compute layers equally often.

    Raises:
        ProfileError: settings contradict each other; it names them in backticks.
    """

    name: str
    seed: int = 0
    text: str | None = text_setting()
    minutes: float | None = setting(
        None,
        "minutes",
        "minutes for the measurement: sets the number of steps or prompts, and their lengths, unless they are given",
        default=f"{CPU_MINUTES} on a CPU, if none of these is given",
        basic=True,
    )

    paced: ClassVar[tuple[str, ...]] = ()
    shared: ClassVar[Literal["nothing", "heads", "weights"]] = "heads"
    way_on: ClassVar[str] = "the same command"  # what goes on from `kept`

    def __post_init__(self) -> None:
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise ProfileError(f"`minutes` must be > 0, got {self.minutes}")

    def on_cpu(self) -> Self:
        """The method in a time that fits a CPU, where neither a time nor what it chooses is given."""
        given = (self.minutes, *(getattr(self, name) for name in self.paced))
        return self if any(value is not None for value in given) else replace(self, minutes=CPU_MINUTES)

    @property
    def kept(self) -> Path | None:
        """The file from which an interrupted measurement goes on, if there is one."""
        return None

    def check(self) -> None:
        """Check settings and files as far as that needs no model.

        Raises:
            KVSurgeryError: a setting is out of range, or a file cannot be read or written.
        """
        from kvsurgery.text.haystack import check_text

        check_text(self.text)

    def check_state(self) -> None:  # noqa: B027  # most methods have nothing to check here
        """Check what needs torch, but no model: the state of an earlier run among it.

        Raises:
            KVSurgeryError: it cannot be gone on with, or would be replaced.
        """

    @abstractmethod
    def measure(self, measured: MeasuredModel, mesh: Mesh, reporter: Reporter) -> Measurement:
        """Measure a model, on the processes of a mesh.

        Raises:
            KVSurgeryError: the model, the text or a setting does not allow it.
        """


@dataclass(frozen=True)
class PacedMethod(Method):
    """A method that times some of its work to choose settings for a time."""

    def fitting(self, measured: MeasuredModel, mesh: Mesh, reporter: Reporter) -> Self:
        """The method with the settings that fit its time, which are said.

        Raises:
            TooLittleTime: it does not fit.
        """
        if self.minutes is None:
            return self
        plan = self.plan_once(measured, mesh, reporter)
        options = {name: entry.option for name, entry in settings_of(type(self)).items()}
        chosen_text = " ".join(f"`{options[name]}` {_as_typed(value)}" for name, value in plan.items())
        reporter.note(f"chosen for {self.minutes:g} min: {chosen_text}")
        return replace(self, minutes=None, **plan)

    def plan_once(self, measured: MeasuredModel, mesh: Mesh, reporter: Reporter) -> dict[str, Any]:
        """The plan, or that of the interrupted measurement to go on with."""
        reporter.note(f"timing some of the work, to fit {self.minutes:g} min")
        return self.plan(measured, mesh)

    @abstractmethod
    def plan(self, measured: MeasuredModel, mesh: Mesh) -> dict[str, Any]:
        """The settings of `paced` that fit `minutes`, those that are given among them.

        Raises:
            TooLittleTime: none fit.
        """


@dataclass(frozen=True)
class SampledMethod(PacedMethod):
    """A method that measures sample by sample.

    Attributes:
        kept: the file that keeps what was measured of each sample, where one process measures.
    """

    kept: Path | None = None

    def plan_once(self, measured: MeasuredModel, mesh: Mesh, reporter: Reporter) -> dict[str, Any]:
        from kvsurgery.measure.kept_samples import KeptSamples

        asked = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "kept"}
        kept_plans = KeptSamples(self.kept, measured, "plan")
        super_plan = super().plan_once
        plan, _ = kept_plans.result([str(asked)], lambda: {"plan": json.dumps(super_plan(measured, mesh, reporter))})
        chosen = json.loads(plan["plan"])
        return {name: tuple(value) if isinstance(value, list) else value for name, value in chosen.items()}

    def drop_plan(self) -> None:
        """Remove the file of a measurement that was refused, where it has a plan and no sample yet."""
        from kvsurgery.measure.kept_samples import read_kept

        with suppress(KVSurgeryError):  # what is damaged is not for this run to remove
            if self.kept is not None and all("plan" in result for result in read_kept(self.kept).values()):
                self.kept.unlink(missing_ok=True)


def _as_typed(value: Any) -> str:
    """A setting's value as the command line takes it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
