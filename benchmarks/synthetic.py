"""Models with random weights and caches of random states, of the sizes of real ones."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from benchmarks.filling import append
from kvsurgery.templates.kv_cache import KVSurgeryCache
from kvsurgery.templates.kv_layout import TILE, Quantization
from tests.helpers.emitted import emitted_class

emitted_class_of = cache(emitted_class)
EmittedLlama = emitted_class_of("llama")
assert issubclass(EmittedLlama, LlamaForCausalLM)

SINK, RECENT = 64, 256
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "Llama-2-7B": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
    "cpu": {
        "vocab_size": 1024,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
    },
}


def build(shape: str, device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """A stock model with random weights, made on the device."""
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=1 << 23)
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def dimensions(config: PreTrainedConfig) -> tuple[int, int]:
    """KV heads of a layer and their size, either of which a config may leave to its other numbers."""
    heads = config.num_attention_heads
    return config.num_key_value_heads or heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def quantization(bits: int) -> Quantization | None:
    """Codes of this many bits; at 16 the cache has the model's dtype."""
    return Quantization(bits) if bits < 16 else None


def section(layers: int, heads: int, full_heads: int, head_dim: int) -> dict:
    """The `kv_surgery` section of a config: in every layer `full_heads` KV heads keep everything, the others stream."""
    layer = {"blocks": [[full_heads, heads - full_heads]], "sink": SINK, "recent": RECENT}
    return {"version": 1, "head_dim": head_dim, "layers": [layer] * layers}


def emitted(stock: PreTrainedModel, full_heads: int) -> PreTrainedModel:
    """The emitted model with the very parameters of a stock one; what heads they belong to is all the same here."""
    config = copy.deepcopy(stock.config)
    heads, head_dim = dimensions(config)
    config.kv_surgery = section(config.num_hidden_layers, heads, full_heads, head_dim)
    with torch.device("meta"):
        model = emitted_class_of(config.model_type)._from_config(config, dtype=stock.dtype)
    model.load_state_dict(stock.state_dict(), assign=True)
    model.model.rotary_emb = stock.model.rotary_emb  # its buffers are in no state dict
    return model.eval()


def empty_cache(model: PreTrainedModel, capacity: int, bits: int = 16) -> DynamicCache | KVSurgeryCache:
    """The cache that a model runs with; an emitted model's has room for `capacity` tokens."""
    if isinstance(model, EmittedLlama):
        return KVSurgeryCache(model.config, capacity, quantization(bits))
    return DynamicCache(config=model.config)


@torch.inference_mode()
def fill(
    cache: DynamicCache | KVSurgeryCache,
    config: PreTrainedConfig,
    batch: int,
    tokens: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    """Append random states to an empty cache, as a forward of `tokens` would; every cache of a shape gets the same."""
    if isinstance(cache, KVSurgeryCache):
        cache.begin(None, batch, tokens)
    heads, head_dim = dimensions(config)
    shape = 2, batch, heads, tokens, head_dim
    for index in range(config.num_hidden_layers):
        generator = torch.Generator(device).manual_seed(index)
        keys, values = torch.randn(shape, generator=generator, dtype=dtype, device=device)
        cache.update(keys, values, index)
        if isinstance(cache, KVSurgeryCache):
            append(cache.layers[index], keys, values)


@torch.inference_mode()
def occupy(cache: KVSurgeryCache, like: torch.Tensor, tokens: int) -> None:
    """Let an empty cache hold random tokens that were never computed; random codes where it is quantized.

    Much faster than `fill`, and needs no memory beside the cache. `like` [batch, kv_heads, 0, head_dim] is what the
    states would be.
    """
    cache.begin(None, like.shape[0], tokens)
    for layer in cache.layers:
        layer.lazy_initialization(like)
        layer.make_room(tokens)
        for states in (layer.keys, layer.values):
            assert states is not None  # as there is room
            states.normal_()
        for group in layer.storage.tiled:
            group.packed = [TILE * group.quantization.tiles(tokens - group.sink)] * like.shape[0]
        quantization_settings = layer.layout.quantization
        if layer.storage.tiles is not None and quantization_settings is not None:
            key_codes, key_scales, value_codes, value_scales = layer.storage.tiles
            for codes, scales in ((key_codes, key_scales), (value_codes, value_scales)):
                codes.random_(0, 256)  # of states between about -2 and 2
                scales[:, :, 0].uniform_(0.5, 1.5).mul_(4 / (2**quantization_settings.bits - 1))
                scales[:, :, 1].uniform_(-2.5, -1.5)
        layer.advance(tokens)
