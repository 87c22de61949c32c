"""Adapters such as LoRA: one that was trained on the original would change the wrong heads of a converted model.

An adapter names the model that it was trained on, and a converted model's config.json has a hash of its order of heads.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from .kv_layout import setting


def check_adapters(model: Any, adapters: Mapping[str, Any]) -> None:
    """Raise ValueError for an adapter of attention that was trained on heads in another order.

    Args:
        model: a converted model, in which the adapters are.
        adapters: by name, their configs, as peft leaves them in a model's `peft_config`.
    """
    order = (setting(model.config, "kv_surgery") or {}).get("order")
    known = vars(model).setdefault("_known_adapters", [])  # of which each forward would look at files again
    for name, adapter in adapters.items():
        if any(adapter is other for other in known):
            continue
        base, here = getattr(adapter, "base_model_name_or_path", None), model.config._name_or_path
        is_new = base is None and not getattr(adapter, "inference_mode", True)  # it is yet to be trained, here
        if not (is_new or base == here or order_of(base) == order) and in_attention(model.get_decoder(), name):
            raise ValueError(
                f"adapter {name!r} was trained on {base or 'a model that it does not name'}, whose heads have another "
                "order than this checkpoint's; merge it into the original (merge_and_unload() of peft) and convert the "
                "result, or, if it was trained on this checkpoint, set base_model_name_or_path in its "
                f"adapter_config.json to {here!r}"
            )
        known.append(adapter)


def order_of(name: str | None) -> str | None:
    """The hash of the order of heads in a folder or a cached model of the Hub; None: the original's, or not known."""
    if name is None:
        return None
    try:
        config, _ = PretrainedConfig.get_config_dict(name, local_files_only=True)
    except (OSError, ValueError):
        return None
    section = config.get("kv_surgery")
    return section.get("order") if isinstance(section, dict) else None


def in_attention(decoder: torch.nn.Module, adapter: str) -> bool:
    """Whether an adapter of this name has parameters in the decoder's attention."""
    return any(
        adapter in name.split(".")
        for layer in decoder.get_submodule("layers").children()
        for name, _ in getattr(layer, "self_attn", torch.nn.Module()).named_parameters()
    )
