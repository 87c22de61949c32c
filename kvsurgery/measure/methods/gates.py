"""Methods that train DuoAttention's gates, each on prompts of its own."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvsurgery.errors import ProfileError
from kvsurgery.measure.gate_options import GateOptions, Loss
from kvsurgery.measure.methods.contexts import ContextMethod
from kvsurgery.measure.methods.method import Measurement, Reporter
from kvsurgery.setting import setting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvsurgery.measure.mesh import Mesh
    from kvsurgery.measure.model import MeasuredModel
    from kvsurgery.measure.own_answers import OwnAnswers
    from kvsurgery.measure.passkeys import Passkeys
    from kvsurgery.measure.prompts import Passages


@dataclass(frozen=True)
class GateMethod(ContextMethod):
    """A training of gates.

    Attributes:
        loss, steps, lr, reg, sink, recent, batch, until_settled: as `GateOptions` has them; `reg` is by default that of
            a training to resume, or the paper's.
        checkpoint: a file that keeps the state of the training.
        resume: whether to go on from it.
        curve: a picture to plot the training in.
    """

    loss: Loss = setting(
        GateOptions.loss,
        "loss",
        "the loss: distill compares last hidden states with the full model's; lm, an ablation, predicts the next token",
    )
    steps: int | None = setting(None, "steps", "training steps", default=GateOptions.steps)
    lr: float = setting(GateOptions.lr, "lr", "peak learning rate")
    reg: float | None = setting(
        None,
        "reg",
        "weight of the mean gate in the loss; a larger weight takes more gates to 0",
        default=f"{GateOptions.reg}, or as in the training to resume",
    )
    sink: int = setting(GateOptions.sink, "sink", "first tokens that streaming heads see", least=0)
    recent: int = setting(GateOptions.recent, "recent", "latest tokens that streaming heads see")
    batch: int = setting(GateOptions.batch, "batch", "prompts per step, over all processes")
    checkpoint: Path | None = setting(None, "checkpoint", "file for the state of the training")
    resume: bool = setting(False, "resume", "continue from `checkpoint`")
    curve: Path | None = setting(None, "curve", "plot loss and gates over the steps as a PNG")
    until_settled: bool = False

    shared = "weights"
    way_on = "`resume`"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minutes is not None and self.steps is not None:
            raise ProfileError("`minutes` chooses `steps`; leave one of them out")
        if self.resume and self.checkpoint is None:
            raise ProfileError("`resume` requires `checkpoint`, the file to continue from")

    @property
    def kept(self) -> Path | None:
        return self.checkpoint

    def check(self) -> None:
        from kvsurgery.display.figure import check_picture
        from kvsurgery.system.files import check_file

        super().check()
        self.options()
        if self.checkpoint is not None:
            check_file(self.checkpoint)
        if self.curve is not None:
            check_picture(self.curve)

    def check_state(self) -> None:
        from kvsurgery.measure.training_state import TrainingState

        if self.checkpoint is not None:
            if self.resume:
                TrainingState.require(self.checkpoint)
            else:
                TrainingState.refuse_to_replace(self.checkpoint)

    def measure(self, measured: MeasuredModel, mesh: Mesh, reporter: Reporter) -> Measurement:
        from kvsurgery.measure.training import KeptState, train_gates
        from kvsurgery.measure.training_state import TrainingState

        saved_facts = TrainingState.require(self.checkpoint)[1] if self.checkpoint and self.resume else None
        method = self.planned(measured, mesh, reporter, saved_facts)
        if saved_facts is not None:
            reg = saved_facts.get("reg") if self.reg is None else self.reg
            method = replace(method, reg=reg, until_settled=saved_facts.get("until_settled", False))
        options = method.options()
        prompts = method.prompts(measured, mesh, reporter)

        if saved_facts is None:
            reporter.progress(0, options.steps)  # preparation is no part of the estimate
        profile, history = train_gates(
            measured,
            prompts,
            options,
            data=prompts.facts,
            method=self.name,
            kept=KeptState(self.checkpoint, resume=self.resume) if self.checkpoint else None,
            progress=reporter.progress,
            mesh=mesh,
        )
        return Measurement(profile, history, self.curve)

    def options(self) -> GateOptions:
        """How gates are trained.

        Raises:
            ProfileError: a number is out of range.
        """
        settings = {field.name: getattr(self, field.name) for field in fields(GateOptions)}
        return GateOptions(**{name: value for name, value in settings.items() if value is not None})

    def planned(
        self, measured: MeasuredModel, mesh: Mesh, reporter: Reporter, saved_facts: Mapping[str, Any] | None
    ) -> Self:
        """The method with settings that depend on the model; `saved_facts` are of a training to go on with."""
        return self

    @abstractmethod
    def prompts(self, measured: MeasuredModel, mesh: Mesh, reporter: Reporter) -> OwnAnswers | Passages | Passkeys:
        """What the gates are trained on."""
