"""Emitted models made in memory, without a conversion: for tests of what runs them."""

from __future__ import annotations

import sys
from types import ModuleType

import torch
from transformers import PreTrainedModel

from kvsurgery.checkpoint.family import load_family
from kvsurgery.emit.modeling import Needs, modeling_code
from kvsurgery.templates.kv_cache import KVSurgeryCache
from tests.helpers.families import FAMILIES, stock


def emitted_class(name: str, reform: bool = False) -> type[PreTrainedModel]:
    """The emitted class that generates, of a family: its modeling file as a module beside the templates."""
    family = load_family(name)
    module = ModuleType(f"kvsurgery.templates.{family.module}")
    module.__package__ = "kvsurgery.templates"
    sys.modules[module.__name__] = module
    needs = Needs(reform, budgets=True, holds=True, quantized=True)
    exec(compile(modeling_code(family, needs), module.__name__, "exec"), vars(module))
    return getattr(module, family.classes["AutoModelForCausalLM"])


CLASSES = {family: emitted_class(family) for family in ("llama", "gemma2", "gpt_oss")}
# a scale for every element loses nothing
LOSSLESS = {
    "bits": 8,
    "scheme": "per-token",
    "group_size": 1,
    "residual": 5,
    "sink": 3,
    "rotate": "both",
    "clip": False,
}
# budgets of two layers; some keep more than a tile
BUDGETED = {
    "selection": {"window": 4, "kernel_size": 3, "pool": "max"},
    "layers": [{"blocks": [[1, 3]], "budgets": [4, 150, 140]}, {"blocks": [[0, 4]], "budgets": [9, 8, 0, 160]}],
}
# the same where they hold
HELD = {**BUDGETED, "selection": {**BUDGETED["selection"], "hold": 30}}
# windows of two tiles and a token
WINDOWS = {"layers": [{"blocks": [[1, 3]], "sink": 3, "recent": 257}, {"blocks": [[0, 4]], "sink": 0, "recent": 256}]}


def emitted(family: str, depth: int = 4, **section) -> torch.nn.Module:
    """A random model with none to three full heads a layer and the family's own sliding ones; `section` overrides."""
    own = {"layer_types": FAMILIES[family]["layer_types"][:depth]} if "layer_types" in FAMILIES[family] else {}
    original = stock(family, num_hidden_layers=depth, **own)
    config = original.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * depth
    config.kv_surgery = {
        "version": 2,
        "head_dim": getattr(config, "head_dim", None) or 6,
        "layers": [
            {"blocks": [[0, 4]], "sink": 0, "recent": 9, "native": True}
            if kind == "sliding_attention"
            else {"blocks": [[index, 4 - index]], "sink": 3, "recent": 5}
            for index, kind in enumerate(kinds)
        ],
        **section,
    }
    model = (emitted_class(family, reform=True) if "reform" in section else CLASSES[family])(config).eval()
    model.load_state_dict(original.state_dict())
    return model


def in_parts(
    model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, sizes: list[int], prompt: int = 0
) -> torch.Tensor:
    """Logits of tokens that come in parts of some sizes, through a cache; the prompt is the first part, or stated."""
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, parts, start = KVSurgeryCache(model.config), [], 0
    cache.expect_prompt(prompt)
    for size in sizes:
        stop = start + size
        with torch.no_grad():
            output = model(
                (ids * mask)[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=position_ids[:, start:stop],
                past_key_values=cache,
            )
        start = stop
        parts.append(output.logits)
    return torch.cat(parts, 1)
