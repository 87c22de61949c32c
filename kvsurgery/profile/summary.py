"""Summaries of head profiles, as JSON and as a few lines of text."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from kvsurgery.profile.comparison import Comparison
from kvsurgery.profile.full_heads import full_per_layer
from kvsurgery.profile.head_profile import Granularity, HeadProfile
from kvsurgery.profile.methods import SCORE_METHODS
from kvsurgery.profile.ranking import SPARSITIES

MOST_DIFFERENT = 5


def facts(profile: HeadProfile) -> dict[str, Any]:
    """The facts that `profile show --json` prints."""
    return {
        "method": profile.method,
        "granularity": profile.granularity,
        "base_model": profile.base_model,
        "base_revision": profile.base_revision,
        "fingerprint": profile.fingerprint,
        "model": asdict(profile.model),
        "windows": profile.windows and list(profile.windows),
        **(_score_facts(profile) if profile.scores is not None else _embedding_facts(profile)),
        "sink": profile.sink,
        "recent": profile.recent,
        "hash": profile.hash,
        "provenance": profile.provenance,
    }


def _score_facts(profile: HeadProfile) -> dict[str, Any]:
    scores = profile.head_scores
    return {
        "kind": SCORE_METHODS[profile.method].kind,
        "shape": list(scores.shape),
        "score_min": float(scores.min()),
        "score_max": float(scores.max()),
        "at_max": int((scores == scores.max()).sum()),
        "full_heads_per_layer": {str(sparsity): full_per_layer(profile, sparsity) for sparsity in SPARSITIES},
        "scores": scores.tolist(),
    }


def _embedding_facts(profile: HeadProfile) -> dict[str, Any]:
    mnr = profile.ranking.mnr if profile.ranking else {}
    return {
        "embedding_heads": [asdict(head) for head in profile.embedding_heads],
        "mnr": {task: {kind: ranks.tolist() for kind, ranks in kinds.items()} for task, kinds in mnr.items()},
    }


def describe(profile: HeadProfile) -> str:
    """A profile in two lines of text, and one more for sliding layers and one for layers without a KV cache."""
    model = f"{profile.base_model} ({profile.model})\n"
    if profile.scores is None:
        return f"{model}{profile.method} embedding heads: {', '.join(map(str, profile.embedding_heads))}"
    scores = profile.scores
    layers, heads = scores.shape
    at_max = int((scores == scores.max()).sum())
    without_cache = (profile.windows or ()).count(0)
    sliding = int((~profile.eligible).sum()) - without_cache
    windows_note = (
        f"\n{sliding} of {layers} layers have a sliding window of the model's own: no head of theirs can be full"
    )
    states_note = f"\n{without_cache} of {layers} layers have no KV cache: their scores are not read"
    return (
        f"{model}{profile.method} scores of {layers} x {heads} {kind_of_head(profile.granularity)}s: "
        f"{scores.min():.4g} to {scores.max():.4g}, mean {scores.mean(dtype=np.float64):.4g}, "
        f"{at_max} of {scores.size} at the maximum"
        f"{windows_note if sliding else ''}{states_note if without_cache else ''}"
    )


def describe_comparison(comparison: Comparison) -> str:
    """Rank correlation and the layers that differ most, in two lines."""
    rho = comparison.spearman
    correlation = "undefined, one profile scores all heads alike" if rho is None else f"{rho:.3f}"
    differences = comparison.layer_differences / comparison.ceiling
    # equal differences: the earlier layer first
    most_different = [layer for layer in np.argsort(-differences, kind="stable")[:MOST_DIFFERENT] if differences[layer]]
    count, kind = comparison.difference[comparison.eligible].size, kind_of_head(comparison.granularity)
    return (
        f"Spearman rank correlation of {count} {kind}s: {correlation}\n"
        "layers that differ most: "
        f"{', '.join(f'{layer} ({differences[layer]:.0%})' for layer in most_different) or 'none'}"
    )


def kind_of_head(granularity: Granularity | None) -> str:
    """`KV head` or `query head`."""
    return "KV head" if granularity == "kv" else "query head"
