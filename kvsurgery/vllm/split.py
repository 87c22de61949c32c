"""Two attentions a layer: one for its full heads and one for its streaming heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from kvsurgery.errors import ServingError
from kvsurgery.templates.kv_codes import nearest
from kvsurgery.templates.kv_layout import TILE, KVLayout, LayerLayout
from kvsurgery.vllm.backends import full_backend, streaming_backend
from kvsurgery.vllm.budgeted import Bin, BudgetedGroups
from kvsurgery.vllm.budgeted_spec import PromptsSpec, PromptsWindowSpec
from kvsurgery.vllm.codes import CodesAttention
from kvsurgery.vllm.forecast import BLOCK, Forecast
from kvsurgery.vllm.groups import Groups, Place
from kvsurgery.vllm.limits import logger
from kvsurgery.vllm.processes import common_part, places
from kvsurgery.vllm.quantized import in_pages
from kvsurgery.vllm.spec import ChunkSpec, SinkWindowSpec
from kvsurgery.vllm.tiles import Tiling


class StreamingAttention(Attention):
    """Attention of heads at position i that see positions j <= i with j < sink or i - j < recent.

    vLLM keeps them in `place`, in blocks of as many tokens if it is `sized`, else of the engine's.
    """

    def __init__(self, *args: Any, sink: int, recent: int, place: Place, sized: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sink, self.recent, self.place, self.sized = sink, recent, place, sized

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """The cache of these heads; that of full heads where vLLM may not free blocks."""
        full_spec = super().get_kv_cache_spec(vllm_config)
        if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
            return full_spec
        return SinkWindowSpec(
            block_size=self.place.size if self.sized else full_spec.block_size,
            num_kv_heads=full_spec.num_kv_heads,
            head_size=full_spec.head_size,
            head_size_v=full_spec.head_size_v,
            dtype=full_spec.dtype,
            kv_quant_mode=full_spec.kv_quant_mode,
            state_content_bytes=full_spec.state_content_bytes,
            sliding_window=self.place.recent,
            sink=self.place.sink,
            bin=self.place.bin,
            drafts=self.place.drafts,
        )


class SplitAttention(nn.Module):
    """What `Attention` does for a layer, as two attentions over its full and its streaming or budgeted heads."""

    order: torch.Tensor
    original_order: torch.Tensor

    def __init__(self, full: Attention | None, streaming: nn.Module | None, layer: LayerLayout) -> None:
        super().__init__()
        self.full, self.streaming = full, streaming
        self.heads, self.cut = layer.heads, layer.full
        self.scattered = layer.scattered
        if self.scattered:
            kinds = torch.tensor(
                [kind for block in layer.blocks for kind, count in enumerate(block) for _ in range(count)]
            )
            order = kinds.argsort(stable=True)
            self.register_buffer("order", order, persistent=False)
            self.register_buffer("original_order", order.argsort(), persistent=False)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, output_shape: None = None
    ) -> torch.Tensor:
        """Attention of new tokens.

        Args:
            query: [tokens, query_heads * head_dim]
            key, value: [tokens, kv_heads * head_dim]; None for queries of a layer that shares this layer's KV cache
            output_shape: that of the result, which Hunyuan 3 passes as None

        Returns:
            [tokens, query_heads * head_dim]
        """
        assert output_shape is None
        if self.full is None or self.streaming is None:
            attention = self.full or self.streaming
            assert attention is not None  # a layer has heads
            return attention(query, key, value)
        full, streaming = zip(*(self._parts(states) for states in (query, key, value)), strict=True)
        attended = torch.cat((self.full(*full), self.streaming(*streaming)), -1)
        return self._by_head(attended, self.original_order) if self.scattered else attended

    def _parts(self, states: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The states of full and of streaming heads."""
        if states is None:
            return None, None
        states = self._by_head(states, self.order) if self.scattered else states.view(len(states), -1)
        cut = states.shape[-1] // self.heads * self.cut
        return states[:, :cut], states[:, cut:]

    def _by_head(self, states: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return states.view(len(states), self.heads, -1).index_select(1, order).flatten(1)


class SharedAttention(nn.Module):
    """Attention of a layer to the KV cache of an earlier one, by the attention of that layer.

    vLLM's own sharing does not know cache groups whose layers differ in width.
    """

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.source = (source,)  # a tuple, as this module has no part of it

    def forward(self, query: torch.Tensor, *states: torch.Tensor | None) -> torch.Tensor:
        """Attention of new tokens [tokens, query_heads * head_dim], whose keys and values are not stored."""
        (source,) = self.source
        return source(query, None, None)


def split_attention(model: nn.Module, layout: KVLayout, vllm_config: Any) -> None:
    """Replace the attentions of a stock model by split ones. Layers with a sliding window of the model's own stay.

    Cache groups are those of the heads that all processes have in common, as vLLM frees the same blocks in all.
    Budgeted heads have the budgets of this process, and the names and cache groups of their places.
    """
    processes = vllm_config.parallel_config.tensor_parallel_size
    common = common_part(layout, processes)
    assert common is not None  # or `checked_layout` has refused it
    part = layout.parts(processes)[get_tensor_model_parallel_rank()]
    place_of = places(part)
    size, itemsize = vllm_config.cache_config.block_size or BLOCK, vllm_config.model_config.dtype.itemsize
    quantized = in_pages(common, vllm_config)
    state = _state_bytes(model, vllm_config) if quantized else 0
    groups = Groups(common, size, itemsize, quantized, state, _drafts(common, vllm_config))
    budgeted = BudgetedGroups(common, size, itemsize, quantized)
    attentions: list[tuple[nn.Module, str, Attention]] = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) in (Attention, ChunkedLocalAttention)
    ]
    replaced: dict[str, nn.Module] = {}  # what attends in the place of each stock attention
    for parent, name, attention in attentions:
        replaced[attention.layer_name] = attention
        if source := attention.kv_sharing_target_layer_name:
            del vllm_config.compilation_config.static_forward_context[attention.layer_name]
            setattr(parent, name, SharedAttention(replaced[source]))
            continue
        index = extract_layer_index(attention.layer_name)
        layer = part.layers[index]
        window = (
            attention.attention_chunk_size if isinstance(attention, ChunkedLocalAttention) else attention.sliding_window
        )
        # vLLM lets those of Cohere 2 see a token more
        if window not in ((layer.recent, layer.recent + 1) if layer.native else (None,)):
            raise ServingError(
                f"kvsurgery: layer {index} has a window of {window} tokens in vLLM, and not in "
                "config.json; use transformers with trust_remote_code=True"
            )
        if layer.native:
            attention.attn_backend = full_backend(attention)
            if isinstance(attention, ChunkedLocalAttention):
                _change_spec(attention, partial(ChunkSpec.of, bin=groups.native[index]))
            if groups.quantized:
                _change_spec(attention, partial(replace, block_size=groups.native_size))
            continue
        own_places = [place_of[index, head] for head in range(len(layer.budgets))]
        bins = {"layers.{}.budgeted{}".format(*place): budgeted.bins[place] for place in own_places}
        replaced[attention.layer_name] = split = _split(attention, layer, index, groups, bins, vllm_config)
        setattr(parent, name, split)
    _prepare_mamba(model, vllm_config)
    split_modules = [module for module in model.modules() if isinstance(module, SplitAttention)]
    if budgeted.bins:
        for full in (module.full for module in split_modules if module.full is not None):
            _change_spec(full, PromptsSpec.beside)
            if isinstance(full, CodesAttention):
                _change_spec(full.newest, PromptsWindowSpec.beside)
    if split_modules:
        _announce(split_modules, budgeted if budgeted.bins else groups, vllm_config)
    scheduler = vllm_config.scheduler_config
    frees = quantized or any(module.heads > module.cut for module in split_modules)
    if frees and groups.drafts is None and not budgeted.bins and not scheduler.disable_hybrid_kv_cache_manager:
        logger.info(
            "kvsurgery: vLLM's own line on capacity counts a step of %s tokens for each request, which all requests "
            "share: more run at a time than it says. A smaller --max-num-batched-tokens leaves them more memory%s",
            f"{scheduler.max_num_batched_tokens:,}",
            ", and so does --no-enable-prefix-caching" * current_platform.is_cpu(),
        )


