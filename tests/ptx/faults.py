"""What is reported: everything a compiled kernel does that a GPU punishes, or takes without a word."""

from __future__ import annotations


class Fault(Exception):
    """Something that a kernel must not do; the message names the instruction and the line of its source."""


class OutOfBounds(Fault):
    """An access outside of every tensor of the launch, or of shared memory."""


class Misaligned(Fault):
    """An address that is no multiple of the bytes that are read or written there."""


class Uninitialized(Fault):
    """A read of shared memory that nothing has written, or to which a copy is still on its way."""


class Race(Fault):
    """Two accesses, one of them a write, that nothing puts in order."""


class Divergence(Fault):
    """Some lanes of a warp or CTA do without the others what all of them must do together."""


class OverLimit(Fault):
    """More shared memory or registers than a block of the target may have."""


class Unknown(Fault):
    """An instruction, operand or directive that this package does not know."""
