"""Gemma 3 text with a head-level KV cache: retrieval heads keep all tokens, streaming heads a recent window."""

from typing import TYPE_CHECKING

from transformers.models.gemma3 import modeling_gemma3 as stock

from .kv_model import KVSurgeryGeneration, KVSurgeryModel, with_kv_cache

if TYPE_CHECKING:  # transformers 4 copies only the modules that are named here
    from .kv_append import append
    from .kv_attention import attention
    from .kv_budget import BudgetedHeads
    from .kv_cache import KVSurgeryCache
    from .kv_columns import Columns
    from .kv_compact import compact
    from .kv_cuda import causal
    from .kv_decode import decode
    from .kv_encode import Encoder
    from .kv_gather import LongPrompts
    from .kv_graph import DecodeGraph
    from .kv_heads import HeadGroup
    from .kv_kernels import EVERY
    from .kv_layout import KVLayout
    from .kv_parallel import own_layout
    from .kv_prefill import prefill
    from .kv_quant import Tiles
    from .kv_reform import Reform
    from .kv_torch import attend


class Gemma3TextModel(KVSurgeryModel, stock.Gemma3TextModel):
    base_model_prefix = "model"  # what the weights are stored under; transformers 4 assumes another
    forward = with_kv_cache(stock.Gemma3TextModel.forward)


class Gemma3ForCausalLM(KVSurgeryGeneration, stock.Gemma3ForCausalLM):
    base_model_prefix = "model"  # what the weights are stored under; transformers 4 assumes another
    forward = with_kv_cache(stock.Gemma3ForCausalLM.forward)
