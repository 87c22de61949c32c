"""What lowers the loss of a quantized cache at equal bytes: divergence of the next token for changes to `kivi`.

    python benchmarks/equal_bytes.py MODEL calibration.txt book.txt --json equal-bytes.json

Each change is simulated: the stock model reads 1,024 tokens of the book, whole tiles of its keys and values are
replaced by what their codes would give back, and one forward reads the 192 tokens that follow. The divergence is the
mean Kullback-Leibler divergence, in nats, of the distribution of the next token from that with an unquantized cache. A
change that takes more bytes is compared with `kivi` at as many bits a value, on straight lines between the logarithms
of its divergences at 2, 3, 4 and 5 bits. The covariances of the queries come from the calibration text. An interrupted
run continues from its JSON file.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from benchmarks.cache_quality import windows
from benchmarks.provenance import record_versions
from kvsurgery.display import console
from kvsurgery.measure.attention_hooks import attention_weights, intercepted, scoring_of
from kvsurgery.measure.cache_trial import next_token_divergence
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.measure.query_rounding import DAMPING, query_factors
from kvsurgery.templates.kv_codes import nearest, rotated
from kvsurgery.templates.kv_layout import CLIPPED, TILE, Quantization
from kvsurgery.templates.kv_rounding import QueryRounding

PROMPT, NEW = 1024, 192
WIDTHS = 4, 3, 2
BASE = "kivi"
DTYPE_BITS = 16  # of keys, values and scales that are stored in the model's dtype
POSITION_BITS = 16  # of a token that is stored beside tiles
RANGE_STEPS = 32  # of a minimum in 8 bits in a group's range
SWEEPS, FITS = 2, 4


class Reading(NamedTuple):
    """What a model that reads a prompt leaves: its cache, and by layer with full attention sums over the queries.

    `received` is the attention that tokens get, [kv_heads, tokens], and `covariances` are sums of q q^T of the queries
    of a KV head, float64 [kv_heads, head_dim, head_dim].
    """

    cache: Any
    received: dict[int, torch.Tensor]
    covariances: dict[int, torch.Tensor]


@torch.inference_mode()
def read(measured: MeasuredModel, tokens: torch.Tensor) -> Reading:
    """Read a prompt [1, tokens]."""
    layers, received, covariances = measured.full_layers(), {}, {}

    def attend(stock, module, query, key, value, mask, **options):
        if (layer := module.layer_idx) in layers:
            weights = attention_weights(query, key, scoring_of(query, options))[0]
            received[layer] = weights.unflatten(0, (key.shape[1], -1)).sum((1, 2))
            queries = query[0].unflatten(0, (key.shape[1], -1)).flatten(1, 2).float()
            covariances[layer] = (queries.mT @ queries).double()
        return stock(module, query, key, value, mask, **options)

    with intercepted(measured.model, attend):
        cache = measured.model(tokens, use_cache=True, logits_to_keep=1).past_key_values
    return Reading(cache, received, covariances)


Scales = tuple[torch.Tensor, torch.Tensor]  # scales and minima of groups


def in_dtype(scale: torch.Tensor, low: torch.Tensor, bits: int, dtype: torch.dtype) -> Scales:
    """Scales and minima as a model's dtype stores them."""
    return scale.to(dtype).float(), low.to(dtype).float()


def scale_in_8_bits(scale: torch.Tensor, low: torch.Tensor, bits: int, dtype: torch.dtype) -> Scales:
    """Scales as floats of 5 bits of exponent and 3 of mantissa, rounded up, and minima in a model's dtype."""
    scale = (scale.half().view(torch.int16) + 127 & ~127).view(torch.float16).float()
    return scale, low.to(dtype).float()


def in_8_bits(scale: torch.Tensor, low: torch.Tensor, bits: int, dtype: torch.dtype) -> Scales:
    """Scales in 8 bits, and minima as whole numbers of 32nds of the range that a scale gives, in 8 bits.

    Where 127 of these do not reach a minimum, the scale is larger.
    """
    levels = 2**bits - 1
    scale, _ = scale_in_8_bits(torch.maximum(scale, low.abs() * (RANGE_STEPS / 127 / levels)), low, bits, dtype)
    unit = scale * (levels / RANGE_STEPS)
    return scale, (low / unit.where(unit > 0, 1)).round().clamp(-128, 127) * unit


class Format(NamedTuple):
    """How a scale and a minimum are stored: in how many bits together, and what becomes of them."""

    bits: int
    store: Callable[[torch.Tensor, torch.Tensor, int, torch.dtype], Scales]


