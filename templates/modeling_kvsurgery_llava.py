"""LLaVA and Pixtral: the text model has a head-level KV cache, in which images are tokens like others."""

from typing import TYPE_CHECKING

from transformers.models.llava import modeling_llava as stock

from .kv_model import KVSurgeryGeneration, KVSurgeryModel, convert_weights, with_kv_cache

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

convert_weights("LlavaModel", "LlavaModel")
convert_weights("LlavaForConditionalGeneration", "llava")


class LlavaModel(KVSurgeryModel, stock.LlavaModel):
    forward = with_kv_cache(stock.LlavaModel.forward)


class LlavaForConditionalGeneration(KVSurgeryGeneration, stock.LlavaForConditionalGeneration):
    _auto_class = "AutoModelForImageTextToText"
    image_inputs = (
        *("pixel_values", "image_sizes", "vision_feature_layer", "vision_feature_select_strategy"),
        "mm_encoder_outputs",
    )
    forward = with_kv_cache(stock.LlavaForConditionalGeneration.forward)
