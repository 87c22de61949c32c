"""Ablation scores: what a model loses when one KV head sees only sink and recent tokens.

A direct measurement: it needs no training, but a forward pass per KV head. Cross-entropy ranks heads better than
accuracy does, where heads that stand in for each other hide behind an argmax that stays right.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from kvsurgery.measure.attention_hooks import intercepted


def ablation_scores(
    model: PreTrainedModel, batches: Sequence[tuple[torch.Tensor, torch.Tensor]], *, sink: int, recent: int
) -> np.ndarray:
    """Rise of the target cross-entropy with each KV head restricted to sink and recent tokens, alone.

    Args:
        model: any causal language model whose attention goes through transformers' attention interface.
        batches: (input_ids, targets) pairs as in `target_loss`; measured once per head, so keep them few.
        sink, recent: what a restricted head sees: j <= i and (j < sink or i - j < recent).

    Returns:
        float32 [layers, kv_heads], in nats per target and clamped at 0. A layer that has a sliding window already is
        restricted inside it.
    """
    config = model.config.get_text_config()
    scores = np.zeros((config.num_hidden_layers, config.num_key_value_heads), dtype=np.float32)
    baseline = target_loss(model, batches)
    for layer, head in np.ndindex(*scores.shape):
        heads = torch.zeros(scores.shape, dtype=torch.bool)
        heads[layer, head] = True
        with restricted(model, heads, sink=sink, recent=recent):
            scores[layer, head] = max(0.0, target_loss(model, batches) - baseline)
    return scores


@torch.no_grad()
def target_loss(model: PreTrainedModel, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Mean cross-entropy of the target tokens, in nats, over all batches.

    Args:
        batches: pairs of input_ids, int64 [batch, tokens], without padding, and targets, bool [batch, tokens], True
            where the loss of predicting that token from those before it counts.
    """
    total, count = 0.0, 0
    for input_ids, targets in batches:
        input_ids, targets = input_ids.to(model.device), targets[:, 1:].to(model.device)
        # logits only where a row has a target: a vocabulary's worth for every token would be most of the memory
        at = targets.any(dim=0).nonzero().squeeze(1)
        logits = model(input_ids, use_cache=False, logits_to_keep=at).logits
        wanted = targets[:, at]
        total += F.cross_entropy(logits[wanted].float(), input_ids[:, at + 1][wanted], reduction="sum").item()
        count += int(wanted.sum())
    return total / count


@contextmanager
def restricted(model: PreTrainedModel, heads: torch.Tensor, *, sink: int, recent: int) -> Generator[None]:
    """Inside, the given KV heads see only sink and recent tokens, by a dense mask over the whole past.

    Slow and exact, for measurement and training: nothing is left out of the cache. Inputs have no padding. One model at
    a time.

    Args:
        heads: bool [layers, kv_heads], True where a head is restricted.
        sink, recent: a restricted head sees j <= i and (j < sink or i - j < recent).
    """

    def attend(stock, module, query, key, value, attention_mask, **options):
        if heads[module.layer_idx].any():
            group = query.shape[1] // key.shape[1]
            limited = heads[module.layer_idx].to(query.device).repeat_interleave(group)[None, :, None, None]
            j = torch.arange(key.shape[2], device=query.device)
            i = j[-query.shape[2] :, None]
            visible = (j <= i) & (~limited | (j < sink) | (i - j < recent))
            if attention_mask is None:
                attention_mask = visible
            elif attention_mask.dtype == torch.bool:
                attention_mask = attention_mask & visible
            else:
                attention_mask = attention_mask.masked_fill(~visible, torch.finfo(query.dtype).min)
        return stock(module, query, key, value, attention_mask, **options)

    with intercepted(model, attend):
        yield
