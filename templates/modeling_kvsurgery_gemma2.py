"""Gemma 2 with a head-level KV cache: retrieval heads keep all tokens, streaming heads sinks and a recent window."""

from transformers.models.gemma2 import modeling_gemma2 as stock

# transformers 4 copies only the modules that are imported here
from .kv_attention import attention  # noqa: F401
from .kv_budget import BudgetedGroup  # noqa: F401
from .kv_cache import KVSurgeryCache  # noqa: F401
from .kv_heads import HeadGroup  # noqa: F401
from .kv_layout import KVLayout  # noqa: F401
from .kv_model import KVSurgeryGeneration, KVSurgeryModel, with_kv_cache


class Gemma2Model(KVSurgeryModel, stock.Gemma2Model):
    forward = with_kv_cache(stock.Gemma2Model.forward)


class Gemma2ForCausalLM(KVSurgeryGeneration, stock.Gemma2ForCausalLM):
    forward = with_kv_cache(stock.Gemma2ForCausalLM.forward)
