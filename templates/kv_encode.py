"""Encoding of a prompt: chunks run with a compressed cache, and every token gets an embedding (REFORM).

Stock layers run, up to the highest one whose states are wanted. What a layer keeps of earlier chunks gets new positions
before every chunk, so that no position exceeds budget + chunk; keys are stored as they are before RoPE for that.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .kv_cache import CACHE, HandingCache, HandingLayer
from .kv_layout import KVLayout, LayerLayout
from .kv_received import attention_received
from .kv_reform import Reform
from .kv_softmax import AttentionPath, Scoring, Span, Window


class Exit(Exception):
    """Raised where what is wanted has been seen, as in the attention of the highest wanted layer."""


class Rotation(NamedTuple):
    """Cosines and sines of RoPE at positions 0, 1, ..., float32 [1, 1, positions, rotary_dim]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, first: int, tokens: int) -> "Rotation":
        """Those of positions from `first` on."""
        return Rotation(*(part[:, :, first : first + tokens] for part in self))

    def turn(self, states: torch.Tensor) -> torch.Tensor:
        """Apply RoPE to states [batch, heads, positions, head_dim], on whichever device."""
        cos, sin = (part.to(states.device) for part in self)
        rotary, unrotated = states.split([cos.shape[-1], states.shape[-1] - cos.shape[-1]], -1)
        first, second = rotary.float().chunk(2, -1)
        rotary = rotary * cos + torch.cat([-second, first], -1) * sin
        return torch.cat([rotary.to(states.dtype), unrotated], -1)

    def turn_back(self, states: torch.Tensor) -> torch.Tensor:
        """States before RoPE, of those after it."""
        scale = self.cos.square() + self.sin.square()  # not 1 where scaled RoPE tempers attention
        return Rotation(self.cos / scale, -self.sin / scale).turn(states)


