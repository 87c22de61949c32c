"""Rolling budgets, by definition: a stock model that keeps every token, and masks what selections have dropped.

One row, one token at a time, one KV head at a time.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers import DynamicCache
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from kvsurgery.heads.kinds import head_list
from kvsurgery.templates.kv_cache import CACHE
from kvsurgery.templates.kv_layout import VALUE_NORM, KVLayout, LayerLayout
from tests.helpers.families import attention_of

NAME = "tests_hold_reference"


@dataclass
class LayerState:
    """All tokens of a layer, what its budgeted heads still have of them, and what they had before each selection."""

    due: int
    sinks: torch.Tensor | None = None  # learned, [query_heads]
    queries: list[torch.Tensor] = field(default_factory=list)  # [query_heads, head_dim] each
    keys: list[torch.Tensor] = field(default_factory=list)  # [kv_heads, head_dim] each
    values: list[torch.Tensor] = field(default_factory=list)
    alive: dict[int, list[int]] = field(default_factory=dict)  # KV head -> positions
    before: list[tuple[int, dict]] = field(default_factory=list)  # column, and `alive` then


class HoldReference:
    """A row of a converted model: `pad` columns of padding, then its tokens.

    Args:
        model: the stock model with the weights of the converted one, heads in its order.
        prompt: columns after which heads select first.
        cache: a stock one for the states of linear attention, which cannot be taken back.
    """

    def __init__(
        self, model: torch.nn.Module, layout: KVLayout, prompt: int, pad: int = 0, cache: DynamicCache | None = None
    ):
        self.model, self.layout, self.prompt, self.pad, self.cache = model, layout, prompt, pad, cache
        self.tokens = 0
        self.states = [LayerState(prompt, alive={head: [] for head in budgets(layer)}) for layer in layout.layers]

    def skip(self, columns: range) -> None:
        """Take columns of padding, in which there is nothing to select from."""
        for column in columns:
            for layer, state in zip(self.layout.layers, self.states, strict=True):
                if layer.holds and (column == self.prompt - 1 or column == state.due > self.prompt):
                    state.due = max(column, self.prompt) + layer.selection.hold

    def __deepcopy__(self, memo) -> HoldReference:
        same = copy.copy(self)
        same.states = copy.deepcopy(self.states, memo)
        return same

    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [tokens, vocabulary] of further tokens."""
        decoder = self.model.get_decoder()
        decoder = getattr(decoder, "model", decoder)  # transformers 5 returns Llama 4 with its output layer
        usual = decoder.config._attn_implementation
        decoder.config._attn_implementation = NAME
        for layer in decoder.layers:
            if (attention := attention_of(layer)) is not None:
                attention.hold_reference = self
        logits = []
        try:
            for token in ids.tolist():
                position = torch.tensor([[self.tokens]])
                with torch.no_grad():
                    cached = {CACHE: self.cache, "use_cache": self.cache is not None}
                    output = self.model(torch.tensor([[token]]), position_ids=position, **cached)
                logits.append(output.logits[0])
                self.tokens += 1
        finally:
            decoder.config._attn_implementation = usual
        return torch.cat(logits) if logits else torch.empty(0, self.model.config.vocab_size)

    def attend(self, module, query, key, value, scaling, softcap, sinks) -> torch.Tensor:
        """Attention of one token [heads, head_dim] in one layer."""
        layer, state, column = self.layout.layers[module.layer_idx], self.states[module.layer_idx], self.now
        if column == state.due > self.prompt:
            self.select(layer, state, column, scaling, softcap)
        state.sinks = sinks
        state.queries.append(query)
        state.keys.append(key)
        state.values.append(value)
        group = len(query) // len(key)
        keys, values = (torch.stack(states).double() for states in (state.keys, state.values))
        output = []
        window, alive = self.layout.attended[module.layer_idx], state.alive
        if layer.source is not None:  # it sees what another has kept, and at the end of the prompt what that had
            source = self.states[layer.source]
            alive = source.before[-1][1] if source.before and column == self.prompt - 1 else source.alive
        for kv_head in range(len(key)):
            if kv_head in state.alive:
                state.alive[kv_head].append(self.tokens)
            places = [*alive.get(kv_head, range(self.tokens + 1))]
            if window.chunked:
                places = places[self.tokens // window.recent * window.recent :]
            elif window.native:
                places = places[max(0, self.tokens + 1 - window.recent) :]
            heads = slice(kv_head * group, (kv_head + 1) * group)
            weights = self.weights(state, heads, self.tokens, keys[places, kv_head], scaling, softcap)
            output.append(weights @ values[places, kv_head])
        if column == self.prompt - 1:
            self.select(layer, state, self.prompt, scaling, softcap)
        return torch.cat(output).to(query.dtype)

    @property
    def now(self) -> int:
        """The column of the token under way."""
        return self.pad + self.tokens

    @staticmethod
    def weights(state, heads, position, keys, scaling, softcap) -> torch.Tensor:
        """Attention [heads, places] of some heads' queries at a position over the keys of their KV head."""
        scores = state.queries[position][heads].double() @ keys.mT * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if state.sinks is not None:
            scores = torch.cat([scores, state.sinks[heads, None].double()], -1)
        return scores.softmax(-1)[:, : len(keys)]

    def select(self, layer: LayerLayout, state: LayerState, column: int, scaling, softcap) -> None:
        how = layer.selection
        if how is None:
            return
        state.before.append((column, copy.deepcopy(state.alive)))
        stop = column - self.pad  # positions before it
        start = max(stop - how.window, 0)
        state.due = column + how.hold
        group = len(state.queries[0]) // layer.heads if state.queries else 1
        keys = torch.stack(state.keys).double() if state.keys else None
        for kv_head, budget in budgets(layer).items():
            alive = state.alive[kv_head]
            candidates = [place for place in alive if place < start]
            if len(candidates) <= budget:
                continue
            received = torch.zeros(len(candidates), dtype=torch.float64)
            heads = slice(kv_head * group, (kv_head + 1) * group)
            for position in range(start, stop):
                seen = keys[[place for place in alive if place <= position], kv_head]
                received += self.weights(state, heads, position, seen, scaling, softcap).sum(0)[: len(received)]
            if how.select == VALUE_NORM:
                received *= torch.tensor([state.values[place][kv_head].double().norm() for place in candidates])
            beside = how.kernel_size // 2
            if how.pool == "max":
                pooled = F.pad(received, (beside, beside)).unfold(0, how.kernel_size, 1).amax(-1)
            else:
                pooled = F.pad(received, (beside, beside)).unfold(0, how.kernel_size, 1).mean(-1)
            if how.select == VALUE_NORM:
                pooled[torch.tensor(candidates) < 4] = float("inf")
            best = sorted(range(len(candidates)), key=lambda place: (-pooled[place].item(), place))[:budget]
            state.alive[kv_head] = [candidates[place] for place in sorted(best)]
            state.alive[kv_head] += [place for place in alive if place >= start]

    @property
    def selected(self) -> int:
        """The column of the last selection."""
        return max((column for state in self.states for column, *_ in state.before), default=0)

    def crop(self, length: int, confirmed: float) -> None:
        """Take back columns from `length` on; selections by columns that were not confirmed are undone."""
        self.tokens = min(self.tokens, max(length - self.pad, 0))
        for state in self.states:
            while state.before and state.before[-1][0] > max(length, confirmed):
                state.due, state.alive = state.before.pop()
            for part in (state.queries, state.keys, state.values):
                del part[self.tokens :]
            state.alive = {head: [p for p in places if p < self.tokens] for head, places in state.alive.items()}


def budgets(layer: LayerLayout) -> dict[int, int]:
    """The budget of each KV head that has one, in the order of the emitted model."""
    return {head: kind for head, kind in enumerate(head_list(layer)) if isinstance(kind, int)}


def attention(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **kwargs):
    """The attention function of the stock model, for one token of one row."""
    states = query[0, :, 0], key[0, :, -1], value[0, :, -1]  # a cache hands over earlier tokens too
    output = module.hold_reference.attend(module, *states, scaling, softcap, s_aux)
    return output[None, None], None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
