"""What every method of measurement is: a frozen dataclass of its settings, which checks them and measures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from kvsurgery.display.progress import Progress, silent
from kvsurgery.setting import text_setting

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


@dataclass(frozen=True)
class Method(ABC):
    """How heads are measured.

    Attributes:
        name: a key of `METHODS`, which the profile records.
        seed: of everything that is drawn.
        text: that is read, or around what is hidden: as `Haystack.read` takes it.
        shared: what several processes can share besides prompts: nothing, the heads of layers, or also all weights
            and the tokens of a prompt, for which all have to compute layers equally often.

    Raises:
        ProfileError: settings contradict each other; it names them in backticks.
    """

    name: str
    seed: int = 0
    text: str | None = text_setting()

    shared: ClassVar[Literal["nothing", "heads", "weights"]] = "heads"
    way_on: ClassVar[str] = "the same command"  # what goes on from `kept`

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

    @abstractmethod
    def measure(self, measured: MeasuredModel, mesh: Mesh, reporter: Reporter) -> Measurement:
        """Measure a model, on the processes of a mesh.

        Raises:
            KVSurgeryError: the model, the text or a setting does not allow it.
        """


@dataclass(frozen=True)
class SampledMethod(Method):
    """A method that measures sample by sample.

    Attributes:
        kept: the file that keeps what was measured of each sample, where one process measures.
    """

    kept: Path | None = None
