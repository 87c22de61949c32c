"""Sections of gpu.py: errors of kernels, decode against the read bandwidth, prefill beside other attention.

One layer of Llama-3-8B's shape in bfloat16: 8 KV heads of 128, four query heads each.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import LlamaConfig

from benchmarks.gpu_report import GIB, Report, free_memory, milliseconds
from benchmarks.synthetic import RECENT, SINK, fill, occupy, quantization, section
from kvsurgery.templates.kv_cache import KVLayerCache, KVSurgeryCache
from kvsurgery.templates.kv_layout import TILE
from kvsurgery.templates.kv_softmax import Scoring, Span, Window
from kvsurgery.templates.kv_storage import HeadTable

try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None

HEADS, GROUP, HEAD_DIM = 8, 4, 128
BITS = 16, 8, 4, 2
SHORT = 1500  # tokens; ten tiles and some that are not packed
ROTATION = GIB  # of caches that are read in turns; far more than the L2
TARGETS = {16: 0.8, 8: 0.7, 4: 0.6}  # shares of the read bandwidth
AT = 2**17  # tokens where they hold
TOLERANCE = 3e-2  # of bfloat16: the norm of the error over that of the result, in which random values nearly cancel
ITEM = 2  # bytes


def read_bandwidth() -> float:
    """Bytes a second that a reduction of 4 GiB reads."""
    states = torch.randn(GIB, device="cuda")
    states.sum()
    return states.nbytes / milliseconds(states.sum, 20) * 1e3


def bytes_to_read(batch: int, tokens: int, full_heads: int, bits: int) -> int:
    """The least that a decode step of a layer reads of its cache."""
    streaming = (HEADS - full_heads) * min(tokens, SINK + RECENT) * 2 * HEAD_DIM * ITEM
    tiles, tile = 0, 0
    if quantization_settings := quantization(bits):
        tiles, tile = (
            quantization_settings.tiles(tokens - quantization_settings.sink),
            quantization_settings.tile_bytes(HEAD_DIM, ITEM),
        )
    return batch * (streaming + full_heads * (tiles * tile + (tokens - tiles * TILE) * 2 * HEAD_DIM * ITEM))


def empty_layers(layers: int, full_heads: int, bits: int, tokens: int) -> tuple[KVSurgeryCache, LlamaConfig]:
    """A cache of this many layers, and the config that it belongs to."""
    config = LlamaConfig(num_hidden_layers=layers, num_key_value_heads=HEADS, head_dim=HEAD_DIM)
    config.kv_surgery = section(layers, HEADS, full_heads, HEAD_DIM)
    return KVSurgeryCache(config, tokens, quantization(bits)), config


def arguments(layer: KVLayerCache) -> tuple[HeadTable, torch.Tensor, Scoring]:
    """What the decode kernel takes of a layer's cache, after the query."""
    columns = torch.tensor([[layer.seen]], dtype=torch.int32, device=layer.device)
    return layer.storage.table(), columns, Scoring(HEAD_DIM**-0.5)


def decode_error(
    query: torch.Tensor, table: HeadTable, columns: torch.Tensor, scoring: Scoring, programs: int | None = None
) -> float:
    """Error of the kernel in the last row, whose memory lies farthest, against torch in float32."""
    from kvsurgery.templates.kv_decode import decode
    from tests.helpers.kernel_reference import decode_reference

    out = decode(query, table, columns, scoring, programs)[-1:].float()
    last_row = table._replace(
        keys=table.keys[-1:].float(), values=table.values[-1:].float(), skipped=table.skipped[-1:]
    )
    if table.tiles is not None and table.packed is not None:
        last_row = last_row._replace(tiles=table.tiles.map(lambda part: part[-1:]), packed=table.packed[-1:])
    exact = decode_reference(query[-1:].float(), last_row, columns, scoring)
    return ((out - exact).norm() / exact.norm()).item()


@functools.cache
def check_quantized(batch: int, full_heads: int, bits: int, device: str = "cuda", **options) -> float:
    """Error over a short cache whose tiles are quantized from random states."""
    cache, config = empty_layers(1, full_heads, bits, SHORT)
    fill(cache, config, batch, SHORT, torch.bfloat16, device)
    query = torch.randn(batch, HEADS * GROUP, HEAD_DIM, device=device, dtype=torch.bfloat16)
    return decode_error(query, *arguments(cache.layers[0]), **options)


