"""Which quantized caches vLLM's pages hold; the others are stored in vLLM's own dtype, which is no wrong answer.

`holds_codes` and `kernels_read` need no vLLM."""

from __future__ import annotations

from typing import Any

from kvsurgery.templates.kv_layout import KVLayout


def in_pages(layout: KVLayout, vllm_config: Any) -> bool:
    """Whether the quantized tiles of a checkpoint lie in vLLM's pages, with these settings."""
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    return (
        holds_codes(layout)
        and (
            current_platform.is_cpu()
            or (kernels_read(layout) and not model.is_hybrid and have_kernels(current_platform, model.dtype))
        )
        and not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        and in_models_dtype(vllm_config)
    )


def in_models_dtype(vllm_config: Any) -> bool:
    """Whether vLLM's cache has the dtype of the model."""
    return vllm_config.cache_config.cache_dtype in ("auto", str(vllm_config.model_config.dtype).removeprefix("torch."))


def have_kernels(platform: Any, dtype: Any) -> bool:
    """Whether Triton kernels of our own attend to pages there: on GPUs of NVIDIA from Ampere on, in 16 bit."""
    return platform.is_cuda() and platform.has_device_capability(80) and dtype.itemsize == 2


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


def kernels_read(layout: KVLayout) -> bool:
    """Whether Triton kernels read all of these tiles.

    They read those of full and budgeted heads where no layer stores full heads otherwise, and where nothing but
    streaming or budgeted heads in the model's dtype is beside them.
    """
    return all(
        (layer.quantization or not layer.full)
        and not (layer.native or layer.quantized_window or layer.source is not None)
        for layer in layout.layers
    )
