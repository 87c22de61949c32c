"""The Triton kernels on a GPU: their share of the read bandwidth in decode, and prefill beside torch's own attention.

    python benchmarks/gpu.py

Decode: one layer of Llama-3-8B's shape (8 KV heads of 128, group 4) in bfloat16, streaming heads of 64 + 256 tokens. A
CUDA graph goes through copies of the layer's cache that are together far larger than the L2; times are medians over
replays, a layer. Prefill: the last chunk of a prompt. Needs torch and triton; without a CUDA device it exits with 2.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

HEADS, GROUP, HEAD_DIM, SINK, RECENT = 8, 4, 128, 64, 256
GIB = 1 << 30


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Median time of some work on the device."""
    work()
    spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in spans:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in spans)


def read_bandwidth() -> float:
    """Bytes a second that a reduction of 4 GiB reads."""
    states = torch.randn(GIB, device="cuda")
    return states.nbytes / milliseconds(states.sum, 20) * 1e3


def decode(batch: int, length: int, full: int, bandwidth: float) -> dict | None:
    """One decode step of a layer of which `full` KV heads keep `length` tokens; None where memory does not suffice."""
    from templates import kv_decode, kv_kernels

    slots = [length] * full + [min(length, SINK + RECENT)] * (HEADS - full)
    read = 2 * batch * sum(slots) * HEAD_DIM * 2
    copies = max(2, -(-GIB // read))
    if read * copies > 0.8 * torch.cuda.mem_get_info()[0]:
        return None
    states = torch.empty(copies, 2, batch, sum(slots), HEAD_DIM, device="cuda", dtype=torch.bfloat16).normal_()
    query = torch.randn(batch, HEADS * GROUP, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    kinds = [(kv_kernels.EVERY, 1, 1)] * full + [(SINK, RECENT, RECENT)] * (HEADS - full)
    sinks, rings, recents = torch.tensor(kinds, dtype=torch.int32, device="cuda").T.contiguous()
    offsets = torch.tensor(slots, device="cuda").cumsum(0) - torch.tensor(slots, device="cuda")
    layout = offsets, torch.full((batch, HEADS), length, device="cuda"), sinks, rings, recents

    out = kv_decode.decode(query, *states[0], *layout)
    exact = kv_decode.decode_reference(
        query[:1].float(), *states[0, :, :1].float(), offsets, layout[1][:1], *layout[2:]
    )
    error = ((out[:1] - exact).norm() / exact.norm()).item()
    assert error < 1e-2, f"wrong by {error:.1e}"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for keys, values in states:
            kv_decode.decode(query, keys, values, *layout)
    taken = milliseconds(graph.replay, 20) / copies * 1e-3
    return {
        "kernel": "decode",
        "batch": batch,
        "tokens": length,
        "full": full / HEADS,
        "megabytes": read / 1e6,
        "floor_us": read / bandwidth * 1e6,
        "us": taken * 1e6,
        "share": read / bandwidth / taken,
    }


def prefill(past: int, tokens: int, kind: str) -> dict:
    """A chunk of a prompt over one kind of head, 8 KV heads of it; full heads beside torch's attention."""
    from templates import kv_prefill

    before = past if kind == "full" else min(past, RECENT - 1)
    query = torch.randn(1, HEADS * GROUP, tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    keys, values = torch.randn(2, 1, HEADS, before + tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    held = {}
    if kind == "streaming":
        held = {"sink": SINK, "recent": RECENT}
        if past:
            held |= {"first": past - before, "sinks": tuple(torch.randn_like(keys[:, :, :SINK]) for _ in range(2))}
    taken = milliseconds(lambda: kv_prefill.prefill(query, keys, values, past, **held), 5)
    row = {"kernel": "prefill", "kind": kind, "past": past, "tokens": tokens, "ms": taken}
    if kind == "full":
        bias = causal_lower_right(tokens, past + tokens)
        row["sdpa_ms"] = milliseconds(
            lambda: F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, enable_gqa=True), 5
        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**13, 2**15, 2**17, 2**19, 2**20])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure", file=sys.stderr)
        sys.exit(2)
    import triton

    torch.manual_seed(0)
    device, bandwidth = torch.cuda.get_device_name(), read_bandwidth()
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(f"{device}, {versions}, read bandwidth {bandwidth / 1e12:.2f} TB/s")
    print(f"{'batch':>5} {'tokens':>8} {'full':>5} {'MB':>8} {'floor us':>9} {'us':>9} {'share':>6}")
    rows = []
    for batch in arguments.batches:
        for length in arguments.lengths:
            for full in (HEADS // 4, HEADS // 2, HEADS):
                row = decode(batch, length, full, bandwidth)
                if row is None:
                    print(f"{batch:>5} {length:>8} {full / HEADS:5.0%} does not fit")
                    continue
                rows.append(row)
                sizes = f"{row['megabytes']:8.1f} {row['floor_us']:9.1f} {row['us']:9.1f}"
                print(f"{batch:>5} {length:>8} {row['full']:5.0%} {sizes} {row['share']:6.1%}", flush=True)
    for past, tokens in ((0, 2**15), (3 * 2**15, 2**15)):
        for kind in ("full", "streaming"):
            row = prefill(past, tokens, kind)
            rows.append(row)
            other = f", torch's attention {row['sdpa_ms']:.2f} ms" if kind == "full" else ""
            print(f"prefill of {tokens} after {past}, {kind}: {row['ms']:.2f} ms{other}", flush=True)

    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"gpu-{device.lower().replace(' ', '-')}"
    report = {"device": device, "versions": versions, "read_bandwidth": bandwidth, "rows": rows}
    path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    with open(path.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row))
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {path}.json and .csv")


if __name__ == "__main__":
    main()
