"""The KV cache of heads of different lengths: preallocated, stored by position, once per KV head.

Stock attention calls `cache.update(k, v, layer)` and passes what it gets to the attention function. Here it gets a
`Handle`: the new keys and values, and the layer cache that they belong to. The attention function (kv_attention.py)
appends them and attends.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import cache_utils
from transformers.modeling_outputs import BaseModelOutputWithPast

from .kv_columns import Columns, Rows
from .kv_heads import HeadGroup
from .kv_kind import Heads
from .kv_kinds import kinds_of, quantized_code, storage_of
from .kv_layout import HYBRID, KVLayout, LayerLayout, Quantization, setting, text_config

# what transformers calls a cache among arguments and outputs, since version 5.24 and before
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
GROWTH = 4  # a cache of unstated length grows by a quarter, so that copies stay rare
NO_WAY_BACK = "some layers have one state of all tokens, from which none can be taken back; generate without drafts"


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


class HandingLayer(cache_utils.CacheLayerMixin):
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
    """One layer: its heads, kind by kind, and their storage."""

    is_croppable = True

    def __init__(self, layout: LayerLayout, columns: Columns, shared: bool = False):
        self.layout, self.columns = layout, columns  # keys and values, which the base would set, are the storage's
        self.shared = shared  # whether later layers attend to what this one stores
        self.reset()

    def __getstate__(self) -> dict:
        return {**self.__dict__, "runs": []}  # which are made of the rest

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._find_runs()

    def reset(self) -> None:
        """Forget everything and free the storage."""
        self.storage = storage_of(self.layout)
        self.heads: list[Heads] = []  # of each kind that the layer has, in the order of storage
        # neighbors that hold equally many tokens as one group each, which `kv_torch.step` takes; none: it takes no step
        self.runs: list[HeadGroup] = []
        self.pads: list[int] | None = None  # the padding that groups know of
        self.seen = self.capacity = self.margin = 0
        self.is_initialized = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.storage = storage_of(self.layout)
        self.heads = [kind(key_states, self.layout, self.columns, self.storage) for kind in kinds_of(self.layout)]
        self.is_initialized = True

    def hold(self, layout: LayerLayout, states: torch.Tensor) -> None:
        if self.seen:
            raise RuntimeError("the cache was filled by a model whose heads are split over other processes")
        self.layout = layout
        self.lazy_initialization(states)

    @property
    def keys(self) -> torch.Tensor | None:  # ty: ignore[incompatible-property-override]  # which the base sets
        """One buffer of all heads, [batch, slots of all heads, head_dim]."""
        return self.storage.keys

    @property
    def values(self) -> torch.Tensor | None:  # ty: ignore[incompatible-property-override]
        """One buffer of all heads, [batch, slots of all heads, head_dim]."""
        return self.storage.values

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that are allocated."""
        return self.storage.nbytes + sum(heads.extra_bytes for heads in self.heads)

    def make_room(self, tokens: int) -> None:
        """Prepare for new columns: where rows begin, what tiles may take, and storage for all."""
        seen = self.seen + tokens
        if seen != self.columns.expected:
            raise RuntimeError(
                "a KVSurgeryCache is filled by calling the converted model; after an interrupted forward, reset() it"
            )
        for group in self.storage.tiled:
            group.settled = self.columns.settled
        if seen > self.capacity or self.pads is not self.columns.pads or self.margin < self.columns.margin:
            self._prepare(seen)

    @torch.inference_mode(False)  # storage is written again later, maybe outside of an inference mode
    @torch.no_grad()
    def _prepare(self, seen: int) -> None:
        """Follow what has changed: the padding of rows, columns that there is no storage for, or the margin."""
        if self.pads is not self.columns.pads:
            self._align()
        if seen > self.capacity:
            grown_capacity = max(seen, self.capacity + self.capacity // GROWTH)
            self.capacity = self.columns.reserved if seen <= self.columns.reserved else grown_capacity
        if self.margin < self.columns.margin:
            self.margin, self.storage.made = self.columns.margin, None  # rings become longer
            for heads in self.heads:
                heads.widen(self.margin, self.seen, self.capacity)
        for heads in self.heads:
            heads.reserve(self.capacity)
        self.storage.fit(self.capacity)
        self._find_runs()

    def _align(self) -> None:
        """Let groups and kernels know the left padding of each row."""
        self.pads = self.columns.pads
        for heads in self.heads:
            heads.align(self.pads)
        self.storage.note_rows()

    def _find_runs(self) -> None:
        """Join heads that a decode step can take at once; none where a step has more to do than store and attend."""
        is_plain = all(heads.plain and heads.ready for heads in self.heads)
        is_special = self.shared or self.margin or self.layout.chunked or self.layout.scattered or any(self.pads or ())
        self.runs = self.storage.runs() if self.keys is not None and is_plain and not is_special else []

    def pack(self) -> None:
        """Quantize the tiles and select the tokens that are due before the next column, by kernels; mostly nothing."""
        for heads in self.heads:
            if heads.due == self.seen:
                heads.renew(self.seen, kernels=True)
        self.storage.pack(self.columns.settled)

    def advance(self, tokens: int) -> None:
        """Count columns that have been stored."""
        self.seen += tokens
        for heads in self.heads:
            heads.advance(self.seen)

    def finish(self, tokens: int) -> None:
        """Count the columns of a forward in which heads may have selected or packed tokens."""
        self.advance(tokens)
        self.storage.note_rows()
        self._find_runs()

    @property
    def ready(self) -> bool:
        """Whether all that is known of the past lies in the groups."""
        return all(heads.ready for heads in self.heads)

    def check_crop(self, length: int) -> None:
        """Raise ValueError where columns from `length` on cannot be taken back."""
        for heads in self.heads if self.seen else ():
            heads.check_crop(length, self.seen)

    def crop(self, length: int) -> None:
        """Take columns back, as `check_crop` allows."""
        for heads in self.heads:
            heads.take_back(length)
        self.seen = min(self.seen, length)

    def get_seq_length(self) -> int:
        return self.seen

    @torch.inference_mode(False)
    def take_rows(self, rows: Rows) -> None:
        """Reorder, repeat or drop rows; the cache's padding has followed already."""
        self.storage.take_rows(rows)
        for heads in self.heads:
            heads.take_rows(rows)
        self._align()
        self._find_runs()


class HandingCache(cache_utils.Cache):
    """A cache whose attention layers hand new states to the attention function."""


class KVSurgeryCache(HandingCache):
    """The cache of a converted model: `generate` makes one, and returns it as `past_key_values` for the next turn.

    Args:
        config: the model's config, with its `kv_surgery` section.
        capacity: tokens to allocate for; without it storage grows by a quarter whenever it is full.
        quantization: how full and budgeted heads are stored, in place of what the config says.
    """

    layers: list[Any]  # in the model's order: `attention`, and stock caches of states
    max_cache_len = -1  # none, as peft writes it

    def __init__(self, config: Any, capacity: int = 0, quantization: Quantization | None = None):
        layout = KVLayout.from_config(config)
        if quantization:
            layout = layout.quantized(quantization)
        if layout.quantization:
            layout = quantized_code().with_rounding(layout, config)
        self.columns = Columns(capacity)
        self.graph: Any = None  # of decode steps, if whoever runs them has one (kv_graph.py)
        self.repeated = 0  # tokens that the next input begins with, and that are here already
        sources = {layer.source for layer in layout.layers}
        layers: list[Any] = [
            KVLayerCache(layer, self.columns, index in sources) if layer.heads else cache_utils.LinearAttentionLayer()
            for index, layer in enumerate(layout.layers)
            if layer.source is None  # those that share a cache come last
        ]
        self.attention = [layer for layer in layers if isinstance(layer, KVLayerCache)]
        if HYBRID in (setting(text_config(config), "layer_types") or ()):
            from . import kv_states

            layers = [kv_states.StatefulLayer(layer) for layer in layers]
        self.linear = [layer for layer in layers if not isinstance(layer, KVLayerCache)]
        super().__init__(layers=layers)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "graph": None}  # a graph is of this storage, not of a copy's

    @torch.inference_mode(False)  # a copy is written later, maybe outside of an inference mode
    def __deepcopy__(self, memo: dict) -> "KVSurgeryCache":
        memo[id(self)] = clone = type(self).__new__(type(self))
        clone.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return clone

    @torch.compiler.disable  # traced, it would be compiled anew for other lengths
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
            ValueError: layers have a state of all tokens.
        """
        if self.linear:
            raise ValueError(NO_WAY_BACK)
        self.columns.record_past = True
        self.confirm(self.get_seq_length())

    def crop(self, tokens: int) -> None:  # ty: ignore[lost-keyword-for-regular-parameter]  # versions name it differently
        """Take tokens back: a negative number says how many, a positive one how many stay (transformers 4).

        Raises:
            ValueError: streaming heads have dropped what is needed, tiles have taken it, or layers have states.
        """
        seen = self.get_seq_length()
        tokens = int(tokens)  # transformers 5 may count in a tensor
        length = tokens if tokens > 0 else max(seen + tokens, 0)
        if self.linear and length < seen:
            raise ValueError(NO_WAY_BACK)
        for layer in self.attention if length < seen else ():
            layer.check_crop(length)
        for layer in self.attention:
            layer.crop(length)
        self.columns.crop(min(seen, length))

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Columns that a layer has seen, padding included.

        During a forward, earlier layers have seen more than later ones. Without a layer, or for one without a KV cache
        of its own, it is the most that any has seen.
        """
        own_layers = self.layers[layer_idx : layer_idx + 1] if layer_idx is not None else []
        lengths = [layer.seen for layer in own_layers if hasattr(layer, "seen")]
        return max(lengths or [layer.seen for layer in self.attention])

    def reset(self) -> None:
        super().reset()
        for layer in self.linear:  # after a reset, they keep their number of rows
            cache_utils.LinearAttentionLayer.__init__(layer)
        self.columns.clear()
        self.graph = None

    def restart(self) -> None:
        """Forget all tokens to read them anew: what has been reserved, confirmed and asked to be recorded stays."""
        seen, record_past = self.get_seq_length(), self.columns.record_past
        self.reset()
        self.columns.record_past = record_past
        self.confirm(seen + 1)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        rows = Rows(beam_idx)
        self.columns.pads = rows.of(self.columns.pads)
        for layer in self.attention:
            if layer.is_initialized:
                layer.take_rows(rows)
        for layer in self.linear:
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self._rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.reorder_cache(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    @property
    def _rows(self) -> int:
        return next((len(layer.storage.groups[0].keys) for layer in self.attention if layer.is_initialized), 0)
