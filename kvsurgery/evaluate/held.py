"""`LongestSample`: the sequence of an evaluation that fills the KV cache most, and the bytes that it takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvsurgery.checkpoint.dtype import stored_dtype
from kvsurgery.checkpoint.source import read_config
from kvsurgery.evaluate.results import Results
from kvsurgery.evaluate.sample import Sample
from kvsurgery.templates.kv_layout import KVLayout
from kvsurgery.templates.kv_reform import Reform


@dataclass(frozen=True)
class LongestSample:
    """The longest sample that fits into a model's context.

    Attributes:
        prompt: tokens that are prefilled.
        new: tokens that follow: a question after its context, a continuation, later turns, and answers.
        itemsize: bytes of an element of the cache.
    """

    prompt: int
    new: int
    itemsize: int

    @classmethod
    def of(cls, checkpoint: str | Path, samples: Iterable[Sample], positions: int, dtype: str) -> LongestSample:
        """The longest of the samples that fit into `positions` tokens, for a checkpoint that is loaded in a dtype."""
        lengths = {sample: sample.positions for sample in samples}
        fitting_samples = [sample for sample, length in lengths.items() if length <= positions]
        longest_sample = max(fitting_samples or lengths, key=lengths.__getitem__)
        loaded_dtype = getattr(torch, dtype if dtype != "auto" else stored_dtype(Path(checkpoint)) or "float32")
        prompt = longest_sample.context or len(longest_sample.tokens) - longest_sample.continuation
        return cls(prompt, longest_sample.positions - prompt, loaded_dtype.itemsize)

    @property
    def tokens(self) -> int:
        """Prompt and answer together."""
        return self.prompt + self.new

    def kv_bytes(self, layout: KVLayout, reform: Reform | None = None) -> int:
        """Bytes that the cache of a converted model allocates."""
        # REFORM recomputes only the tokens that it gathers
        prompt = min(self.prompt, reform.recompute_budget) if reform else self.prompt
        return layout.kv_bytes(1, prompt, self.new, itemsize=self.itemsize)

    def dense_bytes(self, layout: KVLayout) -> int:
        """Bytes that the cache of the original model takes."""
        return layout.dense_bytes(1, self.prompt, self.new, itemsize=self.itemsize)


def with_kv_bytes(
    results: Results, converted: str | Path, samples: Iterable[Sample], positions: int, dtype: str
) -> Results:
    """The results with the KV bytes of the longest sample, by the converted checkpoint's config."""
    config = read_config(Path(converted))
    layout = KVLayout.from_config(config)
    longest_sample = LongestSample.of(converted, samples, positions, dtype)
    return replace(
        results,
        tokens=longest_sample.tokens,
        kv_bytes=longest_sample.kv_bytes(layout, Reform.from_config(config)),
        dense_bytes=longest_sample.dense_bytes(layout),
    )
