from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.conversion.plan import ColumnShuffle, Move, Run, SurgeryPlan, plan_moves, plan_surgery
from kvsurgery.errors import CheckpointError, PolicyError, UnsupportedModel
from kvsurgery.policy.policy import Policy
from kvsurgery.recipe import Recipe
from kvsurgery.templates.kv_layout import KVLayout, LayerLayout
from tests.helpers.shards import LLAMA, llama_checkpoint, llama_shapes, noise_shard

IDENTITY = (0, 1, 2)


def policy(*orders: tuple[int, ...]) -> Policy:
    layers = tuple(LayerLayout(((1, len(order) - 1),), 2, 4, order=order) for order in orders)
    return Policy(KVLayout(layers, 4), Recipe(), {})


def plan_of(folder: Path, *orders: tuple[int, ...]) -> SurgeryPlan:
    return plan_surgery(Checkpoint.open(folder), policy(*orders))


def checkpoint_of(folder: Path, shapes: dict[str, list[int]], dtype: str = "F32", **config: Any) -> Checkpoint:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
    noise_shard(folder / "model.safetensors", shapes, dtype)
    return Checkpoint.open(folder)


def test_by_hand(tmp_path: Path) -> None:
    # 3 KV heads of head_dim 4, groups of 2 query heads, hidden 12, 4 bytes per element
    plan = plan_of(llama_checkpoint(tmp_path / "m"), (2, 0, 1), IDENTITY)
    layer = "model.layers.0.self_attn."
    block = 4 * 12 * 4
    # heads 0 and 1 stay neighbors, so they move as one run
    rows = (Run(0, block, 2 * block), Run(2 * block, 0, block))
    assert plan.moves[layer + "k_proj.weight"] == plan.moves[layer + "v_proj.weight"] == Move(rows)
    assert plan.moves[layer + "q_proj.weight"] == Move(tuple(Run(*(2 * number for number in run)) for run in rows))
    columns = ColumnShuffle(2 * 4 * 4, (2, 0, 1))
    assert plan.moves[layer + "o_proj.weight"] == Move((Run(0, 0, 12 * 24 * 4),), columns)
    assert sorted(plan.moved) == [layer + f"{name}_proj.weight" for name in "koqv"]
    assert plan.policy.orders == ((2, 0, 1), IDENTITY)


def test_identity_moves_nothing(tmp_path: Path) -> None:
    assert plan_of(llama_checkpoint(tmp_path / "m"), IDENTITY, IDENTITY).moved == ()


def test_fused_heads(tmp_path: Path) -> None:
    shapes = {}
    for layer in range(2):
        shapes[f"model.layers.{layer}.self_attn.qkv_proj.weight"] = [48, 12]
        shapes[f"model.layers.{layer}.self_attn.o_proj.weight"] = [12, 24]
    checkpoint = checkpoint_of(tmp_path / "m", shapes, model_type="phi3", architectures=["Phi3ForCausalLM"])
    moves = plan_moves(checkpoint.tensors, checkpoint.model, [(1, 0, 2), IDENTITY])
    # 3 groups of 8 rows for q, then 3 heads of 4 rows for k, and 3 for v
    query = [(0, 8, 8), (8, 0, 8), (16, 16, 8)]
    key = [(24, 28, 4), (28, 24, 4), (32, 32, 4)]
    value = [(36, 40, 4), (40, 36, 4), (44, 44, 4)]
    row = 12 * 4
    expected = tuple(Run(*(number * row for number in run)) for run in query + key + value)
    assert moves["model.layers.0.self_attn.qkv_proj.weight"].runs == expected


