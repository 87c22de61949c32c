"""Which attention backends the heads use on this platform."""

from __future__ import annotations

from types import ModuleType

from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend
from vllm.platforms import current_platform


def full_backend(attention: Attention) -> type:
    """The backend of a stock attention, as one that takes caches whose outermost axis is the block."""
    if not current_platform.is_cpu():
        return attention.attn_backend
    from kvsurgery.vllm.cpu import FullBackend

    if isinstance(attention, ChunkedLocalAttention):
        return create_chunked_local_attention_backend(FullBackend, attention.attention_chunk_size)
    return FullBackend


def streaming_backend() -> type:
    """The backend of heads with sinks and a window."""
    if current_platform.is_cpu():
        from kvsurgery.vllm.cpu import StreamingBackend
    else:
        from kvsurgery.vllm.triton import StreamingBackend

    return StreamingBackend


def budgeted_backend() -> type:
    """The backend of heads with a budget."""
    if current_platform.is_cpu():
        from kvsurgery.vllm.budgeted_cpu import BudgetedBackend
    else:
        from kvsurgery.vllm.triton_budgets import BudgetedBackend

    return BudgetedBackend


def codes_backend() -> type:
    """The backend of quantized tiles."""
    return _codes_module().CodesBackend


def newest_backend() -> type:
    """The backend of the tokens beside quantized tiles that are stored as they are."""
    return _codes_module().NewestBackend


def budgeted_codes_backend() -> type:
    """The backend of quantized tiles of heads with a budget."""
    return _budgeted_codes_module().BudgetedCodesBackend


def budgeted_newest_backend() -> type:
    """The backend of the tokens beside these tiles that are stored as they are."""
    return _budgeted_codes_module().BudgetedNewestBackend


def _codes_module() -> ModuleType:
    if current_platform.is_cpu():
        from kvsurgery.vllm import cpu_codes

        return cpu_codes
    from kvsurgery.vllm import triton_codes

    return triton_codes


def _budgeted_codes_module() -> ModuleType:
    if current_platform.is_cpu():
        from kvsurgery.vllm import cpu_budgeted_codes

        return cpu_budgeted_codes
    from kvsurgery.vllm import triton_budgeted_codes

    return triton_budgeted_codes
