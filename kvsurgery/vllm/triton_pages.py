"""What kernels of our own over vLLM's pages share, on a GPU."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.kv_cache_layout import KVCacheLayout


class PagesImpl(TritonAttentionImpl):
    """Attention that stores new tokens itself."""

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether attention may be written in 8 bits."""
        return False


class PagesBackend(TritonAttentionBackend):
    """Reads and writes blocks of any size.

    It keeps the stock backend's name, which vLLM looks up in an enum."""

    impl: type[PagesImpl]
    builder: type[AttentionMetadataBuilder[Any]]
    forward_includes_kv_cache_update = True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Blocks outermost in memory, where pages of different sizes lie unpadded."""
        return (KVCacheLayout.BLNHC, KVCacheLayout.BLHNC)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def get_impl_cls(cls) -> type[PagesImpl]:
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder[Any]]:
        return cls.builder
