"""The KV cache of heads of different lengths: preallocated, stored by position, once per KV head.

Stock attention calls `cache.update(k, v, layer)` and passes what it gets to the attention function. Here it gets a
`Handle`: the new keys and values, and the layer cache that they belong to. The attention function (kv_attention.py)
appends them and attends.
"""

import copy
from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import BaseModelOutputWithPast

from .kv_codes import Tiles
from .kv_columns import Columns, Rows, on_device
from .kv_heads import HeadGroup, SelectingHeads, allocate, bind, selecting_heads
from .kv_layout import EVERY, KVLayout, LayerLayout, Quantization
from .kv_tiles import QuantizedGroup, allocate_tiles, bind_tiles, head_group

# what transformers calls a cache among arguments and outputs, since version 5.24 and before
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
GROWTH = 4  # a cache of unstated length grows by a quarter, so that copies stay rare


NO_WAY_BACK = (
    "layers with linear attention have one state of all tokens, from which none can be taken back; generate without "
    "a draft model, and do not use this model as one"
)


class HeadTable(NamedTuple):
    """A layer's KV heads and their storage, as the kernels take them."""

    keys: torch.Tensor  # [batch, slots, head_dim], of all heads one after the other
    values: torch.Tensor  # with equal strides
    offsets: torch.Tensor  # int32 [heads], each head's first slot
    sinks: torch.Tensor  # int32 [heads]; `EVERY` of a full head that is not quantized
    rings: torch.Tensor  # int32 [heads], slots of the ring: `recents` or more, but where tiles take a part
    recents: torch.Tensor  # int32 [heads], the window; of a quantized full head one that no position reaches
    skipped: torch.Tensor  # int32 [batch, heads], columns before position 0
    tiles: Tiles | None = None  # of all heads; None: there are none
    first_tiles: torch.Tensor | None = None  # int32 [heads], each head's first tile; -1: it has none
    # int32 [batch, heads], the first tokens after the sinks that are in tiles; a ring may still hold some of them
    packed: torch.Tensor | None = None
    counts: torch.Tensor | None = None  # int32 [heads], tiles that go round a ring; None: no head has a ring of tiles
    quantization: Quantization | None = None
    rotated_keys: int = 0  # heads, the first ones, whose keys are stored rotated
    rotated_values: int = 0


class Handle(NamedTuple):
    """What `update` returns in place of keys and of values, for one forward.

    The attention function leaves in `reads` how queries of this forward attend to what the layer stored of it, where
    later layers share the layer's cache. These get the same handle.
    """

    layer: "HandingLayer"
    keys: torch.Tensor
    values: torch.Tensor
    reads: list[Callable]

    def to(self, device: torch.device, non_blocking: bool = False) -> "Handle":
        """Stay: queries of layers on another device come here."""
        return self


