"""Forecast of the cache groups that vLLM makes of a model; blocks of all groups are as large as the widest needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import ClassVar, NamedTuple

from kvsurgery.templates.kv_layout import TILE, KVLayout, LayerLayout, Quantization

KERNEL_BLOCK = 32  # tokens; vLLM's kernels for a CPU take blocks of as many, or of a multiple


@dataclass(frozen=True)
class Bucket:
    """Layers that vLLM may put into one cache group.

    Attributes:
        widths: bytes of each layer's part of a block.
        sliding: whether the layers have a sliding window.
    """

    widths: tuple[int, ...]
    sliding: bool

    @property
    def counts(self) -> Counter[int]:
        """Number of layers of each width."""
        return Counter(self.widths)

    @property
    def repeats(self) -> int:
        """The number of layers of the most frequent width."""
        return max(self.counts.values())

    @property
    def balanced(self) -> bool:
        """Whether all widths have the same number of layers: vLLM may split such a repeating pattern."""
        return len({*self.counts.values()}) == 1

    @property
    def mixed_pattern(self) -> bool:
        """Whether this is a pattern of several widths; vLLM splits other buckets to its number of repeats."""
        return self.balanced and len(self.counts) > 1


@dataclass(frozen=True)
class Plan:
    """The result of vLLM's planner: the width of a block, and the number of cache groups of each bucket."""

    width: int
    groups: tuple[int, ...]

    @classmethod
    def of(cls, buckets: Sequence[Bucket]) -> Plan:
        """Plan as `get_kv_cache_groups` in vllm/v1/core/kv_cache_utils.py does."""
        if len(buckets) <= 1:
            return cls(sum(sum(bucket.widths) for bucket in buckets), (1,) * len(buckets))
        if len({width for bucket in buckets for width in bucket.widths}) == 1:
            return cls._of_one_width(buckets)
        patterns = [bucket.repeats for bucket in buckets if bucket.mixed_pattern]
        if patterns:
            repeats = _common_size([bucket.repeats for bucket in buckets if bucket.balanced], max(patterns))
            groups = [-(-bucket.repeats // repeats) if bucket.balanced else 1 for bucket in buckets]
        else:
            # sliding windows are split to fit the block of the others, as if all layers were as wide as the first
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
        """Plan layers of one width: all groups have the same number of layers, and some are padded."""
        lengths = [len(bucket.widths) for bucket in buckets]
        size = max(lengths) if max(lengths) < 1.5 * min(lengths) else min(lengths)
        return cls(size * buckets[0].widths[0], tuple(-(-length // size) for length in lengths))


def _common_size(lengths: Sequence[int], minimum: int) -> int:
    """The group size of at least `minimum` that needs the least padding; if several do, the largest."""
    return min(range(minimum, max(lengths) + 1), key=lambda size: (sum(-length % size for length in lengths), -size))


def _bins(widths: Sequence[int], limit: int, patterns: bool) -> list[int]:
    """Assign the layers' heads to bins that are no wider than a limit; returns the bin of each layer.

    vLLM splits a group of windows as if all its layers were as wide as the first, and loses layers if they are not. So
    a bin must also fit if all its layers were as wide as the first.

    Args:
        widths: width of each layer; layers of width 0 get bin 0.
        limit: largest width of a bin.
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
    """The layers of each bin as a bucket, without layers of width 0."""
    widths_by_bin: dict[int, list[int]] = {}
    for width, index in zip(widths, bins, strict=True):
        if width:
            widths_by_bin.setdefault(index, []).append(width)
    return [Bucket(tuple(layers), sliding) for layers in widths_by_bin.values()]


@dataclass(frozen=True)
class Windows:
    """Caches of sinks and a window, of some heads of each layer.

    Attributes:
        pages: bytes of each layer's part of a block.
        size: tokens of a block.
        sink, recent: tokens that stay.
        stride: tokens by which the start of the window moves, as in `skipped_tokens`.
    """

    pages: list[int]
    size: int
    sink: int
    recent: int
    stride: int = 1


class Place(NamedTuple):
    """Where vLLM keeps sinks and a window: in blocks of `size` tokens, of the cache group of a bin.

    `drafts` is that of `Groups`.
    """

    size: int
    sink: int
    recent: int
    stride: int
    bin: int
    drafts: int | None


@dataclass(frozen=True)
class Groups:
    """Cache groups of a model: full heads, bins of streaming heads, and the model's own windows.

    If heads are `quantized`, there are also bins of their newest tokens, and a block of older ones is a tile; widths of
    codes may differ by layer. Full heads of layers without codes are in the group of the tiles, with as many tokens in
    the model's dtype.

    Attributes:
        tokens: tokens of a block, if there are no tiles.
        itemsize: bytes of an element that is not quantized.
        quantized: whether heads are stored in tiles.
        state: with tiles, bytes of the largest state of a layer, such as one of linear attention, which a block holds
            too. Without tiles vLLM makes blocks that are large enough, after its model is loaded.
        drafts: where sinks and windows are lean, most tokens of a step that may be rejected; None: they are not.
    """

    others: ClassVar = "streaming"  # the heads that are not full

    layout: KVLayout
    tokens: int
    itemsize: int = 2
    quantized: bool = False
    state: int = 0
    drafts: int | None = None

    @cached_property
    def size(self) -> int:
        """Tokens of a block that holds no tiles.

        With tiles, it is the largest power of two whose page is no larger than a tile.
        """
        if not self.quantized:
            return self.tokens
        fitting = min(
            layer.quantization.tile_bytes(self._head_dim(layer), self.itemsize) // self._token_bytes(layer)
            for layer in self.layout.layers
            if layer.quantization and layer.quantized_heads
        )
        return 1 << fitting.bit_length() - 1

    @property
    def native_size(self) -> int:
        """Tokens of a block of the model's own windows, which vLLM's kernels read."""
        return max(self.size, KERNEL_BLOCK) if self.quantized else self.tokens

    @property
    def quantization(self) -> Quantization | None:
        """A quantization of the heads, all of which have the same sinks and residual."""
        return next((layer.quantization for layer in self.layout.layers if layer.quantized_heads), None)

    def _head_dim(self, layer: LayerLayout) -> int:
        return layer.head_dim or self.layout.head_dim

    def _token_bytes(self, layer: LayerLayout) -> int:
        """Bytes of a token of a head in the model's dtype."""
        return 2 * self._head_dim(layer) * self.itemsize

    def _pages(self, heads: str, native: bool = False) -> list[int]:
        """Width of each layer.

        Args:
            heads: attribute of the layer with the number of heads: "full", "streaming" or "heads".
            native: whether to count layers with a window of the model's own, or those without.
        """
        size = self.native_size if native else self.size
        return [
            getattr(layer, heads) * self._token_bytes(layer) * size if layer.native == native else 0
            for layer in self.layout.layers
        ]

    @cached_property
    def _full(self) -> list[int]:
        """Width of the full heads of each layer without a window of the model's own."""
        if not self.quantized:
            return self._pages("full")
        return [layer.full * self._tile_bytes(layer) for layer in self.layout.layers]

    @cached_property
    def windows(self) -> dict[str, Windows]:
        """The caches of sinks and a window, by what they hold.

        Streaming heads, or their tiles; and the newest tokens of full heads, or of streaming ones, whose older tokens
        are in tiles.
        """
        layers = self.layout.layers
        sink, recent = next(iter(window_sizes(self.layout)), (0, 1))
        recent = self.window(recent)
        tiled = [self.quantized and layer.quantized_window for layer in layers]
        older = [self._tile_bytes(layer) * layer.streaming for layer in layers]
        newest_sink, residual = (
            (quantization.sink, quantization.residual) if (quantization := self.quantization) else (0, 0)
        )

        def some(pages: list[int], chosen: list[bool]) -> list[int]:
            return [page if is_chosen else 0 for page, is_chosen in zip(pages, chosen, strict=True)]

        plain = some(self._pages("streaming"), [not is_tiled for is_tiled in tiled])
        packed = some(self._pages("full"), [self.quantized and layer.quantization is not None for layer in layers])
        newest = residual + TILE
        return {
            "streaming": Windows(plain, self.size, sink, recent),
            "tiles": Windows(some(older, tiled), TILE, 0, recent),
            "newest": Windows(packed, self.size, newest_sink, self.window(newest), TILE),
            # these read a tile one token later
            "newest of streaming": Windows(
                some(self._pages("streaming"), tiled), self.size, sink, self.window(newest + 1), TILE
            ),
        }

    def _tile_bytes(self, layer: LayerLayout) -> int:
        """Bytes of a tile of a head, or of as many tokens in the model's dtype."""
        if layer.quantization is None:
            return TILE * self._token_bytes(layer)
        return layer.quantization.tile_bytes(self._head_dim(layer), self.itemsize)

    @property
    def _limit(self) -> int:
        """Width of a block that fits all full heads of the model, the other heads of any one layer, and any state."""
        windows = [page for window in self.windows.values() for page in window.pages]
        return max(sum(self._full), self.state, *windows, *self._pages("heads", native=True))

    @cached_property
    def _bins(self) -> list[list[int]]:
        """The bin of each layer, for each of `windows`.

        Bins with patterns can make vLLM split the full heads; without patterns there can be more bins. The
        choice is the one with the smaller cache.
        """
        choices = [
            [_bins(window.pages, self._limit, patterns) for window in self.windows.values()]
            for patterns in (True, False)
        ]
        return min(choices, key=self._cost)

    def place(self, kind: str, layer: int) -> Place:
        """Where vLLM keeps one of `windows` of a layer. Bins of different kinds have different numbers."""
        window, number = self.windows[kind], [*self.windows].index(kind)
        bin = self._bins[number][layer] + number * len(self.layout.layers)
        return Place(window.size, window.sink, window.recent, window.stride, bin, self.drafts)

    @cached_property
    def native(self) -> list[int]:
        """The bin of each layer with a window of the model's own. vLLM itself splits windows, but not chunks."""
        pages = self._pages("heads", native=True)
        if any(layer.chunked for layer in self.layout.layers):
            return _bins(pages, self._limit, patterns=True)
        return [0] * len(pages)

    def _cost(self, bins: list[list[int]]) -> tuple[int, int]:
        """Bytes for each block of tokens and for each block of a window, with these bins."""
        plan, numbers = self._planned(bins)
        return numbers["full"] * plan.width, sum(numbers[kind] for kind in self.windows) * plan.width

    def _planned(self, bins: list[list[int]]) -> tuple[Plan, dict[str, int]]:
        """vLLM's plan for bins of `windows`, and its numbers of groups as `planned`."""
        kinds = self._kinds(bins)
        plan = Plan.of([bucket for buckets in kinds.values() for bucket in buckets])
        numbers = iter(plan.groups)
        return plan, {kind: sum(next(numbers) for _ in buckets) for kind, buckets in kinds.items()}

    def _kinds(self, bins: list[list[int]]) -> dict[str, list[Bucket]]:
        """The buckets of full heads, of each of `windows`, and of the model's own windows."""
        chunked = any(layer.chunked for layer in self.layout.layers)
        windows = zip(self.windows.items(), bins, strict=True)
        return {
            "full": _by_bin(self._full, [0] * len(self._full), sliding=False),
            **{kind: _by_bin(window.pages, own_bins, sliding=True) for (kind, window), own_bins in windows},
            "native": _by_bin(self._pages("heads", native=True), self.native, sliding=not chunked),
        }

    @property
    def planned(self) -> tuple[Plan, dict[str, int]]:
        """vLLM's plan, and its numbers of groups: of full heads, of each of `windows`, and of the model's own ones."""
        return self._planned(self._bins)

    def window(self, recent: int) -> int:
        """Tokens of the window that vLLM keeps where streaming heads, or tiles, need the latest `recent`.

        It is as long or slightly longer: vLLM groups windows of the same length, and the stock manager, which frees
        sinks, may get the group. So the length must differ from the model's own windows, including Cohere 2's, which
        are one token longer in vLLM.
        """
        native_windows = {layer.recent for layer in self.layout.layers if layer.native}
        return next(tokens for tokens in count(recent) if not {tokens, tokens - 1} & native_windows)

    def held(self, tokens: int, in_flight: int = 1) -> list[tuple[Bucket, int]]:
        """Each bucket, with the blocks that a group of it holds of a sequence while `in_flight` tokens are computed."""

        blocks = {"full": -(-tokens // (TILE if self.quantized else self.size)), "native": 0}
        for kind, window in self.windows.items():
            blocks[kind] = _window_blocks(tokens, window.size, window.sink, window.recent, in_flight, window.stride)
        if layer := next((layer for layer in self.layout.layers if layer.native), None):
            # a chunk starts on a block boundary
            size = self.native_size
            blocks["native"] = _window_blocks(tokens, size, 0, layer.recent - size * layer.chunked, in_flight)
        return [(bucket, blocks[kind]) for kind, buckets in self._kinds(self._bins).items() for bucket in buckets]

    def blocks(self, tokens: int, in_flight: int = 1) -> int:
        """Blocks that a sequence of `tokens` holds while `in_flight` tokens are computed."""
        groups = zip(self.planned[0].groups, self.held(tokens, in_flight), strict=True)
        return sum(number * blocks for number, (_, blocks) in groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return max(self.planned[0].width, self.state)

    @property
    def token_bytes(self) -> int:
        """Bytes of each further token, without padding."""
        return sum(self._full) // (TILE if self.quantized else self.size)

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes of the blocks that a sequence holds."""
        return self.blocks(tokens) * self.block_bytes


def window_sizes(layout: KVLayout) -> set[tuple[int, int]]:
    """The sinks and window of streaming heads, in tokens; vLLM can serve those that are the same in all layers."""
    return {(layer.sink, layer.recent) for layer in layout.layers if layer.streaming and not layer.native}


def skipped_tokens(computed: int, sink: int, recent: int, stride: int = 1) -> int:
    """Tokens before the window of the next token, once the first `computed` tokens are there.

    The window has at most `recent` tokens, the next one included. Its start moves by `stride` tokens at a time, counted
    from the end of the sinks: a tile at a time, where it holds the tokens that are not read from tiles.
    """
    return max(sink + (computed - sink - recent + stride) // stride * stride, 0)


def _window_blocks(tokens: int, size: int, sink: int, recent: int, in_flight: int, stride: int = 1) -> int:
    """Most blocks that hold the sinks and a window, which may start inside a block."""
    begin = skipped_tokens(tokens - in_flight, sink, recent, stride)
    return min(-(-sink // size) + -(-(tokens - begin) // size) + 1, -(-tokens // size))
