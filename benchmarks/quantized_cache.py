"""What a quantized KV cache keeps, and what it takes: a converted model beside transformers' own QuantizedCache.

    python benchmarks/byte_model.py pride_and_prejudice.txt --out /tmp/byte-model
    python benchmarks/quantized_cache.py /tmp/byte-model pride_and_prejudice.txt --json quantized.json

Converts MODEL with every head full. Caches of 8, 4 and 2 bits and unquantized ones then hold the same prompts from the
text's last tenth, and go through what follows them token by token, in turns. Bytes are those of all tensors of a cache,
scales and unquantized tokens among them. The error is the norm of the difference to the stock model's logits, over
their norm. Right after a prompt, QuantizedCache has quantized all of it, and kvsurgery keeps room for 256 tokens as
they are; what a further token takes, of which a long context consists, stands beside.

Backends of QuantizedCache: `pip install optimum-quanto` (compiles C++ at its first use), `pip install hqq`; fp8 comes
with recent versions of transformers.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from byte_model import split
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, QuantizedCache
from transformers.utils import logging

from kvsurgery import console
from kvsurgery.bench.caches import STEP, cache_bytes, unusable
from kvsurgery.checkpoint.family import Family
from kvsurgery.checkpoint.source import read_config
from kvsurgery.conversion.convert import convert
from kvsurgery.conversion.prepared import PreparedConversion
from kvsurgery.policy.policy import Quantization
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe

# backend -> bits, and the axes that make it scale keys per channel or per token, and values per token
BACKENDS = {
    "quanto": ((4, 2), {"channel": (-1, 0), "token": (0, 0)}),
    "hqq": ((8, 4, 2), {"channel": (0, 1), "token": (1, 1)}),
}


@dataclass
class Contender:
    """A model with a kind of cache, and what was measured of it."""

    name: str
    scaled: str  # what a scale of keys is for
    bits: int
    model: PreTrainedModel
    make: Callable[[], Any]  # an empty cache
    prompt_bytes: int = 0
    token_bytes: float = 0.0
    difference: float = 0.0  # to the logits of the stock model, sum of squares
    nats: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def converted(source: Path, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model after conversion with every head full."""
    config = read_config(source)
    model = Family.of(config).dimensions(config)
    scores = np.ones((model.layers, model.kv_heads), dtype=np.float32)
    prepared = PreparedConversion.prepare(
        source, HeadProfile(scores, "ablation", "kv", str(source), model), Recipe(sparsity=0.0)
    )
    convert(prepared.checkpoint, prepared.plan, folder, prepared.files)
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype).eval()


def contenders(stock: PreTrainedModel, emitted: PreTrainedModel) -> Iterator[Contender]:
    """The stock model first, then the converted one, then the stock one with what is installed of QuantizedCache."""
    width = 8 * stock.dtype.itemsize
    yield Contender("stock", "", width, stock, partial(DynamicCache, config=stock.config))
    cache = type(emitted(torch.zeros(1, 1, dtype=torch.long)).past_key_values)
    yield Contender("kvsurgery", "", width, emitted, partial(cache, emitted.config))
    for scheme, scaled in (("kivi", "channel"), ("per-token", "token")):
        for bits in (8, 4, 2):
            make = partial(cache, emitted.config, quantization=Quantization(bits, scheme))
            yield Contender("kvsurgery", scaled, bits, emitted, make)
    kinds = [("fp8", "tensor", 8, {})]
    for backend, (widths, axes) in BACKENDS.items():
        for scaled, (keys, values) in axes.items():
            kinds += [
                (backend, scaled, bits, {"nbits": bits, "axis_key": keys, "axis_value": values}) for bits in widths
            ]
    left_out = set()
    for backend, scaled, bits, options in kinds:
        make = partial(QuantizedCache, backend, stock.config, **options)
        if backend not in left_out and (reason := unusable(make)):
            console.stderr.print(f"left out: {backend} ({reason})", markup=False)
            left_out.add(backend)
        if backend not in left_out:
            yield Contender(f"transformers, {backend}", scaled, bits, stock, make)


