"""DuoAttention's gates (Xiao et al. 2024, section 2.2): how far each KV head can do without its full attention.

A gate mixes a head's full attention with its streaming attention, over sink and recent tokens. Training moves the gates
alone, so that the model's last hidden states stay what they are where an answer has to be recalled, while a penalty
pulls every gate down: what stays up needs the whole context.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from kvsurgery.measure import blockwise
from kvsurgery.measure.attention_hooks import intercepted, scoring_of
from kvsurgery.measure.gate_options import Loss
from kvsurgery.measure.mesh import Mesh
from kvsurgery.measure.model import MeasuredModel, decoder_of

WARM_UP = 0.2  # share of the steps
LEAST_RATE = 0.1  # share of the learning rate that the first and the last step have
LOGIT_POSITIONS = 1024  # positions whose logits are held at a time


def initial_gates(measured: MeasuredModel) -> torch.Tensor:
    """One gate per KV head of the caches of full attention, float32 [gated layers, kv_heads], all 1.

    Raises:
        UnsupportedModel: every layer has a sliding window of its own.
    """
    shape = len(measured.full_layers()), measured.dimensions.kv_heads
    return torch.ones(shape, device=measured.model.device).requires_grad_()


def gate_scores(measured: MeasuredModel, gates: torch.Tensor) -> np.ndarray:
    """float32 [layers, kv_heads], 0 in layers without gates; layers that share a KV cache have the same."""
    scores = np.zeros((measured.dimensions.layers, measured.dimensions.kv_heads), dtype=np.float32)
    places = measured.cached_layers()
    scores[[*places]] = gates.detach().cpu().numpy()[[*places.values()]]
    return scores


@contextmanager
def mixed_attention(
    measured: MeasuredModel, gates: torch.Tensor | None = None, *, sink: int = 0, recent: int = 1, mesh: Mesh = Mesh()
) -> Generator[None]:
    """Inside, a KV head of gate a gives a * full + (1 - a) * streaming attention. Inputs have no padding.

    Layers with a window of their own keep it, and layers that share a KV cache share its gates. Memory is linear in the
    tokens. Gradients reach the gates, and have to be taken inside.

    Args:
        gates: [gated layers, kv_heads]; None: the model as it is.
        sink, recent: streaming attention of query i is over j <= i with j < sink or i - j < recent.
        mesh: the processes that share prompts.
    """
    places = measured.cached_layers()

    def attend(stock, module, query, key, value, attention_mask, **options):
        window = measured.windows[module.layer_idx]
        states = query, key, value, scoring_of(query, options)
        output = blockwise.layer_attention(*states, window, measured.layers.chunked)
        if gates is not None and window is None:
            local_gates = gates[places[module.layer_idx]][mesh.heads(gates.shape[1], key.shape[1])]
            gate = local_gates.repeat_interleave(query.shape[1] // key.shape[1])[:, None, None]
            output = gate * output + (1 - gate) * blockwise.streaming(*states, sink, recent)
        return output.to(query.dtype).transpose(1, 2).contiguous(), None

    with intercepted(measured.model, mesh.over_sequences(attend), masks=False):
        yield


def add_gradient(
    measured: MeasuredModel,
    gates: torch.Tensor,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    loss: Loss,
    mesh: Mesh = Mesh(),
    **sizes: int,
) -> torch.Tensor:
    """Add the gradient of one input's loss to `gates.grad`: of the heads that attention has here.

    "distill": squared difference between the model's last hidden states, after the final norm, with and without the
    gates, where the targets are predicted; mean over hidden size and targets. The model itself goes first, on its own,
    and leaves nothing but those states: in a forward pass of both, every layer would keep the inputs of both for the
    backward pass. "lm", the paper's ablation: mean cross-entropy of the targets.

    Args:
        tokens: int64 [batch, tokens], without padding.
        targets: bool [batch, tokens], True where a token has to be predicted from those before it.
        mesh: the processes that share the prompt.
        sizes: sink and recent.

    Returns:
        The loss, float32 []; where processes share the prompt's tokens, the part that this one's contribute.
    """
    tokens = tokens.to(gates.device)
    targets = targets.to(gates.device)
    if loss == "distill":
        with torch.no_grad(), mixed_attention(measured, mesh=mesh):
            full_states = target_states(measured, tokens, targets, mesh)[0]
    with mixed_attention(measured, gates, mesh=mesh, **sizes), recomputed(measured.model):
        states, predicted_tokens = target_states(measured, tokens, targets, mesh)
        if loss == "distill":
            value = (_upcast(states) - _upcast(full_states)).square().mean(-1).sum()
        else:
            value = cross_entropy(measured.model, states, predicted_tokens)
        value = value / targets[:, 1:].sum()
        value.backward()
    return value.detach()


def target_states(
    measured: MeasuredModel, tokens: torch.Tensor, targets: torch.Tensor, mesh: Mesh = Mesh()
) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states that targets are predicted from, and the targets' tokens.

    The states [targets, hidden] are those one place before, after the final norm, of the tokens that lie in this
    process; the tokens are [targets].
    """
    local_targets = mesh.tokens(targets[:, 1:])
    positions = mesh.tokens(torch.arange(tokens.shape[1] - 1, device=tokens.device)[None])
    states = measured.last_states(mesh.tokens(tokens[:, :-1]), positions)
    return states[local_targets], mesh.tokens(tokens[:, 1:])[local_targets]


def cross_entropy(model: PreTrainedModel, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Sum of cross-entropy, in nats, of tokens [n] predicted from hidden states [n, hidden]; a few logits at a time."""
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def chunk_loss(states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = _upcast(model.get_output_embeddings()(states))
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return F.cross_entropy(logits, tokens, reduction="sum")

    chunks = zip(states.split(LOGIT_POSITIONS), tokens.split(LOGIT_POSITIONS), strict=True)
    return sum(blockwise.checkpointed(chunk_loss, *chunk) for chunk in chunks)


@contextmanager
def recomputed(model: PreTrainedModel) -> Generator[None]:
    """Inside, a layer saves nothing but its input for the backward pass, and is computed again then."""
    layers = decoder_of(model).layers
    for layer in layers:
        layer.forward = partial(blockwise.checkpointed, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def rate(step: int, steps: int) -> float:
    """Share of the learning rate in step 0, 1, ...: from a tenth to all of it over a fifth, and back over the rest."""
    peak = WARM_UP * steps
    rise = step / peak
    fall = (steps - 1 - step) / max(steps - 1 - peak, 1)
    return LEAST_RATE + (1 - LEAST_RATE) * min(rise, fall, 1.0)


def _upcast(states: torch.Tensor) -> torch.Tensor:
    """In float32, or float64 if they already are."""
    return states.to(torch.promote_types(states.dtype, torch.float32))
