"""Losses of quantized and streaming caches: how far the next token of real text moves, for every KV head and width.

Tokens of a text are in the cache, and the tokens that follow are read in one forward, each scored against the same with
an unquantized cache (teacher forcing). First every head is quantized, with each way to rotate, clip and round, and the
best is kept for each width. Then one head at a time is quantized or made streaming. At last several heads change.
"""

from __future__ import annotations

import itertools
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from kvsurgery.display.progress import Progress, silent
from kvsurgery.errors import ProfileError, UnsupportedModel
from kvsurgery.measure.cache_trial import EXACT, CacheTrial, Window
from kvsurgery.measure.mesh import Mesh
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.measure.query_rounding import measured_factors, roundings
from kvsurgery.profile.cache_losses import MEASURED_WIDTHS, STREAMING_CACHE, CacheLosses, Combination, WholeCacheLoss
from kvsurgery.profile.query_factors import QueryFactors
from kvsurgery.templates.kv_layout import ROUNDINGS, Quantization, Widths
from kvsurgery.text.haystack import even_pieces
from kvsurgery.version import TOOL

EIGHTHS = 2, 4, 6, 7, 8  # of all heads that stream together; the last ones lose most
TIMED_CONTEXT = 512  # tokens in the cache of the passage that is timed
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
        quantization = Quantization(4)
        min_context = max(quantization.sink + quantization.residual + 129, self.sink + self.recent + 1)
        if self.context < min_context:
            raise ProfileError(
                f"`context` must be at least {min_context} tokens, so that caches differ, got {self.context}"
            )

    def of(self, text: np.ndarray, prefix_tokens: Sequence[int]) -> list[torch.Tensor]:
        """The passages of a text, int64 [length] each, with `prefix_tokens` before each."""
        pieces = even_pieces(text, self.length - len(prefix_tokens), self.passages)
        prefix = torch.tensor(prefix_tokens, dtype=torch.int64)
        return [torch.cat([prefix, torch.from_numpy(piece)]) for piece in pieces]


def cache_losses(
    measured: MeasuredModel,
    text: np.ndarray,
    sizes: TrialSizes = TrialSizes(),
    *,
    prefix_tokens: Sequence[int] = (),
    data: Mapping[str, Any],
    progress: Progress = silent,
    mesh: Mesh = Mesh(),
) -> CacheLosses:
    """Measure the losses of a model's caches.

    Args:
        text: int64 [tokens], with room for a passage.
        prefix_tokens: tokens that stand before any text that the model reads.
        data: what the text is, for the provenance.
        progress: of the tokens read, over all passages and caches.
        mesh: the processes that share the passages.

    Raises:
        ProfileError: the context is too short, or passages cannot be dealt evenly.
        UnsupportedModel: no layer has full attention, or queries that far have a factor by position.
    """
    layers = measured.full_layers()
    sizes.check()
    config = measured.model.config.get_text_config()
    if getattr(config, "attn_temperature_tuning", False) and sizes.length >= config.floor_scale:
        raise UnsupportedModel(
            f"queries of {measured.name} have a factor by position from {config.floor_scale} tokens on, with which its "
            "caches cannot be measured; give a shorter `context`"
        )
    measuring = _Measuring(measured, layers, sizes, progress, mesh)
    measuring.read(text, prefix_tokens)
    progress(0, measuring.total * mesh.groups)  # preparation is no part of the estimate
    settings = measuring.settings()
    heads = measuring.heads(settings)
    combinations = measuring.combinations(settings, heads)
    return CacheLosses(
        settings=settings,
        heads={name: measured.by_original_head(losses) for name, losses in heads.items()},
        rounding={
            rotate: QueryFactors(*map(measured.by_original_head, (factors.order, factors.feedback)))
            for rotate, factors in measuring.rounding.items()
        },
        combinations=combinations,
        quantization=Quantization(MEASURED_WIDTHS[0]),
        sink=sizes.sink,
        recent=sizes.recent,
        context=sizes.context,
        base_model=measured.name,
        model=measured.dimensions,
        base_revision=measured.revision,
        windows=measured.windows,
        fingerprint=measured.source_fingerprint,
        provenance={"data": dict(data), **asdict(sizes), "tool": TOOL},
    )


