"""Which attention backends full and streaming heads use on this platform."""

from __future__ import annotations

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
