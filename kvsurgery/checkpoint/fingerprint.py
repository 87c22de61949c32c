"""Fingerprints that identify a model's weights in any folder and with any sharding, without reading all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from blake3 import blake3

from kvsurgery.checkpoint.headers import Read, Shard, Tensor

SAMPLED_BYTES = 64  # first bytes of every tensor
DIGITS = 32

# the first bytes of a tensor, of an open shard, as the original checkpoint has them
FirstBytes = Callable[[Read, Tensor], bytes]


def stored_first_bytes(read: Read, tensor: Tensor) -> bytes:
    """The first bytes of a tensor as they are stored."""
    sample = bytearray(min(SAMPLED_BYTES, tensor.size))
    read(memoryview(sample), tensor.start)
    return bytes(sample)


def fingerprint(shards: Iterable[Shard], first_bytes: FirstBytes = stored_first_bytes) -> str:
    """A hash of the name, dtype, shape and first bytes of every tensor, in hexadecimal.

    Copies of a model have the same fingerprint, also with other shards. A fine-tuned model has another one.

    Raises:
        CheckpointError: a shard cannot be read.
    """
    samples: dict[str, bytes] = {}
    for shard in shards:
        with shard.open(len(shard.header), shard.size) as read:
            for tensor in shard.tensors:
                facts = f"{tensor.dtype} {list(tensor.shape)} ".encode()
                samples[tensor.name] = facts + first_bytes(read, tensor)
    digest = blake3()
    for name, sample in sorted(samples.items()):
        digest.update(f"{name} {len(sample)} ".encode() + sample)
    return digest.hexdigest()[:DIGITS]
