"""Which keys the new tokens of a batch see on a CPU, planned once for the cache groups of a step."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.vllm.cpu import Mask, plan
from tests.vllm.serving import converted, engine, generate, prompts

REQUESTS = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=4)


@given(REQUESTS, st.integers(0, 70), st.integers(1, 90), st.integers(1, 3))
def test_every_new_token_sees_sinks_and_window_once(
    requests: list[tuple[int, int]], sink: int, recent: int, group: int
) -> None:
    """Requests have so many tokens in the cache, and so many new ones."""
    starts = (0, *accumulate(new for _, new in requests))
    lengths = tuple(past + new for past, new in requests)
    size = 32
    seen: dict[int, list[int]] = {}
    for piece in plan(starts, lengths, Mask(sink, recent, size, group, torch.float32)):
        tokens = torch.arange(starts[-1])[piece.tokens].view(len(piece.rows), -1)
        keys = piece.columns * size + piece.offsets[:, 0]
        for index, row in enumerate(piece.rows.flatten().tolist()):
            first, end = starts[row : row + 2]
            for place, token in enumerate(tokens[index].tolist()):
                assert first <= token < end
                for query in range(group):
                    held = keys[index]
                    if piece.bias is not None:
                        held = held[piece.bias[index, 0, query * tokens.shape[1] + place] == 0]
                    assert seen.setdefault(token, held.tolist()) == held.tolist()
    for (first, end), (past, _) in zip(pairwise(starts), requests, strict=True):
        for token in range(first, end):
            position = past + token - first
            assert seen[token] == [key for key in range(position + 1) if key < sink or position - key < recent]


def test_the_cache_groups_of_a_step_share_its_plan(tmp_path: Path) -> None:
    checkpoint = converted("llama", tmp_path, sparsity=0.75)
    with engine(checkpoint.folder) as llm:
        groups = llm.llm_engine.model_executor.driver_worker.worker.model_runner.attn_groups
        builders = sum(attention.backend.__name__ == "StreamingBackend" for group in groups for attention in group)
        assert builders > 1
        plan.cache_clear()
        generate(llm, prompts(), new=8)
        found = plan.cache_info()
    assert found.hits == (builders - 1) * found.misses > 0