SIXTEEN, MIXED, EIGHT = Format(32, in_dtype), Format(24, scale_in_8_bits), Format(16, in_8_bits)


@dataclass(frozen=True)
class Groups:
    """States of a tile that share a scale and a minimum: of some tokens and channels; None for all channels."""

    tokens: int
    channels: int | None
    format: Format = SIXTEEN

    def bits(self, head_dim: int) -> float:
        """Bits of scales and minima for a state."""
        return self.format.bits / (self.tokens * (self.channels or head_dim))

    def of(self, states: torch.Tensor) -> torch.Tensor:
        """Tiles [..., TILE, head_dim] by group, [..., rows, tokens, columns, channels]."""
        return states.unflatten(-1, (-1, self.channels or states.shape[-1])).unflatten(-3, (-1, self.tokens))


class Coding(NamedTuple):
    """How grouped states are coded: `bits`, how many of the `CLIPPED` ranges are tried, and how scales are stored."""

    bits: int
    ranges: int
    format: Format
    dtype: torch.dtype

    def store(self, scale: torch.Tensor, low: torch.Tensor) -> Scales:
        """Scales and minima as they are stored."""
        return self.format.store(scale, low, self.bits, self.dtype)

    def all_ranges(self, grouped: torch.Tensor, exact: torch.Tensor) -> Scales:
        """Scales and minima [ranges, ...] of all ranges of states but those that are `exact`."""
        low = grouped.masked_fill(exact, math.inf).amin((-3, -1), keepdim=True)
        high = grouped.masked_fill(exact, -math.inf).amax((-3, -1), keepdim=True)
        fractions = torch.arange(20, 20 - self.ranges, -1.0).view(-1, *[1] * low.dim()) / 20
        spans = (high - low) * fractions
        starts = ((low + high) * 0.5 - spans * 0.5).where(fractions < 1, low)
        return self.store(spans / (2**self.bits - 1), starts)

    def best_range(self, grouped: torch.Tensor, exact: torch.Tensor) -> Scales:
        """Scale and minimum of each group: of its ranges, the one with the least squared error."""
        scales, lows = self.all_ranges(grouped, exact)
        errors = torch.stack([self.coded(grouped, *pair) - grouped for pair in zip(scales, lows, strict=True)])
        best = errors.masked_fill_(exact, 0).square_().sum((-3, -1), keepdim=True).argmin(0, keepdim=True)
        return scales.gather(0, best)[0], lows.gather(0, best)[0]

    def coded(self, grouped: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """What the nearest codes of states stand for."""
        return nearest(grouped, scale, low, self.bits) * scale + low


# What codes of grouped states give back, by how they are coded, which are exact, and the covariance of the queries
Fit = Callable[[torch.Tensor, torch.Tensor, Coding, torch.Tensor], torch.Tensor]


def least_squares(grouped: torch.Tensor, exact: torch.Tensor, coding: Coding, covariance: torch.Tensor) -> torch.Tensor:
    """As the product does it: the range with the least squared error, and the nearest codes."""
    return coding.coded(grouped, *coding.best_range(grouped, exact))


def regressed(grouped: torch.Tensor, exact: torch.Tensor, coding: Coding, covariance: torch.Tensor) -> torch.Tensor:
    """Scale and minimum by linear regression of states on their codes, and codes by these, some times in turn."""
    scale, low = coding.best_range(grouped, exact)
    mean = grouped.mean((-3, -1), keepdim=True)
    for _ in range(FITS):
        codes = nearest(grouped, scale, low, coding.bits)
        mean_code = codes.mean((-3, -1), keepdim=True)
        deviations = codes - mean_code
        square = deviations.square().sum((-3, -1), keepdim=True)
        slope = (deviations * (grouped - mean)).sum((-3, -1), keepdim=True) / square.where(square > 0, 1)
        scale = slope.where(square > 0, scale)
        scale, low = coding.store(scale, mean - scale * mean_code)
    return coding.coded(grouped, scale, low)


def rounded_by_queries(
    grouped: torch.Tensor, exact: torch.Tensor, coding: Coding, covariance: torch.Tensor
) -> torch.Tensor:
    """As the product does it with `--kv-rounding queries`."""
    order, feedback = query_factors(covariance)
    rounding = QueryRounding(torch.from_numpy(order).long(), torch.from_numpy(feedback))
    scale, low = coding.best_range(grouped, exact)
    return rounding(grouped[None], scale[None], low[None], coding.bits)[0] * scale + low


def ranges_by_queries(
    grouped: torch.Tensor, exact: torch.Tensor, coding: Coding, covariance: torch.Tensor
) -> torch.Tensor:
    """Of each channel in turn the range with the least error of q . k beside the errors of others; nearest codes."""
    scales, lows = coding.all_ranges(grouped, exact)
    choices = torch.stack([coding.coded(grouped, *pair) for pair in zip(scales, lows, strict=True)])
    return _descended(grouped, exact, coding, covariance, lambda channel, target: choices[..., channel, :])


def codes_by_queries(
    grouped: torch.Tensor, exact: torch.Tensor, coding: Coding, covariance: torch.Tensor
) -> torch.Tensor:
    """Of each channel in turn the range and the codes with the least error of q . k beside the errors of all others."""
    scales, lows = coding.all_ranges(grouped, exact)
    return _descended(
        grouped,
        exact,
        coding,
        covariance,
        lambda channel, target: coding.coded(target, scales[..., channel, :], lows[..., channel, :]),
    )


def _descended(
    grouped: torch.Tensor,
    exact: torch.Tensor,
    coding: Coding,
    covariance: torch.Tensor,
    choices: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Coordinate descent over the channels of keys [heads, tiles, rows, tokens, head_dim, 1].

    Args:
        choices: of a channel and what it should be, so that the errors of other channels are made up for, what it can
            be in each range, [ranges, heads, tiles, rows, tokens, 1].
    """
    damping = DAMPING * covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    metric = covariance + damping * torch.eye(covariance.shape[-1])
    shares = (metric / metric.diagonal(dim1=-2, dim2=-1)[..., None]).float()
    restored = least_squares(grouped, exact, coding, covariance)
    errors = restored - grouped
    for channel in [*range(grouped.shape[-2])] * SWEEPS:
        shift = (errors[..., 0] @ shares[:, channel, :, None][:, None, None]) - errors[..., channel, :]
        target = grouped[..., channel, :] - shift
        possible = choices(channel, target)
        best = (possible - target).square().sum(-2, keepdim=True).argmin(0, keepdim=True)
        restored[..., channel, :] = possible.gather(0, best.expand_as(possible[:1]))[0]
        errors[..., channel, :] = restored[..., channel, :] - grouped[..., channel, :]
    return restored


def by_key_norm(keys: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Ranks tokens [kv_heads, tokens] by how small their keys [kv_heads, tokens, head_dim] are."""
    return -keys.float().norm(dim=-1)


def by_attention(keys: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Ranks tokens [kv_heads, tokens] by the attention that they get in the prompt."""
    return received


@dataclass(frozen=True)
class Cache:
    """A quantized cache of full heads, values rotated.

    Attributes:
        sinks: tokens of a head that are exact.
        rank: which ones, by keys and attention; None for the first ones, which lie in no tile. Others also keep their
            place in a tile, whose ranges they do not widen.
        clip: whether ranges are clipped; None for what the product does at this width.
        key_fit, value_fit: how codes are found.
    """

    bits: int
    keys: Groups = Groups(TILE, 1)
    values: Groups = Groups(1, None)
    sinks: int = Quantization(4).sink
    rank: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    clip: bool | None = None
    key_fit: Fit = field(default=least_squares)
    value_fit: Fit = field(default=least_squares)

    def tiles(self, tokens: int) -> slice:
        """The tokens of a prompt that tiles hold."""
        first = self.sinks if self.rank is None else 0
        return slice(first, first + TILE * Quantization(4).tiles(tokens - first))

    def bits_a_value(self, head_dim: int, tokens: int = PROMPT) -> float:
        """Bits of sinks and tiles of a prompt: codes, scales, minima and positions, for each of their values."""
        tiles = self.tiles(tokens)
        tile_bits = self.bits + (self.keys.bits(head_dim) + self.values.bits(head_dim)) / 2
        exact_bits = DTYPE_BITS if self.rank is None else DTYPE_BITS + POSITION_BITS / (2 * head_dim)
        return ((tiles.stop - tiles.start) * tile_bits + self.sinks * exact_bits) / tiles.stop

    def restored(
        self, keys: torch.Tensor, values: torch.Tensor, received: torch.Tensor, covariance: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the cache gives back of a prompt's keys and values [1, kv_heads, tokens, head_dim].

        Args:
            received: attention that the tokens get, [kv_heads, tokens].
            covariance: of the queries, float64 [kv_heads, head_dim, head_dim].
        """
        tiles, heads = self.tiles(keys.shape[2]), keys.shape[1]
        exact = torch.zeros(heads, tiles.stop, dtype=torch.bool)
        if self.rank is not None:
            ranks = self.rank(keys[0, :, : tiles.stop], received[:, : tiles.stop])
            exact.scatter_(1, ranks.topk(self.sinks).indices, True)
        exact = exact[:, tiles, None]
        new_keys = self._coded(keys[0, :, tiles], exact, self.keys, self.key_fit, covariance)
        turned_values = rotated(values, heads)[0, :, tiles]
        new_values = self._coded(turned_values, exact, self.values, self.value_fit, covariance)
        new_values = rotated(new_values[None], heads, back=True)[0]
        restored = keys.clone(), values.clone()
        for states, new in zip(restored, (new_keys, new_values), strict=True):
            states[0, :, tiles] = new.where(~exact, states[0, :, tiles])
        return restored

    def _coded(
        self, states: torch.Tensor, exact: torch.Tensor, groups: Groups, fit: Fit, covariance: torch.Tensor
    ) -> torch.Tensor:
        clip = Quantization(self.bits).clip if self.clip is None else self.clip
        coding = Coding(self.bits, CLIPPED if clip else 1, groups.format, states.dtype)
        grouped = groups.of(states.float().unflatten(1, (-1, TILE)))
        grouped_exact = Groups(groups.tokens, 1).of(exact.unflatten(1, (-1, TILE)))
        return fit(grouped, grouped_exact, coding, covariance).reshape(states.shape).to(states.dtype)


def changes(bits: int) -> dict[str, Cache]:
    """The caches that are compared at a width, by what they change."""
    base = Cache(bits)
    return {
        BASE: base,
        "8-bit scales": replace(base, keys=Groups(TILE, 1, EIGHT), values=Groups(1, None, EIGHT)),
        "groups of 32, 8-bit scales": replace(base, keys=Groups(32, 1, EIGHT), values=Groups(1, 32, EIGHT)),
        "keys in groups of 64": replace(base, keys=Groups(64, 1)),
        "keys in groups of 64, 8-bit scales": replace(base, keys=Groups(64, 1, EIGHT)),
        "keys in groups of 64, 8-bit scales, 16-bit minima": replace(base, keys=Groups(64, 1, MIXED)),
        "keys in groups of 64, all scales in 8 bits": replace(
            base, keys=Groups(64, 1, EIGHT), values=Groups(1, None, EIGHT)
        ),
        "16 sinks": replace(base, sinks=16),
        "32 sinks": replace(base, sinks=32),
        "4 smallest keys": replace(base, rank=by_key_norm),
        "4 tokens of most attention": replace(base, rank=by_attention),
        "regression from the full range": replace(base, clip=False, key_fit=regressed, value_fit=regressed),
        "regression from the best range": replace(base, key_fit=regressed, value_fit=regressed),
        "key ranges by the queries": replace(base, clip=True, key_fit=ranges_by_queries),
        "keys rounded by the queries": replace(base, key_fit=rounded_by_queries),
        "key ranges and codes by the queries": replace(base, clip=True, key_fit=codes_by_queries),
    }


def compared(names: Sequence[str]) -> dict[str, Cache]:
    """The caches with some changes and those without any, by bits and name."""
    caches = {f"{bits} {name}": changes(bits)[name] for bits in WIDTHS for name in [BASE, *names]}
    return {f"5 {BASE}": Cache(5)} | caches


@torch.inference_mode()
def measure(
    measured: MeasuredModel,
    tokens: torch.Tensor,
    covariances: Mapping[int, torch.Tensor],
    caches: Mapping[str, Cache],
) -> Iterator[tuple[str, float]]:
    """Names of caches, and the divergence with each of what follows a prompt, [1, PROMPT + NEW]."""
    reading = read(measured, tokens[:, :PROMPT])

    def following(cache: Any) -> torch.Tensor:
        return measured.model(tokens[:, PROMPT:], past_key_values=cache).logits[0].float().log_softmax(-1)

    exact = following(copy.deepcopy(reading.cache))
    for name, cache in caches.items():
        changed = copy.deepcopy(reading.cache)
        for layer, received in reading.received.items():
            states = changed.layers[layer]
            states.keys, states.values = cache.restored(states.keys, states.values, received, covariances[layer])
        yield name, next_token_divergence(following(changed), exact).item()


def at_equal_bytes(report: Mapping[str, Any], window: Mapping[str, float], bits: float) -> float:
    """The divergence of `kivi` at some bits a value in one passage, on lines between the logarithms at its widths."""
    known = sorted((report["bits"][f"{width} {BASE}"], math.log(window[f"{width} {BASE}"])) for width in (5, *WIDTHS))
    place = max(min(sum(bits > width for width, _ in known), len(known) - 1), 1)
    (low, log_low), (high, log_high) = known[place - 1 : place + 1]
    return math.exp(log_low + (log_high - log_low) * (bits - low) / (high - low))


def ratios(report: Mapping[str, Any], name: str) -> tuple[float, int]:
    """Divergence of a cache as a share of that of `kivi` at equal bytes, and in how many passages it is lower."""
    measured = report["windows"].values()
    pairs = [(window[name], at_equal_bytes(report, window, report["bits"][name])) for window in measured]
    return fmean(ours for ours, _ in pairs) / fmean(base for _, base in pairs), sum(ours < base for ours, base in pairs)


def cell(report: Mapping[str, Any], name: str) -> str:
    """How far a cache's divergence is from that of `kivi` at equal bytes, bold where it is lower in every passage."""
    if name not in report["bits"]:
        return "–"
    ratio, lower = ratios(report, name)
    change = f"{ratio - 1:+.0%}"
    return f"**{change}**" if lower == len(report["windows"]) else change


def table(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown, for models in turn: added bits a value, and divergences beside `kivi` at equal bytes.

    In the row of `kivi`, bits a value beyond the width, and divergences.
    """
    lines = [f"| change | bits a value | {' | '.join(f'{bits} bits' for bits in WIDTHS)} |"]
    lines.append("|---" * (2 + len(WIDTHS)) + "|")

    def add_row(title: str, bits_cells: Sequence[str], *cells: Sequence[str]) -> None:
        lines.append(f"| {title} | {' | '.join(' / '.join(each) for each in (bits_cells, *cells))} |")

    divergences = [
        [f"{fmean(window[f'{bits} {BASE}'] for window in report['windows'].values()):.4f}" for report in reports]
        for bits in WIDTHS
    ]
    base_bits = [report["bits"][f"2 {BASE}"] for report in reports]
    add_row(f"`{BASE}`", [f"+{bits - 2:.2f}" for bits in base_bits], *divergences)
    measured = {name for report in reports for name in report["bits"]}
    for name in [name for name in changes(2) if name != BASE and f"2 {name}" in measured]:
        changed_bits = [report["bits"].get(f"2 {name}") for report in reports]
        added = [
            "–" if changed is None else f"{changed - base:+.2f}"
            for changed, base in zip(changed_bits, base_bits, strict=True)
        ]
        add_row(name, added, *([cell(report, f"{bits} {name}") for report in reports] for bits in WIDTHS))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock checkpoint with a tokenizer")
    parser.add_argument("calibration", type=Path, metavar="TEXT", help="UTF-8 text that queries are measured on")
    parser.add_argument("text", type=Path, metavar="TEXT", help="UTF-8 text that is read")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--passages", type=int, default=2, help="of the calibration text")
    parser.add_argument("--windows", type=int, default=3, help="of the text that is read")
    parser.add_argument("--changes", nargs="+", default=[*changes(2)][1:], choices=[*changes(2)][1:], metavar="NAME")
    parser.add_argument("--json", type=Path, required=True, help="where the results are written")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    measured = MeasuredModel.load(str(arguments.model), dtype=arguments.dtype, device="cpu")
    caches = compared(arguments.changes)
    report: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {"windows": {}}
    report |= {"model": arguments.model.name, "calibration": arguments.calibration.name, "text": arguments.text.name}
    report |= {"dtype": arguments.dtype, "prompt": PROMPT, "new": NEW, "passages": arguments.passages}
    report.setdefault("bits", {})
    report["bits"] |= {name: cache.bits_a_value(measured.dimensions.head_dim) for name, cache in caches.items()}
    passages = windows(arguments.calibration, measured.tokenizer, PROMPT, arguments.passages).values()
    read_passages = [read(measured, passage).covariances for passage in passages]
    covariances = {
        layer: torch.stack([passage[layer] for passage in read_passages]).sum(0) for layer in measured.full_layers()
    }
    for start, tokens in windows(arguments.text, measured.tokenizer, PROMPT + NEW, arguments.windows).items():
        window = report["windows"].setdefault(str(start), {})
        missing = {name: cache for name, cache in caches.items() if name not in window}
        if not missing:
            continue
        for name, divergence in measure(measured, tokens, covariances, missing):
            window[name] = divergence
            record_versions(report, str(start))
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
            console.stderr.print(f"{start}: {name}: {divergence:.5f}")
    console.stdout.print("\n".join(table([report])))


if __name__ == "__main__":
    main()
