"""What budgets keep of recall: the bundled model at HeadKV's published settings, with even budgets, and with all of it.

    python benchmarks/budgets.py --json budgets.json
    python benchmarks/budgets.py --sizes 12 16 20 24    # where recall breaks

Every KV head has a budget. "KV per head" counts the observation window, as HeadKV does: at 64, heads keep 56 tokens of
the prompt on average and its last 8 on top. A larger beta spreads them more evenly; "even" leaves the scores out.

All rows answer the same queries. The prompt ends in the query, so heads choose with the query in sight, and the first
word of the answer still comes from the whole prompt. KV bytes are what the cache of one prompt and its answer
allocates. A head keeps no more than the prompt: what its budget has beyond that is lost, not handed to other heads, so
uneven budgets take less than even ones once the best heads have everything.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from kvsurgery.api import convert
from kvsurgery.display import console
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Budgeted, Recipe

HERE = Path(__file__).resolve().parents[1] / "examples" / "tiny-recall"
# as published with HeadKV (Fu et al. 2024)
SIZES = (64, 128, 256, 512, 1024)
BETAS = (1.005, 1.01, 1.1, 1.2, 1.5, 2.0, 5.0, 10.0)
SEED = 1234


def load_task() -> ModuleType:
    """The module that lies beside the model."""
    spec = importlib.util.spec_from_file_location("tiny_recall_task", HERE / "task.py")
    assert spec is not None  # as the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def setting(profile: HeadProfile, size: int | None, beta: float | None) -> tuple[HeadProfile, Recipe]:
    """A profile and a recipe of `size` tokens per head (None: full heads), spread by score (beta None: evenly)."""
    if size is None:
        return profile, Recipe.of(sparsity=0.0)
    if beta is None:  # equal scores make every beta the same
        profile, beta = replace(profile, scores=np.ones_like(profile.scores)), max(BETAS)
    return profile, Recipe.of(rest="budgeted", budget=size - Budgeted().window, beta=beta)


@torch.inference_mode()
def measure(profile: HeadProfile, recipe: Recipe, task: ModuleType, questions: Any) -> tuple[float, int]:
    """Convert and load; returns exact-match recall and the bytes of the cache of one prompt and its answer."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "tiny-recall-budgets"  # one name: transformers imports the emitted code once
        convert(HERE / "model", folder, profile, recipe)
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto").eval()
    prompt = questions.tokens[:1]
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=task.VALUES,
        min_new_tokens=task.VALUES,
        do_sample=False,
        pad_token_id=task.PAD,
        return_dict_in_generate=True,
    )
    return task.exact_match(model, questions), output.past_key_values.allocated_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="KV per head, window included")
    parser.add_argument("--betas", type=float, nargs="+", default=BETAS)
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    if min(arguments.sizes) <= Budgeted().window or min(arguments.betas) <= 1:
        parser.error(f"--sizes must be above {Budgeted().window}, the window, and --betas above 1")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)

    task, profile = load_task(), HeadProfile.load(HERE / "profile.safetensors")
    questions = task.prompts(seed=SEED, count=arguments.queries, length=arguments.length)
    settings = [(None, None), *((size, beta) for size in arguments.sizes for beta in (*arguments.betas, None))]
    results, rows, full_bytes = [], [], 0
    for size, beta in settings:
        start = time.perf_counter()
        recall, cache_bytes = measure(*setting(profile, size, beta), task, questions)
        full_bytes = full_bytes or cache_bytes  # the full cache comes first
        names = ("all", "-") if size is None else (f"{size:,}", "even" if beta is None else f"{beta:g}")
        rows.append((*names, f"{recall:.1%}", console.size(cache_bytes), f"{cache_bytes / full_bytes:.1%}"))
        facts = {"kv_per_head": size, "beta": beta, "exact_match": recall}
        results.append({**facts, "kv_bytes": cache_bytes, "of_full": cache_bytes / full_bytes})
        progress = f"{len(rows)} of {len(settings)}, {time.perf_counter() - start:.1f} s"
        console.stderr.print(f"{progress}: KV per head {names[0]}, beta {names[1]}: {recall:.1%}")
    title = f"Recall of facts in {arguments.length:,} tokens ({arguments.queries} queries), KV cache of one prompt"
    console.stdout.print(console.table(title, ["KV per head", "beta", "exact match", "KV bytes", "of full"], rows, 0))
    if arguments.json:
        facts = {"queries": arguments.queries, "length": arguments.length, "seed": SEED, "window": Budgeted().window}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        arguments.json.write_text(json.dumps({**facts, **versions, "settings": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
