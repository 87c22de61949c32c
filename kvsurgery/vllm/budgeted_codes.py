"""Budgeted heads whose older tokens lie in quantized tiles: a cache of tiles, and one of newest tokens."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.attention import Attention

from kvsurgery.templates.kv_codes import Rounding
from kvsurgery.templates.kv_layout import TILE, Quantization
from kvsurgery.vllm.backends import budgeted_codes_backend, budgeted_newest_backend
from kvsurgery.vllm.budgeted import Bin
from kvsurgery.vllm.budgeted_attention import BudgetedAttention
from kvsurgery.vllm.budgeted_spec import BudgetedNewestSpec, BudgetedSpec
from kvsurgery.vllm.tiles import Tiling


class BudgetedNewest(Attention):
    """Only a cache: of a prompt that is read; then of the first tokens of a head, and of its newest ones.

    Of the prompt the head has `kept` tokens.
    """

    def __init__(self, *args: Any, kept: int, tiling: Tiling, bin: Bin, size: int, **options: Any) -> None:
        super().__init__(*args, attn_backend=budgeted_newest_backend(), **options)
        self.kept, self.tiling, self.bin, self.size = kept, tiling, bin, size

    def get_kv_cache_spec(self, vllm_config: Any) -> BudgetedNewestSpec:
        """Sinks and a window, in blocks of `size` tokens."""
        return BudgetedNewestSpec.of(self.size, self.head_size, self.kv_cache_torch_dtype, self.tiling, self.bin)


class BudgetedCodes(BudgetedAttention):
    """Attention of a budgeted head over its tiles, and over the tokens of `newest`."""

    def __init__(
        self,
        *args: Any,
        quantization: Quantization,
        round_keys: Rounding,
        bin: Bin,
        size: int,
        prefix: str,
        **options: Any,
    ) -> None:
        super().__init__(*args, bin=bin, size=TILE, prefix=prefix, **options)
        self.quantization, self.tiling, self.round_keys = quantization, Tiling.of(quantization), round_keys
        unused = {"budget", "selection"}
        self.newest = BudgetedNewest(
            *args,
            kept=self.kept,
            tiling=self.tiling,
            bin=bin,
            size=size,
            prefix=f"{prefix}.newest",
            **{name: option for name, option in options.items() if name not in unused},
        )

    def backend(self) -> type:
        """The backend of the tiles on this platform."""
        return budgeted_codes_backend()

    def get_kv_cache_spec(self, vllm_config: Any) -> BudgetedSpec:
        """The cache of the tiles."""
        size = self.quantization.tile_bytes(self.head_size, self.kv_cache_torch_dtype.itemsize)
        return BudgetedSpec.of_tiles(self.head_size, size, self.bin)