def decode_row(batch: int, tokens: int, full_heads: int, bits: int, bandwidth: float) -> dict:
    """A decode step of a layer of which `full_heads` KV heads keep all tokens, by a CUDA graph over several caches."""
    from kvsurgery.templates.kv_decode import decode

    bytes_read = bytes_to_read(batch, tokens, full_heads, bits)
    copies = math.ceil(ROTATION / bytes_read)
    cache, _ = empty_layers(copies, full_heads, bits, tokens)
    occupy(cache, torch.empty(batch, HEADS, 0, HEAD_DIM, device="cuda", dtype=torch.bfloat16), tokens)
    query = torch.randn(batch, HEADS * GROUP, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    calls = [arguments(layer) for layer in cache.layers]
    errors = [decode_error(query, *calls[-1]), check_quantized(batch, full_heads, bits)]
    assert all(error < TOLERANCE for error in errors), f"wrong by {errors}"  # NaN is, too
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            decode(query, *call)
    graph.replay()
    seconds = milliseconds(graph.replay, 20) / copies * 1e-3
    return {
        "bits": bits,
        "batch": batch,
        "tokens": tokens,
        "full": full_heads / HEADS,
        "MB": bytes_read / 1e6,
        "floor us": bytes_read / bandwidth * 1e6,
        "us": seconds * 1e6,
        "share": bytes_read / bandwidth / seconds,
        "target": TARGETS.get(bits) if tokens == AT else None,
        "error": max(errors),
    }


def decode_section(report: Report, lengths: list[int], batches: list[int]) -> None:
    """Shares of the read bandwidth; batch 1 comes first, all widths of it."""
    bandwidth = report.facts["read_bandwidth"]
    columns = {"bits": "4", "batch": "5", "tokens": "9,", "full": "5.0%", "MB": "9,.1f", "floor us": "9.1f"}
    columns |= {"us": "9.1f", "share": "6.1%", "target": "6.0%", "error": "7.0e"}
    report.table("kernels", columns)
    for batch in batches:
        for bits in BITS:
            for tokens in lengths:
                for full_heads in (HEADS // 4, HEADS // 2, HEADS):
                    name = f"{bits} bits, batch {batch}, {tokens:,} tokens, {full_heads / HEADS:.0%} full"
                    free_memory()
                    # beside the caches: float32 of one row, for the check
                    row = 8 * HEADS * tokens * HEAD_DIM * (2 if bits == 16 else 1)
                    needed_bytes = max(ROTATION, bytes_to_read(batch, tokens, full_heads, bits)) + row
                    if needed_bytes > 0.95 * torch.cuda.mem_get_info()[0]:
                        report.skip(name, f"needs {needed_bytes / 1e9:.0f} GB")
                    elif report.allows(name, 3):
                        with report.attempt(name):
                            report.add(**decode_row(batch, tokens, full_heads, bits, bandwidth))


def chunk(past: int, tokens: int, streaming: bool, device: str = "cuda") -> tuple:
    """What the prefill kernel takes of a chunk after a past, of one kind of head, with random states."""
    visible_past = min(past, RECENT - 1) if streaming else past
    query = torch.randn(1, HEADS * GROUP, tokens, HEAD_DIM, device=device, dtype=torch.bfloat16)
    keys, values = torch.randn(2, 1, HEADS, visible_past + tokens, HEAD_DIM, device=device, dtype=torch.bfloat16)
    span, sinks = Span(past), None
    if streaming and past:
        span = span._replace(first=past - visible_past)
        sinks = torch.randn_like(keys[:, :, :SINK]), torch.randn_like(keys[:, :, :SINK])
    window = Window(SINK, RECENT, sinks) if streaming else None
    return query, keys, values, span, Scoring(HEAD_DIM**-0.5), window


def check_streaming(past: int, device: str = "cuda") -> float:
    """Error of a short chunk over streaming heads; what nobody sees of its past is zero in the reference."""
    from kvsurgery.templates.kv_prefill import prefill
    from tests.helpers.kernel_reference import prefill_reference

    *states, span, scoring, window = chunk(past, 400, True, device)
    out = prefill(*states, span, scoring, window).float()
    query, *keys_and_values = (part.float() for part in states)
    if past:
        for index, sinks in enumerate(window.sinks):
            padded = torch.zeros(1, HEADS, past + 400, HEAD_DIM, device=device)
            padded[:, :, :SINK], padded[:, :, span.first :] = sinks, keys_and_values[index]
            keys_and_values[index] = padded
    exact = prefill_reference(query, *keys_and_values, span, scoring, window)
    return ((out - exact).norm() / exact.norm()).item()


def correctness_section(report: Report, device: str = "cuda") -> None:
    """Errors of short caches and prompts in bfloat16 against torch in float32; 32 rows have a launch that plans."""
    report.table("correctness", {"kernel": "<8", "bits": "4", "batch": "5", "past": "6,", "error": "7.0e"})
    for bits in BITS:
        for batch in (1, 8, 32):
            with report.attempt(f"decode, {bits} bits, batch {batch}"):
                row = report.add(
                    kernel="decode", bits=bits, batch=batch, error=check_quantized(batch, HEADS // 2, bits, device)
                )
                assert row["error"] < TOLERANCE, f"wrong by {row['error']:.1e}"
    for past in (0, 1000):
        with report.attempt(f"prefill after {past:,} tokens"):
            row = report.add(kernel="prefill", past=past, error=check_streaming(past, device))
            assert row["error"] < TOLERANCE, f"wrong by {row['error']:.1e}"


def visible_pairs(past: int, tokens: int, streaming: bool) -> int:
    """Pairs of a query and a key that it sees, of one query head."""
    if not streaming:
        return tokens * past + tokens * (tokens + 1) // 2
    return sum(min(position + 1, SINK + RECENT) for position in range(past, past + tokens))


def prefill_row(past: int, tokens: int, streaming: bool) -> dict:
    """A chunk over one kind of head, 8 KV heads of it; full heads beside torch's attention and flash attention."""
    from kvsurgery.templates.kv_prefill import prefill

    query, keys, values, *settings = chunk(past, tokens, streaming)
    baselines, repeats = {}, 5
    out = prefill(query, keys, values, *settings)
    elapsed_ms = milliseconds(lambda: prefill(query, keys, values, *settings), repeats)
    if streaming:
        error = check_streaming(1000 if past else 0)
    else:
        bias = causal_lower_right(tokens, past + tokens)

        def sdpa() -> torch.Tensor:
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, enable_gqa=True)

        reference = sdpa()
        error = ((out - reference).float().norm() / reference.float().norm()).item()
        baselines["SDPA ms"] = milliseconds(sdpa, repeats)
        if flash_attn_func is not None:
            states = [part.transpose(1, 2) for part in (query, keys, values)]
            flash = functools.partial(flash_attn_func, *states, causal=True)
            flash()
            baselines["flash ms"] = milliseconds(flash, repeats)
    assert error < TOLERANCE, f"wrong by {error:.1e}"
    operations = 4 * HEAD_DIM * HEADS * GROUP * visible_pairs(past, tokens, streaming)
    return {
        "kind": "streaming" if streaming else "full",
        "past": past,
        "tokens": tokens,
        "ms": elapsed_ms,
        "TFLOP/s": operations / elapsed_ms / 1e9,
        **baselines,
        "error": error,
    }


def prefill_section(report: Report) -> None:
    """A chunk of 32k tokens at the start and after 96k."""
    columns = {"kind": "9", "past": "7,", "tokens": "7,", "ms": "8.2f", "TFLOP/s": "7.0f", "SDPA ms": "8.2f"}
    report.table("prefill", columns | {"flash ms": "8.2f", "error": "7.0e"})
    for past in (0, 3 * 2**15):
        for streaming in (False, True):
            name = f"{'streaming' if streaming else 'full'} heads after {past:,} tokens"
            if report.allows(name, 8):
                with report.attempt(name):
                    report.add(**prefill_row(past, 2**15, streaming))
