"""What measuring a profile would cost: an estimate from the sizes of a model and the defaults of `profile compute`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kvsurgery.checkpoint.experts import expert_share
from kvsurgery.checkpoint.headers import DTYPES, Tensor
from kvsurgery.checkpoint.model import EMBEDDINGS, LM_HEAD
from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.measure.gate_options import GateOptions
from kvsurgery.measure.methods import attention, reform
from kvsurgery.text.lengths import DEPTHS, LONGEST_PROMPT, SHORTEST_PROMPT, default_lengths

# an H100's 989 TFLOP/s in bfloat16, of which 40% are reached
FLOPS, DEVICE = 0.4 * 989e12, "H100"
NEEDLES_IN_SET = 12  # of a shipped set
# passes over a prompt, in forward passes: gates take the original's, their own, that again while it is differentiated,
# and the gradient of its inputs; REFORM reads everything twice
PASSES = {"duo": 4, "attention": 1, "headkv-*": 1, "reform": 2}


@dataclass(frozen=True)
class Cost:
    """What measuring a model with one method takes, estimated.

    Attributes:
        method: of `profile compute`.
        prompts, tokens: how many there are.
        passes: of each, in forward passes.
        flops: floating-point operations.
        weights: bytes that the model takes; gates and contexts come on top.
    """

    method: str
    prompts: int
    tokens: int
    passes: int
    flops: float
    weights: int

    @property
    def hours(self) -> float:
        """On one H100."""
        return self.flops / FLOPS / 3600

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "hours": self.hours, "device": DEVICE, "flops_per_second": FLOPS}


def costs(checkpoint: Checkpoint) -> list[Cost]:
    """The cost of each method.

    A token takes two operations per weight that it meets, and two per state that it attends to, for its key and for its
    value; on average, that is half of the prompt.

    Raises:
        UnsupportedModel: the config makes no sense.
    """
    dimensions = checkpoint.model.dimensions
    weights = sum(_multiplied_weights(tensor, checkpoint) for tensor in checkpoint.tensors)
    result = []
    for method, lengths in _prompts(checkpoint.positions or LONGEST_PROMPT):
        tokens = sum(lengths)
        attention_flops = sum(length * length / 2 for length in lengths) * 4 * dimensions.query_width
        flops = PASSES[method] * (2.0 * weights * tokens + attention_flops)
        result.append(Cost(method, len(lengths), tokens, PASSES[method], flops, checkpoint.size))
    return result


def _prompts(max_context: int) -> Iterator[tuple[str, list[int]]]:
    """Of each method, the tokens of every prompt."""
    longest = min(LONGEST_PROMPT, max_context)
    shortest = min(SHORTEST_PROMPT, longest)
    for method, count in (("duo", GateOptions.steps), ("attention", attention.SAMPLES)):
        yield method, [shortest + (longest - shortest) * place // max(count - 1, 1) for place in range(count)]
    yield "headkv-*", [length for length in default_lengths(max_context) for _ in range(NEEDLES_IN_SET * len(DEPTHS))]
    yield "reform", 2 * reform.SAMPLES * [min(reform.CONTEXT, max_context)]


def _multiplied_weights(tensor: Tensor, checkpoint: Checkpoint) -> int:
    """Weights of a tensor that a token of a prompt is multiplied with: no embedding, and of experts its own."""
    if len(tensor.shape) < 2 or tensor.name.endswith((*EMBEDDINGS, LM_HEAD)):
        return 0
    count = tensor.size * 8 // DTYPES[tensor.dtype]
    return round(count * expert_share(checkpoint.config)) if ".experts." in tensor.name else count
