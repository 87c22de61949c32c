"""Which quantized caches vLLM's pages hold; the others are stored in vLLM's own dtype, which is no wrong answer.

`holds_codes` needs no vLLM."""

from __future__ import annotations

from typing import Any

from kvsurgery.templates.kv_layout import KVLayout


def in_pages(layout: KVLayout, vllm_config: Any) -> bool:
    """Whether the quantized tiles of a checkpoint lie in vLLM's pages, with these settings."""
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    return (
        holds_codes(layout)
        and current_platform.is_cpu()
        and not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        and vllm_config.cache_config.cache_dtype in ("auto", str(model.dtype).removeprefix("torch."))
    )


def holds_codes(layout: KVLayout) -> bool:
    """Whether pages hold the tiles of these heads.

    They do where all quantized heads have the same residual, and full and budgeted ones the same sinks; widths may
    differ. A window of the model's own is not quantized there. Where the model attends in chunks, vLLM's prefix cache
    needs blocks of equally many tokens for all layers.
    """
    unpacked = {
        (layer.quantization.sink, layer.quantization.residual)
        for layer in layout.layers
        if layer.quantization and layer.quantized_heads
    }
    return len(unpacked) == 1 and not any(
        layer.native and (layer.quantized_window or layer.chunked) for layer in layout.layers
    )
