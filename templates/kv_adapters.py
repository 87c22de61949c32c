"""Adapters and weights for heads in another order, such as the original's, which would meet the wrong heads here.

An adapter names the model that it was trained on, and a converted model's config.json has a hash of its order of heads.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from .kv_layout import setting

NO_HOTSWAP = (
    "adapters of this checkpoint are not swapped in place, where nothing says which order of heads they were trained "
    "with; load the adapter under a name of its own, or call delete_adapter() first"
)
ORDER = "kv_surgery_order"  # in the metadata of a state dict


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
                "order than this checkpoint's; convert it with kvsurgery convert --adapter, or, if it was converted or "
                f"trained for this checkpoint, set base_model_name_or_path in its adapter_config.json to {here!r}"
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
    attentions = (module for module in decoder.get_submodule("layers").modules() if hasattr(module, "kv_layout"))
    names = (name for attention in attentions for name, _ in attention.named_parameters())
    return any(adapter in name.split(".") for name in names)


def mark_order(order: str | None, decoder: torch.nn.Module, weights: dict, prefix: str, metadata: dict) -> None:
    """Note in the metadata of a decoder's state dict which order its heads have."""
    metadata[ORDER] = order


def check_order(
    order: str | None, decoder: torch.nn.Module, weights: dict, prefix: str, metadata: dict, *args: Any
) -> None:
    """Raise ValueError for the state dict of a model with heads in another order; without metadata, none is known."""
    if "version" in metadata and metadata.get(ORDER) != order:
        raise ValueError(
            "the state dict is of a model whose heads have another order than this checkpoint's; convert that model, "
            "or load it into the original's class"
        )