def _drafts(layout: KVLayout, vllm_config: Any) -> int | None:
    """Most tokens of a step that may be taken back; None where sinks and windows cannot be lean.

    They are lean on a CPU, whose attention reads new tokens from its inputs, if neither other requests nor other layers
    read what a step stores. Drafts may be rejected. With asynchronous scheduling, a step follows an answer's last token
    before vLLM knows that it is the last; where a prompt grows after that, it goes on before that token.
    """
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    shared = cache.enable_prefix_caching or any(layer.source is not None for layer in layout.layers)
    if shared or scheduler.disable_hybrid_kv_cache_manager or not current_platform.is_cpu():
        return None
    speculative = vllm_config.speculative_config
    return speculative.num_speculative_tokens if speculative else int(scheduler.async_scheduling)


def _state_bytes(model: nn.Module, vllm_config: Any) -> int:
    """Bytes of the largest state of a layer, before vLLM pads it to the keys and values of a block of its own size."""
    specs = (module.get_kv_cache_spec(vllm_config) for module in model.modules() if isinstance(module, MambaBase))
    return max((spec.page_size_bytes for spec in specs if spec), default=0)


def _prepare_mamba(model: nn.Module, vllm_config: Any) -> None:
    """Let vLLM choose how to compute steps of Mamba 2; where cache groups have several widths, its runner does not."""
    mixers = [module for module in model.modules() if isinstance(module, MambaMixer2)]
    if not mixers:
        return
    from vllm.model_executor.layers.mamba.ops.ssu_dispatch import initialize_mamba_ssu_backend

    groups = [KVCacheGroupSpec([mixer.prefix], mixer.get_kv_cache_spec(vllm_config)) for mixer in mixers]
    initialize_mamba_ssu_backend(
        vllm_config.mamba_config,
        KVCacheConfig(num_blocks=0, kv_cache_tensors=[], kv_cache_groups=groups),
        use_replayssm=vllm_config.cache_config.use_replayssm,
    )


