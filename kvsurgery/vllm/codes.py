"""Attention of heads whose older tokens lie in quantized tiles: a cache of tiles, and one of newest tokens."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.attention import Attention

from kvsurgery.templates.kv_codes import Rounding
from kvsurgery.templates.kv_layout import Quantization
from kvsurgery.vllm.backends import codes_backend, newest_backend
from kvsurgery.vllm.groups import Place
from kvsurgery.vllm.spec import CodesSpec, SinkWindowSpec
from kvsurgery.vllm.tiles import Tiling


class NewestAttention(Attention):
    """Only a cache: of the first tokens of heads, and of the newest ones, in the model's dtype."""

    def __init__(self, *args: Any, tiling: Tiling, place: Place, **options: Any) -> None:
        super().__init__(*args, attn_backend=newest_backend(), **options)
        self.tiling, self.place = tiling, place

    def get_kv_cache_spec(self, vllm_config: Any) -> SinkWindowSpec:
        """Sinks and a window."""
        return SinkWindowSpec.of(self.place, self.num_kv_heads, self.head_size, self.kv_cache_torch_dtype)


class CodesAttention(Attention):
    """Attention over tiles, and over the tokens of `newest`.

    `tiles` is the place of those of streaming heads; None: they are in the cache group of full heads.
    """

    def __init__(
        self,
        *args: Any,
        quantization: Quantization,
        tiling: Tiling,
        round_keys: Rounding,
        newest: Place,
        tiles: Place | None = None,
        prefix: str,
        **options: Any,
    ) -> None:
        super().__init__(*args, attn_backend=codes_backend(), prefix=prefix, **options)
        self.quantization, self.tiling, self.round_keys, self.tiles = quantization, tiling, round_keys, tiles
        self.newest = NewestAttention(*args, tiling=tiling, place=newest, prefix=f"{prefix}.newest", **options)

    def get_kv_cache_spec(self, vllm_config: Any) -> CodesSpec | SinkWindowSpec:
        """The cache of the tiles."""
        size = self.quantization.tile_bytes(self.head_size, self.kv_cache_torch_dtype.itemsize)
        if self.tiles is None:
            return CodesSpec.of(self.num_kv_heads, self.head_size, size)
        return SinkWindowSpec.of_tiles(self.tiles, self.num_kv_heads, self.head_size, size)