@given(order=st.permutations(range(3)), dtype=st.sampled_from(["F16", "BF16", "F32", "F64"]))
def test_runs_cover_every_byte_once(tmp_path_factory: pytest.TempPathFactory, order: list[int], dtype: str) -> None:
    folder = tmp_path_factory.mktemp("m") / "m"
    plan = plan_of(llama_checkpoint(folder, dtype=dtype), tuple(order), IDENTITY)
    for tensor in Checkpoint.open(folder).tensors:
        runs = plan.moves[tensor.name].runs
        for starts in ([(run.source, run.length) for run in runs], sorted((run[1], run.length) for run in runs)):
            end = 0
            for start, length in starts:
                assert start == end
                end = start + length
            assert end == tensor.size


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"model.layers.0.self_attn.q_norm.weight": [4]}, UnsupportedModel, "q_norm"),
        ({"model.layers.1.self_attn.q_proj.weight": None}, CheckpointError, r"1\.self_attn\.q_proj\.weight is missing"),
        ({"model.layers.1.self_attn.o_proj.weight": None}, CheckpointError, r"1\.self_attn\.o_proj\.weight is missing"),
        (
            {"model.layers.0.mlp.up_proj.weight": None},
            CheckpointError,
            r"model\.layers\.0\.mlp\.up_proj\.weight is missing",
        ),
        ({"model.norm.weight": None}, CheckpointError, r"model\.norm\.weight is missing"),
        ({"lm_head.weight": None}, CheckpointError, "lm_head.weight is missing.*tie_word_embeddings"),
        ({"model.layers.0.self_attn.k_proj.weight": [24, 12]}, CheckpointError, r"\[24, 12\].*\[12, 12\]"),
        ({"model.layers.0.self_attn.o_proj.weight": [24, 12]}, CheckpointError, r"\[12, 24\]"),
        ({"model.layers.0.self_attn.v_proj.weight": [144]}, CheckpointError, "shape"),
        ({"model.layers.0.self_attn.q_proj.bias": [12]}, CheckpointError, "q_proj.bias"),
        ({"model.layers.2.input_layernorm.weight": [12]}, UnsupportedModel, "beyond the 2 layers"),
        ({"norm.weight": [12]}, CheckpointError, "twice"),
    ],
    ids=str,
)
def test_every_tensor_is_checked(tmp_path: Path, change: dict[str, Any], error: type[Exception], word: str) -> None:
    shapes = {name: shape for name, shape in {**llama_shapes(), **change}.items() if shape is not None}
    checkpoint = checkpoint_of(tmp_path / "m", shapes)
    with pytest.raises(error, match=word):
        plan_surgery(checkpoint, policy((1, 0, 2), IDENTITY))


def test_layers_that_predict_further_tokens_are_copied(tmp_path: Path) -> None:
    shapes = llama_shapes()
    attention = {name: shape for name, shape in shapes.items() if "layers.1.self_attn" in name}
    beyond = {name.replace("layers.1.", "layers.2."): shape for name, shape in attention.items()}
    beyond["model.layers.2.eh_proj.weight"] = [12, 24]
    glm = {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "num_nextn_predict_layers": 1}
    glm["first_k_dense_replace"] = 2  # no layer has experts
    plan = plan_surgery(checkpoint_of(tmp_path / "m", shapes | beyond, **glm), policy((1, 0, 2), (1, 0, 2)))
    assert {*plan.moved} == {name for name in shapes if "self_attn" in name and "bias" not in name}
    checkpoint = checkpoint_of(tmp_path / "n", shapes | beyond, **glm | {"num_nextn_predict_layers": 0})
    with pytest.raises(UnsupportedModel, match="layer 2 lie beyond the 2 layers"):
        plan_surgery(checkpoint, policy((1, 0, 2), (1, 0, 2)))


def test_weights_without_their_scales_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="is U8"):
        plan_of(llama_checkpoint(tmp_path / "m", dtype="U8"), IDENTITY, IDENTITY)


@pytest.mark.parametrize("orders", [[IDENTITY], [IDENTITY] * 3, [(0, 1), IDENTITY], [(0, 1, 1), IDENTITY]], ids=str)
def test_policy_of_another_model(tmp_path: Path, orders: list[tuple[int, ...]]) -> None:
    folder = llama_checkpoint(tmp_path / "m")
    with pytest.raises(PolicyError, match="2 layers, 6 query heads, 3 KV heads of 4"):
        plan_of(folder, *orders)
