"""Which attention backends full and streaming heads use on this platform."""

from __future__ import annotations

from vllm.platforms import current_platform


def full_backend(stock: type) -> type:
    """The stock backend, as one that takes caches whose outermost axis is the block."""
    if not current_platform.is_cpu():
        return stock
    from kvsurgery.vllm.cpu import FullBackend

    return FullBackend


def streaming_backend() -> type:
    """The backend of heads with sinks and a window."""
    if current_platform.is_cpu():
        from kvsurgery.vllm.cpu import StreamingBackend
    else:
        from kvsurgery.vllm.triton import StreamingBackend

    return StreamingBackend
