"""What a converted model computes, in this process or in one of several that share it, as `torchrun` starts them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from kvsurgery.system.processes import Processes
from tests.helpers.families import tokens

BATCH, PROMPT, NEW = 2, 21, 3
# a model that processes share
WIDE = {"hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 2}
WIDE |= {"vocab_size": 104}
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
FIVE = VERSION >= (5, 0)
ODD = VERSION >= (5, 18) or not FIVE  # the others want a vocabulary that divides
MESHES = VERSION >= (5, 18)  # before, stock models do not load onto a mesh of tensors and data either
SAVED = ("llama", "mixtral", "budgets")
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "suppress_tokens": [0, 2]}


AUTO = {"tp_plan": "auto"}  # all that transformers 4 has, and 5 still takes


def load(folder: Path, options: Mapping[str, Any] | None = None, **sizes: int) -> torch.nn.Module:
    """The emitted model in float32, whole, or shared as options or these sizes of a `DistributedConfig` say."""
    options = dict(options or {})
    if sizes and FIVE:
        from transformers.distributed import DistributedConfig

        options = {"distributed_config": DistributedConfig(**sizes)}
    elif sizes:
        options = AUTO
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32, **options).eval()


@torch.no_grad()
def compute(model: torch.nn.Module, chunks: bool = True) -> dict[str, Any]:
    """Logits without a cache, in chunks, and of padded rows that generate; what other searches find; bytes."""
    ids = tokens(BATCH, PROMPT)
    mask = torch.ones_like(ids)
    mask[1, :8] = 0
    found = {"whole": model(ids, use_cache=False).logits}
    if chunks:
        cache, parts = None, []
        for part in ids.split([13, 1, 7], 1):
            output = model(part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
        found["chunks"] = torch.cat(parts, 1)
    options = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
    padded = model.generate(ids * mask, attention_mask=mask, **options)
    found |= {"greedy": padded.sequences, "logits": torch.stack(padded.logits)}
    found["bytes"] = padded.past_key_values.allocated_bytes()
    found["beams"] = model.generate(ids, **GREEDY, num_beams=2)
    torch.manual_seed(0)
    found["sampled"] = model.generate(ids, **{**GREEDY, "do_sample": True})
    return found


def work(processes: Processes, folders: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """What one of several processes computes of every checkpoint, or says against it."""
    found, world = {}, processes.world
    for name, folder in folders.items():
        model = load(folder, tp_size=world)
        if name == "one block":
            found[name] = [refusal(model, use_cache=use_cache) for use_cache in (False, True)]
            continue
        found[name] = compute(model)
        own = (weight.to_local() if hasattr(weight, "to_local") else weight for weight in model.state_dict().values())
        # tensors that are tied appear once
        found[name]["weights"] = sum({weight.data_ptr(): weight.nbytes for weight in own}.values())
        if name == "reform":
            found["long"] = refusal(model, long=True)
        if name in SAVED:
            model.save_pretrained(out / name)
    if FIVE and world == 2:
        found["pipeline"] = compute(load(folders["llama"], pp_size=2), chunks=False)
        found["tp_plan"] = compute(load(folders["llama"], AUTO), chunks=False)
    if MESHES and world == 4:
        found["tensors and data"] = compute(load(folders["uneven"], tp_size=2, fsdp_size=2))
    return found


def refusal(model: torch.nn.Module, long: bool = False, **options: Any) -> str:
    """What a model says against a forward, or a long prompt."""
    try:
        model.generate(tokens(1, 80), **GREEDY) if long else model(tokens(1, 5), **options)
    except RuntimeError as error:
        return str(error)
    return ""
