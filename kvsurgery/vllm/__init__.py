"""vLLM plugin: serves converted checkpoints with one KV cache for full heads and another for streaming heads.

vLLM calls `register` through the entry point `vllm.general_plugins`; before that, nothing of vLLM is imported.
"""

from __future__ import annotations

import logging

from kvsurgery.vllm.architectures import ARCHITECTURES, DENSE, stock

OLDEST, NEWEST = (0, 30), (0, 33)  # vLLM's cache planner and cache managers as this plugin extends them


def register() -> None:
    """Register a model class and a check of its config for each architecture, which serve other checkpoints as before.

    On a version of vLLM that is not supported, nothing is registered: every checkpoint is served by the stock class.
    """
    import vllm

    if not supports(vllm.__version__):
        logging.getLogger("vllm.kvsurgery").warning(
            "kvsurgery: vLLM %s is not supported (%s to %s are): converted checkpoints are served with the original's "
            "tokens and a KV cache of the original's size",
            vllm.__version__,
            *(".".join(map(str, version)) for version in (OLDEST, NEWEST)),
        )
        return
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    from kvsurgery.vllm.limits import config_class

    for architecture in (*ARCHITECTURES, *DENSE):
        checked = MODELS_CONFIG_MAP.get(architecture, VerifyAndUpdateConfig)
        if not checked.__module__.startswith(__name__):
            MODELS_CONFIG_MAP[architecture] = config_class(checked)
    for architecture in ARCHITECTURES:
        registered = vllm.ModelRegistry.models.get(architecture)
        module = getattr(registered, "module_name", __name__)
        if not module.startswith(__name__):
            stock[architecture] = module, registered.class_name
            vllm.ModelRegistry.register_model(architecture, f"{__name__}.models:{architecture}")


def supports(version: str) -> bool:
    """Whether the plugin supports a version of vLLM, such as "0.32.0+cpu"."""
    major, minor, *_ = [*version.split("."), "", ""]
    return major.isdecimal() and minor.isdecimal() and OLDEST <= (int(major), int(minor)) <= NEWEST
