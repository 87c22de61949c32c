"""How vLLM groups the heads of a model: all groups share blocks of one size, that of the widest group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import count

from kvsurgery.templates.kv_layout import KVLayout, LayerLayout


@dataclass
class Bin:
    """Layers whose streaming heads share a cache group: widths of the first layer and of all layers, and their number.

    The width of heads is the number of elements that their keys have.
    """

    first: int
    width: int = 0
    layers: int = 0

    def takes(self, width: int, limit: int) -> bool:
        """Whether one more layer fits a block of a width.

        vLLM splits a group of windows as if all layers had as many heads as the first, and loses layers if they differ;
        so that many have to fit too.
        """
        return self.width + width <= limit and (self.layers + 1) * self.first <= limit


@dataclass(frozen=True)
class Groups:
    """The cache groups of a model: one of all full heads, bins of streaming heads, and the model's own windows."""

    layout: KVLayout

    def _width(self, layer: LayerLayout, heads: int) -> int:
        """The width of heads of a layer."""
        return heads * (layer.head_dim or self.layout.head_dim)

    @cached_property
    def width(self) -> int:
        """The width of a block: of all full heads of the model, or of the widest layer of other heads."""
        full = sum(self._width(layer, layer.full) for layer in self.layout.layers if not layer.native)
        return max(full, *(self._width(layer, layer.heads - layer.full) for layer in self.layout.layers))

    @cached_property
    def _filled(self) -> tuple[list[Bin], list[int]]:
        bins: list[Bin] = []
        chosen = []
        for layer in self.layout.layers:
            width = 0 if layer.native else self._width(layer, layer.streaming)
            index = 0
            if width:
                fitting = (index for index, bin in enumerate(bins) if bin.takes(width, self.width))
                index = next(fitting, len(bins))
                if index == len(bins):
                    bins.append(Bin(width))
                bins[index].width += width
                bins[index].layers += 1
            chosen.append(index)
        return bins, chosen

    @property
    def streaming(self) -> list[int]:
        """The bin of each layer's streaming heads; no bin is wider than a block."""
        return self._filled[1]

    def window(self, layer: LayerLayout) -> int:
        """Tokens of the window that vLLM keeps for a layer's streaming heads: `recent`, or one or two more.

        vLLM puts windows of one length in one group, and of that group the manager may be the stock one, which frees
        sinks; so no window is as long as one of the model's own. Those of Cohere 2 have one token more in vLLM.
        """
        own = {layer.recent for layer in self.layout.layers if layer.native}
        return next(tokens for tokens in count(layer.recent) if not {tokens, tokens - 1} & own)

    def blocks(self, tokens: int, size: int, in_flight: int = 1) -> int:
        """Blocks of `size` tokens that a sequence of `tokens` holds while `in_flight` of them are computed."""
        blocks = -(-tokens // size) if any(layer.full for layer in self.layout.layers) else 0
        layers = [layer for layer in self.layout.layers if not layer.native and layer.streaming]
        if layers:
            window = self.window(layers[0])
            blocks += len(self._filled[0]) * _window_blocks(tokens, size, layers[0].sink, window, in_flight)
        native = [layer for layer in self.layout.layers if layer.native]
        if native:
            groups = -(-len(native) // (self.width // self._width(native[0], native[0].heads)))
            window = native[0].recent - size * native[0].chunked  # chunks begin with a block
            blocks += groups * _window_blocks(tokens, size, 0, window, in_flight)
        return blocks

    def block_bytes(self, size: int, itemsize: int = 2) -> int:
        """Bytes of a block: keys and values of `size` tokens."""
        return self.width * size * 2 * itemsize

    def sequence_bytes(self, tokens: int, size: int = 16, itemsize: int = 2) -> int:
        """Bytes of the blocks that a sequence holds."""
        return self.blocks(tokens, size) * self.block_bytes(size, itemsize)


def _window_blocks(tokens: int, size: int, sink: int, recent: int, in_flight: int) -> int:
    """Most blocks that hold sinks and a window, which may begin inside of a block."""
    window = -(-(recent - 1 + in_flight) // size) + 1
    return min(-(-sink // size) + window, -(-tokens // size))
