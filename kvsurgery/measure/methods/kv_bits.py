"""What a quantized cache loses on a text, and how to rotate and clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvsurgery.errors import ProfileError
from kvsurgery.measure.methods.method import Measurement, PacedMethod, Reporter
from kvsurgery.setting import setting

if TYPE_CHECKING:
    from kvsurgery.measure.cache_losses import TrialSizes
    from kvsurgery.measure.mesh import Mesh
    from kvsurgery.measure.model import MeasuredModel


PASSAGES = 12


@dataclass(frozen=True)
class KVBits(PacedMethod):
    """Losses of quantized caches on passages of a text.

    Attributes:
        passages, context, sink, recent: as `TrialSizes` has them.
    """

    name: str = "kv-bits"
    passages: int | None = setting(None, "samples", "number of passages of the text", default=PASSAGES)
    context: int = setting(1024, "context", "tokens in the cache", tokens=True)
    sink: int = setting(64, "sink", "first tokens that streaming heads see", least=0)
    recent: int = setting(256, "recent", "latest tokens that streaming heads see")

    paced = ("passages",)
    shared = "nothing"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text is None:
            raise ProfileError("`text` is missing: `method` kv-bits measures on real text")

    @property
    def sizes(self) -> TrialSizes:
        """What is measured."""
        from kvsurgery.measure.cache_losses import TrialSizes

        return TrialSizes(passages=self.passages or PASSAGES, context=self.context, sink=self.sink, recent=self.recent)

    def check_state(self) -> None:
        self.sizes.check()

    def measure(self, measured: MeasuredModel, mesh: Mesh, reporter: Reporter) -> Measurement:
        from kvsurgery.measure.cache_losses import cache_losses
        from kvsurgery.text.haystack import Haystack
        from kvsurgery.text.tokens import first_tokens

        sizes = self.fitting(measured, mesh, reporter).sizes
        text = Haystack.read(self.text, measured.text, sizes.passages * sizes.length, self.seed)
        losses = cache_losses(
            measured,
            text.tokens,
            sizes,
            prefix_tokens=first_tokens(measured.text),
            data={"text": text.name},
            progress=reporter.progress,
            mesh=mesh,
        )
        return Measurement(losses)

    def plan(self, measured: MeasuredModel, mesh: Mesh) -> dict[str, Any]:
        from kvsurgery.measure.cache_losses import passage_seconds
        from kvsurgery.measure.pace import Candidate, fitted, operations_of

        seconds = mesh.processes.agree(passage_seconds(measured, self.sizes, operations_of(measured)))
        least, most = (1, PASSAGES) if self.passages is None else (self.passages, self.passages)
        candidate = Candidate({}, seconds / mesh.groups)
        return {"passages": fitted(self.minutes or 0, [candidate], "samples", least, most, mesh.groups)["samples"]}