@torch.inference_mode()
def measure(models: list[Contender], tokens: torch.Tensor, prompt: int) -> float:
    """Put [1, prompt + new + 1] tokens through every cache; returns the sum of squares of the stock model's logits."""
    caches, norm, last = [], 0.0, tokens.shape[1] - 1
    for contender in models:
        caches.append(contender.make())
        contender.model(tokens[:, :prompt], past_key_values=caches[-1], logits_to_keep=1)
        if hasattr(caches[-1], "reserve"):
            caches[-1].reserve(last)
    for step in range(prompt, last):
        for contender, cache in zip(models, caches, strict=True):
            begin = time.perf_counter()
            logits = contender.model(tokens[:, step : step + 1], past_key_values=cache).logits[0].float()
            contender.seconds.append(time.perf_counter() - begin)
            if contender is models[0]:
                reference = logits
                norm += reference.square().sum().item()
            contender.difference += (logits - reference).square().sum().item()
            contender.nats.append(F.cross_entropy(logits, tokens[0, step + 1 : step + 2]).item())
    return norm


@torch.inference_mode()
def count_bytes(contender: Contender, tokens: torch.Tensor, prompt: int) -> None:
    """Bytes of its cache after a prompt, and of every further token, of which a long context consists."""
    sizes = []
    for length in (prompt, prompt + 2 * STEP):
        cache = contender.make()
        contender.model(tokens[:, :length], past_key_values=cache, logits_to_keep=1)
        sizes.append(cache_bytes(cache))
    contender.prompt_bytes, contender.token_bytes = sizes[0], (sizes[1] - sizes[0]) / (2 * STEP)


def show(title: str, results: list[dict[str, Any]]) -> None:
    """Print the results as a table."""
    rows = [
        (
            *(result[name] for name in ("cache", "keys_scaled_per", "bits")),
            console.size(result["bytes_after_prompt"]),
            f"{result['bytes_per_token']:,.0f}",
            f"{result['bytes_per_token'] / results[0]['bytes_per_token']:.1%}",
            f"{result['logits_error']:.2e}",
            f"{result['bits_per_byte']:.4f}",
            f"{result['decode_ms']:.2f}",
        )
        for result in results
    ]
    columns = ["cache", "keys per", "bits", "KV bytes", "a token", "of stock", "logits error", "bits/byte", "ms"]
    console.stdout.width = max(console.stdout.width, 110)
    console.stdout.print(console.table(title, columns, rows, left=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock checkpoint with a tokenizer")
    parser.add_argument("text", type=Path, metavar="TEXT", help="UTF-8 text; its last tenth is used")
    parser.add_argument("--prompt", type=int, default=704, help=f"tokens of a prompt, a multiple of {STEP}")
    parser.add_argument("--new", type=int, default=192, help="tokens that follow it")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    if arguments.prompt % STEP:
        parser.error(f"--prompt must be a multiple of {STEP}")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    text, dtype = split(arguments.text)[1], getattr(torch, arguments.dtype)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    assert tokenizer is not None  # its type in transformers allows None
    tokens = torch.tensor([tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]])
    length = arguments.prompt + arguments.new + 1
    starts = torch.linspace(0, tokens.shape[1] - length, arguments.prompts).long().tolist()
    stock = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval()
    with tempfile.TemporaryDirectory() as scratch:
        models = [*contenders(stock, converted(arguments.model, Path(scratch) / "all-full", dtype))]
    norm = sum(measure(models, tokens[:, start : start + length], arguments.prompt) for start in starts)
    for contender in models:
        count_bytes(contender, tokens, arguments.prompt)
    per_byte = tokens.shape[1] / len(text.encode()) / math.log(2)  # from nats per token to bits
    results = [
        {
            "cache": contender.name,
            "keys_scaled_per": contender.scaled,
            "bits": contender.bits,
            "bytes_after_prompt": contender.prompt_bytes,
            "bytes_per_token": contender.token_bytes,
            "logits_error": math.sqrt(contender.difference / norm),
            "bits_per_byte": statistics.fmean(contender.nats) * per_byte,
            "decode_ms": 1e3 * statistics.median(contender.seconds),
        }
        for contender in models
    ]
    title = (
        f"{arguments.prompts} prompts of {arguments.prompt:,} tokens, {arguments.new:,} more each, {arguments.dtype}"
    )
    show(title, results)
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in ("prompt", "new", "prompts", "dtype")}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        arguments.json.write_text(json.dumps({**settings, **versions, "caches": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
