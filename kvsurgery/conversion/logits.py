"""Comparing logits: the emitted model with every head full against the stock class."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from kvsurgery.checkpoint.quantization import check_known
from kvsurgery.checkpoint.source import read_config
from kvsurgery.emit.config import auto_class
from kvsurgery.errors import Mismatch
from kvsurgery.templates.kv_cache import CACHE
from kvsurgery.templates.kv_layout import QUANTIZATION, has_states

# largest difference over max(1, largest logit): float32 sums in another order, half precision rounds at every layer
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
PROMPT, STEPS = 48, 16


@dataclass(frozen=True)
class LogitsReport:
    """Largest difference of any logit, relative to max(1, the largest logit), and the bound for the dtype."""

    difference: float
    bound: float
    dtype: str


def compare_logits(folder: str | Path, dtype: str = "auto") -> LogitsReport:
    """Run both models on the same random tokens, the emitted one through its cache: a prompt, then single steps.

    So does a stock one with states, which are rounded in other places if all tokens come at once.

    One model is in memory at a time. The emitted code is executed: verify it first.

    Args:
        dtype: of the weights; "auto" is the checkpoint's.

    Raises:
        Mismatch: the difference exceeds the bound.
        UnsupportedModel: quantized weights that transformers does not know.
    """
    source_config = read_config(folder)
    check_known(source_config, folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    auto = getattr(transformers, auto_class(source_config))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.get_text_config().vocab_size, (1, PROMPT + STEPS), generator=generator)
    # eager: stock SDPA leaves the soft cap of some families out
    stock_model = auto.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    parts = [PROMPT] + [1] * STEPS
    loaded_dtype, stock_logits = (
        stock_model.dtype,
        _logits(stock_model, tokens, parts if has_states(config.get_text_config()) else [PROMPT + STEPS]),
    )
    del stock_model
    gc.collect()
    for name in QUANTIZATION.values():
        config.kv_surgery.pop(name, None)
    config.kv_surgery["layers"] = [
        layer
        if layer.get("native") or "source" in layer
        else {"blocks": [[sum(block), 0] for block in layer["blocks"]], "sink": 0, "recent": 1}
        for layer in config.kv_surgery["layers"]
    ]
    emitted_model = auto.from_pretrained(folder, config=config, dtype=dtype, trust_remote_code=True)
    emitted_logits = _logits(emitted_model, tokens, parts)
    difference = ((emitted_logits - stock_logits).abs().max() / stock_logits.abs().max().clamp(min=1)).item()
    report = LogitsReport(difference, BOUNDS[loaded_dtype], str(loaded_dtype).removeprefix("torch."))
    # written so that a NaN fails too
    if not difference <= report.bound:
        raise Mismatch(
            f"{folder}: logits differ from the stock model's by {difference:.2g} of the largest, "
            f"more than {report.bound:g} for {report.dtype}"
        )
    return report


def _logits(model: transformers.PreTrainedModel, tokens: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """float32 logits [1, tokens, vocabulary], of tokens fed in parts of some sizes."""
    model.eval()
    cache, parts = None, []
    # left out, some models that read images count the positions of each part from 0 in transformers 4
    positions = torch.arange(tokens.shape[1])[None]
    with torch.inference_mode():
        for part, places in zip(tokens.split(sizes, 1), positions.split(sizes, 1), strict=True):
            mask = torch.ones(1, int(places[0, -1]) + 1, dtype=torch.int64)
            options = {"attention_mask": mask, "position_ids": places, CACHE: cache}
            output = model(part, use_cache=len(sizes) > 1, **options)
            cache = output.get(CACHE)
            parts.append(output.logits.float())
    return torch.cat(parts, 1)
