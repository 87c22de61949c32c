"""Section of gpu.py: how many tokens of one sequence fit in 80 GB beside Llama-3-8B with 8-bit weights.

The weights are a stand-in, made here: int8 with a bfloat16 scale per row, dequantized in blocks of rows at every matrix
product. Half of the KV heads are full, their cache has 4 bits. It is filled with random codes, and one decode step
runs. Everything that the process takes of the device counts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from benchmarks.gpu_report import Report, free_memory
from benchmarks.synthetic import SHAPES, build, dimensions, emitted, occupy
from kvsurgery.templates.kv_cache import KVSurgeryCache
from kvsurgery.templates.kv_layout import KVLayout, Quantization

SHAPE, FULL, BITS = "Llama-3-8B", 0.5, 4
LIMIT = 80_000_000_000  # bytes
STEP = 100_000  # tokens
TARGET = 3_600_000
WORKSPACE = 500_000_000  # bytes that a decode step may take, for a first guess
ROWS = 2048  # of a weight that are dequantized at once


class Int8Linear(nn.Module):
    """A linear layer without bias whose weight is int8 with a scale per row."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach()
        scale = (weight.abs().amax(1, keepdim=True).float() / 127).to(weight.dtype)
        self.register_buffer("scale", scale[:, 0])
        self.register_buffer("weight", (weight / scale).round().clamp(-127, 127).to(torch.int8))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        blocks = zip(self.weight.split(ROWS), self.scale.split(ROWS), strict=True)
        return torch.cat([F.linear(states, weight.to(states.dtype)) * scale for weight, scale in blocks], -1)


def with_int8_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Replace every linear layer, one after the other; embeddings and norms stay."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child))
    return model


@torch.inference_mode()
def try_tokens(model: PreTrainedModel, tokens: int) -> dict | None:
    """Fill a cache with this many tokens and decode one more; None where memory does not suffice."""
    config = model.config
    like = torch.empty(1, config.num_key_value_heads, 0, config.head_dim, dtype=model.dtype, device=model.device)
    layout = KVLayout.from_config(config).quantized(Quantization(BITS))
    free_memory()
    torch.cuda.reset_peak_memory_stats()
    try:
        cache = KVSurgeryCache(config, tokens + 1, Quantization(BITS))
        occupy(cache, like, tokens)
        token = torch.ones(1, 1, dtype=torch.long, device=model.device)
        assert model(input_ids=token, past_key_values=cache, logits_to_keep=1).logits.isfinite().all()
    except torch.OutOfMemoryError:
        return None
    allocated_bytes, predicted_bytes = (
        cache.allocated_bytes(),
        layout.kv_bytes(1, tokens, 1, itemsize=model.dtype.itemsize),
    )
    assert allocated_bytes == predicted_bytes, f"the cache has {allocated_bytes:,} bytes, not {predicted_bytes:,}"
    return {
        "cache": allocated_bytes,
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def dense_tokens(weights: int) -> int:
    """Tokens of an ordinary bfloat16 cache that the formula leaves room for beside bfloat16 weights."""
    shape = SHAPES[SHAPE]
    return (LIMIT - weights) // (4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"])


def search(report: Report, guess: int, attempt: Callable[[int], dict | None], **facts) -> tuple[int, bool]:
    """Go in steps from a guess, up while tokens fit and down while they do not.

    Returns:
        The most tokens that were seen to fit, 0 if none were, and whether a step more was seen not to.
    """
    fits_by_tokens: dict[int, bool] = {}
    tokens = guess
    while tokens > 0 and len(set(fits_by_tokens.values())) < 2 and report.allows(f"{tokens:,} tokens", 6):
        figures = attempt(tokens)
        free_memory()
        fits_by_tokens[tokens] = figures is not None
        gigabytes = {f"{name} GB": value / 1e9 for name, value in (figures or {}).items()}
        report.add(tokens=tokens, fits="yes" if figures else "no", predicted=guess, target=TARGET, **gigabytes, **facts)
        tokens += STEP if fits_by_tokens[tokens] else -STEP
    return max((tokens for tokens, fits in fits_by_tokens.items() if fits), default=0), False in fits_by_tokens.values()


def section(report: Report) -> None:
    """Steps of 0.1 M tokens from what the formula predicts, up or down until the answer changes."""
    columns = {"tokens": "10,", "fits": "<5", "cache GB": "8.2f", "peak GB": "7.2f", "reserved GB": "11.2f"}
    report.table("capacity", columns | {"target": "10,"})
    free, total = torch.cuda.mem_get_info()
    context_bytes = total - free - torch.cuda.memory_reserved()  # the context, which no allocator counts
    if total < LIMIT:
        report.skip("capacity", f"the device has {total / 1e9:.1f} GB")
        return
    torch.cuda.set_per_process_memory_fraction((LIMIT - context_bytes) / total)
    try:
        stock_model = build(SHAPE, "cuda", torch.bfloat16)
        dense_capacity = dense_tokens(sum(weight.nbytes for weight in stock_model.parameters()))
        model = with_int8_weights(emitted(stock_model, round(FULL * dimensions(stock_model.config)[0])))
        del stock_model
        free_memory()
        weights = torch.cuda.memory_allocated()
        layout = KVLayout.from_config(model.config).quantized(Quantization(BITS))
        per_token = (layout.kv_bytes(1, 1 << 21) - layout.kv_bytes(1, 1 << 20)) / (1 << 20)
        guess = int((LIMIT - context_bytes - weights - WORKSPACE) / per_token) // STEP * STEP
        facts = {
            "weights GB": weights / 1e9,
            "outside GB": context_bytes / 1e9,
            "dense tokens, by formula": dense_capacity,
        }
        capacity, exact = search(report, guess, lambda tokens: try_tokens(model, tokens), **facts)
        if capacity:
            qualifier, targets = (
                "" if exact else "at least ",
                f"target {TARGET:,}; dense in bfloat16, by formula, {dense_capacity:,}",
            )
            print(f"{qualifier}{capacity:,} tokens fit; {targets}")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
