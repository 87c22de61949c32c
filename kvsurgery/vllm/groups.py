"""How vLLM groups the heads of a model: all groups share blocks of one size, that of the widest group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import ClassVar

from kvsurgery.templates.kv_layout import TILE, KVLayout, LayerLayout


@dataclass(frozen=True)
class Bucket:
    """Layers that vLLM may put into one cache group: the widths of their heads, and whether these see a sliding window.

    The width of heads is the number of bytes of their part of a block.
    """

    widths: tuple[int, ...]
    sliding: bool

    @property
    def counts(self) -> Counter[int]:
        """How many layers have each width."""
        return Counter(self.widths)

    @property
    def repeats(self) -> int:
        """The number of layers of the most frequent width."""
        return max(self.counts.values())

    @property
    def balanced(self) -> bool:
        """Whether all widths have equally many layers, which vLLM takes for a repeating pattern and may split."""
        return len({*self.counts.values()}) == 1

    @property
    def mixed_pattern(self) -> bool:
        """Whether this is a pattern of several widths, whose repeats vLLM splits other buckets to."""
        return self.balanced and len(self.counts) > 1


@dataclass(frozen=True)
class Plan:
    """What vLLM's planner makes of buckets: the width of a block, and the number of cache groups of each bucket."""

    width: int
    groups: tuple[int, ...]

    @classmethod
    def of(cls, buckets: Sequence[Bucket]) -> Plan:
        """The plan that `get_kv_cache_groups` in vllm/v1/core/kv_cache_utils.py makes."""
        if len(buckets) == 1:
            return cls(sum(buckets[0].widths), (1,))
        if len({width for bucket in buckets for width in bucket.widths}) == 1:
            return cls._of_one_width(buckets)
        patterns = [bucket.repeats for bucket in buckets if bucket.mixed_pattern]
        if patterns:
            repeats = _common_size([bucket.repeats for bucket in buckets if bucket.balanced], max(patterns))
            groups = [-(-bucket.repeats // repeats) if bucket.balanced else 1 for bucket in buckets]
        else:
            # sliding windows are split to fit a block that others need, as if all layers were as wide as the first
            block_width = max(sum(bucket.counts if bucket.sliding else bucket.widths) for bucket in buckets)
            groups = [
                -(-len(bucket.widths) // (block_width // bucket.widths[0])) if bucket.sliding else 1
                for bucket in buckets
            ]
        width = max(
            sum(-(-layers // group_count) * width for width, layers in bucket.counts.items())
            for bucket, group_count in zip(buckets, groups, strict=True)
        )
        return cls(width, tuple(groups))

    @classmethod
    def _of_one_width(cls, buckets: Sequence[Bucket]) -> Plan:
        """The plan where all layers have one width: groups have equally many layers, and some are padded."""
        lengths = [len(bucket.widths) for bucket in buckets]
        size = max(lengths) if max(lengths) < 1.5 * min(lengths) else min(lengths)
        return cls(size * buckets[0].widths[0], tuple(-(-length // size) for length in lengths))


def _common_size(lengths: Sequence[int], minimum: int) -> int:
    """The size of groups, at least `minimum`, that pads these lengths least; of several, the largest."""
    return min(range(minimum, max(lengths) + 1), key=lambda size: (sum(-length % size for length in lengths), -size))


def _bins(widths: Sequence[int], limit: int, patterns: bool) -> list[int]:
    """The bin of each layer's heads, none of them wider than a limit.

    vLLM splits a group of windows as if all layers had as many heads as the first, and loses layers if they differ; so
    that many have to fit too.

    Args:
        widths: of the layers; those of width 0 get bin 0.
        patterns: whether a bin may end as a pattern of several widths.
    """
    bins: list[tuple[int, ...]] = []

    def fits(bin_widths: tuple[int, ...], width: int) -> bool:
        grown_bin = (*bin_widths, width)
        within_limit = sum(grown_bin) <= limit and len(grown_bin) * grown_bin[0] <= limit
        return within_limit and (patterns or not Bucket(grown_bin, sliding=True).mixed_pattern)

    indices = []
    for width in widths:
        if not width:
            indices.append(0)
            continue
        index = next((index for index, bin_widths in enumerate(bins) if fits(bin_widths, width)), len(bins))
        bins[index : index + 1] = [(*bins[index], width) if index < len(bins) else (width,)]
        indices.append(index)
    return indices


def _by_bin(widths: Sequence[int], bins: Sequence[int], sliding: bool) -> list[Bucket]:
    """The layers of each bin, without those of width 0."""
    widths_by_bin: dict[int, list[int]] = {}
    for width, index in zip(widths, bins, strict=True):
        if width:
            widths_by_bin.setdefault(index, []).append(width)
    return [Bucket(tuple(layers), sliding) for layers in widths_by_bin.values()]


@dataclass(frozen=True)
class Groups:
    """The cache groups of a model: those of all full heads, bins of streaming heads, and the model's own windows.

    If the tiles of full heads are `quantized`, alike in all layers, there are also bins of their newest tokens, and a
    block of full heads is a tile.

    Attributes:
        tokens: of a block that is not of tiles, where no tiles are.
        itemsize: bytes of an element that is not quantized.
    """

    others: ClassVar = "streaming"  # the heads that are not full

    layout: KVLayout
    tokens: int
    itemsize: int = 2
    quantized: bool = False

    @cached_property
    def size(self) -> int:
        """Tokens of a block that is not of tiles.

        Where there are tiles, its pages are no larger than theirs: then groups are as wide as they have heads.
        """
        if not self.quantized:
            return self.tokens
        return 1 << (self._tile_bytes // (2 * self.layout.head_dim * self.itemsize)).bit_length() - 1

    @property
    def _tile_bytes(self) -> int:
        """Bytes of a quantized tile of a full head."""
        assert self.layout.quantization is not None  # as there are tiles
        return self.layout.quantization.tile_bytes(self.layout.head_dim, self.itemsize)

    def _pages(self, heads: str, native: bool = False) -> list[int]:
        """Bytes of a block of the full, streaming or all heads of each layer that has a window of the model's own, or
        none."""
        token_bytes = 2 * self.itemsize * self.size
        return [
            getattr(layer, heads) * (layer.head_dim or self.layout.head_dim) * token_bytes
            if layer.native == native
            else 0
            for layer in self.layout.layers
        ]

    @cached_property
    def _full(self) -> list[int]:
        """Bytes of a block of the full heads of each layer that has no window of the model's own."""
        if not self.quantized:
            return self._pages("full")
        return [layer.full * self._tile_bytes for layer in self.layout.layers]

    @cached_property
    def _newest(self) -> list[int]:
        """Bytes of a block of the newest tokens of the full heads of each layer."""
        return self._pages("full") if self.quantized else [0] * len(self.layout.layers)

    @property
    def _limit(self) -> int:
        """Bytes of a block that all full heads of the model fit, and the other heads of each layer."""
        others = (*self._newest, *self._pages("streaming"), *self._pages("heads", native=True))
        return max(sum(self._full), *others)

    @cached_property
    def _bins(self) -> tuple[list[int], list[int]]:
        """The bins of each layer's streaming heads, and of its newest tokens.

        Of two choices the one with the smaller cache: bins that are patterns can make vLLM split the full heads, and
        bins that are none can be more.
        """
        streaming, newest = self._pages("streaming"), self._newest
        choices = [
            (_bins(streaming, self._limit, patterns), _bins(newest, self._limit, patterns))
            for patterns in (True, False)
        ]
        return min(choices, key=lambda bins: self._cost(*bins))

    @property
    def streaming(self) -> list[int]:
        """The bin of each layer's streaming heads."""
        return self._bins[0]

    @property
    def newest(self) -> list[int]:
        """The bin of the newest tokens of each layer's full heads, none of which is a bin of streaming heads."""
        return [bin + len(self.layout.layers) for bin in self._bins[1]]

    @cached_property
    def native(self) -> list[int]:
        """The bin of each layer with a window of the model's own. vLLM splits windows by itself, and no chunks."""
        pages = self._pages("heads", native=True)
        if any(layer.chunked for layer in self.layout.layers):
            return _bins(pages, self._limit, patterns=True)
        return [0] * len(pages)

    def _cost(self, streaming: list[int], newest: list[int]) -> tuple[int, int]:
        """What a token and what a window take with these bins of streaming heads and newest tokens."""
        plan, (full, *windows, _) = self._planned(streaming, newest)
        return full * plan.width, sum(windows) * plan.width

    def _planned(self, streaming: list[int], newest: list[int]) -> tuple[Plan, tuple[int, int, int, int]]:
        """vLLM's plan for bins of streaming heads and newest tokens, and its numbers of groups of full heads, streaming
        heads, newest tokens, and windows of the model."""
        chunked = any(layer.chunked for layer in self.layout.layers)
        kinds = (
            _by_bin(self._full, [0] * len(self._full), sliding=False),
            _by_bin(self._pages("streaming"), streaming, sliding=True),
            _by_bin(self._newest, newest, sliding=True),
            _by_bin(self._pages("heads", native=True), self.native, sliding=not chunked),
        )
        plan = Plan.of([bucket for buckets in kinds for bucket in buckets])
        numbers = iter(plan.groups)
        full, streaming_groups, newest_groups, native = (sum(next(numbers) for _ in buckets) for buckets in kinds)
        return plan, (full, streaming_groups, newest_groups, native)

    @property
    def planned(self) -> tuple[Plan, tuple[int, int, int, int]]:
        """vLLM's plan, and its numbers of groups.

        They are those of full heads, streaming heads, newest tokens, and windows of the model.
        """
        return self._planned(*self._bins)

    def window(self, layer: LayerLayout) -> int:
        """Tokens of the window that vLLM keeps for a layer's streaming heads: `recent`, or one or two more.

        vLLM puts windows of one length in one group, and of that group the manager may be the stock one, which frees
        sinks; so no window is as long as one of the model's own. Those of Cohere 2 have one token more in vLLM.
        """
        native_windows = {layer.recent for layer in self.layout.layers if layer.native}
        return next(tokens for tokens in count(layer.recent) if not {tokens, tokens - 1} & native_windows)

    def blocks(self, tokens: int, in_flight: int = 1) -> int:
        """Blocks that a sequence of `tokens` holds while `in_flight` of them are computed."""
        _, (full, streaming, newest, native) = self.planned
        blocks = full * -(-tokens // (TILE if self.quantized else self.size))
        windows = []
        if layer := next((layer for layer in self.layout.layers if not layer.native and layer.streaming), None):
            windows.append((streaming, layer.sink, self.window(layer)))
        if self.quantized and (quantization := self.layout.quantization):
            windows.append((newest, quantization.sink, quantization.residual + TILE))
        if layer := next((layer for layer in self.layout.layers if layer.native), None):
            # chunks begin with a block
            windows.append((native, 0, layer.recent - self.size * layer.chunked))
        return blocks + sum(
            groups * _window_blocks(tokens, self.size, sink, recent, in_flight) for groups, sink, recent in windows
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.planned[0].width

    @property
    def token_bytes(self) -> int:
        """Bytes that each more token takes, without those of blocks that are not filled."""
        return sum(self._full) // (TILE if self.quantized else self.size)

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes of the blocks that a sequence holds."""
        return self.blocks(tokens) * self.block_bytes


def _window_blocks(tokens: int, size: int, sink: int, recent: int, in_flight: int) -> int:
    """Most blocks that hold sinks and a window, which may begin inside of a block."""
    window = -(-(recent - 1 + in_flight) // size) + 1
    return min(-(-sink // size) + window, -(-tokens // size))