class HandingLayer(CacheLayerMixin):
    """A layer that stores nothing when it is updated: it hands the new states to the attention function."""

    is_sliding = False
    layout: LayerLayout
    attend: Callable[..., torch.Tensor]  # of a layer that reads a long prompt (kv_encode.py)

    def hold(self, layout: LayerLayout, states: torch.Tensor) -> None:
        """Store only a part of the heads, which this process has: begin anew with heads like `states`."""
        raise NotImplementedError

    def update(  # ty: ignore[incompatible-method-override]  # stock layers return tensors
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[Handle, Handle]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        # under autocast, keys are wider than values once they are rotated
        handle = Handle(self, key_states, value_states.to(key_states.dtype), [])
        return handle, handle

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        # transformers 4 gives the tensor of cache positions
        new_tokens = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + new_tokens, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class KVLayerCache(HandingLayer):
    """One layer: groups of full heads, of streaming heads, and of each budgeted head, in this order."""

    is_croppable = True

    def __init__(self, layout: LayerLayout, columns: Columns, shared: bool = False):
        super().__init__()
        self.layout, self.columns = layout, columns
        self.shared = shared  # whether later layers attend to what this one stores
        self.reset()

    def __getstate__(self) -> dict:
        return {**self.__dict__, "runs": [], "table": None}  # which are made of the rest

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._bind()
        self._find_runs()

    def reset(self) -> None:
        """Forget everything and free the storage."""
        self.groups: list[HeadGroup] = []
        self.present: list[HeadGroup] = []  # those of them that have heads
        # neighbors that hold equally many tokens as one group each, which `kv_torch.step` takes; none: it takes no step
        self.runs: list[HeadGroup] = []
        self.budgeted: SelectingHeads | None = None
        self.keys = self.values = None  # one buffer of all groups, [batch, slots of all heads, head_dim]
        self.slots: list[int] = []  # of a head of each group
        self.tiles, self.counts = None, []  # one buffer of all tiles, and how many a head of each quantized group has
        self.table = None  # what `head_table` made of all this
        self.pads: list[int] | None = None  # the padding that groups know of
        self.seen = self.capacity = self.restorable = self.margin = 0
        self.is_initialized = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        layout = self.layout
        self.dtype, self.device = key_states.dtype, key_states.device
        window_quantization = layout.quantization if layout.quantized_window else None
        full = head_group(key_states, layout.full, layout.quantization)
        streaming = head_group(key_states, layout.streaming, window_quantization, layout.sink, layout.recent)
        self.groups = [full, streaming]
        heads_class = selecting_heads(layout)
        self.budgeted = heads_class(key_states, layout, self.columns.prompt) if heads_class else None
        self.groups += self.budgeted.groups if self.budgeted else []
        self.present = [group for group in self.groups if group.heads]
        self.is_initialized = True

    def hold(self, layout: LayerLayout, states: torch.Tensor) -> None:
        if self.seen:
            raise RuntimeError("the cache was filled by a model whose heads are split over other processes")
        self.layout = layout
        self.lazy_initialization(states)

    @property
    def full(self) -> HeadGroup:
        return self.groups[0]

    @property
    def streaming(self) -> HeadGroup:
        return self.groups[1]

    @property
    def held(self) -> SelectingHeads | None:
        """The heads with rolling budgets, if there are any."""
        return self.budgeted if self.layout.holds else None

    @property
    def quantized(self) -> list[QuantizedGroup]:
        """The groups that have tiles."""
        return [group for group in self.groups if isinstance(group, QuantizedGroup)]

    @property
    def filling(self) -> list[QuantizedGroup]:
        """Those of them that fill tiles with what will not be taken back; heads with rolling budgets can undo it."""
        held_groups = self.held.groups if self.held else ()
        return [group for group in self.quantized if group not in held_groups]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that are allocated."""
        budgeted_bytes = self.budgeted.nbytes if self.budgeted else 0
        return sum(group.nbytes for group in self.groups) + budgeted_bytes

    def make_room(self, tokens: int) -> None:
        """Prepare the groups for new columns: where their rows begin, what tiles may take, and storage for all."""
        seen = self.seen + tokens
        if seen != self.columns.expected:
            raise RuntimeError(
                "a KVSurgeryCache is filled by calling the converted model; after a forward that was interrupted, "
                "reset() it"
            )
        for group in self.quantized:
            group.settled = self.columns.settled
        if seen > self.capacity or self.pads is not self.columns.pads or self.margin < self.columns.margin:
            self._prepare(seen)

    @torch.inference_mode(False)  # storage is written again later, maybe outside of an inference mode
    @torch.no_grad()
    def _prepare(self, seen: int) -> None:
        """Follow what has changed: the padding of rows, columns that there is no storage for, or the margin."""
        if self.pads is not self.columns.pads:
            self.pads, self.table = self.columns.pads, None
            for group in self.groups:
                group.align(self.pads)
        if seen > self.capacity:
            grown_capacity = max(seen, self.capacity + self.capacity // GROWTH)
            self.capacity = self.columns.reserved if seen <= self.columns.reserved else grown_capacity
        quantized, self.margin = self.quantized, self.columns.margin
        for group in dict.fromkeys([*([self.held] if self.held else []), self.streaming, *self.filling]):
            if self.margin > group.margin:
                group.widen(self.margin, self.seen, self.capacity)
                self.table = None
        if self.held:
            self.held.reserve(self.capacity)
        slots = [group.wanted(self.capacity) for group in self.groups]
        counts = [group.wanted_tiles(self.capacity) for group in quantized]
        if self.keys is None or slots != self.slots:
            self.keys, self.values = allocate(self.groups, slots)
            self.slots, self.table = slots, None
        if counts != self.counts:
            self.tiles = allocate_tiles(quantized, counts)
            self.counts, self.table = counts, None
        self._find_runs()

    def _find_runs(self) -> None:
        """Join heads that a decode step can take at once; none where a step has more to do than store and attend."""
        self.runs, begin = [], 0
        if self.keys is None or self.values is None or not self._is_plain():
            return
        for (_, slots, _), neighbors in groupby(self.present, lambda group: (group.wraps, group.slots, group.skips)):
            group, *others = neighbors
            run, shape = copy.copy(group), (sum(neighbor.heads for neighbor in (group, *others)), slots)
            end = begin + shape[0] * slots
            run.keys, run.values = (states[:, begin:end].unflatten(1, shape) for states in (self.keys, self.values))
            self.runs.append(run)
            begin = end

    def _is_plain(self) -> bool:
        """Whether nothing but a token's states has to be stored, each group has its window, and rows are alike."""
        layout = self.layout
        if self.shared or self.held or self.quantized or self.margin or not self.ready:
            return False
        return not (layout.chunked or layout.scattered or any(self.pads or ()))

    def follow_selection(self) -> None:
        """Learn that budgeted heads have selected, so that their rows skip other columns."""
        self.table = None
        self._find_runs()

    def store(self, group: HeadGroup, column: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store columns of one group, for which `make_room` has prepared: [batch, heads, tokens, head_dim]."""
        if torch.is_grad_enabled():  # to enter `no_grad` takes as long as to store one token
            with torch.no_grad():
                group.store(column, keys, values)
        else:
            group.store(column, keys, values)
        if isinstance(group, QuantizedGroup):
            self.table = None  # it says what is packed

    def advance(self, tokens: int) -> None:
        """Count columns that have been stored."""
        self.seen += tokens
        # tiles hold a window for whatever may be taken back
        if not self.layout.quantized_window and self.seen > self.layout.sink + self.streaming.ring:
            self.restorable = max(self.restorable, self.seen - self.streaming.margin - 1)

    @property
    def ready(self) -> bool:
        """Whether all that is known of the past lies in the groups."""
        return self.budgeted is None or self.budgeted.selected

    @torch.inference_mode(False)  # later selections write to it
    def head_table(self) -> "HeadTable":
        """The heads as the kernels see them; the same tensors until storage or rows change."""
        if self.table is None:
            heads, skips, packed = [], [], []
            offset = tile = 0
            counts = iter(self.counts)
            for group, slots in zip(self.groups, self.slots, strict=True):
                quantized = isinstance(group, QuantizedGroup)
                tiles = next(counts) if quantized else 0
                sink = EVERY if group.sink is None else group.sink
                recent = group.span if quantized else max(group.recent, 1)
                for _ in range(group.heads):
                    heads.append((offset, sink, max(group.ring, 1), recent, tile if quantized else -1, max(tiles, 1)))
                    skips.append(group.skips)
                    packed.append(group.packed)
                    offset, tile = offset + slots, tile + tiles
            (offsets, sinks, rings, recents, first_tiles, counts), skipped, packed = (
                on_device(list(zip(*part, strict=True)), self.device, torch.int32) for part in (heads, skips, packed)
            )
            assert self.keys is not None  # as `make_room` was called
            assert self.values is not None
            self.table = HeadTable(self.keys, self.values, offsets, sinks, rings, recents, skipped)
            if self.tiles is not None:
                self.table = self.table._replace(
                    tiles=self.tiles,
                    first_tiles=first_tiles,
                    packed=packed,
                    counts=counts if self.layout.quantized_window else None,
                    quantization=self.layout.quantization,
                    rotated_keys=self.layout.rotated_keys,
                    rotated_values=self.layout.rotated_values,
                )
        return self.table

    def check_crop(self, length: int) -> None:
        """Raise ValueError where columns from `length` on cannot be taken back."""
        if self.layout.streaming and length < min(self.restorable, self.seen):
            raise ValueError(
                f"cannot take the cache back from {self.seen} to {length} tokens: streaming heads kept only what is "
                f"needed from {self.restorable} on; call activate_past_recording() before what may be taken back"
            )
        if self.budgeted and self.seen:
            oldest = max(self.budgeted.oldest(self.columns.settled), 1) if self.ready else self.seen + 1
            if length < oldest:
                raise ValueError(
                    f"cannot take the cache back to {length} tokens: that is inside the prompt, or before the "
                    "observation window of the last selection, and budgeted heads have dropped or quantized some of it"
                )
        if length < (tiles_end := max((group.tiles_end for group in self.filling), default=0)):
            raise ValueError(
                f"cannot take the cache back from {self.seen} to {length} tokens: all but the newest "
                f"{self.seen - tiles_end} are quantized"
            )

    def crop(self, length: int) -> None:
        """Take columns back, as `check_crop` allows."""
        if self.budgeted:
            self.budgeted.take_back(length, self)
        self.seen = min(self.seen, length)

    def get_seq_length(self) -> int:
        return self.seen

    def _bind(self) -> None:
        """Let the groups be views of the layer's buffers."""
        if self.keys is not None and self.values is not None:
            bind(self.groups, self.slots, (self.keys, self.values))
        if self.tiles is not None:
            bind_tiles(self.quantized, self.counts, self.tiles)

    @torch.inference_mode(False)
    def take_rows(self, rows: Rows) -> None:
        """Reorder, repeat or drop rows; the cache's padding has followed already."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = rows(self.keys), rows(self.values)
        if self.tiles is not None:
            self.tiles = self.tiles.map(rows)
        self._bind()
        if self.budgeted:
            self.budgeted.take_rows(rows)
        self.pads, self.table = self.columns.pads, None
        for group in self.groups:
            group.take_rows(rows.of)
            group.align(self.pads)
        self._find_runs()


def linear_layer() -> Any:
    """The stock cache of a layer with linear attention: the states of its convolution and its recurrence."""
    from transformers.cache_utils import LinearAttentionLayer  # transformers 4 has none

    return LinearAttentionLayer()


class HandingCache(Cache):
    """A cache whose attention layers hand new states to the attention function."""


class KVSurgeryCache(HandingCache):
    """The cache of a converted model: `generate` makes one, and returns it as `past_key_values` for the next turn.

    Args:
        config: the model's config, with its `kv_surgery` section.
        capacity: tokens to allocate for; without it storage grows by a quarter whenever it is full.
        quantization: how full and budgeted heads are stored, in place of what the config says.
    """

    layers: list[Any]  # in the model's order: `attention`, and stock caches of linear attention
    max_cache_len = -1  # none, as peft writes it

    def __init__(self, config: Any, capacity: int = 0, quantization: Quantization | None = None):
        layout = KVLayout.from_config(config)
        if quantization:
            layout = layout.quantized(quantization)
        self.columns = Columns(capacity)
        self.graph: Any = None  # of decode steps, if whoever runs them has one (kv_graph.py)
        self.repeated = 0  # tokens that the next input begins with, and that are here already
        sources = {layer.source for layer in layout.layers}
        layers = [
            KVLayerCache(layer, self.columns, index in sources) if layer.heads else linear_layer()
            for index, layer in enumerate(layout.layers)
            if layer.source is None  # those that share a cache come last
        ]
        self.attention = [layer for layer in layers if isinstance(layer, KVLayerCache)]
        self.linear = [layer for layer in layers if not isinstance(layer, KVLayerCache)]
        super().__init__(layers=layers)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "graph": None}  # a graph is of this storage, not of a copy's

    @torch.inference_mode(False)  # a copy is written later, maybe outside of an inference mode
    def __deepcopy__(self, memo: dict) -> "KVSurgeryCache":
        memo[id(self)] = clone = type(self).__new__(type(self))
        clone.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return clone

    def begin(self, mask: torch.Tensor | None, rows: int, tokens: int) -> None:
        """Announce a forward of `tokens` new columns; `mask` [rows, columns] covers all columns, or is None.

        Waits for the device on the first forward and on later ones of more than one token, not in a decode step unless
        a row is nothing but padding so far.

        Raises:
            ValueError: the mask has holes, does not fit, contradicts an earlier one, or the cache ends in padding or
                has another number of rows.
        """
        stored_rows = self._rows or rows
        if rows != stored_rows:
            raise ValueError(f"the cache holds {stored_rows} rows, the input has {rows}")
        self.columns.begin(mask, rows, tokens, self.get_seq_length())

    def reserve(self, capacity: int) -> None:
        """State how many tokens the cache will hold, so that storage is allocated once and exactly."""
        self.columns.reserved = max(self.columns.reserved, capacity)

    def expect_prompt(self, tokens: int) -> None:
        """State how many columns the prompt has, however it is cut into forwards; by default, the first forward's."""
        if self.get_seq_length() == 0:
            self.columns.prompt = tokens

    def confirm(self, tokens: int) -> None:
        """State that the first `tokens` columns will never be taken back."""
        self.columns.confirmed = max(self.columns.confirmed, tokens)

    def allocated_bytes(self) -> int:
        """Bytes of keys and values that are allocated, as `KVLayout.kv_bytes` predicts."""
        return sum(layer.nbytes for layer in self.attention)

    def activate_past_recording(self) -> None:
        """Keep enough of streaming heads that tokens appended from here on can be taken back by `crop`.

        Raises:
            ValueError: layers with linear attention have one state of all tokens.
        """
        if self.linear:
            raise ValueError(NO_WAY_BACK)
        self.columns.record_past = True
        self.confirm(self.get_seq_length())

    def crop(self, tokens: int) -> None:  # ty: ignore[lost-keyword-for-regular-parameter]  # versions name it differently
        """Take tokens back: a negative number says how many, a positive one how many stay (transformers 4).

        Raises:
            ValueError: streaming heads have dropped what the earlier state needs, or tiles have taken it; or layers
                have linear attention.
        """
        seen, tokens = self.get_seq_length(), int(tokens)  # transformers 5 may count in a tensor
        length = tokens if tokens > 0 else max(seen + tokens, 0)
        if self.linear and length < seen:
            raise ValueError(NO_WAY_BACK)
        for layer in self.attention if length < seen else ():
            layer.check_crop(length)
        for layer in self.attention:
            layer.crop(length)
        self.columns.crop(min(seen, length))

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Columns that a layer has seen, padding included. During a forward, earlier layers have seen more than later
        ones; without a layer, or for one without a KV cache of its own, it is the most that any has seen."""
        own_layers = self.layers[layer_idx : layer_idx + 1] if layer_idx is not None else []
        lengths = [layer.seen for layer in own_layers if isinstance(layer, KVLayerCache)]
        return max(lengths or [layer.seen for layer in self.attention])

    def reset(self) -> None:
        super().reset()
        for layer in self.linear:  # after a reset, they keep their number of rows
            layer.__init__()
        self.columns.clear()
        self.graph = None

    def restart(self) -> None:
        """Forget all tokens to read them anew: what has been reserved, confirmed and asked to be recorded stays."""
        seen, record_past = self.get_seq_length(), self.columns.record_past
        self.reset()
        self.columns.record_past = record_past
        self.confirm(seen + 1)

    def _take_rows(self, index: torch.Tensor) -> None:
        rows = Rows(index)
        self.columns.pads = rows.of(self.columns.pads)
        for layer in self.attention:
            if layer.is_initialized:
                layer.take_rows(rows)
        for layer in self.linear:
            layer.reorder_cache(index)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._take_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._take_rows(torch.arange(self._rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._take_rows(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    @property
    def _rows(self) -> int:
        return next((len(layer.full.keys) for layer in self.attention if layer.is_initialized), 0)
