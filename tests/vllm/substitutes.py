"""What stands in for layers that vLLM's CPU build computes in bfloat16 only, or not at all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import conv1d, silu, softplus
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import register_cpu_gdn_attention_ops
from vllm.model_executor.models import minimax_m2
from vllm.model_executor.models.gpt_oss import TransformerBlock
from vllm.model_executor.models.mllama4 import Llama4UnfoldConvolution
from vllm.utils.torch_utils import _resolve_layer_name


def linear_attention(mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor, output: torch.Tensor, name: Any) -> None:
    """The linear attention of Qwen3-Next and Qwen3.5, with its states in vLLM's cache.

    Args:
        mixed: [tokens, channels], queries, keys and values.
        b, a: [tokens, heads], gates.
        output: [tokens, heads, head_dim]
    """
    context = get_forward_context()
    if context.attn_metadata is None:  # a step without requests, to measure memory
        return
    layer = context.no_compile_layers[_resolve_layer_name(name)]
    step = context.attn_metadata[layer.prefix]
    weight = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", layer.conv1d.weight.squeeze(1))
    decay, beta = -layer.A_log.exp() * softplus(a + layer.dt_bias), b.sigmoid()
    starts = step.non_spec_query_start_loc.tolist()
    for row, place in enumerate(step.non_spec_state_indices_tensor.tolist()):
        new = slice(starts[row], starts[row + 1])
        channels, state = (part[place] for part in layer.kv_cache)
        state = state.view(len(state), layer.head_k_dim, layer.head_v_dim)
        if row >= step.num_decodes and not step.has_initial_state[row]:
            channels.zero_()
            state.zero_()
        inputs = torch.cat((channels, mixed[new]))
        channels.copy_(inputs[-len(channels) :])
        convolved = silu(conv1d(inputs.T, weight[:, None], groups=len(weight))).T
        query, key, value = layer.rearrange_mixed_qkv(convolved)
        group = value.shape[2] // key.shape[2]
        query, key = (part.repeat_interleave(group, 2) for part in (query, key))
        attended, last = torch_recurrent_gated_delta_rule(
            query,
            key,
            value,
            g=decay[None, new],
            beta=beta[None, new],
            initial_state=state[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        output[new], state[:] = attended[0], last[0]


class Experts(torch.nn.Module):
    """The experts of gpt-oss, with vLLM's names and shapes of their weights."""

    def __init__(self, vllm_config: Any, layer_idx: int, prefix: str) -> None:
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        self.router = GptOssTopKRouter(config)
        self.experts = torch.nn.Module()
        count, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        shapes = {
            "w13_weight": (count, 2 * inner, hidden),
            "w13_bias": (count, 2 * inner),
            "w2_weight": (count, hidden, inner),
            "w2_bias": (count, hidden),
        }
        for name, shape in shapes.items():
            self.experts.register_parameter(name, torch.nn.Parameter(torch.empty(shape), requires_grad=False))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] of the same, by all experts, of which each token weighs the chosen ones."""
        stored, limit = self.experts, self.config.swiglu_limit
        _, weights, chosen = self.router(states)
        weights = torch.zeros(len(states), self.config.num_local_experts).scatter(1, chosen, weights)
        inner = torch.einsum("th,eih->tei", states, stored.w13_weight) + stored.w13_bias
        gate, up = inner[..., ::2].clamp(max=limit), inner[..., 1::2].clamp(-limit, limit)
        inner = gate * (gate * self.config.swiglu_alpha).sigmoid() * (up + 1)
        outer = torch.einsum("tei,ehi->teh", inner, stored.w2_weight) + stored.w2_bias
        return torch.einsum("te,teh->th", weights, outer)


def patches_of(layer: Any, pixels: torch.Tensor) -> torch.Tensor:
    """The patches of images [images, channels, height, width] for Llama 4's tower: [images, patches, hidden].

    The CPU build's product of matrices takes rows that lie together only.
    """
    return layer.linear(layer.unfold(pixels).permute(0, 2, 1).contiguous())[0]


def substitute(patch: pytest.MonkeyPatch) -> None:
    """Let engines that start from now on use these."""
    register_cpu_gdn_attention_ops()
    patch.setattr(torch.ops.vllm, "cpu_gdn_attention_core", linear_attention)
    patch.setattr(TransformerBlock, "mlp_cls", Experts)
    # experts chosen by sigmoids: in groups only, and one group of all is the same
    one_group = {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1}
    patch.setattr(minimax_m2, "FusedMoEFactory", partial(minimax_m2.FusedMoEFactory, **one_group))
    patch.setattr(Llama4UnfoldConvolution, "forward", patches_of)
