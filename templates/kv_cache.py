"""The KV cache of a model whose heads keep different amounts: preallocated, stored by position, once per KV head.

Stock attention calls `cache.update(k, v, layer)` and passes what it gets to the attention function. Here it gets a
`Handle`: the new keys and values, and the layer cache that they belong to. The attention function (kv_attention.py)
appends them and attends.
"""

from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .kv_budget import BudgetedGroup
from .kv_heads import HeadGroup, allocate, bind
from .kv_layout import KVLayout, LayerLayout

EVERY = 2**30  # the sink of a full head, which no position reaches
GROWTH = 4  # a cache of unstated length grows by a quarter, so that copies stay rare


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
    padded_left, padded_right, holed = torch.stack([left.any(), (right & mask.any(-1)).any(), holes.any()]).tolist()
    if holed:
        raise ValueError("the attention mask has holes between tokens; only padding at the ends of a row is supported")
    return padded_left, padded_right


class Handle(NamedTuple):
    """What `update` returns in place of keys and of values."""

    layer: "KVLayerCache"
    keys: torch.Tensor
    values: torch.Tensor


class KVLayerCache(CacheLayerMixin):
    """One layer: a group of full heads and a group of streaming heads."""

    is_sliding = False
    is_croppable = True

    def __init__(self, layout: LayerLayout, cache: "KVSurgeryCache"):
        super().__init__()
        self.layout, self.cache = layout, cache
        self.reset()

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        if self.keys is not None:  # pickle copies views
            bind((self.full, self.streaming), self.slots, (self.keys, self.values))

    def reset(self) -> None:
        """Forget everything and free the storage."""
        self.full = self.streaming = self.budgeted = None
        self.keys = self.values = None  # one buffer of full and streaming heads, [batch, slots of all heads, head_dim]
        self.slots = [0, 0]  # of a full head and of a streaming one
        self.table = None  # what `head_table` made for these slots
        self.seen = self.capacity = self.restorable = 0
        self.is_initialized = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.full = HeadGroup(key_states, self.layout.full)
        self.streaming = HeadGroup(key_states, self.layout.streaming, self.layout.sink, self.layout.recent)
        self.budgeted = BudgetedGroup(key_states, self.layout) if self.layout.budgets else None
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[Handle, Handle]:
        if not self.is_initialized:
            self.lazy_initialization(key_states)
        handle = Handle(self, key_states, value_states)
        return handle, handle

    @property
    def groups(self) -> tuple[HeadGroup | BudgetedGroup, ...]:
        """The full heads, then the others."""
        return (self.full, self.budgeted or self.streaming) if self.is_initialized else ()

    def padding(self) -> torch.Tensor | None:
        """Left padding of each row, int64 [batch], or None where no row is padded."""
        padding = self.cache.padding
        return None if padding is None else padding.to(self.device)

    def lengths(self) -> torch.Tensor:
        """Tokens of each row so far, padding aside: int64 [1 or batch, 1]."""
        padding = self.padding()
        if padding is None:
            return torch.full((1, 1), self.seen, device=self.device)
        return self.seen - padding[:, None]

    @torch.inference_mode(False)  # storage is written again later, maybe outside of an inference mode
    @torch.no_grad()
    def make_room(self, tokens: int) -> None:
        """Allocate for new columns, wherever full and streaming heads will store them."""
        seen = self.seen + tokens
        if seen != self.cache.expected:
            raise RuntimeError(
                "a KVSurgeryCache is filled by calling the converted model itself, not its inner `.model`; "
                "after a forward that was interrupted, reset() it"
            )
        if seen > self.capacity:
            grown = max(seen, self.capacity + self.capacity // GROWTH)
            self.capacity = self.cache.reserved if seen <= self.cache.reserved else grown
        if self.cache.margin > self.streaming.margin:
            wrapped = self.seen > self.layout.sink + self.streaming.ring
            self.streaming.widen(self.cache.margin, self.capacity, self.lengths(), wrapped)
            self.table = None
        groups = (self.full, self.streaming)
        slots = [group.wanted(self.capacity) for group in groups]
        if self.keys is None or slots != self.slots:
            self.keys, self.values = allocate(groups, slots)
            self.slots, self.table = slots, None

    @torch.no_grad()
    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new tokens of full and streaming heads: [batch, kv_heads, tokens, head_dim].

        Budgeted heads need the queries too: the attention function stores theirs.
        """
        self.make_room(keys.shape[2])
        padding = self.padding()
        parts = (states.split([self.layout.full, self.layout.heads - self.layout.full], 1) for states in (keys, values))
        for group, new_keys, new_values in zip((self.full, self.streaming), *parts, strict=True):
            if group.keys.shape[1]:
                self._store(group, new_keys, new_values, padding)
        self.advance(keys.shape[2])

    def advance(self, tokens: int) -> None:
        """Count columns that have been stored."""
        self.seen += tokens
        if self.seen > self.layout.sink + self.streaming.ring:
            self.restorable = max(self.restorable, self.seen - self.streaming.margin - 1)

    def head_table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of each head, for the kernels: first slot in the buffer, sink, ring and window, int32 [heads] each."""
        if self.table is None:
            (full, streaming), counts = self.slots, (self.layout.full, self.layout.streaming)
            offsets = [full * head for head in range(counts[0])]
            offsets += [full * counts[0] + streaming * head for head in range(counts[1])]
            columns = [offsets]
            for of_full, of_streaming in (
                (EVERY, self.layout.sink),
                (1, self.streaming.ring),
                (1, self.layout.recent),
            ):
                columns.append([of_full] * counts[0] + [of_streaming] * counts[1])
            self.table = tuple(torch.tensor(columns, dtype=torch.int32, device=self.device))
        return self.table

    def _store(self, group: HeadGroup, keys: torch.Tensor, values: torch.Tensor, padding: torch.Tensor | None) -> None:
        if padding is None:
            group.write(slice(None), self.seen, keys, values)
        elif keys.shape[2] == 1:
            group.write_one(self.seen - padding, keys, values)
        else:
            for row, pad in enumerate(self.cache.pads):
                skip = max(0, pad - self.seen)
                here = slice(row, row + 1)
                group.write(here, self.seen + skip - pad, keys[here, :, skip:], values[here, :, skip:])

    def recent_window(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of streaming heads in the last recent - 1 columns, oldest first. To call before `append`."""
        window = min(self.layout.recent - 1, self.seen)
        columns = torch.arange(self.seen - window, self.seen, device=self.device)[None]
        padding = self.padding()
        positions = columns if padding is None else columns - padding[:, None]
        return self.streaming.take(self.streaming.slot(positions.clamp(min=0)))

    def crop_to(self, length: int) -> None:
        """Take back every token from column `length` on."""
        if self.layout.streaming and length < min(self.restorable, self.seen):
            raise ValueError(
                f"cannot take the cache back from {self.seen} to {length} tokens: streaming heads kept only what is "
                f"needed from {self.restorable} on; call activate_past_recording() before what may be taken back"
            )
        if self.budgeted and self.seen and (self.budgeted.start is None or length < self.budgeted.start):
            raise ValueError(
                f"cannot take the cache back to {length} tokens: that is inside the prompt of budgeted heads"
            )
        self.seen = min(self.seen, length)

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        # an integer, or the tensor of cache positions in transformers 4
        return self.seen + (query_length if isinstance(query_length, int) else query_length.shape[0]), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    @torch.inference_mode(False)
    def _map_rows(self, change) -> None:
        if self.keys is not None:
            self.keys, self.values = change(self.keys), change(self.values)
            bind((self.full, self.streaming), self.slots, (self.keys, self.values))
        if self.budgeted:
            self.budgeted.map_rows(change)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._map_rows(lambda states: states.index_select(0, beam_idx.to(states.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_rows(lambda states: states.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map_rows(lambda states: states[indices.to(states.device)])


class KVSurgeryCache(Cache):
    """The cache of a converted model: `generate` makes one, and returns it as `past_key_values` for the next turn.

    Args:
        config: the model's config, with its `kv_surgery` section.
        capacity: tokens to allocate for; without it storage grows by a quarter whenever it is full.
    """

    def __init__(self, config, capacity: int = 0):
        layout = KVLayout.from_config(config)
        self.reserved = capacity  # columns to allocate for, known in advance
        super().__init__(layers=[KVLayerCache(layer, self) for layer in layout.layers])
        self._clear()

    def _clear(self) -> None:
        self.padding: torch.Tensor | None = None  # left padding of each row, int64 [batch]; None: no row is padded
        self.pads: list[int] = []  # the same on the host, as of the last forward of several tokens
        self.padding_open = False  # whether the padding of a row may go on in later columns
        self.padded_right = False
        self.prompt = 0  # columns after which budgeted heads choose what they keep
        self.expected = 0  # columns that the forward under way will have been seen after it
        self.record_past = False
        self.confirmed = 0  # columns that will never be taken back
        self.margin = 0  # tokens that streaming heads keep beyond their window, to be taken back

    def begin(self, mask: torch.Tensor | None, rows: int, tokens: int) -> None:
        """Announce a forward of `tokens` new columns; `mask` [rows, columns] covers all columns, or is None.

        Waits for the device on the first forward and on later ones of more than one token, never in a decode step:
        there, only padding that may go on is read from the mask.

        Raises:
            ValueError: the mask has holes, does not fit, contradicts an earlier one, or the cache ends in padding or
                has another number of rows.
        """
        seen = self.get_seq_length()
        stored = next((layer.full.keys.shape[0] for layer in self.layers if layer.is_initialized), rows)
        if rows != stored:
            raise ValueError(f"the cache holds {stored} rows, the input has {rows}")
        if self.padded_right:
            raise ValueError(
                "the cache ends in right padding, so nothing can follow; pad prompts on the left to generate"
            )
        if mask is not None and mask.shape[-1] != seen + tokens:
            raise ValueError(f"the attention mask covers {mask.shape[-1]} tokens, cache and input have {seen + tokens}")
        self.expected = seen + tokens
        if not seen or (mask is not None and tokens > 1):
            padded_left, padded_right = (False, False) if mask is None else check_padding(mask)
            padding = leading_padding(mask) if padded_left else None
            known, stated = (0 if pads is None else pads.clamp(max=seen) for pads in (self.padding, padding))
            if seen and torch.as_tensor(known != stated).any():
                raise ValueError("the attention mask pads other tokens than it did in an earlier call")
            self.padding, self.padded_right = padding, padded_right
        elif mask is not None and self.padding_open:
            self.padding = leading_padding(mask)
        if not seen or tokens > 1:
            self.pads = [] if self.padding is None else self.padding.tolist()
            self.padding_open = any(pad >= self.expected for pad in self.pads)
        self.prompt = self.prompt or tokens
        if self.record_past:
            self.confirmed = self.confirmed or tokens
            self.margin = max(self.margin, self.expected - self.confirmed)

    def reserve(self, capacity: int) -> None:
        """State how many tokens the cache will hold, so that storage is allocated once and exactly."""
        self.reserved = max(self.reserved, capacity)

    def expect_prompt(self, tokens: int) -> None:
        """State how many columns the prompt has, however it is cut into forwards; by default, the first forward's."""
        if self.get_seq_length() == 0:
            self.prompt = tokens

    def confirm(self, tokens: int) -> None:
        """State that the first `tokens` columns will never be taken back."""
        self.confirmed = max(self.confirmed, tokens)

    def allocated_bytes(self) -> int:
        """Bytes of keys and values that are allocated, as `KVLayout.kv_bytes` predicts."""
        return sum(group.nbytes for layer in self.layers for group in layer.groups)

    def activate_past_recording(self) -> None:
        """Keep enough of streaming heads that tokens appended from here on can be taken back by `crop`."""
        self.record_past = True
        self.confirm(self.get_seq_length())

    def crop(self, tokens: int) -> None:
        """Take tokens back: a negative number says how many, a positive one how many stay (transformers 4).

        Raises:
            ValueError: streaming heads have dropped what the earlier state needs.
        """
        seen, tokens = self.get_seq_length(), int(tokens)  # transformers 5 may count in a tensor
        length = tokens if tokens > 0 else max(seen + tokens, 0)
        for layer in self.layers:
            layer.crop_to(length)
        self.confirmed = min(seen, length)
        self.padding_open = self.padding is not None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, padding included; the same for every layer that runs here, 0 for layers that run elsewhere."""
        return max(layer.seen for layer in self.layers)

    def reset(self) -> None:
        super().reset()
        self._clear()

    def _map_padding(self, change) -> None:
        if self.padding is not None:
            self.padding = change(self.padding)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._map_padding(lambda padding: padding.index_select(0, beam_idx.to(padding.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map_padding(lambda padding: padding.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._map_padding(lambda padding: padding[indices.to(padding.device)])
