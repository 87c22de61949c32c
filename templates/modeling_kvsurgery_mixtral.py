"""Mixtral with a head-level KV cache: retrieval heads keep all tokens, streaming heads sinks and a recent window."""

from transformers.models.mixtral import modeling_mixtral as stock

# transformers 4 copies only the modules that are imported here
from .kv_attention import attention  # noqa: F401
from .kv_budget import BudgetedGroup  # noqa: F401
from .kv_cache import KVSurgeryCache  # noqa: F401
from .kv_heads import HeadGroup  # noqa: F401
from .kv_layout import KVLayout  # noqa: F401
from .kv_model import KVSurgeryGeneration, KVSurgeryModel, convert_experts, with_kv_cache

convert_experts("MixtralModel", "mixtral")


class MixtralModel(KVSurgeryModel, stock.MixtralModel):
    forward = with_kv_cache(stock.MixtralModel.forward)


class MixtralForCausalLM(KVSurgeryGeneration, stock.MixtralForCausalLM):
    forward = with_kv_cache(stock.MixtralForCausalLM.forward)
