"""Measured cache losses, made up: of two layers of three heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.cache_losses import CacheLosses, Combination, WholeCacheLoss
from kvsurgery.profile.query_factors import QueryFactors
from kvsurgery.templates.kv_layout import Quantization, Widths

MODEL = ModelDimensions(layers=2, query_heads=6, kv_heads=3, head_dim=16)
WHOLE: dict[int | str, float] = {
    8: 1e-5,
    4: 0.001,
    3: 0.005,
    "k3v2": 0.02,
    2: 0.08,
}  # loss of every head quantized, of the best setting


def losses(
    model: ModelDimensions = MODEL,
    base_model: str = "made up",
    windows: Sequence[int | None] | None = None,
    seed: int = 0,
    measured: Sequence[int | str] = (8, 4, 3, 2),
    rounded: bool = False,
) -> CacheLosses:
    """Losses that fall with bits; keys are best rotated, and never clipped; with `rounded`, best by the queries."""
    random, shape = np.random.default_rng(seed), (model.layers, model.kv_heads)
    windows = tuple(windows or [None] * model.layers)
    full = np.array([[window is None] for window in windows])
    widths = [bits for bits in measured if Widths.of(bits).fill_words(model.head_dim)]
    settings = {}
    for bits in widths:
        some = (("values", False, 2), ("values", True, 4), ("both", False, 1), ("both", True, 3))
        settings[bits] = tuple(WholeCacheLoss(rotate, clip, WHOLE[bits] * times) for rotate, clip, times in some)
        if rounded:
            settings[bits] += tuple(
                WholeCacheLoss(rotate, clip, WHOLE[bits] * times / 2, "queries") for rotate, clip, times in some
            )
    heads = {str(bits): random.random(shape) * full * WHOLE[bits] for bits in widths}
    heads["streaming"] = random.random(shape) * full * 0.1
    return CacheLosses(
        settings,
        heads,
        (Combination("3 heads streaming", 0.01, 0.02),),
        Quantization(8),
        sink=4,
        recent=16,
        context=1024,
        base_model=base_model,
        model=model,
        windows=windows,
        provenance={"data": {"text": "book.txt"}},
        rounding={rotate: factors(model, seed + place) for place, rotate in enumerate(("values", "both") * rounded)},
    )


def factors(model: ModelDimensions, seed: int) -> QueryFactors:
    """Factors of rounding by queries that are alike in a few directions."""
    random, size = np.random.default_rng(seed), model.head_dim
    found = QueryFactors.unmeasured(model)
    for head in np.ndindex(model.layers, model.kv_heads):
        queries = random.normal(size=(400, size)) * 0.3 + random.normal(size=(400, 2)) @ random.normal(size=(2, size))
        found.order[head], found.feedback[head] = least_error_factors(queries.T @ queries)
    return found


def least_error_factors(covariance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Order of channels, and what of a channel's error best goes to each later one: by regression, one by one."""
    order = np.argsort(-covariance.diagonal(), kind="stable")
    damped = covariance / covariance.diagonal().mean() + 0.01 * np.eye(len(order))
    damped, feedback = damped[np.ix_(order, order)], np.zeros_like(damped)
    for place in range(len(order) - 1):
        later = slice(place + 1, None)
        feedback[place, later] = -np.linalg.solve(damped[later, later], damped[later, place])
    return order, feedback
