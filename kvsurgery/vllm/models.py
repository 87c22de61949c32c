"""The model classes that vLLM asks for: a subclass of each stock class, made on first use."""

from __future__ import annotations

import importlib
from typing import Any

from kvsurgery.vllm.architectures import stock


def __getattr__(architecture: str) -> type:
    if architecture not in stock:
        raise AttributeError(f"no model class for {architecture}")
    module, name = stock[architecture]
    base = getattr(importlib.import_module(module), name)
    globals()[architecture] = model_class = _served_class(base)
    return model_class


def _served_class(base: type) -> type:
    """A subclass of a stock model class that splits the attention of converted checkpoints."""

    class Served(base):  # ty: ignore[unsupported-base]  # which is known at run time
        def __init__(self, *, vllm_config: Any, prefix: str = "", **options: Any) -> None:
            from kvsurgery.vllm.limits import checked_layout, is_converted

            converted = is_converted(vllm_config)
            if converted:
                from kvsurgery.vllm.split import split_attention

                layout = checked_layout(vllm_config)
            super().__init__(vllm_config=vllm_config, prefix=prefix, **options)
            if converted:
                split_attention(self, layout, vllm_config)

    Served.__name__ = Served.__qualname__ = base.__name__
    Served.__doc__, Served.__module__ = base.__doc__, __name__
    return Served
