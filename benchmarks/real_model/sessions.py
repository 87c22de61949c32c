"""How models read an answer through caches that stay small: ours, H2O, TOVA, and presses of kvpress that decode."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from benchmarks.peers.held import held_bytes
from kvsurgery.templates.kv_layout import KVLayout

BLOCK = 512  # tokens that are read at once


class Session:
    """A prompt and what follows it, read through the model's own cache.

    Attributes:
        cache: holds the tokens so far.
        last: logits [1, 1, vocabulary] after the prompt.
        kv_bytes: the most that the cache has held since the prompt was read.
    """

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor, new: int):
        """Read a prompt, int64 [1, tokens], before so many new ones."""
        self.model, self.cache, self.prompt, self.seen, self.kv_bytes = model, None, prompt.shape[1], 0, 0
        self.last = self.forward(prompt, logits_to_keep=1).logits
        if hasattr(self.cache, "reserve"):  # as `generate` does: otherwise it grows by a quarter whenever it is full
            self.cache.reserve(self.seen + new)

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [1, n, vocabulary] after each of the next tokens, int64 [1, n]."""
        logits = [self.forward(block).logits for block in tokens.split(BLOCK, 1)]
        self.kv_bytes = max(self.kv_bytes, self.stored_bytes())
        return torch.cat(logits, 1)

    def forward(self, tokens: torch.Tensor, **options: Any) -> Any:
        """One forward over the next tokens. Positions are given, as a cache does not count what was evicted."""
        positions = torch.arange(self.seen, self.seen + tokens.shape[1])[None]
        output = self.model(tokens, past_key_values=self.cache, position_ids=positions, **options)
        self.cache, self.seen = output.past_key_values, self.seen + tokens.shape[1]
        return output

    def stored_bytes(self) -> int:
        """Bytes of keys and values."""
        return checked_bytes(self.model, self.cache, self.prompt)


def checked_bytes(model: PreTrainedModel, cache: Any, prompt: int, rows: int = 1) -> int:
    """Bytes of keys and values of a cache. Those that a converted model has allocated are what its config says."""
    if cache is None or not hasattr(cache, "allocated_bytes"):
        return held_bytes(cache)
    allocated, room = cache.allocated_bytes(), cache.layers[0].capacity - prompt
    layout = KVLayout.from_config(model.config)
    assert allocated == layout.kv_bytes(rows, prompt, room, itemsize=model.dtype.itemsize)
    return allocated


class StepSession(Session):
    """One that reads token by token, since it evicts between them."""

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [1, n, vocabulary] after each of the next tokens, int64 [1, n]."""
        return torch.cat([super(StepSession, self).read(token) for token in tokens.split(1, 1)], 1)


class H2O(StepSession):
    """Heavy hitters (Zhang et al. 2023): half of what a head keeps is recent, the rest has got most attention so far.

    The scores take bytes too. The model's attention is eager, so that its weights can be seen.
    """

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor, new: int, max_tokens: int):
        """Keep at most so many tokens."""
        self.max_tokens, self.scores = max_tokens, {}
        super().__init__(model, prompt, new)

    def forward(self, tokens: torch.Tensor, **options: Any) -> Any:
        """One forward, after which every layer evicts."""
        output = super().forward(tokens, output_attentions=True, **options)
        for number, (layer, weights) in enumerate(zip(output.past_key_values.layers, output.attentions, strict=True)):
            kept_places = self.kept_places(number, weights[0].unflatten(0, (layer.keys.shape[1], -1)))
            if kept_places.shape[1] < layer.keys.shape[2]:
                places = kept_places[None, :, :, None].expand(-1, -1, -1, layer.keys.shape[3])
                layer.keys, layer.values = layer.keys.gather(2, places), layer.values.gather(2, places)
        return output

    def kept_places(self, number: int, weights: torch.Tensor) -> torch.Tensor:
        """Places that a layer keeps, int64 [heads, n], by attention weights [heads, group, queries, keys]."""
        heads, count = weights.shape[0], weights.shape[3]
        past_scores = self.scores.get(number, weights.new_zeros(heads, 0))
        scores = F.pad(past_scores, (0, count - past_scores.shape[1])) + weights.sum((1, 2))
        recent = self.max_tokens // 2
        worth = scores.clone()
        worth[:, -recent:] = float("inf")
        kept_places = worth.topk(min(self.max_tokens, count)).indices.sort().values
        self.scores[number] = scores.gather(1, kept_places)
        return kept_places

    def stored_bytes(self) -> int:
        """Bytes of keys, values and scores."""
        return super().stored_bytes() + held_bytes(self.scores)


class TOVA(H2O):
    """Each layer drops the token that the last query attended to least (Oren et al. 2024), the same for all heads."""

    def kept_places(self, number: int, weights: torch.Tensor) -> torch.Tensor:
        """Places that a layer keeps, int64 [heads, n], by attention weights [heads, group, queries, keys]."""
        received = weights[:, :, -1].mean((0, 1))
        return received.topk(min(self.max_tokens, len(received))).indices.sort().values.expand(len(weights), -1)


class PressSession(StepSession):
    """A press of kvpress, which compresses the prompt and then the answer whenever a block has come."""

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor, new: int, press: Any):
        """Hook a press into each forward; questions that are asked between them do not touch it."""
        self.press = press
        press.post_init_from_model(model)
        for layer in model.model.layers:
            layer.self_attn.rotary_emb = model.model.rotary_emb  # as kvpress has it
        super().__init__(model, prompt, new)

    def forward(self, tokens: torch.Tensor, **options: Any) -> Any:
        """One forward, after which the press may compress."""
        modules = [layer.self_attn for layer in self.model.model.layers]
        hooks = [module.register_forward_hook(self.press.forward_hook, with_kwargs=True) for module in modules]
        try:
            return super().forward(tokens, **options)
        finally:
            for hook in hooks:
                hook.remove()
