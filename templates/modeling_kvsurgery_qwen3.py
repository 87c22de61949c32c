"""Qwen3 with a head-level KV cache: retrieval heads keep all tokens, streaming heads sinks and a recent window."""

from transformers.models.qwen3 import modeling_qwen3 as stock

# transformers 4 copies only the modules that are imported here
from .kv_attention import attention  # noqa: F401
from .kv_budget import BudgetedGroup  # noqa: F401
from .kv_cache import KVSurgeryCache  # noqa: F401
from .kv_heads import HeadGroup  # noqa: F401
from .kv_layout import KVLayout  # noqa: F401
from .kv_model import KVSurgeryGeneration, KVSurgeryModel, with_kv_cache


class Qwen3Model(KVSurgeryModel, stock.Qwen3Model):
    forward = with_kv_cache(stock.Qwen3Model.forward)


class Qwen3ForCausalLM(KVSurgeryGeneration, stock.Qwen3ForCausalLM):
    forward = with_kv_cache(stock.Qwen3ForCausalLM.forward)
