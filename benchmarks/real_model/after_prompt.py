"""What follows a prompt, read through caches that stay constant and through caches that grow, on a real language model.

    python benchmarks/real_model/after_prompt.py MODEL --profile er.safetensors --text book.txt --json after_prompt.json

Every head has a budget. Budgets that hold are compared with streaming heads that keep as many tokens, with budgets
that keep all that follows the prompt, and with the original. Pieces of a text are read as prompt and answer; perplexity
is that of the answer, in quarters. KV bytes are those that the cache has allocated in the end; those of a converted
model must be what its config predicts after every quarter. With `--steps`, the last tokens of each quarter come one by
one, and take so much CPU time. A run continues from its JSON file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging
from trials import Window, windows

from kvsurgery import __version__, console
from kvsurgery.conversion.convert import convert
from kvsurgery.conversion.prepared import PreparedConversion
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe
from kvsurgery.templates.kv_layout import KVLayout
from kvsurgery.text.haystack import Haystack

ORIGINAL, SINK, QUARTERS = "original", 4, 4


def recipes(budget: int, hold: int) -> dict[str, Recipe]:
    """The conversions that are compared, by name."""
    kept = budget + Recipe().window + hold
    return {
        f"budgets of {budget} that hold, blocks of {hold}": Recipe(rest="budgeted", budget=budget, hold=hold),
        f"all heads streaming, {SINK} + {kept - SINK}": Recipe(
            sparsity=1.0, rest="streaming", sink=SINK, recent=kept - SINK
        ),
        f"budgets of {budget}, all that follows is kept": Recipe(rest="budgeted", budget=budget),
    }


@torch.inference_mode()
def measure(model: PreTrainedModel, pieces: list[Window], steps: int) -> dict[str, Any]:
    """Perplexity by quarter of what follows the prompts, the bytes of the cache in the end, and, of the last `steps`
    tokens of each quarter, milliseconds of CPU time for one."""
    losses, clocks = [], []
    for piece in pieces:
        tokens, logits = torch.from_numpy(piece.tokens)[None], []
        cache = model(tokens[:, : piece.prompt], logits_to_keep=1).past_key_values
        if hasattr(cache, "reserve"):  # as `generate` does: otherwise it grows by a quarter whenever it is full
            cache.reserve(tokens.shape[1] - 1)
        for quarter in tokens[:, piece.prompt : -1].chunk(QUARTERS, 1):
            whole, *ones = quarter.split([quarter.shape[1] - steps, *[1] * steps], 1)
            logits.append(model(whole, past_key_values=cache).logits)
            begin = time.process_time()
            logits += [model(one, past_key_values=cache).logits for one in ones]
            clocks.append(time.process_time() - begin)
            held = held_bytes(model, cache, piece.prompt)
        logs = torch.cat(logits, 1)[0].float().log_softmax(-1)
        losses.append(-logs.gather(1, tokens[0, piece.prompt + 1 :, None])[:, 0])
    means = torch.stack(losses).mean(0).chunk(QUARTERS)
    found = {"perplexity": [part.mean().exp().item() for part in means], "kv_bytes": held}
    if steps:
        found["step_ms"] = (1e3 / steps * np.reshape(clocks, (-1, QUARTERS)).mean(0)).tolist()
    return found


def held_bytes(model: PreTrainedModel, cache: Any, prompt: int) -> int:
    """Bytes that a cache has allocated; those of a converted model are checked against its config."""
    if not hasattr(cache, "allocated_bytes"):
        return sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))
    held, after = cache.allocated_bytes(), cache.layers[0].capacity - prompt
    assert held == KVLayout.from_config(model.config).kv_bytes(1, prompt, after, itemsize=4)
    return held


def table(found: dict[str, Any]) -> list[str]:
    """Lines of a Markdown table."""
    quarter = found["settings"]["new"] // QUARTERS
    heads = [f"{(number + 1) * quarter:,}" for number in range(QUARTERS)]
    timed = [f"ms a token at {heads[0]}", f"at {heads[-1]}"] if found["settings"].get("steps") else []
    lines = [
        f"| {' | '.join(['cache', 'KV bytes', f'perplexity up to {heads[0]}', *heads[1:], *timed])} |",
        "|---" * (QUARTERS + 2 + len(timed)) + "|",
    ]
    for name, result in found["results"].items():
        cells = [f"{value:.1f}" for value in result["perplexity"]]
        cells += [f"{result['step_ms'][place]:.0f}" for place in (0, -1) if timed]
        lines.append(f"| {name} | {console.size(result['kv_bytes'])} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock checkpoint with a tokenizer")
    parser.add_argument("--profile", type=Path, required=True, help="head scores that budgets follow")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=1024, help="tokens that follow")
    parser.add_argument("--pieces", type=int, default=4, help="of the text")
    parser.add_argument("--budget", type=int, default=120)
    parser.add_argument("--hold", type=int, default=128)
    parser.add_argument("--steps", type=int, default=0, help="tokens at the end of each quarter that are timed")
    parser.add_argument("--json", type=Path, required=True, help="results; those there are not computed again")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    assert tokenizer is not None  # for the checker: transformers' types say it may be
    haystack = Haystack.read(str(arguments.text), tokenizer, arguments.prompt + arguments.new + 1)
    pieces = windows(haystack, arguments.prompt, arguments.new, arguments.pieces)
    settings = {name: getattr(arguments, name) for name in ("prompt", "new", "pieces", "budget", "hold", "steps")}
    versions = {"kvsurgery": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    settings["text"] = arguments.text.name
    found = json.loads(arguments.json.read_text()) if arguments.json.exists() else {"settings": settings}
    if found["settings"] != settings:
        parser.error(f"{arguments.json} was measured with {found['settings']}; give it another name")
    found["versions"], results = versions, found.setdefault("results", {})

    def keep(name: str, model: PreTrainedModel) -> None:
        results[name] = measure(model, pieces, arguments.steps)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        console.stderr.print(f"{name}: {results[name]}", markup=False)

    if ORIGINAL not in results:
        keep(ORIGINAL, AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval())
    profile = HeadProfile.load(arguments.profile)
    for name, recipe in recipes(arguments.budget, arguments.hold).items():
        if name in results:
            continue
        prepared = PreparedConversion.prepare(arguments.model, profile, recipe)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "converted"  # one name: transformers imports the emitted code once
            convert(prepared.checkpoint, prepared.plan, folder, prepared.files)
            model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
        keep(name, model)
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
