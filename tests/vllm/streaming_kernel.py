"""Run vLLM's Triton kernel over shortened block tables in Triton's interpreter, which TRITON_INTERPRET=1 turns on.

Every slot of the cache that a request does not own is NaN, so that whatever reads one shows.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from types import SimpleNamespace

import torch
from triton.backends import backends

# vLLM's CPU build turns Triton off where it has no backend of the name "cpu"; the interpreter needs none
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.v1.attention.backends.triton_attn import (  # noqa: E402
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from kvsurgery.vllm.triton import StreamingBuilder  # noqa: E402

QUERY_HEADS, KV_HEADS, HEAD_DIM, SIZE, WIDTH = 4, 2, 32, 16, 64
# new tokens of each request and all its tokens, sink, recent: decoding, chunks of a prefill, both, no sinks
CASES = (
    ((1, 1, 1, 1), (9, 300, 333, 64), 20, 40),
    ((48, 1, 33), (48, 250, 200), 20, 40),
    ((70, 5), (200, 64), 16, 1),
    ((1, 3), (200, 131), 0, 33),
)


def expected(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    past: int,
    sink: int,
    recent: int,
    learned: torch.Tensor | None,
) -> torch.Tensor:
    """Attention over all tokens of a request with the mask of streaming heads: states [tokens, heads, head_dim].
    `learned` has a score for each query head whose value is 0."""
    places, keys = torch.arange(len(query))[:, None] + past, torch.arange(len(key))
    seen = (keys <= places) & ((keys < sink) | (places - keys < recent))
    key, value = (states.repeat_interleave(QUERY_HEADS // KV_HEADS, 1) for states in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * HEAD_DIM**-0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    if learned is not None:
        scores = torch.cat((scores, learned[:, None, None].expand(-1, len(query), 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value)


def builder(sink: int, recent: int) -> StreamingBuilder:
    """A builder without an engine."""
    made = object.__new__(StreamingBuilder)
    made.sink, made.recent, made.block_size, made.table = sink, recent, SIZE, None
    made.prefixes = torch.full((8,), sink, dtype=torch.int32)
    made.lengths = torch.zeros(8, dtype=torch.int32)
    return made


def stock_metadata(**given: object) -> TritonAttentionMetadata:
    """Metadata as vLLM's builder makes it, with what is stated."""
    return TritonAttentionMetadata(**{field.name: None for field in fields(TritonAttentionMetadata)} | given)


def largest_error(
    new: tuple[int, ...], lengths: tuple[int, ...], sink: int, recent: int, learned: torch.Tensor | None
) -> float:
    blocks = sum(-(-length // SIZE) for length in lengths) + 1
    cache = torch.full((blocks, SIZE, KV_HEADS, 2 * HEAD_DIM), float("nan")).transpose(1, 2)
    table = torch.zeros(len(lengths), WIDTH, dtype=torch.int32)
    queries, wanted, free = [], [], 1
    for row, (count, length) in enumerate(zip(new, lengths, strict=True)):
        query = torch.randn(count, QUERY_HEADS, HEAD_DIM)
        key, value = torch.randn(2, length, KV_HEADS, HEAD_DIM)
        past = length - count
        first = max(0, past - recent + 1) // SIZE  # block of the window
        for block in range(-(-length // SIZE)):
            if -(-sink // SIZE) <= block < first:
                continue  # freed: the table leads to the null block
            part = slice(block * SIZE, min(length, (block + 1) * SIZE))
            cache[free, :, : part.stop - part.start] = torch.cat((key, value), -1)[part].transpose(0, 1)
            table[row, block], free = free, free + 1
        queries.append(query)
        wanted.append(expected(query, key, value, past, sink, recent, learned))
    TritonAttentionMetadataBuilder.build = lambda *_: stock_metadata(
        num_actual_tokens=sum(new),
        max_query_len=max(new),
        query_start_loc=torch.tensor([0, *new]).cumsum(0).int(),
        max_seq_len=max(lengths),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        causal=True,
        seq_threshold_3D=0,
        num_par_softmax_segments=16,
    )
    metadata = builder(sink, recent).build(0, None)
    assert metadata.seq_lens.max() <= sink + recent + max(new) + 2 * SIZE, "the gap is visited"
    implementation = TritonAttentionImpl(
        QUERY_HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, None, None, "auto", sinks=learned
    )
    layer = SimpleNamespace(_q_scale=torch.ones(()), _k_scale=torch.ones(()), _v_scale=torch.ones(()))
    query, want = torch.cat(queries), torch.cat(wanted)
    output = torch.empty_like(query)
    implementation.forward(layer, query, query, query, cache, metadata, output)
    return (output - want).abs().nan_to_num(float("inf")).max().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    with set_current_vllm_config(VllmConfig()):
        # learned sinks in every second case
        errors = [
            largest_error(*case, torch.randn(QUERY_HEADS) if number % 2 else None) for number, case in enumerate(CASES)
        ]
    print(errors)
    sys.exit(not max(errors) < 1e-5)