def passage_seconds(measured: MeasuredModel, sizes: TrialSizes, operations: Callable[[int], float]) -> float:
    """About how long one passage takes here, from a few caches of a shorter one.

    Args:
        operations: of a prompt, by its tokens.
    """
    sizes.check()
    timed = replace(sizes, passages=1, context=min(sizes.context, TIMED_CONTEXT), scored=sizes.alone)
    ratio = operations(sizes.length) / operations(timed.length)
    ids = np.arange(timed.length) % measured.model.config.get_text_config().vocab_size
    layers = measured.full_layers()
    total = _Measuring(measured, layers, replace(sizes, passages=1), silent, Mesh()).total
    measuring = _Measuring(measured, layers, timed, silent, Mesh())
    start_time = time.perf_counter()
    measuring.read(ids, ())
    read_seconds = time.perf_counter() - start_time
    [trial] = measuring.trials
    heads = []
    for head in range(measuring.shape[1]):
        heads.append(measuring._uniform_changes(EXACT))
        heads[-1][layers[len(layers) // 2], head] = len(measuring.caches)
    rows = torch.from_numpy(np.stack(heads))
    # the least of several, which other work on the machine slows least
    seconds = min(timeit.repeat(lambda: trial.divergence(rows, sizes.alone), number=1, repeat=3))
    token_seconds = seconds / (len(rows) * sizes.alone)
    return ratio * (read_seconds + total * token_seconds * timed.length / sizes.length)


class _Measuring:
    """The passages of a text in a model's caches; `caches` are all kinds of cache that heads may have."""

    def __init__(
        self, measured: MeasuredModel, layers: Sequence[int], sizes: TrialSizes, progress: Progress, mesh: Mesh
    ):
        self.measured, self.layers, self.sizes, self.mesh = measured, layers, sizes, mesh
        self.shape = measured.dimensions.layers, measured.dimensions.kv_heads
        self.widths = [bits for bits in MEASURED_WIDTHS if Widths.of(bits).fill_words(measured.dimensions.head_dim)]
        self.caches: list[Quantization | Window] = [
            quantization for bits in self.widths for quantization in _quantizations(bits)
        ]
        self.caches.append(Window(sizes.sink, sizes.recent))
        self.trials: list[CacheTrial] = []
        self.rounding: dict[str, QueryFactors] = {}  # by what is rotated
        self.done, self.progress = 0, progress
        single_count = (len(self.widths) - (SHARED in self.widths) + 1) * len(layers) * self.shape[1]
        combined_count = len(
            [*self._combined_changes({STREAMING_CACHE: np.zeros(self.shape)}, dict.fromkeys(self.widths, 1))]
        )
        tokens = (len(self.caches) - 1) * sizes.scored + single_count * sizes.alone + combined_count * sizes.length
        self.total = len(self.mesh.share(sizes.passages)) * tokens

    def read(self, text: np.ndarray, prefix_tokens: Sequence[int]) -> None:
        """Put the passages of this process into caches, each after `prefix_tokens`."""
        passages, (model, layers) = self.sizes.of(text, prefix_tokens), (self.measured.model, self.measured.layers)
        for number in self.mesh.share(self.sizes.passages):
            trial = CacheTrial(model, layers, passages[number][None], self.sizes.context, self.caches)
            self.trials.append(trial)
        self._find_rounding()

    def _find_rounding(self) -> None:
        """Let all trials round by the queries of all passages."""
        processes = self.mesh.processes
        covariance = torch.stack([trial.covariance(self.layers) for trial in self.trials]).sum(0)
        covariance = processes.add(covariance.to(processes.device)).cpu()
        self.rounding = measured_factors(covariance, self.layers, self.measured.dimensions)
        for trial in self.trials:
            trial.rounding = roundings(self.rounding, self.layers, self.measured.model.device)

    def settings(self) -> dict[int | str, tuple[WholeCacheLoss, ...]]:
        """Losses with every head quantized, in each way that is tried."""
        quantizations = [quantization for quantization in self.caches if isinstance(quantization, Quantization)]
        changes = [self._uniform_changes(place) for place, _ in enumerate(quantizations, 1)]
        losses = self._mean_divergences(changes, CacheTrial.divergence, self.sizes.scored)
        settings_by_width: dict[int | str, tuple[WholeCacheLoss, ...]] = dict.fromkeys(self.widths, ())
        for quantization, loss in zip(quantizations, losses, strict=True):
            settings_by_width[quantization.bits] += (
                WholeCacheLoss(
                    str(quantization.rotate), bool(quantization.clip), float(loss), str(quantization.rounding)
                ),
            )
        return settings_by_width

    def heads(self, settings: Mapping[int | str, tuple[WholeCacheLoss, ...]]) -> dict[str, np.ndarray]:
        """Losses of single heads, by cache."""
        places = {str(bits): place for bits, place in self._best_places(settings).items() if bits != SHARED}
        places[STREAMING_CACHE] = len(self.caches)
        head_losses = {name: np.zeros(self.shape) for name in places}
        for layer in self.layers:
            changes = []
            for place in places.values():
                for head in range(self.shape[1]):
                    changes.append(self._uniform_changes(EXACT))
                    changes[-1][layer, head] = place
            divergence = partial(CacheTrial.divergence, tokens=self.sizes.alone)
            losses = self._mean_divergences(changes, divergence, self.sizes.alone)
            for name, layer_losses in zip(places, losses.reshape(len(places), -1), strict=True):
                head_losses[name][layer] = layer_losses
        if SHARED in self.widths:
            [next_width_losses, *_] = head_losses.values()
            whole_loss = min(setting.loss for setting in settings[SHARED])
            head_losses = {
                str(SHARED): next_width_losses * (whole_loss / max(next_width_losses.sum(), 1e-30)),
                **head_losses,
            }
        return head_losses

    def combinations(
        self, settings: Mapping[int | str, tuple[WholeCacheLoss, ...]], heads: Mapping[str, np.ndarray]
    ) -> tuple[Combination, ...]:
        """Losses of several heads at once, beside the sums of their own."""
        best_places = self._best_places(settings)
        changes_by_name = dict(self._combined_changes(heads, best_places))
        names = {place: str(bits) for bits, place in best_places.items()} | {len(self.caches): STREAMING_CACHE}
        expected_losses = [
            sum(float(heads[name][changes == place].sum()) for place, name in names.items())
            for changes in changes_by_name.values()
        ]
        # as a converted model has it: a prompt that streaming heads read is another
        measured_losses = self._mean_divergences(
            changes_by_name.values(), CacheTrial.converted_divergence, self.sizes.length
        )
        window = len(self.caches)
        streaming = [
            int((changes == window).sum()) if np.isin(changes, (EXACT, window)).all() else 0
            for changes in changes_by_name.values()
        ]
        return tuple(map(Combination, changes_by_name, expected_losses, measured_losses.tolist(), streaming))

    def _combined_changes(
        self, heads: Mapping[str, np.ndarray], best_places: Mapping[int | str, int]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Names and changes of several heads: the least harmful ones streaming, others quantized."""
        streaming, window = heads[STREAMING_CACHE], len(self.caches)
        ranking = [
            place for place in streaming.argsort(axis=None, kind="stable") if place // self.shape[1] in self.layers
        ]
        narrow_widths = [bits for bits in self.widths if bits != SHARED]
        half_count = len(ranking) // 2
        for count in sorted({len(ranking) * eighths // 8 for eighths in EIGHTHS} - {0}):
            for bits in (None, *narrow_widths) if count == half_count else (None,):
                changes = self._uniform_changes(EXACT if bits is None else best_places[bits])
                changes.flat[ranking[:count]] = window
                suffix = "" if bits is None else f", the others in {bits} bits"
                yield f"{count} {'head' if count == 1 else 'heads'} streaming{suffix}", changes
        if len(narrow_widths) > 1:
            changes = self._uniform_changes(EXACT)
            changes[self.layers] = np.resize([best_places[bits] for bits in narrow_widths], changes[self.layers].shape)
            yield f"{', '.join(map(str, narrow_widths))} bits in turn", changes

    def _uniform_changes(self, place: int) -> np.ndarray:
        """int64 [layers, kv_heads]: every head that can change with the cache at a place."""
        changes = np.full(self.shape, EXACT)
        changes[self.layers] = place
        return changes

    def _best_places(self, settings: Mapping[int | str, tuple[WholeCacheLoss, ...]]) -> dict[int | str, int]:
        """Of each width, the place of the cache that loses least."""
        places = {}
        for bits, losses in settings.items():
            best_setting = min(losses, key=lambda setting: setting.loss)
            places[bits] = self.caches.index(best_setting.quantization(bits)) + 1
        return places

    def _mean_divergences(
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


def _quantizations(bits: int | str) -> list[Quantization]:
    """The ways to rotate, clip and round that are tried at a width."""
    if bits == SHARED:
        return [Quantization(bits)]
    ways = itertools.product(("values", "both"), (False, True), ROUNDINGS)
    return [Quantization(bits, rotate=rotate, clip=clip, rounding=rounding) for rotate, clip, rounding in ways]
