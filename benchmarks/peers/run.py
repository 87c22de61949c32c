"""Where kvsurgery stands: kvpress, transformers' QuantizedCache and StreamingLLM beside it, measured in one run.

    python benchmarks/peers/run.py --json peers.json --plot peers.png
    python benchmarks/peers/run.py --queries 20 --long-queries 5 --texts 1 --rounds 2    # a quick look
    python benchmarks/peers/run.py --show benchmarks/peers/results.json                  # what such a run has found

All run on the bundled model, with the head scores of its profile, in one process on one thread. kvpress takes no
current transformers, so that process has an environment of its own (`--venv`, made at the first run, about 2 GB; or
`--python`, one that is there). Converted models run in it as they are: they need transformers alone.

Bytes are of the storage of all tensors in a cache, counted alike for all, whatever a contender says. A press of kvpress
is told to keep the share of the cache that a converted model takes ("= duo, 2 full"), or its heads, and its compression
acts where kvpress' own pipeline has it act: once, after the prompt. Prompts end in a question; a second one comes after
its answer. Perplexity is of what follows a prompt, token by token through the cache, without the facts that are stated,
which are drawn at random. Times are medians of CPU time, contenders taking turns, beside the stock model's; of a model
this small they are mostly Python's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import venv
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.budgets import HERE, load_task
from benchmarks.peers.contenders import CONTENDERS, Contender
from benchmarks.peers.entries import place
from benchmarks.peers.report import plot, show
from benchmarks.peers.worker import AFTER
from kvsurgery import __version__
from kvsurgery.api import convert
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
SHORT, LONG = 1024, 3000  # tokens of a prompt
FOLLOWING = 600  # tokens of a story after its prompt
TIMED = 32  # tokens whose decoding is timed, each round
FACTS, STORY_FACTS, STORY_QUERIES = 4, 24, 36
SEED = 1234


def environment(folder: Path) -> Path:
    """Python of a venv that has what REQUIREMENTS says, made if it is not there or has something else."""
    python, installed = folder / "bin" / "python", folder / REQUIREMENTS.name
    if not installed.exists() or installed.read_bytes() != REQUIREMENTS.read_bytes():
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", REQUIREMENTS], check=True)
        installed.write_bytes(REQUIREMENTS.read_bytes())
    return python


def make(contender: Contender, profile: HeadProfile, folder: Path) -> None:
    """Convert the bundled model as a contender says."""
    options = dict(contender.options)
    bits = options.pop("bits", None)
    convert(HERE / "model", place(folder, contender), profile, Recipe.of(kv_bits=bits, **options))


def questions(task: ModuleType, seed: int, count: int, prompt: int) -> torch.Tensor:
    """[count, prompt + AFTER]: two different facts are asked for at the end; the prompt ends in the first question."""
    tokens, _ = task.texts(np.random.default_rng(seed), 2 * count, prompt + AFTER + 1, FACTS, 2, at_end=True)
    first_query, second_query = tokens[:, prompt - 1], tokens[:, prompt - 1 + task.FACT]
    return tokens[first_query != second_query][:count, :-1].contiguous()


def texts(task: ModuleType, queries: int, long_queries: int, stories: int) -> dict[str, torch.Tensor]:
    """What contenders read."""
    story, kind = task.texts(np.random.default_rng(SEED + 2), stories, SHORT + FOLLOWING, STORY_FACTS, STORY_QUERIES)
    long_prompts = questions(task, SEED + 1, long_queries, LONG)
    timed = task.filler(np.random.default_rng(SEED + 3), 1, LONG + TIMED)
    return {
        "short": questions(task, SEED, queries, SHORT),
        "long": long_prompts,
        "story": story,
        "counted": kind != task.GIVEN,
        "timed": torch.from_numpy(timed),
    }


def measure(python: Path, names: list[str], data: dict[str, torch.Tensor], rounds: int) -> dict[str, Any]:
    """Convert, and let the worker measure in its own environment."""
    profile = HeadProfile.load(HERE / "profile.safetensors")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for contender in CONTENDERS:
            if contender.kind == "converted" and contender.name in names:
                make(contender, profile, folder)
        save_file({**data, "scores": torch.tensor(profile.scores)}, folder / "texts.safetensors")
        job = {"contenders": names, "model": str(HERE / "model"), "rounds": rounds}
        (folder / "job.json").write_text(json.dumps(job))
        command = [python, "-m", "benchmarks.peers.worker", folder]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
        return json.loads((folder / "results.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queries", type=int, default=100, help=f"prompts of {SHORT:,} tokens, of two questions each")
    parser.add_argument("--long-queries", type=int, default=20, help=f"prompts of {LONG:,} tokens")
    parser.add_argument("--texts", type=int, default=2, help=f"of {SHORT + FOLLOWING:,} tokens, for perplexity")
    parser.add_argument("--rounds", type=int, default=5, help="of timing")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-peers", help="environment that is made and used")
    parser.add_argument("--python", type=Path, help="use this interpreter instead; what it lacks is left out")
    parser.add_argument("--only", nargs="+", default=[each.name for each in CONTENDERS], metavar="CONTENDER")
    parser.add_argument("--show", type=Path, metavar="JSON", help="measure nothing: show what an earlier run wrote")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--plot", type=Path, help="draw recall and perplexity against bytes")
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - {each.name for each in CONTENDERS}:
        parser.error(f"there is no contender {', '.join(sorted(unknown))}")
    if arguments.show:
        report = json.loads(arguments.show.read_text())
    else:
        settings = {name: getattr(arguments, name) for name in ("queries", "long_queries", "texts", "rounds")}
        data = texts(load_task(), arguments.queries, arguments.long_queries, arguments.texts)
        python = arguments.python or environment(arguments.venv)
        results = measure(python, arguments.only, data, arguments.rounds)
        sizes = {"tokens": SHORT, "long_tokens": LONG, "following_tokens": FOLLOWING, "seed": SEED}
        report = {**settings, **sizes, "kvsurgery": __version__, **results}
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot:
        plot(report, arguments.plot)


if __name__ == "__main__":
    main()
