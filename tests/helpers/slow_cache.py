"""`SlowCache`: a quantized cache that a stock model reads, tile by tile without packed codes."""

import torch
from transformers import DynamicCache

from kvsurgery.templates.kv_codes import rotated
from kvsurgery.templates.kv_layout import TILE


class SlowCache(DynamicCache):
    """Every token as it came, but for whole tiles of the oldest ones, which are what quantizing one by one makes."""

    def __init__(self, quantization, config):
        super().__init__(config=config)
        self.quantization, self.packed = quantization, {}

    def update(self, keys, values, layer, *args, **kwargs):
        before = (
            self.layers[layer].keys.shape[2] if layer < len(self.layers) and self.layers[layer].get_seq_length() else 0
        )
        if keys.shape[2] == 1:
            self.pack(layer, before)
            return super().update(keys, values, layer, *args, **kwargs)
        stored = super().update(keys, values, layer, *args, **kwargs)
        seen = [states.clone() for states in stored]
        self.pack(layer, before + keys.shape[2] - 1)
        return seen

    def pack(self, layer, settled):
        if self.layers[layer].is_sliding:
            return
        done = self.packed.get(layer, self.quantization.sink)
        while settled - done >= self.quantization.residual + TILE:
            for which, states in enumerate((self.layers[layer].keys, self.layers[layer].values)):
                stored = states[:, :, done : done + TILE]
                rotate = self.quantization.rotate in (("both",), ("both", "values"))[which]
                tile = rotated(stored, stored.shape[1]) if rotate else stored.clone()
                per_channel = which == 0 and self.quantization.scheme == "kivi"
                size = self.quantization.group_size or (TILE if per_channel else tile.shape[3])
                for part in tile.split(size, 2 if per_channel else 3):
                    dim = 2 if per_channel else 3
                    part.copy_(self.coded(part, dim, self.quantization.widths[which]))
                stored.copy_(rotated(tile, tile.shape[1], back=True) if rotate else tile)
            done = self.packed[layer] = done + TILE

    def coded(self, states, dim, bits):
        """What the codes of some groups stand for."""
        low, high = states.amin(dim, keepdim=True), states.amax(dim, keepdim=True)
        most, found = 2**bits - 1, []
        for factor in (1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7) if self.quantization.clip else (1,):
            start, step = (low + high - (high - low) * factor) / 2, ((high - low) * factor / most).clamp(min=1e-30)
            found.append(start + ((states - start) / step).round().clamp(0, most) * step)
        found = torch.stack(found)
        best = (found - states).square().sum(dim + 1, keepdim=True).argmin(0, keepdim=True)
        return found.gather(0, best.expand(1, *states.shape))[0]
