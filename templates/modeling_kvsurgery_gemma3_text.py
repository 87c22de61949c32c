"""Gemma 3 text with a head-level KV cache: retrieval heads keep all tokens, streaming heads sinks and a recent window."""

from transformers.models.gemma3 import modeling_gemma3 as stock

# transformers 4 copies only the modules that are imported here
from .kv_attention import attention  # noqa: F401
from .kv_cache import KVSurgeryCache  # noqa: F401
from .kv_layout import KVLayout  # noqa: F401
from .kv_model import KVSurgeryGeneration, KVSurgeryModel, with_kv_cache


class Gemma3TextModel(KVSurgeryModel, stock.Gemma3TextModel):
    forward = with_kv_cache(stock.Gemma3TextModel.forward)


class Gemma3ForCausalLM(KVSurgeryGeneration, stock.Gemma3ForCausalLM):
    forward = with_kv_cache(stock.Gemma3ForCausalLM.forward)
