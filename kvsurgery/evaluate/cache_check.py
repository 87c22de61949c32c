"""Checking a converted checkpoint: how far its next tokens are from the original's, on a text."""

from __future__ import annotations

import copy
import gc
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from kvsurgery.evaluate.checkpoint import load, reader_of
from kvsurgery.measure.cache_losses import TrialSizes
from kvsurgery.measure.cache_trial import next_token_divergence, next_token_logs
from kvsurgery.system.processes import usable_device
from kvsurgery.templates.kv_cache import CACHE
from kvsurgery.templates.kv_layout import QUANTIZATION
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.tokens import first_tokens

SIZES = TrialSizes(passages=4, scored=64)


@dataclass(frozen=True)
class CheckText:
    """Passages of a text, int64 [passages, tokens], and what the text is called."""

    passages: torch.Tensor
    name: str

    @classmethod
    def read(cls, source: str, folder: Path, trust_remote_code: bool = False) -> CheckText:
        """Passages for the tokenizer of a checkpoint, evenly spaced over a text file or a dataset.

        Raises:
            TextError: it cannot be read, or is too short.
            UnsupportedModel: the checkpoint has no tokenizer, or one with code that is not trusted.
        """
        tokenizer = reader_of(folder, trust_remote_code=trust_remote_code).tokenizer
        text = Haystack.read(source, tokenizer, SIZES.passages * SIZES.length)
        start_tokens = first_tokens(tokenizer)
        passages = SIZES.of(text.tokens, start_tokens)
        return cls(torch.stack(passages), text.name)


@dataclass(frozen=True)
class CacheCheck:
    """Mean Kullback-Leibler divergence, in nats, of the next token's distribution at `context` tokens of a text.

    Attributes:
        original: from the original model's.
        unquantized: from that with the same heads in the model's dtype; None where nothing is quantized.
    """

    text: str
    context: int
    original: float
    unquantized: float | None

    def __str__(self) -> str:
        """The check, as one sentence."""
        clause = "" if self.unquantized is None else f", and {self.unquantized:.2g} from the same heads unquantized"
        return (
            f"Divergence of the next token at {self.context:,} tokens of {self.text}: {self.original:.2g} nats from "
            f"the original model{clause}."
        )


def check_cache(folder: Path, text: CheckText, *, dtype: str = "auto") -> CacheCheck:
    """Compare a converted checkpoint with its original, one model in memory at a time. The emitted code is executed.

    Each passage fills the cache with 1,024 tokens, and the 64 tokens that follow are read in one forward.

    Args:
        dtype: of the weights; "auto" is the checkpoint's.
    """
    device = usable_device(None)
    model = load(folder, device=device, dtype=dtype, stock=True)
    references = [_log_probabilities(model, passage, None) for passage in text.passages]
    del model
    gc.collect()
    model = load(folder, device=device, dtype=dtype)
    plain = copy.deepcopy(model.config)
    quantized = [plain.kv_surgery.pop(name, None) for name in QUANTIZATION.values()] != [None] * len(QUANTIZATION)
    cache_class = type(model(text.passages[:1, :1].to(device))[CACHE])
    original = unquantized = 0.0
    for passage, reference in zip(text.passages, references, strict=True):
        log_probs = _log_probabilities(model, passage, cache_class(model.config))
        original += next_token_divergence(log_probs, reference).item()
        if quantized:
            unquantized += next_token_divergence(
                log_probs, _log_probabilities(model, passage, cache_class(plain))
            ).item()
    count = len(text.passages)
    return CacheCheck(text.name, SIZES.context, original / count, unquantized / count if quantized else None)


def _log_probabilities(model: PreTrainedModel, passage: torch.Tensor, cache) -> torch.Tensor:
    """float32 [scored, vocabulary], on the CPU, after each of a passage's last tokens."""
    prompt, scored_tokens = passage[None].to(model.device).split([SIZES.context, SIZES.scored], 1)
    return next_token_logs(model, prompt, scored_tokens, cache).cpu()
