"""Reading a prompt chunk by chunk beside a compressed cache, for an embedding of every token (REFORM).

Stock layers run, up to the highest one whose states are wanted. What a layer keeps of earlier chunks gets new positions
before every chunk, so that no position exceeds budget + chunk; keys are stored as they are before RoPE for that.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, CacheLayerMixin

from .kv_budget import attention_received
from .kv_cache import Handle
from .kv_layout import KVLayout, LayerLayout
from .kv_reform import Reform


class Exit(Exception):
    """Raised in the attention of the highest wanted layer: nothing that follows is needed."""


class Rotation(NamedTuple):
    """Cosines and sines of RoPE at positions 0, 1, ..., float32 [1, 1, positions, rotary_dim]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, first: int, tokens: int) -> "Rotation":
        """Those of positions from `first` on."""
        return Rotation(*(part[:, :, first : first + tokens] for part in self))

    def to(self, device: torch.device) -> "Rotation":
        """The same on a device."""
        return Rotation(*(part.to(device) for part in self))

    def turn(self, states: torch.Tensor) -> torch.Tensor:
        """Apply RoPE to states [batch, heads, positions, head_dim]."""
        return self._apply(states, self.cos, self.sin)

    def turn_back(self, states: torch.Tensor) -> torch.Tensor:
        """States before RoPE, of those after it."""
        scale = self.cos.square() + self.sin.square()  # not 1 where scaled RoPE tempers attention
        return self._apply(states, self.cos / scale, -self.sin / scale)

    def _apply(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned, rest = states.split([cos.shape[-1], states.shape[-1] - cos.shape[-1]], -1)
        first, second = turned.float().chunk(2, -1)
        turned = turned * cos + torch.cat([-second, first], -1) * sin
        return torch.cat([turned.to(states.dtype), rest], -1)


class EncodingLayer(CacheLayerMixin):
    """What one layer keeps from chunk to chunk: keys before RoPE and values, [1, kv_heads, kept, head_dim]."""

    is_sliding = False

    def __init__(self, index: int, layout: LayerLayout, encoder: "Encoder"):
        super().__init__()
        self.index, self.layout, self.encoder = index, layout, encoder

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        self.keys, self.values = key_states[:, :, :0], key_states[:, :, :0]
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[Handle, Handle]:
        if not self.is_initialized:
            self.lazy_initialization(key_states)
        handle = Handle(self, key_states, value_states)
        return handle, handle

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, path: ModuleType, options: dict
    ) -> torch.Tensor:
        """Attention of a chunk over what is kept and itself; then what is kept of both is chosen.

        Args:
            query: [1, query_heads, tokens, head_dim], after RoPE, as `keys` [1, kv_heads, tokens, head_dim] are.
            path: where attention is computed, `kv_torch` or `kv_cuda`.
            options: scaling, softcap and dropout.

        Raises:
            Exit: this is the highest layer that is looked at, and its states are taken.
        """
        past, tokens = self.encoder.past, query.shape[2]
        kept = self.keys.shape[2]  # less than `past` in a layer with a sliding window of its own
        rotation = self.encoder.rotation(self.index).to(query.device)
        own = rotation.at(past, tokens)
        unturned = own.turn_back(keys)
        self.encoder.take(self.index, {"q": lambda: own.turn_back(query), "k": lambda: unturned, "v": lambda: values})
        if self.index == self.encoder.reform.exit_layer:
            raise Exit
        before = rotation.at(past - kept, kept).turn(self.keys), self.values
        stored = torch.cat([self.keys, unturned], 2), torch.cat([self.values, values], 2)
        if self.layout.native:
            sinks = tuple(states[:, :, :0] for states in before)
            output = path.streaming(query, sinks, before, (keys, values), past, 0, self.layout, options)
            last = min(kept + tokens, self.layout.recent - 1, self.encoder.reform.encode_budget)
            self.keys, self.values = (states[:, :, kept + tokens - last :].clone() for states in stored)
            return output
        seen = torch.cat([before[0], keys], 2)
        output = path.causal(query, seen, stored[1], 0, options)
        if past + tokens <= self.encoder.reform.encode_budget:
            self.keys, self.values = stored
        else:
            chosen = self.choose(query, seen, options)[None, :, :, None].expand(-1, -1, -1, keys.shape[-1])
            self.keys, self.values = (states.gather(2, chosen) for states in stored)
        return output

    def choose(self, query: torch.Tensor, keys: torch.Tensor, options: dict) -> torch.Tensor:
        """Places that every KV head keeps, ascending, int64 [kv_heads, encode_budget]; of equal ones, the earlier."""
        reform, places = self.encoder.reform, keys.shape[2]
        if reform.compressor == "streaming":
            importance = torch.arange(places, device=keys.device).float().expand(keys.shape[1], -1)
        else:
            window = 1 if reform.compressor == "tova" else reform.window
            scaling, padding = options["scaling"] or keys.shape[-1] ** -0.5, keys.new_zeros(1, 1, 1)
            importance = attention_received(query[:, :, -window:], keys, padding, scaling, options["softcap"])[0]
            if reform.compressor == "tova":
                importance = importance.mean(0, keepdim=True).expand_as(importance)
        importance = importance.clone()
        importance[:, : reform.keep] = importance[:, places - reform.keep :] = float("inf")
        order = importance.sort(dim=-1, descending=True, stable=True).indices
        return order[:, : reform.encode_budget].sort().values

    def get_seq_length(self) -> int:
        return self.encoder.past

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        return self.encoder.past + (query_length if isinstance(query_length, int) else query_length.shape[0]), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class Encoder:
    """Reads one prompt.

    Args:
        model: the stock decoder, without its head.
        layout: of its heads; only windows of the model's own matter while a prompt is read.
        reform: settings.
        device: where embeddings are kept.
    """

    def __init__(self, model: torch.nn.Module, layout: KVLayout, reform: Reform, device: torch.device | str = "cpu"):
        self.model, self.reform, self.device = model, reform, device
        self.cache = Cache(layers=[EncodingLayer(index, layer, self) for index, layer in enumerate(layout.layers)])
        self.past = 0  # positions that earlier chunks take
        self.tables: dict[str | None, Rotation] = {}
        self.states: list[torch.Tensor | None] = []
        self.embeddings: list[torch.Tensor] = []

    @torch.no_grad()
    def read(self, progress: Callable[[int], None] | None = None, **inputs: torch.Tensor) -> torch.Tensor:
        """Embeddings of all tokens, [tokens, embedding_heads * head_dim], each head's part of length 1.

        Args:
            progress: is told after every chunk how many tokens it had.
            inputs: input_ids [1, tokens] or inputs_embeds [1, tokens, hidden].
        """
        [(name, whole)] = inputs.items()
        for start in range(0, whole.shape[1], self.reform.chunk):
            part = whole[:, start : start + self.reform.chunk]
            self._read_chunk(name, part)
            if progress is not None:
                progress(part.shape[1])
        return torch.cat(self.embeddings)

    def _read_chunk(self, name: str, part: torch.Tensor) -> None:
        tokens = part.shape[1]
        positions = torch.arange(self.past + tokens, device=part.device)
        self._rotate(positions[None])
        self.states = [None] * len(self.reform.heads)
        with suppress(Exit):
            self.model(
                **{name: part}, position_ids=positions[None, self.past :], past_key_values=self.cache, use_cache=True
            )
        self.embeddings.append(torch.cat([F.normalize(own.float(), dim=-1).to(own) for own in self.states], -1))
        self.past = min(self.past + tokens, self.reform.encode_budget)

    def take(self, layer: int, states: dict[str, Callable[[], torch.Tensor]]) -> None:
        """Keep what is wanted of a layer's states before RoPE, each [1, heads, tokens, head_dim]."""
        for place, (wanted, state, head) in enumerate(self.reform.heads):
            if wanted == layer:
                self.states[place] = states[state]()[0, head].to(self.device)

    def rotation(self, layer: int) -> Rotation:
        """RoPE of a layer, at all positions of this chunk and what is kept before it."""
        return self.tables[self._kind(layer)]

    def _kind(self, layer: int) -> str | None:
        return None if None in self.tables else self.model.config.layer_types[layer]

    def _rotate(self, positions: torch.Tensor) -> None:
        """Ask the model for RoPE at these positions, int64 [1, positions], as it applies it: in its own dtype."""
        rotary = self.model.rotary_emb
        local = getattr(self.model, "rotary_emb_local", None)
        like = torch.empty(0, dtype=self.model.dtype, device=positions.device)
        if "layer_type" in inspect.signature(rotary.forward).parameters:  # Gemma 3 has a base for each kind of layers
            made = {kind: rotary(like, positions, kind) for kind in set(self.model.config.layer_types)}
        elif local is not None:  # and in transformers 4 a module
            made = {"full_attention": rotary(like, positions), "sliding_attention": local(like, positions)}
        else:
            made = {None: rotary(like, positions)}
        self.tables = {kind: Rotation(*(part[:, None].float() for part in pair)) for kind, pair in made.items()}
