"""Contenders that run: models, caches and presses. kvpress patches every attention function that is registered when it
is imported, so it comes before any converted model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

try:
    import kvpress
except ImportError:
    kvpress = None
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, QuantizedCache

from benchmarks.peers.contenders import RECENT, SINK, WINDOW, Contender


@dataclass
class Entry:
    """A contender with a model of its own, and what was measured of it.

    Attributes:
        make: an empty cache that will hold this many tokens.
        shares: of the full cache that converted models keep, by name and tokens of the prompt.
        results: as they are written.
        refused: of what could not be measured, the reason.
        prefill, decode: seconds of a prompt, and of a token after it.
    """

    contender: Contender
    model: PreTrainedModel
    make: Callable[[int], Any]
    shares: Mapping[tuple[str, int], float]
    press: Any = None
    results: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)

    def read(self, prompt: torch.Tensor, new: int) -> tuple[Any, torch.Tensor]:
        """A cache that holds prompts [n, tokens], with room for `new` tokens, and their last logits [n, vocabulary]."""
        cache = self.make(prompt.shape[1] + new)
        if self.contender.equals:
            self.press.compression_ratio = 1 - self.shares[self.contender.equals, prompt.shape[1]]
        with self.press(self.model) if self.press else contextlib.nullcontext():
            output = self.model(prompt, past_key_values=cache, logits_to_keep=1)
        return cache, output.logits[:, -1]

    def step(self, cache: Any, token: torch.Tensor, position: int) -> torch.Tensor:
        """Logits [n, vocabulary] after one more token of each [n, 1], whose position evicted tokens count in."""
        positions = torch.full_like(token, position)
        return self.model(token, past_key_values=cache, position_ids=positions).logits[:, -1]

    def through(self, tokens: torch.Tensor, prompt: int) -> tuple[Any, torch.Tensor]:
        """The cache, and logits [n, tokens - prompt, vocabulary] of what follows the prompt in [n, tokens]."""
        cache, logits = self.read(tokens[:, :prompt], tokens.shape[1] - prompt)
        logits_by_token = [logits]
        for position in range(prompt, tokens.shape[1] - 1):
            logits_by_token.append(self.step(cache, tokens[:, position : position + 1], position))
        return cache, torch.stack(logits_by_token, 1)


def enter(
    contender: Contender, model: Path, folder: Path, scores: torch.Tensor, shares: Mapping[tuple[str, int], float]
) -> Entry:
    """Load the stock model, or a converted one from its place in `folder`.

    Args:
        scores: of the heads, [layers, KV heads].

    Raises:
        ImportError: what the contender needs is not installed.
    """
    if contender.kind == "converted":
        loaded_model = AutoModelForCausalLM.from_pretrained(place(folder, contender), trust_remote_code=True).eval()
        cache = type(loaded_model(torch.zeros(1, 1, dtype=torch.long)).past_key_values)
        return Entry(contender, loaded_model, partial(cache, loaded_model.config), shares)
    loaded_model = AutoModelForCausalLM.from_pretrained(model).eval()
    if contender.kind == "quantized":

        def make(tokens: int) -> QuantizedCache:
            return QuantizedCache(config=loaded_model.config, **contender.options)

        make(0)
        return Entry(contender, loaded_model, make, shares)
    press = made_press(contender, scores) if contender.kind == "press" else None
    return Entry(contender, loaded_model, lambda tokens: DynamicCache(config=loaded_model.config), shares, press)


def place(folder: Path, contender: Contender) -> Path:
    """Where its converted model is; transformers makes a module's name of the last part."""
    return folder / "".join(letter if letter.isalnum() else "_" for letter in contender.name)


def made_press(contender: Contender, scores: torch.Tensor) -> Any:
    """A press with our head scores, our sinks or our observation window; what it keeps is said when it is used.

    Raises:
        ImportError: kvpress is not installed.
    """
    if kvpress is None:
        raise ImportError("kvpress is not installed")
    if contender.series == "DuoAttentionPress":
        full_heads = contender.options["full_heads"]
        press = kvpress.DuoAttentionPress(head_compression_ratio=1 - full_heads / scores.numel())
        press.load_attention_pattern = lambda model: (SINK, RECENT, scores.numpy())  # in place of a download
        return press
    if contender.series == "StreamingLLMPress":
        return kvpress.StreamingLLMPress(n_sink=SINK)
    if contender.series == "AdaKVPress":
        return kvpress.AdaKVPress(kvpress.SnapKVPress(window_size=WINDOW))
    return getattr(kvpress, contender.series)(window_size=WINDOW)
