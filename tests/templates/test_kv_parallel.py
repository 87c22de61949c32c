"""Which heads a process holds, told by its keys and by the mesh of its weights, without other processes."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.templates import kv_graph
from kvsurgery.templates.kv_attention import full_heads_first, in_blocks, own_layout
from kvsurgery.templates.kv_graph import split_over_devices
from kvsurgery.templates.kv_layout import LayerLayout
from tests.helpers.emitted import emitted

EVEN = LayerLayout(((1, 1),) * 4, 3, 5)
UNEVEN = LayerLayout(((1, 1), (0, 2), (0, 2), (1, 1)), 3, 5)


def module(rank: int, *shape: int) -> SimpleNamespace:
    """An attention module whose weights lie on a mesh of this shape, seen by one rank of its last dimension."""
    ranks = (0,) * (len(shape) - 1) + (rank,)
    mesh = SimpleNamespace(shape=shape, ndim=len(shape), get_local_rank=lambda dimension: ranks[dimension])
    return SimpleNamespace(k_proj=SimpleNamespace(weight=SimpleNamespace(device_mesh=mesh)))


PLAIN = torch.nn.Module()


@pytest.mark.parametrize("rank", range(4))
def test_the_mesh_says_which_process_this_is(rank):
    assert own_layout(UNEVEN, 2, module(rank, 4)) == UNEVEN.part(rank, 4)
    assert own_layout(UNEVEN, 2, module(rank, 3, 4)) == UNEVEN.part(rank, 4)  # data parallelism comes first
    assert own_layout(UNEVEN, 4, module(rank // 2, 2)) == UNEVEN.part(rank // 2, 2)


def test_all_heads_are_the_layer():
    for layout in (EVEN, UNEVEN):
        assert own_layout(layout, 8, PLAIN) is layout
        assert own_layout(layout, 8, module(1, 2)) is layout  # attention is replicated


def test_without_a_mesh_only_what_is_the_same_everywhere():
    assert own_layout(EVEN, 2, PLAIN) == EVEN.part(3, 4)
    with pytest.raises(RuntimeError, match="give the index of this process"):
        own_layout(UNEVEN, 2, PLAIN)


@pytest.mark.parametrize(
    ("layout", "heads", "of"),
    [
        (EVEN, 1, PLAIN),  # half a block
        (EVEN, 3, PLAIN),
        (EVEN, 16, PLAIN),
        (EVEN, 2, module(0, 3)),  # the last of three processes may hold fewer
        (LayerLayout(((2, 6),), 3, 5), 4, module(0, 2)),
    ],
    ids=["half a block", "no divisor", "more", "another mesh", "one block"],
)
def test_other_splits_are_refused(layout, heads, of):
    with pytest.raises(RuntimeError, match=rf"this process holds {heads} of the 8 KV heads.*tensor parallelism"):
        own_layout(layout, heads, of)


@given(
    st.integers(1, 4).flatmap(
        lambda size: st.lists(st.integers(0, size).map(lambda full: (full, size - full)), min_size=1, max_size=5)
    ),
    st.integers(1, 3),
)
def test_heads_come_together_and_go_back(blocks, group):
    layout = LayerLayout(tuple(blocks), 3, 5)
    place = torch.arange(layout.heads * group)[None, :, None]
    together = full_heads_first(place, layout)
    full = [
        head for first, (count, _) in zip(starts(blocks), blocks, strict=True) for head in range(first, first + count)
    ]
    others = [head for head in range(layout.heads) if head not in full]
    assert together[0, ::group, 0].tolist() == [head * group for head in full + others]
    assert in_blocks(together, layout).equal(place)


def starts(blocks):
    """The first head of each block."""
    return [sum(map(sum, blocks[:index])) for index in range(len(blocks))]


def test_what_has_to_wait_for_other_devices():
    model = torch.nn.Linear(2, 2)
    assert not split_over_devices(model)
    for name, value in {"_device_mesh": object(), "hf_device_map": {"a": 0, "b": "cpu"}}.items():
        split = torch.nn.Linear(2, 2)
        setattr(split, name, value)
        assert split_over_devices(split)
    model.weight.device_mesh = object()  # as a sharded parameter has one
    assert split_over_devices(model)


def test_steps_that_wait_for_others_are_not_captured(monkeypatch):
    monkeypatch.setattr(kv_graph, "capturable", lambda states: True)
    model, given = emitted("llama", 1), {"input_ids": torch.ones(1, 1, dtype=torch.long)}
    with torch.no_grad():
        assert kv_graph.fits(model, given)
        model._device_mesh = object()
        assert not kv_graph.fits(model, given)
