"""Losses of quantized and streaming caches: how far the next token of real text moves, for every KV head and width.

Tokens of a text are in the cache, and the tokens that follow are read in one forward, each scored against the same with
an unquantized cache (teacher forcing). First every head is quantized, with each way to rotate and clip, and the best is
kept for each width. Then one head at a time is quantized or made streaming. At last several heads change at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from kvsurgery.display.progress import Progress, silent
from kvsurgery.errors import ProfileError, UnsupportedModel
from kvsurgery.measure.cache_trial import EXACT, CacheTrial, Window
from kvsurgery.measure.gates import gated_layers
from kvsurgery.measure.mesh import Mesh
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.profile.cache_losses import MEASURED_WIDTHS, STREAMING_CACHE, CacheLosses, Combination, WholeCacheLoss
from kvsurgery.templates.kv_layout import Quantization
from kvsurgery.version import __version__

EIGHTHS = 2, 4, 6, 7, 8  # of all heads that stream together; the last ones lose most
SHARED = 8  # bits whose loss is too small to measure head by head: it is divided as that of the next width


@dataclass(frozen=True)
class TrialSizes:
    """What is measured.

    Attributes:
        passages: of the text, evenly spaced.
        context: tokens of each in the cache.
        scored: tokens that follow. A few of them lose most, so the losses of many heads at once are measured on all.
        alone: how many of these are scored where a single head changes, which gives its share of such a loss.
        sink, recent: of streaming heads.
    """

    passages: int = 12
    context: int = 1024
    scored: int = 128
    alone: int = 16
    sink: int = 64
    recent: int = 256

    @property
    def length(self) -> int:
        """Tokens of a passage."""
        return self.context + self.scored

    def check(self) -> None:
        """Raise ProfileError where a cache of this size has no tile, or loses no token of a streaming head."""
        plain = Quantization(4)
        least = max(plain.sink + plain.residual + 129, self.sink + self.recent + 1)
        if self.context < least:
            raise ProfileError(f"`context` is at least {least} tokens, so that caches differ, got {self.context}")

    def of(self, text: np.ndarray, first: Sequence[int]) -> list[torch.Tensor]:
        """The passages of a text, int64 [length] each, with the `first` tokens before each."""
        part, before = self.length - len(first), torch.tensor(first, dtype=torch.int64)
        starts = np.linspace(0, len(text) - part, self.passages + 2).astype(int)[1:-1]
        return [torch.cat([before, torch.from_numpy(text[start : start + part])]) for start in starts]


def cache_losses(
    measured: MeasuredModel,
    text: np.ndarray,
    sizes: TrialSizes = TrialSizes(),
    *,
    first: Sequence[int] = (),
    data: Mapping[str, Any],
    progress: Progress = silent,
    mesh: Mesh = Mesh(),
) -> CacheLosses:
    """Measure the losses of a model's caches.

    Args:
        text: int64 [tokens], with room for a passage.
        first: tokens that stand before any text that the model reads.
        data: what the text is, for the provenance.
        progress: of the tokens read, over all passages and caches.
        mesh: the processes that share the passages.

    Raises:
        ProfileError: the context is too short, or passages cannot be dealt evenly.
        UnsupportedModel: no layer has full attention, or queries that far have a factor by position.
    """
    layers = gated_layers(measured)
    sizes.check()
    config = measured.model.config.get_text_config()
    if getattr(config, "attn_temperature_tuning", False) and sizes.length >= config.floor_scale:
        raise UnsupportedModel(
            f"queries of {measured.name} have a factor by position from {config.floor_scale} tokens on, with which its "
            "caches cannot be measured; give a shorter `context`"
        )
    measuring = _Measuring(measured, layers, sizes, progress, mesh)
    measuring.read(text, first)
    settings = measuring.settings()
    heads = measuring.heads(settings)
    combinations = measuring.combinations(settings, heads)
    return CacheLosses(
        settings=settings,
        heads={name: measured.by_original_head(losses) for name, losses in heads.items()},
        combinations=combinations,
        quantization=Quantization(MEASURED_WIDTHS[0]),
        sink=sizes.sink,
        recent=sizes.recent,
        context=sizes.context,
        base_model=measured.name,
        model=measured.dimensions,
        base_revision=measured.revision,
        windows=measured.windows,
        provenance={"data": dict(data), **asdict(sizes), "tool": __version__},
    )


class _Measuring:
    """The passages of a text in a model's caches; `caches` are all kinds of cache that heads may have."""

    def __init__(
        self, measured: MeasuredModel, layers: Sequence[int], sizes: TrialSizes, progress: Progress, mesh: Mesh
    ):
        self.measured, self.layers, self.sizes, self.mesh = measured, layers, sizes, mesh
        self.shape = measured.dimensions.layers, measured.dimensions.kv_heads
        self.widths = [bits for bits in MEASURED_WIDTHS if measured.dimensions.head_dim * bits % 16 == 0]
        self.caches: list[Quantization | Window] = [how for bits in self.widths for how in _ways(bits)]
        self.caches.append(Window(sizes.sink, sizes.recent))
        self.trials: list[CacheTrial] = []
        self.done, self.progress = 0, progress
        alone = (len(self.widths) - (SHARED in self.widths) + 1) * len(layers) * self.shape[1]
        several = len([*self._several({STREAMING_CACHE: np.zeros(self.shape)}, dict.fromkeys(self.widths, 1))])
        tokens = (len(self.caches) - 1) * sizes.scored + alone * sizes.alone + several * sizes.length
        self.total = len(self.mesh.share(sizes.passages)) * tokens

    def read(self, text: np.ndarray, first: Sequence[int]) -> None:
        """Put the passages of this process into caches, each after the `first` tokens."""
        passages, (model, layers) = self.sizes.of(text, first), (self.measured.model, self.measured.layers)
        for number in self.mesh.share(self.sizes.passages):
            trial = CacheTrial(model, layers, passages[number][None], self.sizes.context, self.caches)
            self.trials.append(trial)

    def settings(self) -> dict[int, tuple[WholeCacheLoss, ...]]:
        """Losses with every head quantized, in each way that is tried."""
        ways = [how for how in self.caches if isinstance(how, Quantization)]
        changes = [self._every(place) for place, _ in enumerate(ways, 1)]
        losses = self._mean(changes, CacheTrial.divergence, self.sizes.scored)
        found: dict[int, tuple[WholeCacheLoss, ...]] = dict.fromkeys(self.widths, ())
        for how, loss in zip(ways, losses, strict=True):
            found[how.bits] += (WholeCacheLoss(str(how.rotate), bool(how.clip), float(loss)),)
        return found

    def heads(self, settings: Mapping[int, tuple[WholeCacheLoss, ...]]) -> dict[str, np.ndarray]:
        """Losses of single heads, by cache."""
        places = {str(bits): place for bits, place in self._best(settings).items() if bits != SHARED}
        places[STREAMING_CACHE] = len(self.caches)
        found = {name: np.zeros(self.shape) for name in places}
        for layer in self.layers:
            changes = []
            for place in places.values():
                for head in range(self.shape[1]):
                    changes.append(self._every(EXACT))
                    changes[-1][layer, head] = place
            alone = partial(CacheTrial.divergence, tokens=self.sizes.alone)
            losses = self._mean(changes, alone, self.sizes.alone)
            for name, each in zip(places, losses.reshape(len(places), -1), strict=True):
                found[name][layer] = each
        if SHARED in self.widths:
            [following, *_] = found.values()
            whole = min(setting.loss for setting in settings[SHARED])
            found = {str(SHARED): following * (whole / max(following.sum(), 1e-30)), **found}
        return found

    def combinations(
        self, settings: Mapping[int, tuple[WholeCacheLoss, ...]], heads: Mapping[str, np.ndarray]
    ) -> tuple[Combination, ...]:
        """Losses of several heads at once, beside the sums of their own."""
        best = self._best(settings)
        several = dict(self._several(heads, best))
        names = {place: str(bits) for bits, place in best.items()} | {len(self.caches): STREAMING_CACHE}
        expected = [
            sum(float(heads[name][changes == place].sum()) for place, name in names.items())
            for changes in several.values()
        ]
        # as a converted model has it: a prompt that streaming heads read is another
        measured = self._mean(several.values(), CacheTrial.converted_divergence, self.sizes.length)
        window = len(self.caches)
        streaming = [
            int((changes == window).sum()) if np.isin(changes, (EXACT, window)).all() else 0
            for changes in several.values()
        ]
        return tuple(map(Combination, several, expected, measured.tolist(), streaming))

    def _several(self, heads: Mapping[str, np.ndarray], best: Mapping[int, int]) -> Iterator[tuple[str, np.ndarray]]:
        """Names and changes of several heads: the least harmful ones streaming, others quantized."""
        streaming, window = heads[STREAMING_CACHE], len(self.caches)
        ranking = [
            place for place in streaming.argsort(axis=None, kind="stable") if place // self.shape[1] in self.layers
        ]
        low = [bits for bits in self.widths if bits != SHARED]
        half = len(ranking) // 2
        for count in sorted({len(ranking) * eighths // 8 for eighths in EIGHTHS} - {0}):
            for bits in (None, *low) if count == half else (None,):
                changes = self._every(EXACT if bits is None else best[bits])
                changes.flat[ranking[:count]] = window
                others = "" if bits is None else f", the others in {bits} bits"
                yield f"{count} {'head' if count == 1 else 'heads'} streaming{others}", changes
        if len(low) > 1:
            changes = self._every(EXACT)
            changes[self.layers] = np.resize([best[bits] for bits in low], changes[self.layers].shape)
            yield f"{', '.join(map(str, low))} bits in turn", changes

    def _every(self, place: int) -> np.ndarray:
        """int64 [layers, kv_heads]: every head that can change with the cache at a place."""
        changes = np.full(self.shape, EXACT)
        changes[self.layers] = place
        return changes

    def _best(self, settings: Mapping[int, tuple[WholeCacheLoss, ...]]) -> dict[int, int]:
        """Of each width, the place of the cache that loses least."""
        found = {}
        for bits, some in settings.items():
            best = min(some, key=lambda one: one.loss)
            found[bits] = self.caches.index(Quantization(bits, rotate=best.rotate, clip=best.clip)) + 1
        return found

    def _mean(
        self, changes: Iterable[np.ndarray], divergence: Callable[[CacheTrial, torch.Tensor], torch.Tensor], tokens: int
    ) -> np.ndarray:
        """float64 [changes]: means over all passages of all processes. Each change reads `tokens` of a passage."""
        rows = torch.from_numpy(np.stack([*changes]))
        total = torch.zeros(len(rows), dtype=torch.float64)
        for trial in self.trials:
            total += divergence(trial, rows)
            self.done += len(rows) * tokens
            self.progress(self.done * self.mesh.groups, self.total * self.mesh.groups)
        total = self.mesh.processes.add(total.to(self.mesh.processes.device)).cpu()
        return total.numpy() / self.sizes.passages


def _ways(bits: int) -> list[Quantization]:
    """The ways to rotate and clip that are tried at a width."""
    if bits == SHARED:
        return [Quantization(bits)]
    return [Quantization(bits, rotate=rotate, clip=clip) for rotate in ("values", "both") for clip in (False, True)]
