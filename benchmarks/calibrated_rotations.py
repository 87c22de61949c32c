"""What rotations calibrated for each head gain over Hadamard's at 2 bits: divergence of the next token.

    python benchmarks/calibrated_rotations.py MODEL calibration.txt book.txt --json rotations.json

As in OSCAR (arXiv 2605.17757), a head's states are turned to the eigenvectors of a covariance, then by a Hadamard
matrix: keys by the covariance of the queries, values by their own, weighted by the attention that they get. Both are
taken from a text of their own. The stock model reads a prompt whose keys and values are what the codes of whole tiles
stand for, with sinks and clipping as in the product, and the tokens that follow. The product has no such rotations.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from benchmarks.cache_quality import windows
from kvsurgery.display import console
from kvsurgery.templates.kv_codes import dequantize, quantize, rotation
from kvsurgery.templates.kv_layout import TILE, Quantization

NAME, BITS, PROMPT, NEW, WINDOWS = "covariances", 2, 1024, 192, 4
HADAMARD, CALIBRATED = "Hadamard", "calibrated"


class Turns(NamedTuple):
    """How keys and values are turned: HADAMARD or CALIBRATED; keys may stay as they are (None)."""

    keys: str | None
    values: str


SETTINGS = {
    "kivi, values by Hadamard": ("kivi", Turns(None, HADAMARD)),
    "kivi, Hadamard": ("kivi", Turns(HADAMARD, HADAMARD)),
    "kivi, values calibrated": ("kivi", Turns(HADAMARD, CALIBRATED)),
    "kivi, calibrated": ("kivi", Turns(CALIBRATED, CALIBRATED)),
    "per-token, Hadamard": ("per-token", Turns(HADAMARD, HADAMARD)),
    "per-token, calibrated": ("per-token", Turns(CALIBRATED, CALIBRATED)),
}


@dataclass
class Covariances:
    """Sums over tokens of outer products of queries and of weighted values by layer, [kv_heads, head_dim, head_dim]."""

    queries: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]
    sinks: int  # first tokens that are never quantized

    def attention(self, module: Any, query, key, value, mask, **options: Any) -> Any:
        """Attention of one sequence, which is added to the sums."""
        heads, tokens = key.shape[1:3]
        grouped = query[0].unflatten(0, (heads, -1))
        scores = grouped @ key[0, :, None].mT * key.shape[-1] ** -0.5
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        received = scores.masked_fill(later, float("-inf")).softmax(-1).sum((1, 2))
        received[:, : self.sinks] = 0
        layer = module.layer_idx
        self.queries[layer] = self.queries.get(layer, 0) + torch.einsum("hgtd,hgte->hde", grouped, grouped)
        self.values[layer] = self.values.get(layer, 0) + torch.einsum("ht,htd,hte->hde", received, value[0], value[0])
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **options)


@torch.inference_mode()
def covariances(model: PreTrainedModel, pieces: list[torch.Tensor]) -> Covariances:
    """Those of a model that reads some pieces of text."""
    moments = Covariances({}, {}, Quantization(BITS).sink)
    ALL_ATTENTION_FUNCTIONS.register(NAME, moments.attention)
    model.set_attn_implementation(NAME)
    for piece in pieces:
        model(piece, logits_to_keep=1, use_cache=False)
    model.set_attn_implementation("sdpa")
    return moments


def calibrated_rotation(covariance: torch.Tensor) -> torch.Tensor:
    """Rotations by which states [..., head_dim] are multiplied, transposed: eigenvectors, the largest first, then
    Hadamard."""
    vectors = torch.linalg.eigh(covariance.double()).eigenvectors.flip(-1).mT.float()
    return rotation(vectors.shape[-1], torch.float32, vectors.device) @ vectors


def restored_states(states: torch.Tensor, matrix: torch.Tensor, quantization: Quantization, keys: bool) -> torch.Tensor:
    """What a cache gives back of states [1, heads, tokens, head_dim] that it rotates by matrices."""
    start = quantization.sink
    stop = start + TILE * quantization.tiles(states.shape[2] - start)
    tiles = (states[:, :, start:stop] @ matrix.mT).unflatten(2, (-1, TILE))
    pair = (tiles, torch.zeros_like(tiles)) if keys else (torch.zeros_like(tiles), tiles)
    restored = dequantize(quantize(*pair, quantization), quantization.widths)[0 if keys else 1].flatten(2, 3) @ matrix
    return torch.cat([states[:, :, :start], restored, states[:, :, stop:]], 2)


@torch.inference_mode()
def measure(model: PreTrainedModel, tokens: torch.Tensor, moments: Covariances) -> dict[str, float]:
    """Divergence by setting of what follows a prompt, [1, PROMPT + NEW + 1]."""
    cache = model(tokens[:, :PROMPT], logits_to_keep=1).past_key_values
    states = [(layer.keys, layer.values) for layer in cache.layers]
    head_dim = states[0][0].shape[-1]
    fixed_rotations = {None: torch.eye(head_dim), HADAMARD: rotation(head_dim, torch.float32, torch.device("cpu"))}
    calibrated_rotations = [
        (calibrated_rotation(moments.queries[layer]), calibrated_rotation(moments.values[layer]))
        for layer in range(len(states))
    ]

    def following(scheme: str | None, turns: Turns) -> torch.Tensor:
        cache, quantization = DynamicCache(), Quantization(BITS, scheme or "kivi", rotate="none", clip=True)
        for layer, (keys, values) in enumerate(states):
            if scheme is not None:
                layer_rotations = calibrated_rotations[layer]
                keys = restored_states(
                    keys, fixed_rotations.get(turns.keys, layer_rotations[0]), quantization, keys=True
                )
                values = restored_states(
                    values, fixed_rotations.get(turns.values, layer_rotations[1]), quantization, keys=False
                )
            cache.update(keys, values, layer)
        return model(tokens[:, PROMPT:-1], past_key_values=cache).logits[0].log_softmax(-1)

    exact, divergences = following(None, Turns(None, HADAMARD)), {}
    for name, (scheme, turns) in SETTINGS.items():
        loss = F.kl_div(following(scheme, turns), exact, log_target=True, reduction="none")
        divergences[name] = loss.sum(-1).mean().item()
    return divergences


def rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Mean divergence by setting, as a table has it."""
    return [(name, f"{fmean(window[name] for window in report['windows']):.4f}") for name in SETTINGS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock checkpoint with a tokenizer")
    parser.add_argument("calibration", type=Path, metavar="TEXT", help="UTF-8 text that rotations are calibrated on")
    parser.add_argument("text", type=Path, metavar="TEXT", help="UTF-8 text that is read")
    parser.add_argument("--json", type=Path, required=True, help="where the results are written")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    moments = covariances(model, [*windows(arguments.calibration, tokenizer, PROMPT, WINDOWS).values()])
    report = {"calibration": arguments.calibration.name, "text": arguments.text.name, "bits": BITS, "windows": []}
    for number, piece in enumerate(windows(arguments.text, tokenizer, PROMPT + NEW + 1, WINDOWS).values()):
        report["windows"].append(measure(model, piece, moments))
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        console.stderr.print(f"{number + 1} of {WINDOWS}: {report['windows'][-1]}")
    console.stdout.print(console.table(f"{BITS} bits", ["rotations", "KL"], rows(report)))


if __name__ == "__main__":
    main()
