"""Measured cache losses, made up: of two layers of three heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.cache_losses import CacheLosses, Combination, WholeCacheLoss
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
) -> CacheLosses:
    """Losses that fall with bits; keys are best rotated, and never clipped."""
    random, shape = np.random.default_rng(seed), (model.layers, model.kv_heads)
    windows = tuple(windows or [None] * model.layers)
    full = np.array([[window is None] for window in windows])
    widths = [bits for bits in measured if Widths.of(bits).fill_words(model.head_dim)]
    settings = {}
    for bits in widths:
        some = (("values", False, 2), ("values", True, 4), ("both", False, 1), ("both", True, 3))
        settings[bits] = tuple(WholeCacheLoss(rotate, clip, WHOLE[bits] * times) for rotate, clip, times in some)
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
    )
