"""`Footprint`: what a model takes beside its KV cache, from its headers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from kvsurgery.checkpoint.dtype import ITEMSIZES, STORED, loading_dtype
from kvsurgery.checkpoint.experts import EXPERTS_PER_TOKEN
from kvsurgery.checkpoint.headers import Tensor
from kvsurgery.checkpoint.model import EMBEDDINGS, Model
from kvsurgery.checkpoint.role import Role
from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.errors import UnsupportedModel
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.policy.tensor_parallel import check_blocks

# the projection out of an MLP, or of an expert: [hidden, inner], or stacked [experts, hidden, inner]
DOWN = re.compile(
    r".*\.(?:mlp|block_sparse_moe|feed_forward|mixer|layers\.\d+)\.(experts\.)?(?:\d+\.)?(?:down_proj|w2)(?:\.weight)?"
)
# [experts, inner, hidden] of Llama 4, where every token goes through all experts
ALL_EXPERTS = re.compile(r".*\.feed_forward\.experts\.down_proj")
# what processes of tensor parallelism share of a layer, by its rows and by its columns; not Qwen's shared experts
SPLIT_BY_ROWS = re.compile(
    r"(?!mlp\.shared_expert\.).*\.(?:(?:q|k|v|qkv|gate|up|gate_up)_proj(?:\.weight|\.bias)?|w[13]\.weight)"
    r"|linear_attn\.(?:in_proj_\w+|out_proj)\.weight"
)
SPLIT_BY_COLUMNS = re.compile(r"(?!mlp\.shared_expert\.).*\.(?:(?:o|down)_proj(?:\.weight)?|w2\.weight)")
# experts of a token where neither a config nor its family says: the most that another family has by default
MOST_EXPERTS = 8
# states of keys, and as many of values, that a GPU dequantizes together while a chunk attends to tiles
DEQUANTIZED = 1 << 24


@dataclass(frozen=True)
class Footprint:
    """A model's weights, and the widths that its activations follow from.

    With tensor parallelism, they are of the process that holds most.

    Attributes:
        model: attention dimensions, with the heads that a process computes.
        weights: bytes; an output layer that is the embedding counts once.
        itemsize: bytes of an element of its projections, and so of activations and cache.
        hidden: width of the hidden state.
        inner: elements that the MLP of one token holds at once.
        vocabulary: tokens that have logits.
        states: bytes of a sequence's states in layers without a KV cache.
        sliding: as `model`, of layers with a sliding window; None where they have the same.
        positions: that the model was made for; None where its config does not say.
    """

    model: ModelDimensions
    weights: int
    itemsize: int
    hidden: int
    inner: int
    vocabulary: int
    states: int = 0
    sliding: ModelDimensions | None = None
    positions: int | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint, processes: int = 1) -> Footprint:
        """The footprint of a stock checkpoint that is loaded with `dtype="auto"`, by this many processes.

        Raises:
            UnsupportedModel: its config makes no sense.
            PolicyError: its heads do not divide over the processes.
        """
        model = checkpoint.model
        family = model.family
        for dimensions in (model.dimensions, model.sliding_dimensions):
            check_blocks(processes, dimensions.kv_heads)
        share = 1 if family.replicated else processes
        hidden = model.hidden
        is_tied = checkpoint.config.get("tie_word_embeddings") is True
        tensors = [
            tensor
            for tensor in checkpoint.tensors
            if not (is_tied and tensor.name == "lm_head.weight") and not model.is_beyond(model.role(tensor).layer)
        ]
        weights = [model.plain_weight(tensor) for tensor in tensors]
        is_fused = any(name.endswith("mlp.gate_up_proj.weight") for name, _ in weights)
        itemsize = ITEMSIZES[loading_dtype(checkpoint.config, checkpoint.shards)]
        inner, vocabulary = 0, 0
        for name, shape in weights:
            width = shape[-1] if shape else 0
            if name.endswith(EMBEDDINGS):
                vocabulary = math.prod(shape) // max(width, 1)
            elif ALL_EXPERTS.fullmatch(name):
                experts, local_inner = shape[0], -(-shape[1] // processes)
                inner = max(inner, experts * (hidden + max(4 * local_inner, hidden + 3 * local_inner)))
            elif match := DOWN.fullmatch(name):
                # the gate after its activation, up, and their product; a fused gate lives as long as its up
                local_inner = -(-width // processes)
                elements = (4 if match[1] else 3) * local_inner
                if is_fused:  # and gathered, by way of a copy
                    elements = 4 * width + (2 * local_inner if processes > 1 else 0)
                # experts run together, on copies of their tokens
                inner = max(inner, _experts_per_token(model) * (hidden + elements) if match[1] else elements)
        if processes > 1:
            # a share of the MLP may be less than a norm in float32 takes, of the state or of queries that are gathered
            queries = model.dimensions.query_heads * model.dimensions.head_dim if family.replicated else 0
            inner = max(inner + hidden, 4 * hidden, 9 * queries)
        full = _shared(model.dimensions, share)
        sliding = _shared(model.sliding_dimensions, share)
        return cls(
            full,
            sum(_held_bytes(tensor, model.role(tensor), processes, itemsize) for tensor in tensors),
            itemsize,
            hidden,
            inner,
            vocabulary,
            model.state_bytes(itemsize),
            None if sliding == full else sliding,
            checkpoint.positions,
        )

    def activation_bytes(self, batch: int, context: int, chunk: int, tiles: bool) -> int:
        """Peak of activations while a chunk of a prompt goes through a layer, and the logits of its last token.

        A token holds its embedding, the residual, its norm and two rotary factors; beside these either what its MLP
        holds, or its query with the copies that rotate it, 5 widths. Over quantized tiles these are 10, since parts of
        the result merge in float32, and a block of tiles lies there dequantized. Logits are copied to float32.

        Not counted: what does not grow with the model, such as masks on a CPU, and what is not the model's, such as a
        CUDA context and an allocator's gaps. Nor is what layers with states compute with, beside these.

        Args:
            batch, context: sequences, and tokens of each.
            chunk: tokens of each that go through at a time.
            tiles: whether a chunk attends to earlier ones that are quantized.
        """
        model, tokens = self.model, batch * chunk
        attention = tokens * (10 if tiles else 5) * model.query_heads * model.head_dim
        if tiles:
            # keys and values, and as much again that they are made from
            attention += 4 * min(DEQUANTIZED, batch * context * model.kv_heads * model.head_dim)
        elements = tokens * (3 * self.hidden + 2 * model.head_dim) + max(tokens * self.inner, attention)
        return elements * self.itemsize + batch * self.vocabulary * (self.itemsize + 4)


def _shared(dimensions: ModelDimensions, processes: int) -> ModelDimensions:
    """The heads of each of several processes."""
    return replace(
        dimensions, query_heads=dimensions.query_heads // processes, kv_heads=dimensions.kv_heads // processes
    )


def _held_bytes(tensor: Tensor, role: Role, processes: int, itemsize: int) -> int:
    """Bytes of a tensor that a process holds at most, in elements of `itemsize` bytes.

    Embedding and output layer count whole, which they are before transformers 5.18. Vectors count as they are stored,
    since some stay in float32.
    """
    size = tensor.size
    if tensor.dtype in STORED and len(tensor.shape) > 1:
        size = math.prod(tensor.shape) * itemsize
    if SPLIT_BY_ROWS.fullmatch(role.part):
        axis = -min(2, len(tensor.shape))
    else:
        axis = -1 if SPLIT_BY_COLUMNS.fullmatch(role.part) else None
    if role.layer is None or axis is None or not size:
        return size
    axis_size = tensor.shape[axis]
    return size // axis_size * -(-axis_size // processes)


def _experts_per_token(model: Model) -> int:
    """Experts that a token goes through."""
    config = {**model.family.defaults, **model.text}
    key = next((key for key in EXPERTS_PER_TOKEN if key in config), EXPERTS_PER_TOKEN[0])
    count = config.get(key, MOST_EXPERTS)
    if type(count) is not int or not 0 < count <= 1 << 20:
        raise UnsupportedModel(f"config.json: {key} is {count!r}, not a number of experts")
    return count