def _change_spec(attention: Attention, change: Callable[[Any], Any]) -> None:
    """Change what an attention asks of vLLM's planner, where vLLM may free blocks."""
    earlier_spec = attention.get_kv_cache_spec

    def get_kv_cache_spec(vllm_config: Any) -> Any:
        spec = earlier_spec(vllm_config)
        return spec if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager else change(spec)

    attention.get_kv_cache_spec = get_kv_cache_spec


def _announce(split_modules: list[SplitAttention], groups: Groups | BudgetedGroups, vllm_config: Any) -> None:
    """Log the heads of this process and the memory that they take, beside that of the original model."""
    attention = next(module for module in split_modules[0].modules() if isinstance(module, Attention))
    limit = vllm_config.model_config.max_model_len
    longest = Forecast.of(replace(groups, itemsize=attention.kv_cache_torch_dtype.itemsize), limit)
    logger.info(
        "kvsurgery: %d full and %d %s KV heads in this process; KV cache of a token %.1f KiB (dense %.1f), of "
        "%s tokens %.2f GiB (dense %.2f); such sequences in a GiB: %.1f (dense %.1f)",
        sum(module.cut for module in split_modules),
        sum(module.heads - module.cut for module in split_modules),
        groups.others,
        longest.token_bytes / 2**10,
        longest.dense_token_bytes / 2**10,
        f"{limit:,}",
        longest.kv_bytes / 2**30,
        longest.dense_bytes / 2**30,
        2**30 / longest.kv_bytes,
        2**30 / longest.dense_bytes,
    )


