"""Gemma 3 text with a head-level KV cache: retrieval heads keep all tokens, streaming heads a recent window."""

from transformers.models.gemma3 import modeling_gemma3 as stock

# transformers 4 copies only the modules that are imported here
from .kv_attention import attention  # noqa: F401
from .kv_budget import BudgetedGroup  # noqa: F401
from .kv_cache import KVSurgeryCache  # noqa: F401
from .kv_heads import HeadGroup  # noqa: F401
from .kv_layout import KVLayout  # noqa: F401
from .kv_model import KVSurgeryGeneration, KVSurgeryModel, with_kv_cache


class Gemma3TextModel(KVSurgeryModel, stock.Gemma3TextModel):
    base_model_prefix = "model"  # what the weights are stored under; transformers 4 assumes another
    forward = with_kv_cache(stock.Gemma3TextModel.forward)


class Gemma3ForCausalLM(KVSurgeryGeneration, stock.Gemma3ForCausalLM):
    base_model_prefix = "model"  # what the weights are stored under; transformers 4 assumes another
    forward = with_kv_cache(stock.Gemma3ForCausalLM.forward)
