"""The classes that vLLM asks for: of each architecture a check of its config, and a model, made on first use."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from kvsurgery.vllm.architectures import DENSE, stock


def __getattr__(architecture: str) -> type:
    if architecture not in stock:
        raise AttributeError(f"no model class for {architecture}")
    module, name = stock[architecture]
    base = getattr(importlib.import_module(module), name)
    globals()[architecture] = model_class = (
        _dense_class(base, architecture) if architecture in DENSE else _served_class(base)
    )
    return model_class


def checking_first(architectures: Iterable[str]) -> None:
    """Let vLLM refuse converted checkpoints of these architectures while it reads its own options."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    for architecture in architectures:
        base = MODELS_CONFIG_MAP.get(architecture, VerifyAndUpdateConfig)
        if base.__module__ != __name__:
            MODELS_CONFIG_MAP[architecture] = _named_as(base, _checked_class(base))


def _checked_class(base: Any) -> type:
    """A subclass of a stock check of vLLM's config that refuses first what cannot be served."""

    class Checked(base):
        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            if _is_converted(vllm_config):
                from kvsurgery.vllm.limits import check

                check(vllm_config)
            base.verify_and_update_config(vllm_config)

    return Checked


def _served_class(base: type) -> type:
    """A subclass of a stock model class that splits the attention of converted checkpoints."""

    class Served(base):  # ty: ignore[unsupported-base]  # which is known at run time
        def __init__(self, *, vllm_config: Any, prefix: str = "", **options: Any) -> None:
            converted = _is_converted(vllm_config)
            if converted:
                from kvsurgery.vllm.limits import checked_layout
                from kvsurgery.vllm.split import split_attention

                layout = checked_layout(vllm_config)
            super().__init__(vllm_config=vllm_config, prefix=prefix, **options)
            if converted:
                split_attention(self, layout, vllm_config)

    return _named_as(base, Served)


def _dense_class(base: type, architecture: str) -> type:
    """A subclass of a stock model class that says of converted checkpoints that their cache is the original's."""

    class Dense(base):  # ty: ignore[unsupported-base]  # which is known at run time
        def __init__(self, *, vllm_config: Any, prefix: str = "", **options: Any) -> None:
            if _is_converted(vllm_config):
                from vllm.logger import init_logger

                init_logger("vllm.kvsurgery").warning_once(
                    "kvsurgery: the plugin does not know %s: this checkpoint is served with the original's tokens and "
                    "a KV cache of the original's size; it saves memory in transformers, with trust_remote_code=True",
                    architecture,
                )
            super().__init__(vllm_config=vllm_config, prefix=prefix, **options)

    return _named_as(base, Dense)


def _is_converted(vllm_config: Any) -> bool:
    return getattr(vllm_config.model_config.hf_config, "kv_surgery", None) is not None


def _named_as(base: type, subclass: type) -> type:
    """The subclass under the name and with the docstring of its base."""
    subclass.__name__ = subclass.__qualname__ = base.__name__
    subclass.__doc__, subclass.__module__ = base.__doc__, __name__
    return subclass
