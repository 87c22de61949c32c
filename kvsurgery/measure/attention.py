"""Attention scores: how much a head looks at a passkey while the passkey is recalled.

DuoAttention's attention-based ablation (Xiao et al. 2024, section 3.4). Cheap, since it takes forward passes only, but
it sees neither what a head's values do to the output nor what other heads make up for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvsurgery.display.progress import Progress, silent
from kvsurgery.errors import ProfileError
from kvsurgery.measure import blockwise
from kvsurgery.measure.attention_hooks import attention_weights, intercepted, scoring_of
from kvsurgery.measure.kept_samples import KeptSamples
from kvsurgery.measure.mesh import Mesh
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.version import TOOL

# (step, place) -> tokens int64, targets bool and passkeys int64, all [batch, tokens], as `PasskeyPrompt` has them
Recalls = Callable[[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def attention_profile(
    measured: MeasuredModel,
    prompts: Recalls,
    count: int = 50,
    *,
    data: Mapping[str, Any],
    kept: Path | None = None,
    progress: Progress = silent,
    mesh: Mesh = Mesh(),
) -> HeadProfile:
    """Mean attention mass of a KV head, in [0, 1], on the tokens of the passkey that is being recalled.

    Averaged over the tokens that predict the passkey, the query heads of a group, and prompts. Layers with a window of
    their own score 0.

    Args:
        prompts: called for the numbers 0 to count - 1, at place 0 of each.
        data: what the prompts are, for the provenance.
        kept: the file from which an interrupted measurement goes on; only for a single process.
        progress: of the prompts.
        mesh: the processes that share the prompts.

    Raises:
        ProfileError: a prompt recalls nothing, or the prompts cannot be dealt evenly.
        UnsupportedModel: no layer has full attention.
    """
    measured.full_layers()  # raises where there are none
    if count < 1:
        raise ProfileError(f"attention is measured over 1 prompt or more, got {count}")
    total = torch.zeros(measured.dimensions.layers, measured.dimensions.kv_heads, dtype=torch.float64)
    share = mesh.share(count)
    kept_samples = KeptSamples(kept, measured, "attention")
    for done, number in enumerate(share, 1):
        prompt = prompts(number, 0)
        facts = [part.tolist() for part in prompt]
        result, was_kept = kept_samples.result(facts, partial(_prompt_mass, measured, prompt, mesh))
        total += torch.from_numpy(result["mass"])
        progress(done * mesh.groups, None if was_kept else count)  # what was kept counts for no time
    total = mesh.processes.add(total.to(mesh.processes.device)).cpu().numpy()
    scores = (total / mesh.copies(measured) / count).clip(0, 1)
    provenance = {"data": dict(data), "count": count, "tool": TOOL}
    return measured.profile(scores.astype(np.float32), "attention", "kv", provenance=provenance)


def _prompt_mass(measured: MeasuredModel, prompt: tuple[torch.Tensor, ...], mesh: Mesh) -> dict[str, np.ndarray]:
    return {"mass": attention_mass(measured, *prompt, mesh=mesh).cpu().numpy()}


@torch.no_grad()
def attention_mass(
    measured: MeasuredModel, tokens: torch.Tensor, targets: torch.Tensor, passkeys: torch.Tensor, mesh: Mesh = Mesh()
) -> torch.Tensor:
    """float64 [layers, kv_heads], over the targets of one input; arguments as `PasskeyPrompt` has them.

    It is 0 for heads that other processes of `mesh` hold.

    Raises:
        ProfileError: there are no targets, or what they recall is not in the text.
    """
    device = measured.model.device
    spans = list(_recalled(targets, passkeys))
    mass = torch.zeros(measured.dimensions.layers, measured.dimensions.query_heads, dtype=torch.float64, device=device)

    def attend(stock, module, query, key, value, attention_mask, **options):
        window, head_slice = measured.windows[module.layer_idx], mesh.heads(mass.shape[1], query.shape[1])
        scoring = scoring_of(query, options)
        for row, first, last, source in spans if window is None else ():
            # the last queries over all keys up to their own, for one passkey at a time
            weights = attention_weights(query[row, None, :, first:last], key[row, None, :, :last], scoring)
            mass[module.layer_idx, head_slice] += weights[0, :, :, source.to(device)].double().sum((-1, -2))
        output = blockwise.layer_attention(query, key, value, scoring, window, measured.layers.chunked)
        return output.transpose(1, 2).contiguous(), None

    positions = torch.arange(tokens.shape[1], device=device)[None]
    with intercepted(measured.model, mesh.over_sequences(attend), masks=False):
        measured.last_states(mesh.tokens(tokens.to(device)), mesh.tokens(positions))
    queries = sum(last - first for _, first, last, _ in spans)
    return mass.view(*mass.shape[:1], measured.dimensions.kv_heads, -1).mean(-1) / queries


def _recalled(targets: torch.Tensor, passkeys: torch.Tensor) -> Iterator[tuple[int, int, int, torch.Tensor]]:
    """Row, the tokens from which one passkey is predicted (from, to), and where it is hidden."""
    for row, (is_target, labels) in enumerate(zip(targets, passkeys, strict=True)):
        for passkey in labels[is_target].unique().tolist():
            answer = ((labels == passkey) & is_target).nonzero()[:, 0]
            source = ((labels == passkey) & ~is_target).nonzero()[:, 0]
            if not passkey or not len(source):
                raise ProfileError(f"the answer at token {int(answer[0])} recalls nothing that the text has hidden")
            yield row, int(answer[0]) - 1, int(answer[-1]), source
    if not targets.any():
        raise ProfileError("a prompt without an answer: there is nothing to recall")
