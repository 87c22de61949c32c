"""Qwen2 with a head-level KV cache: retrieval heads keep all tokens, streaming heads sinks and a recent window."""

from transformers.models.qwen2 import modeling_qwen2 as stock

# transformers 4 copies only the modules that are imported here
from .kv_attention import attention  # noqa: F401
from .kv_budget import BudgetedGroup  # noqa: F401
from .kv_cache import KVSurgeryCache  # noqa: F401
from .kv_heads import HeadGroup  # noqa: F401
from .kv_layout import KVLayout  # noqa: F401
from .kv_model import KVSurgeryGeneration, KVSurgeryModel, with_kv_cache


class Qwen2Model(KVSurgeryModel, stock.Qwen2Model):
    forward = with_kv_cache(stock.Qwen2Model.forward)


class Qwen2ForCausalLM(KVSurgeryGeneration, stock.Qwen2ForCausalLM):
    forward = with_kv_cache(stock.Qwen2ForCausalLM.forward)
