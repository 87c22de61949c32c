"""Attention of heads whose older tokens lie in quantized tiles: a cache of tiles, and one of newest tokens."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.attention import Attention

from kvsurgery.templates.kv_codes import Rounding
from kvsurgery.templates.kv_layout import Quantization
from kvsurgery.vllm.cpu_codes import CodesBackend, NewestBackend
from kvsurgery.vllm.spec import CodesSpec, SinkWindowSpec
from kvsurgery.vllm.tiles import Tiling


class NewestAttention(Attention):
    """Only a cache: of the first tokens of heads, and of the newest ones, in the model's dtype.

    `window`, `bin` and `size` are the fields of its `SinkWindowSpec`, and its tokens of a block.
    """

    def __init__(self, *args: Any, tiling: Tiling, window: int, bin: int, size: int, **options: Any) -> None:
        super().__init__(*args, attn_backend=NewestBackend, **options)
        self.tiling, self.window, self.bin, self.size = tiling, window, bin, size

    def get_kv_cache_spec(self, vllm_config: Any) -> SinkWindowSpec:
        """Sinks and a window, in blocks of `size` tokens."""
        return SinkWindowSpec(
            block_size=self.size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.kv_cache_torch_dtype,
            sliding_window=self.window,
            sink=self.tiling.sink,
            bin=self.bin,
        )


class CodesAttention(Attention):
    """Attention over tiles, and over the tokens of `newest`."""

    def __init__(
        self,
        *args: Any,
        quantization: Quantization,
        round_keys: Rounding,
        window: int,
        bin: int,
        size: int,
        prefix: str,
        **options: Any,
    ) -> None:
        super().__init__(*args, attn_backend=CodesBackend, prefix=prefix, **options)
        self.quantization, self.tiling, self.round_keys = quantization, Tiling.of(quantization), round_keys
        self.newest = NewestAttention(
            *args, tiling=self.tiling, window=window, bin=bin, size=size, prefix=f"{prefix}.newest", **options
        )

    def get_kv_cache_spec(self, vllm_config: Any) -> CodesSpec:
        """The cache of the tiles."""
        return CodesSpec.of(self.num_kv_heads, self.head_size, self.kv_cache_torch_dtype.itemsize, self.quantization)
