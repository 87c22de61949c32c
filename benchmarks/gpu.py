"""On a GPU: kernels against the read bandwidth, whole models against stock ones, and how many tokens fit in 80 GB.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --sections models capacity

Needs torch, triton and transformers, one GPU of 80 GB or more, and about nine minutes. Sections, each with a time
of its own; what does not fit in time or memory is skipped, and the results say so:

  - correctness: errors of the decode and the prefill kernels in bfloat16 against torch in float32.
  - kernels: decode at 131,072 tokens. One layer of Llama-3-8B's shape, 16 to 2 bits, streaming heads of 64 + 256
    tokens. A CUDA graph goes through copies of the cache that are together far larger than the L2; medians over
    replays, a layer. Every configuration is compared with torch in float32 first.
  - generate: 64 more tokens by `generate` after 100k whose cache is filled, with the CUDA graph that users get, without
    it, and with the stock model. The graph's capture is part of the time.
  - graphs: how long the capture of a decode step takes, and after how many steps it has paid, by the model's depth.
  - models: Llama-3-8B and Llama-2-7B with random weights and filled caches, in bfloat16. `ms` is the time of a decode
    step as users get it, from a CUDA graph where one pays, `eager ms` as Python drives it, `kernels ms` what its
    kernels take, `graph ms` a replay. Baselines are the stock model, which copies its cache at every token, and ours
    with every head full. Comparisons with stock have to fit in 80 GB: the paper's factor of 1.5 at 500k tokens is
    shown beside 400k, since stock's cache of 65.5 GB and 16 GB of weights do not fit at 500k. The column `target at`
    says so. Peaks of memory are those of the steps, weights included.
  - capacity: one sequence beside 8-bit weights, with a 4-bit cache and half of the heads full.
  - prefill: a chunk of a prompt over one kind of head, beside SDPA and flash-attn.
  - prompts: a prompt of 320k tokens in chunks, by Llama-3-8B. Chunks that there is no time for are interpolated, and
    the table says how many were measured.
  - lengths: the same as kernels at the other lengths.

Results are written to JSON and CSV after every section. Without a CUDA device it exits with 2; `--device cpu` runs the
sections generate, models and prompts with a tiny model, to check this script: its times say nothing.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
# sections in the order in which they run: what has to be seen first, comes first
SECONDS = {
    "correctness": 40,
    "kernels": 60,
    "generate": 60,
    "graphs": 30,
    "models": 80,
    "capacity": 40,
    "prefill": 20,
    "prompts": 160,
    "lengths": 70,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=SECONDS, default=[*SECONDS], metavar="SECTION")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**13, 2**15, 2**17, 2**19, 2**20])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--slower", type=float, default=1.0, help="factor of every section's time")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    start = time.monotonic()
    on_gpu = arguments.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("no CUDA device: nothing to measure", file=sys.stderr)
        sys.exit(2)
    from benchmarks import gpu_capacity, gpu_kernels, gpu_models
    from benchmarks.gpu_report import Report

    gc.freeze()  # what is imported need not be searched every time that memory is freed
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    device = torch.cuda.get_device_name() if on_gpu else "tiny models on a CPU"
    facts: dict[str, str | float] = {"device": device}
    facts |= {"torch": torch.__version__, "transformers": transformers.__version__}
    if on_gpu:
        import triton

        facts |= {"triton": triton.__version__, "read_bandwidth": gpu_kernels.read_bandwidth()}
    report = Report(arguments.out / f"gpu-{device.lower().replace(' ', '-')}", facts)
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    first_lengths = [tokens for tokens in arguments.lengths if tokens == gpu_kernels.AT]
    other_lengths = [tokens for tokens in arguments.lengths if tokens != gpu_kernels.AT]
    measurements = {
        "correctness": lambda: gpu_kernels.correctness_section(report),
        "kernels": lambda: gpu_kernels.decode_section(report, first_lengths, arguments.batches),
        "generate": lambda: gpu_models.generate_section(report, arguments.device),
        "graphs": lambda: gpu_models.graphs_section(report),
        "models": lambda: gpu_models.decode_sections(report, arguments.device),
        "capacity": lambda: gpu_capacity.section(report),
        "prefill": lambda: gpu_kernels.prefill_section(report),
        "prompts": lambda: gpu_models.prompt_sections(report, arguments.device),
        "lengths": lambda: gpu_kernels.decode_section(report, other_lengths, arguments.batches),
    }
    report.deadline = start
    for name in [name for name in SECONDS if name in arguments.sections]:
        report.section = name
        report.deadline += SECONDS[name] * arguments.slower  # what one leaves, the next ones have
        if not on_gpu and name not in ("generate", "models", "prompts"):
            report.skip(name, "needs a CUDA device")
        else:
            with report.attempt(name):
                measurements[name]()
        report.write()
    print(f"\nwrote {report.path}.json and .csv after {time.monotonic() - start:.0f} s")
    sys.exit(report.failed)


if __name__ == "__main__":
    main()
