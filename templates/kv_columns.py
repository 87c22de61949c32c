"""Columns of a cache and rows of a batch: where texts begin, how many columns have come, and which rows there are."""

import functools
from collections.abc import Sequence

import torch


class Columns:
    """The columns of a cache, as of the forward under way.

    Attributes:
        reserved: columns to allocate for, known in advance.
        expected: columns that will have been seen after the forward.
        prompt: columns after which budgeted heads choose what they keep.
        pads: left padding of each row; empty where no row is padded.
        confirmed: columns that will never be taken back, where `record_past` says that others may be.
        margin: columns that heads keep beyond their window or residual, to be taken back.
    """

    def __init__(self, reserved: int = 0):
        self.reserved = reserved
        self.clear()

    def clear(self) -> None:
        """Forget everything but what is reserved."""
        self.expected = self.prompt = self.confirmed = self.margin = 0
        self.record_past = False
        self.pads: list[int] = []
        self.padding_open = False  # whether the padding of a row may go on in later columns
        self.padded_right = False
        self._on: dict[torch.device, torch.Tensor] = {}

    def begin(self, mask: torch.Tensor | None, rows: int, tokens: int, seen: int) -> None:
        """Learn of a forward of `tokens` columns after `seen` ones, as `KVSurgeryCache.begin` says."""
        if self.padded_right:
            raise ValueError("the cache ends in right padding, so nothing can follow; pad on the left to generate")
        if mask is not None and mask.shape[-1] != seen + tokens:
            raise ValueError(f"the attention mask covers {mask.shape[-1]} tokens, cache and input have {seen + tokens}")
        self.expected = seen + tokens
        for count in self._on.values():
            count.fill_(self.expected)
        pads = self.pads
        new_padding = mask is not None and tokens > 1
        if mask is not None and tokens == 1 and mask.device.type == "cpu":  # a step does not wait for another device
            new_padding = mask.count_nonzero() != mask.numel() - sum(pads)
        if not seen or new_padding:
            padded_left, padded_right = (False, False) if mask is None else check_padding(mask)
            pads = leading_padding(mask).tolist() if mask is not None and padded_left else []
            known_pads = [min(pad, seen) for pad in self.pads or [0] * rows]
            stated_pads = [min(pad, seen) for pad in pads or [0] * rows]
            if known_pads != stated_pads:
                raise ValueError("the attention mask pads other tokens than it did in an earlier call")
            self.padded_right = padded_right and tokens > 1  # a row that has ended may have more steps
        elif mask is not None and self.padding_open:
            pads = leading_padding(mask).tolist()
        if pads != self.pads:  # layers look for another list
            self.pads = pads
        self.padding_open = any(pad >= self.expected for pad in pads)
        self.prompt = self.prompt or tokens
        if self.record_past:
            self.confirmed = self.confirmed or tokens
            self.margin = max(self.margin, self.expected - self.confirmed)

    @property
    def settled(self) -> int:
        """Columns that tiles may take: all but the newest, if nothing says that more may be taken back."""
        return min(self.expected - 1, self.confirmed) if self.record_past else self.expected - 1

    def on(self, device: torch.device) -> torch.Tensor:
        """The number of expected columns on a device, int32 [1, 1]; always the same tensor."""
        if device not in self._on:
            with torch.inference_mode(False):  # it is written again later, maybe outside of an inference mode
                self._on[device] = torch.tensor([[self.expected]], dtype=torch.int32, device=device)
        return self._on[device]

    def crop(self, length: int) -> None:
        """Forget columns from `length` on."""
        self.expected = min(self.expected, length)
        self.confirmed, self.padding_open = length, bool(self.pads)


class Rows:
    """A change of rows: which old row each one copies."""

    def __init__(self, index: torch.Tensor):
        self.index = index

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return states.index_select(0, self.index.to(states.device))

    def of(self, values: list) -> list:
        """Left padding and length of rows as the host knows them. Waits for the device where rows differ."""
        if len(set(values)) <= 1:
            return values[:1] * len(self.index)
        return [values[row] for row in self.rows]

    @functools.cached_property
    def rows(self) -> list[int]:
        """The index on the host."""
        return self.index.tolist()


def leading_padding(mask: torch.Tensor) -> torch.Tensor:
    """Leading zeros of each row of a padding mask: [batch, tokens] -> int64 [batch]. A row may be all padding."""
    return (mask.bool().cumsum(-1) == 0).sum(-1)


def check_padding(mask: torch.Tensor) -> tuple[bool, bool]:
    """Whether a padding mask [batch, tokens] pads rows on the left and on the right. Waits for the device.

    Raises:
        ValueError: a hole between the tokens of a row.
    """
    mask = mask.bool()
    left, right = ~mask[:, 0], ~mask[:, -1]
    edges = (mask[:, 1:] != mask[:, :-1]).sum(-1)
    holes = edges > left.long() + right.long()
    padded_left, padded_right, has_holes = torch.stack([left.any(), (right & mask.any(-1)).any(), holes.any()]).tolist()
    if has_holes:
        raise ValueError("the attention mask has holes between tokens; only padding at the ends of a row is supported")
    return padded_left, padded_right


def on_device(values: Sequence, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of what the host knows, made without waiting for the device."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
