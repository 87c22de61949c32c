"""Rounding of keys by the queries that meet them: a channel's error is made up for by the channels that follow.

What counts is the error of q . k, not that of k. The channels of a head's keys are rounded in turn, those with the
largest queries first, and the expected effect of each error on q . k is taken off the channels that are still to be
rounded. For weights and their inputs this is LDLQ (Chee et al. 2023, arXiv 2307.13304) and GPTQ (Frantar et al. 2022,
arXiv 2210.17323). Queries were measured before the conversion, and a file of the checkpoint has what follows from them.
"""

import functools
import os
from dataclasses import replace

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from .kv_layout import ROUNDING_FILE, KVLayout

BLOCK = 32  # channels whose errors reach all later ones together


class QueryRounding:
    """How some KV heads of a layer round their keys; call it as `kv_codes.nearest`.

    Args:
        order: int64 [heads, head_dim], channels in the order in which they are rounded.
        feedback: [heads, head_dim, head_dim], by places in this order: the share of the error of a channel, a row, that
            is taken off a later one. What is not above the diagonal does not count.
    """

    def __init__(self, order: torch.Tensor, feedback: torch.Tensor):
        self.order, self.feedback = order, feedback

    def __deepcopy__(self, memo: dict) -> "QueryRounding":
        return self  # nothing changes it

    @property
    def nbytes(self) -> int:
        """Bytes of the factors."""
        return self.order.nbytes + self.feedback.nbytes

    def to(self, device: torch.device) -> "QueryRounding":
        """The factors on another device."""
        return QueryRounding(self.order.to(device), self.feedback.to(device))

    def part(self, first: int, heads: int) -> "QueryRounding":
        """How `heads` heads from `first` on round."""
        return QueryRounding(self.order[first : first + heads], self.feedback[first : first + heads])

    @torch.no_grad()
    def __call__(self, grouped: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, bits: int) -> torch.Tensor:
        """Codes in float32 of keys [batch, heads, ..., tokens, head_dim, 1], whose groups have these scales and minima.

        Without feedback they are those of `kv_codes.nearest`.
        """
        order, feedback = self.order.T[..., None], self.feedback.float()
        parts = (part.expand_as(grouped)[..., 0].movedim((-1, 1), (0, 1)) for part in (grouped - low, scale))
        keys, scale = (part.flatten(2).take_along_dim(order, 0) for part in parts)  # [head_dim, heads, keys]
        scale = scale.where(scale > 0, torch.finfo(scale.dtype).max)  # a code of 0 then, as it stands for nothing else
        codes = torch.empty_like(keys)
        errors = torch.empty_like(keys)
        for start in range(0, len(keys), BLOCK):
            block = slice(start, start + BLOCK)
            keys[block] -= (feedback[:, :start, block].mT @ errors[:start].transpose(0, 1)).transpose(0, 1)
            channels = zip(keys[block], scale[block], codes[block], errors[block], strict=True)
            for place, (key, channel_scale, code, error) in enumerate(channels, start):
                torch.div(key, channel_scale, out=code).round_().clamp_(0, 2**bits - 1)
                torch.addcmul(key, code, channel_scale, value=-1, out=error)
                shares = feedback[:, place, place + 1 : start + BLOCK].T[..., None]
                keys[place + 1 : start + BLOCK].addcmul_(shares, error, value=-1)
        shape = grouped[..., 0].movedim((-1, 1), (0, 1)).shape
        return codes.scatter(0, order.expand_as(codes), codes).view(shape).movedim((0, 1), (-1, 1))[..., None]


def with_factors(layout: KVLayout, name: str, revision: str | None) -> KVLayout:
    """The layout of a model with the factors by which keys of its layers are rounded, from the checkpoint's file.

    Args:
        name, revision: folder of the checkpoint, or its Hub id and commit.

    Raises:
        ValueError: there is no such file, or it is not one of these layers.
    """
    try:
        path = str(cached_file(name, ROUNDING_FILE, revision=revision))
        factors = read(path, os.stat(path).st_mtime_ns)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{name} has no readable {ROUNDING_FILE}, by which its keys are rounded; copy it from the converted "
            f"checkpoint ({' '.join(str(error).split())})"
        ) from error
    layers = []
    for index, layer in enumerate(layout.layers):
        round_keys = None
        if layer.rounded_by_queries:
            round_keys = checked(factors, index, layer.heads, layer.head_dim or layout.head_dim)
        layers.append(replace(layer, round_keys=round_keys))
    return replace(layout, layers=tuple(layers))


@functools.lru_cache(maxsize=2)
@torch.inference_mode(False)
def read(path: str, modified: int) -> dict[str, torch.Tensor]:
    """The tensors of a file that was last modified then."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # it is no dict


def checked(factors: dict[str, torch.Tensor], layer: int, heads: int, head_dim: int) -> QueryRounding:
    """The factors of a layer's heads.

    Raises:
        ValueError: they are missing, or have another shape or values that no factors have.
    """
    fault = f"{ROUNDING_FILE} has no factors of {heads} heads of {head_dim} for layer {layer}; convert the model again"
    order = factors.get(f"layers.{layer}.order")
    feedback = factors.get(f"layers.{layer}.feedback")
    if order is None or order.shape != (heads, head_dim) or order.dtype != torch.int16:
        raise ValueError(fault)
    if feedback is None or feedback.shape != (heads, head_dim, head_dim) or feedback.dtype != torch.float16:
        raise ValueError(fault)
    every_channel = torch.arange(head_dim, device=order.device).expand(heads, -1)  # models are made on other devices
    if not torch.equal(order.long().sort().values, every_channel) or not feedback.isfinite().all():
        raise ValueError(fault)
    return QueryRounding(order.long(), feedback)