class EncodingLayer(HandingLayer):
    """What one layer keeps from chunk to chunk: keys before RoPE and values, [1, kv_heads, kept, head_dim]."""

    encoder: Any  # the `ChunkEncoder`, while a chunk is read

    def __init__(self, index: int, layout: LayerLayout):
        super().__init__()
        self.index, self.layout = index, layout

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        self.keys, self.values = key_states[:, :, :0], key_states[:, :, :0]
        self.is_initialized = True

    def hold(self, layout: LayerLayout, states: torch.Tensor) -> None:
        raise RuntimeError(
            "a long prompt is read by all heads of a layer together, and tensor parallelism splits them; read it with "
            "the model in one process"
        )

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, path: AttentionPath, scoring: Scoring
    ) -> torch.Tensor:
        """Attention of a chunk over what is kept and itself; then what is kept of both is chosen.

        Args:
            query: [1, query_heads, tokens, head_dim], after RoPE, as `keys` [1, kv_heads, tokens, head_dim] are.

        Raises:
            Exit: nothing that follows is needed.
        """
        assert self.keys is not None  # as `update` was called
        assert self.values is not None
        past, tokens = self.encoder.past, query.shape[2]
        kept_tokens = self.keys.shape[2]  # less than `past` in a layer with a sliding window of its own
        kept_rotation = self.encoder.rotation.at(past - kept_tokens, kept_tokens)
        chunk_rotation = self.encoder.rotation.at(past, tokens)
        plain_keys = chunk_rotation.turn_back(keys)
        self.encoder.take(
            self.index, {"q": lambda: chunk_rotation.turn_back(query), "k": lambda: plain_keys, "v": lambda: values}
        )
        kept_states = kept_rotation.turn(self.keys), self.values
        visible_states = torch.cat([kept_states[0], keys], 2), torch.cat([kept_states[1], values], 2)
        if self.layout.native:
            sinks = tuple(states[:, :, :0] for states in kept_states)
            window = Window.of(self.layout, sinks, kept_states)
            output = path.attend(query, keys, values, Span(past), scoring, window)
        else:
            output = path.attend(query, *visible_states, Span(kept_tokens), scoring)
        kept_places = self.kept(query, visible_states[0], scoring)[None, :, :, None].expand(-1, -1, -1, keys.shape[-1])
        self.keys = torch.cat([self.keys, plain_keys], 2).gather(2, kept_places)
        self.values = visible_states[1].gather(2, kept_places)
        return output

    def kept(self, query: torch.Tensor, keys: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Places of `keys` [1, kv_heads, n, head_dim] that every KV head keeps, ascending, int64 [kv_heads, kept]."""
        n, budget = keys.shape[2], self.encoder.reform.encode_budget
        if n > budget and not self.layout.native:
            return self.choose(query, keys, scoring)
        first_place = max(n - min(self.layout.recent - 1, budget), 0) if self.layout.native else 0
        return torch.arange(first_place, n, device=keys.device).expand(keys.shape[1], -1)

    def choose(self, query: torch.Tensor, keys: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Places of `keys` that every KV head keeps where the budget is less than n: int64 [kv_heads, budget]."""
        reform = self.encoder.reform
        if reform.compressor == "streaming":
            importance = torch.arange(keys.shape[2], device=keys.device).float().expand(keys.shape[1], -1)
        else:
            window = 1 if reform.compressor == "tova" else reform.window
            importance = attention_received(query[:, :, -window:], keys, keys.new_zeros(1, 1, 1), scoring)[0]
            if reform.compressor == "tova":
                importance = importance.mean(0, keepdim=True).expand_as(importance)
        return best_places(importance, reform.encode_budget, reform.keep)

    def get_seq_length(self) -> int:
        return self.encoder.past


def best_places(importance: torch.Tensor, budget: int, keep: int) -> torch.Tensor:
    """The most important places, and the first and last `keep`: int64 [kv_heads, budget], ascending.

    By importance float32 [kv_heads, n], of equal places the earlier, with a budget of less than n."""
    importance = importance.clone()
    importance[:, :keep] = importance[:, importance.shape[1] - keep :] = float("inf")
    order = importance.sort(dim=-1, descending=True, stable=True).indices
    return order[:, :budget].sort().values


class ChunkEncoder:
    """Reads one input, chunk by chunk.

    Args:
        model: the stock decoder, without its head.
        layout: of its heads; only windows of the model's own matter while an input is read.
        reform: settings.
    """

    layer = EncodingLayer
    rotation: Rotation  # of the layer that runs, at the positions of earlier chunks and the chunk's

    def __init__(self, model: torch.nn.Module, layout: KVLayout, reform: Reform):
        self.model, self.reform = model, reform
        self.layers = [self.layer(index, layer) for index, layer in enumerate(layout.layers)]
        self.cache = HandingCache(layers=[*self.layers])
        self.past = 0  # positions that earlier chunks take

    def read_chunk(self, **inputs: torch.Tensor) -> Any:
        """What the model returns for the next tokens, as `Encoder.read` takes them; None if it was left by `Exit`."""
        [states] = inputs.values()
        positions = torch.arange(self.past + states.shape[1], device=states.device)[None]
        output = None
        with ExitStack() as hooks, suppress(Exit):
            for layer in self.layers:
                layer.encoder = self
                # a reference that lasts would keep what was read until garbage is collected
                hooks.callback(delattr, layer, "encoder")
            for layer in self.model.get_submodule("layers").children():
                attention = layer.get_submodule("self_attn")
                hooks.callback(attention.register_forward_pre_hook(self.position, with_kwargs=True).remove)
            output = self.model(**inputs, position_ids=positions, use_cache=True, **{CACHE: self.cache})
        self.past = min(positions.shape[1], self.reform.encode_budget)
        return output

    def position(self, attention: torch.nn.Module, args: tuple, options: dict) -> tuple[tuple, dict] | None:
        """The model makes RoPE for all positions, since what is kept needs it too; a layer gets that of its input."""
        if options[CACHE] is not self.cache:  # another thread's forward
            return None
        rotation = options["position_embeddings"]
        self.rotation = Rotation(*(part[:, None].float() for part in rotation))
        return args, {**options, "position_embeddings": tuple(part[:, self.past :] for part in rotation)}

    def take(self, layer: int, states: dict[str, Callable[[], torch.Tensor]]) -> None:
        """Look at a layer's states of a chunk before RoPE, each [1, heads, tokens, head_dim]; may raise `Exit`."""


class Encoder(ChunkEncoder):
    """Embeds the tokens of one prompt."""

    @torch.no_grad()
    def read(self, progress: Callable[[int], None] | None = None, **inputs: torch.Tensor) -> torch.Tensor:
        """Embeddings of all tokens, in host memory: [tokens, embedding_heads * head_dim], each head's part of length 1.

        Args:
            progress: is told after every chunk how many tokens it had.
            inputs: input_ids [1, tokens] or inputs_embeds [1, tokens, hidden].
        """
        [(name, prompt)] = inputs.items()
        embeddings = torch.empty(0)  # until the first chunk says how large they are
        for start in range(0, prompt.shape[1], self.reform.chunk):
            chunk = prompt[:, start : start + self.reform.chunk]
            self.parts: dict[int, torch.Tensor] = {}  # by place in `reform.heads`
            self.read_chunk(**{name: chunk})
            chunk_embeddings = torch.cat([self.parts[place] for place in range(len(self.reform.heads))], -1)
            if not start:
                embeddings = chunk_embeddings.new_empty(prompt.shape[1], chunk_embeddings.shape[1])
            embeddings[start : start + len(chunk_embeddings)] = chunk_embeddings
            if progress is not None:
                progress(chunk.shape[1])
        return embeddings

    def take(self, layer: int, states: dict[str, Callable[[], torch.Tensor]]) -> None:
        """Embed what is wanted."""
        for place, (embedding_layer, state, head) in enumerate(self.reform.heads):
            if embedding_layer == layer:
                head_states = states[state]()[0, head]
                self.parts[place] = F.normalize(head_states.float(), dim=-1).to("cpu", head_states.dtype)
        if layer == self.reform.exit_layer:
            raise Exit
