"""Qwen3 MoE with a head-level KV cache: retrieval heads keep all tokens, streaming heads sinks and a recent window."""

from transformers.models.qwen3_moe import modeling_qwen3_moe as stock

# transformers 4 copies only the modules that are imported here
from .kv_attention import attention  # noqa: F401
from .kv_budget import BudgetedGroup  # noqa: F401
from .kv_cache import KVSurgeryCache  # noqa: F401
from .kv_heads import HeadGroup  # noqa: F401
from .kv_layout import KVLayout  # noqa: F401
from .kv_model import KVSurgeryGeneration, KVSurgeryModel, convert_experts, with_kv_cache

convert_experts("Qwen3MoeModel", "qwen3_moe")


class Qwen3MoeModel(KVSurgeryModel, stock.Qwen3MoeModel):
    forward = with_kv_cache(stock.Qwen3MoeModel.forward)


class Qwen3MoeForCausalLM(KVSurgeryGeneration, stock.Qwen3MoeForCausalLM):
    forward = with_kv_cache(stock.Qwen3MoeForCausalLM.forward)