def _split(
    attention: Attention, layer: LayerLayout, index: int, groups: Groups, bins: dict[str, Bin], vllm_config: Any
) -> SplitAttention:
    """Two attentions in the place of a layer's stock one, with its settings; `bins` are by the names of heads."""
    group = attention.num_heads // attention.num_kv_heads
    settings = {
        "head_size": attention.head_size,
        "scale": attention.impl.scale,
        "cache_config": vllm_config.cache_config,
        "quant_config": attention.quant_config,
        "logits_soft_cap": attention.impl.logits_soft_cap or None,
    }
    full_sinks, streaming_sinks = learned_sinks(attention, layer)
    del vllm_config.compilation_config.static_forward_context[attention.layer_name]
    full = streaming = None

    def options(kind: str, heads: int, sinks: dict[str, torch.Tensor]) -> dict[str, Any]:
        prefix = f"{attention.layer_name}.{kind}"
        return {"num_heads": heads * group, "num_kv_heads": heads, "prefix": prefix, **sinks, **settings}

    if layer.full:
        common = options("full", layer.full, full_sinks)
        if groups.quantized and layer.quantization:
            full = CodesAttention(
                quantization=layer.quantization,
                round_keys=layer.round_keys.part(0, layer.full) if layer.round_keys else nearest,
                tiling=Tiling.of(layer.quantization),
                newest=groups.place("newest", index),
                **common,
            )
        else:
            full = Attention(attn_backend=full_backend(attention), **common)
            if groups.quantized:
                _change_spec(full, partial(replace, block_size=TILE))
    if layer.streaming:
        common = options("streaming", layer.streaming, streaming_sinks)
        if groups.quantized and layer.quantization and layer.quantized_window:
            streaming = CodesAttention(
                quantization=layer.quantization,
                round_keys=layer.round_keys.part(layer.full, layer.streaming) if layer.round_keys else nearest,
                tiling=Tiling(layer.sink, layer.quantization.residual, layer.recent),
                newest=groups.place("newest of streaming", index),
                tiles=groups.place("tiles", index),
                **common,
            )
        else:
            streaming = StreamingAttention(
                attn_backend=streaming_backend(),
                sink=layer.sink,
                recent=layer.recent,
                place=groups.place("streaming", index),
                sized=groups.quantized,
                **common,
            )
    if layer.budgets:
        from kvsurgery.vllm.budgeted_attention import BudgetedAttention, BudgetedHeads

        size = TILE if groups.quantized else None
        kinds: list[Any] = [partial(BudgetedAttention, size=size)] * len(layer.budgets)
        if groups.quantized and layer.quantization:
            from kvsurgery.vllm.budgeted_codes import BudgetedCodes

            codes = partial(BudgetedCodes, quantization=layer.quantization, size=groups.size)
            kinds = [
                partial(codes, round_keys=layer.round_keys.part(place, 1) if layer.round_keys else nearest)
                for place in range(layer.full, layer.heads)
            ]
        return SplitAttention(full, BudgetedHeads(attention, layer, bins, streaming_sinks, settings, kinds), layer)
    return SplitAttention(full, streaming, layer)


def learned_sinks(attention: Attention, layer: LayerLayout) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The learned sinks of full and of streaming heads, as the option of their attentions; none where it has none.

    They are parts of the parameter that the weights are loaded into later. Full heads lie together, or `checked_layout`
    has refused them.
    """
    sinks = getattr(attention.impl, "sinks", None)
    if sinks is None:
        return {}, {}
    cut = layer.full * (attention.num_heads // attention.num_kv_heads)
    return {"sinks": sinks.data[:cut]}, {"sinks": sinks.data[cut:]}
