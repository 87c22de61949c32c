"""`CacheTrial`: how far the next token moves when the cache of some KV heads changes, many changes at once."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvsurgery.heads.dimensions import ModelLayers
from kvsurgery.measure import blockwise
from kvsurgery.measure.attention_hooks import intercepted, scoring_of
from kvsurgery.measure.model import decoder_of, last_token
from kvsurgery.templates import kv_softmax
from kvsurgery.templates.kv_cache import CACHE
from kvsurgery.templates.kv_codes import Rounding, dequantize, nearest, quantize, rotated
from kvsurgery.templates.kv_layout import QUERIES, TILE, LayerLayout, Quantization

LOGITS_AT_ONCE = 1 << 25  # elements of logits that are computed at a time
EXACT = 0  # the place of an unchanged head among the caches of a trial


@dataclass(frozen=True)
class Window:
    """The cache of a streaming head: position i sees j <= i with j < sink or i - j < recent."""

    sink: int
    recent: int


KeysValues = tuple[torch.Tensor, torch.Tensor]  # keys and values [1, kv_heads, tokens, head_dim]


class CacheTrial:
    """A prompt in a model's cache, and the tokens that follow it, read in one forward as a later prompt is.

    The prompt is computed once, with full attention, and layers below the first changed head are not computed again.
    In a converted model streaming heads stream while the prompt is read too, which `converted_divergence` follows.

    Args:
        model: any causal language model whose attention goes through transformers' attention interface.
        layers: what attention each of the model's has.
        tokens: int64 [1, prompt + following].
        prompt: how many of them are in the cache.
        caches: what a head's cache can be; `EXACT` stands before them.

    Attributes:
        covariances: by layer with full attention, sums of q q^T over the prompt's queries of each KV head, float64
            [kv_heads, head_dim, head_dim].
        rounding: by what is rotated and by layer, how keys are rounded by the queries. Set it before caches need it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: ModelLayers,
        tokens: torch.Tensor,
        prompt: int,
        caches: Sequence[Quantization | Window],
    ):
        self.model, self.layers, self.caches = model, layers, (None, *caches)
        self.tokens = tokens[:, :prompt].to(model.device)
        self.following = tokens[:, prompt:].to(model.device)
        self.prompt = prompt
        self.covariances: dict[int, torch.Tensor] = {}
        self.rounding: Mapping[str, Mapping[int, Rounding]] = {}
        self.outputs: list[Any] = []  # of each layer with an unchanged cache
        self.states: dict[int, KeysValues] = {}
        # of layers without a KV cache: the last inputs of a convolution, and a recurrent state
        self.layer_states: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._read_prompt(None)
        modules = decoder_of(model).layers
        hooks = [module.register_forward_hook(lambda *call: self.outputs.append(call[-1])) for module in modules]
        changing = next((layer for layer, window in enumerate(layers.windows) if window is None), 0)
        exact_changes = torch.full((len(modules), self.states[changing][0].shape[1]), EXACT)
        try:
            self.exact = self._log_probabilities(exact_changes[None], 0, self.following.shape[1])[0]
        finally:
            for hook in hooks:
                hook.remove()

    def covariance(self, layers: Sequence[int]) -> torch.Tensor:
        """The covariances of some layers, float64 [layers, kv_heads, head_dim, head_dim]."""
        return torch.stack([self.covariances[layer] for layer in layers])

    @torch.no_grad()
    def divergence(self, changes: torch.Tensor, tokens: int | None = None) -> torch.Tensor:
        """Mean Kullback-Leibler divergence, in nats, of the next token's distribution from the unchanged cache's.

        Args:
            changes: int64 [rows, layers, kv_heads], for every row the place of each head's cache among all. Layers with
                a window of their own stay as they are.
            tokens: how many of the following ones are read; by default all.

        Returns:
            float64 [rows].
        """
        count = min(tokens or self.following.shape[1], self.following.shape[1])
        rows_at_once = max(1, LOGITS_AT_ONCE // self.exact[:count].numel())
        divergences = []
        for rows in changes.split(rows_at_once):
            changed_layers = (rows != EXACT).any(2).any(0).nonzero()
            first_layer = int(changed_layers[0]) if len(changed_layers) else len(self.layers.windows) - 1
            # other layers read the keys and values of those whose cache is shared
            first_layer = min([first_layer, *self.layers.sources.values()])
            log_probabilities = self._log_probabilities(rows, first_layer, count)
            # row by row, since logits are most of the memory
            divergences += [next_token_divergence(row, self.exact[: len(row)]).cpu() for row in log_probabilities]
        return torch.stack(divergences)

    def converted_divergence(self, changes: torch.Tensor) -> torch.Tensor:
        """The divergence where streaming heads stream while the prompt is read too, once for each set of such heads."""
        windows = torch.tensor([isinstance(cache, Window) for cache in self.caches])
        streaming = changes.where(windows[changes], EXACT)
        prompts, prompt_of = streaming.unique(dim=0, return_inverse=True)
        divergences = torch.zeros(len(changes), dtype=torch.float64)
        for place, prompt in enumerate(prompts):
            trial, rows = copy.copy(self), prompt_of == place
            if (prompt != EXACT).any():
                trial.states = {}
                trial._read_prompt(prompt)
            divergences[rows] = trial.divergence(changes[rows])
        return divergences

    @torch.no_grad()
    def _read_prompt(self, changes: torch.Tensor | None) -> None:
        """Read the prompt and keep its keys and values; `changes` [layers, kv_heads] says which heads stream."""
        cache = DynamicCache(config=self.model.config)
        # transformers 4 has no such layers
        with_states: dict[int, Any] = {
            place: layer for place, layer in enumerate(cache.layers) if hasattr(layer, "conv_states")
        }
        options = {CACHE: cache} if with_states else {}
        with intercepted(self.model, partial(self._record, changes=changes), masks=False):
            kept = last_token(self.tokens)
            self.model(self.tokens, use_cache=bool(with_states), logits_to_keep=kept, **options)
        self.layer_states = {
            place: (layer.conv_states[0], layer.recurrent_states[0])
            for place, layer in with_states.items()
            if layer.conv_states[0] is not None  # of layers with an MLP alone, in earlier versions
        }

    def _log_probabilities(self, changes: torch.Tensor, first_layer: int, count: int) -> torch.Tensor:
        """Log-probabilities [rows, count, vocabulary] with these caches, which differ from `first_layer` on."""
        rows = len(changes)
        positions = torch.arange(self.prompt, self.prompt + count, device=self.model.device)[None]
        attend = partial(self._attend, changes=changes.to(self.model.device))
        options = {CACHE: self._cache_of_states(rows)} if self.layer_states else {}
        with torch.no_grad(), intercepted(self.model, attend, masks=False), self._resumed(first_layer, rows, count):
            logits = self.model(
                self.following[:, :count].expand(rows, -1),
                position_ids=positions,
                use_cache=bool(options),
                **options,
            ).logits
        return logits.float().log_softmax(-1)

    def _cache_of_states(self, rows: int) -> DynamicCache:
        """A stock cache of `rows` rows with the layers' states after the prompt, and no keys and values."""
        cache = DynamicCache(config=self.model.config)
        for layer, (convolution, recurrence) in self.layer_states.items():
            cache.update_conv_state(convolution.expand(rows, *convolution.shape[1:]), layer)
            if recurrence is not None:
                cache.update_recurrent_state(recurrence.expand(rows, *recurrence.shape[1:]), layer)
        return cache

    @contextmanager
    def _resumed(self, first_layer: int, rows: int, count: int) -> Generator[None]:
        """Inside, layers below `first_layer` are not computed: the last of them gives what it gave before."""
        skipped_layers = decoder_of(self.model).layers[:first_layer]
        for place, layer in enumerate(skipped_layers):
            # an attribute of the instance goes before the method of its class
            layer.forward = partial(_known_output, _repeated(self.outputs[place], rows, count))
        try:
            yield
        finally:
            for layer in skipped_layers:
                del layer.forward

    def _record(self, stock, module, query, key, value, attention_mask, *, changes: torch.Tensor | None, **options):
        """The attention of a prompt, whose keys and values are kept."""
        layer, scoring = module.layer_idx, scoring_of(query, options)
        self.states[layer] = key, value
        output = blockwise.layer_attention(query, key, value, scoring, self.layers.windows[layer], self.layers.chunked)
        if changes is None:
            self._note_queries(self.layers.sources.get(layer, layer), query[0].unflatten(0, (key.shape[1], -1)))
            return output.transpose(1, 2), None
        kinds = changes[self.layers.sources.get(layer, layer)]
        for kind, cache in enumerate(self.caches):
            if isinstance(cache, Window) and len(heads := (kinds == kind).nonzero()[:, 0]):
                states = [
                    tensor.unflatten(1, (key.shape[1], -1))[:, heads].flatten(1, 2) for tensor in (query, key, value)
                ]
                head_scoring = scoring
                if scoring.sinks is not None:
                    head_scoring = scoring._replace(
                        sinks=scoring.sinks.unflatten(0, (key.shape[1], -1))[heads].flatten()
                    )
                streaming = blockwise.streaming(*states, head_scoring, cache.sink, cache.recent)
                output.unflatten(1, (key.shape[1], -1))[:, heads] = streaming.unflatten(1, (len(heads), -1))
        return output.transpose(1, 2), None

    def _note_queries(self, layer: int, query: torch.Tensor) -> None:
        """Add the queries [kv_heads, group, tokens, head_dim] that attend to a layer's keys to their covariances."""
        if self.layers.windows[layer] is None:
            states = query.flatten(1, 2).float()
            self.covariances[layer] = self.covariances.get(layer, 0) + (states.mT @ states).cpu().double()

    def _attend(self, stock, module, query, key, value, attention_mask, *, changes: torch.Tensor, **options):
        """The attention of the following tokens over each row's cache and themselves."""
        layer, (rows, heads) = module.layer_idx, key.shape[:2]
        if self.layers.windows[layer] is None:
            kinds = changes[:, self.layers.sources.get(layer, layer)].expand(rows, heads)
        else:  # it may have another number of heads
            kinds = changes.new_full((rows, heads), EXACT)
        states = [
            torch.cat([past_states, new_states], 2)
            for past_states, new_states in zip(self._past(layer, kinds), (key, value), strict=True)
        ]
        # each KV head a row of its own, since each has its own mask
        head_states = [tensor.reshape(rows * heads, -1, *tensor.shape[2:]) for tensor in (query, *states)]
        visible = self._visible(layer, kinds, query.shape[2])
        scoring = scoring_of(query, options)
        if scoring.sinks is None:
            output = kv_softmax.attend(*head_states, visible, scoring).reshape(query.shape)
        else:  # a number for each query head, which lie together again
            output, lse = kv_softmax.attend_with_lse(*head_states, visible, scoring)
            output = scoring.sunk(output.view(query.shape), lse.view(query.shape[:3]))
        return output.transpose(1, 2), None

    def _past(self, layer: int, kinds: torch.Tensor) -> KeysValues:
        """Keys and values [rows, kv_heads, prompt, head_dim] of heads whose caches are `kinds` [rows, kv_heads]."""
        keys, values = (states.expand(len(kinds), -1, -1, -1) for states in self.states[layer])
        for kind in kinds.unique().tolist():
            if isinstance(cache := self.caches[kind], Quantization):
                mask = (kinds == kind)[:, :, None, None]
                round_keys = nearest
                if cache.rounding == QUERIES:
                    round_keys = self.rounding[str(cache.rotate)][self.layers.sources.get(layer, layer)]
                quantized_states = stored_states(*self.states[layer], cache, round_keys)
                keys, values = (
                    torch.where(mask, new, old) for new, old in zip(quantized_states, (keys, values), strict=True)
                )
        return keys, values

    def _visible(self, layer: int, kinds: torch.Tensor, count: int) -> torch.Tensor:
        """bool [1 or rows * kv_heads, count, prompt + count]: what a head's queries see."""
        j = torch.arange(self.prompt + count, device=kinds.device)
        i = j[self.prompt :, None]
        layout = LayerLayout((), 0, self.layers.windows[layer] or len(j), chunked=self.layers.chunked)
        visible = ((j <= i) & layout.in_window(i, j))[None]
        for kind in kinds.unique().tolist():
            if isinstance(cache := self.caches[kind], Window):
                is_kept = (j < cache.sink) | (i - j < cache.recent)
                visible = visible & (is_kept | (kinds != kind).view(-1, 1, 1))
        return visible


@torch.inference_mode()
def next_token_logs(
    model: PreTrainedModel, prompt: torch.Tensor, following: torch.Tensor, cache: Any = None
) -> torch.Tensor:
    """Log-probabilities of the next token after each of `following`, which are read in one forward after a prompt.

    Args:
        prompt, following: int64 [1, tokens], on the model's device.
        cache: empty, for the prompt. None: the model's own.

    Returns:
        float32 [following tokens, vocabulary].
    """
    cache = model(prompt, use_cache=True, logits_to_keep=1, **{CACHE: cache})[CACHE]
    return model(following, **{CACHE: cache}).logits[0].float().log_softmax(-1)


def next_token_divergence(approximate: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Mean Kullback-Leibler divergence, in nats, of the next token's distribution from the exact one: float64 [].

    Args:
        approximate, exact: log-probabilities [tokens, vocabulary].
    """
    return (exact.exp() * (exact - approximate)).sum(-1, dtype=torch.float64).mean().clamp(min=0)


def stored_states(
    keys: torch.Tensor, values: torch.Tensor, quantization: Quantization, round_keys: Rounding = nearest
) -> KeysValues:
    """A prompt's keys and values [1, kv_heads, tokens, head_dim] as a quantized cache gives them back."""
    heads, tokens = keys.shape[1:3]
    tiles = slice(quantization.sink, quantization.sink + TILE * quantization.tiles(tokens - quantization.sink))
    if tiles.stop == tiles.start:
        return keys, values
    are_rotated = quantization.rotate == "both", quantization.rotate != "none"
    packed = [
        (rotated(states, heads) if is_rotated else states)[:, :, tiles].unflatten(2, (-1, TILE))
        for states, is_rotated in zip((keys, values), are_rotated, strict=True)
    ]
    restored = []
    for exact_states, tile_states, is_rotated in zip(
        (keys, values),
        dequantize(quantize(packed[0], packed[1], quantization, round_keys), quantization.widths),
        are_rotated,
        strict=True,
    ):
        tile_states = tile_states.flatten(2, 3)
        tile_states = rotated(tile_states, heads, back=True) if is_rotated else tile_states
        restored.append(
            torch.cat([exact_states[:, :, : tiles.start], tile_states, exact_states[:, :, tiles.stop :]], 2)
        )
    return restored[0], restored[1]


def _known_output(output: Any, *arguments: Any, **options: Any) -> Any:
    """The forward of a layer whose output is known."""
    return output


def _repeated(output: Any, rows: int, count: int) -> Any:
    """A layer's output, cut to `count` tokens and repeated for `rows` rows."""
    if isinstance(output, torch.Tensor):
        *streams, _, _, hidden = output.shape  # several streams of hidden states in Gemma 3n
        return output[..., :count, :].expand(*streams, rows, count, hidden)
    first, *others = output
    return _repeated(first, rows, count), *others
