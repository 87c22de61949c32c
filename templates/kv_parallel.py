"""Tensor parallelism: which of a layer's heads this process holds, and how they lie there.

transformers gives every process an equal run of heads. A checkpoint converted for T of them has the heads of a layer in
T blocks of equal size, in each block the full heads first, so that a process gets whole blocks. Where it gets several,
its full heads are brought together before attention, and its output is put back in order.
"""

import torch

from .kv_layout import LayerLayout


def own_layout(layout: LayerLayout, heads: int, module: torch.nn.Module) -> LayerLayout:
    """The layout of the heads that this process holds of a layer, told by how many its keys have.

    Where processes hold different ones, the device mesh of the attention module's weights says which process this is.

    Raises:
        RuntimeError: heads are split in a way that the layout does not know. Every process raises, since each has as
            many of them.
    """
    if heads == layout.heads:
        return layout
    mesh = getattr(getattr(getattr(module, "k_proj", None), "weight", None), "device_mesh", None)
    # the mesh's dimensions of data parallelism come first
    processes = max(layout.heads // heads, 1) if mesh is None else mesh.shape[-1]
    try:
        if processes * heads != layout.heads:
            raise ValueError(f"{layout.heads} heads do not divide so")
        return layout.part(None if mesh is None else mesh.get_local_rank(mesh.ndim - 1), processes)
    except ValueError as error:
        raise RuntimeError(
            f"this process holds {heads} of the {layout.heads} KV heads of a layer, which this checkpoint was not "
            f"converted for ({error}); convert it with --tp {processes}, or a multiple, for tensor parallelism over "
            f"{processes} processes"
        ) from error


def full_heads_first(states: torch.Tensor, layout: LayerLayout) -> torch.Tensor:
    """Heads [batch, heads, ...] as they come, brought into the order of storage: all full heads, then all others."""
    parts = states.split(_sizes([heads for block in layout.blocks for heads in block], states.shape[1]), 1)
    return torch.cat(parts[::2] + parts[1::2], 1)


def in_blocks(states: torch.Tensor, layout: LayerLayout) -> torch.Tensor:
    """The reverse: heads [batch, heads, ...] from the order of storage into that of the projections."""
    full, others = zip(*layout.blocks, strict=True)
    parts = states.split(_sizes(full + others, states.shape[1]), 1)
    pairs = zip(parts[: len(full)], parts[len(full) :], strict=True)
    return torch.cat([part for pair in pairs for part in pair], 1)


def _sizes(kv_heads: list[int] | tuple[int, ...], heads: int) -> list[int]:
    """How many of `heads` query or KV heads belong to so many KV heads each."""
    return [count * heads // sum(kv_heads) for count in kv_heads]


def split_over_devices(model: torch.nn.Module) -> bool:
    """Whether a forward of a model waits for other processes or moves between devices."""
    mapped = set(getattr(model, "hf_device_map", {}).values())
    sharded = hasattr(next(model.parameters(), None), "device_mesh")
    return len(mapped) > 1 or sharded or getattr(model, "_device_mesh", None) is not None
