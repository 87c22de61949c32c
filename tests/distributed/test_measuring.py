"""Profiles that several processes measure are those that one process measures, however they share the work."""

from pathlib import Path

import numpy as np
import pytest

from kvsurgery.errors import ProfileError, UnsupportedModel
from kvsurgery.measure.mesh import Mesh, check_divisible
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.system.processes import Processes
from tests.distributed import measuring, process
from tests.distributed.process import WIDE
from tests.distributed.start import start
from tests.helpers.cases import some
from tests.helpers.families import WITH_STATES, make, stock
from tests.helpers.measured_models import measured_model
from tests.helpers.tiny_recall import FOLDER

# by processes: family, and how many of them share heads and tokens
CASES = {
    2: [
        ("llama-tied-mha", 1, 1),
        ("llama", 2, 1),
        ("phi3", 2, 1),
        ("gemma2", 1, 2),
        ("gpt_oss", 1, 2),
        (FOLDER / "model", 1, 1),
        (FOLDER / "model", 2, 1),
    ],
    4: [("qwen3", 1, 2), ("llama", 2, 2)],
}
TYPES = {"gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]}}


@pytest.mark.slow
@pytest.mark.parametrize("count", some(CASES))
def test_processes_measure_what_one_does(count, tmp_path):
    """Sharded weights, prompts dealt to all, gradients summed; embeddings that are tied to the head."""
    cases = [case for case in CASES[count] if case[1] in (1, count) or process.MESHES]
    cases = [case for case in cases if isinstance(case[0], str) or process.ODD]
    folders = {
        name: make(name, tmp_path / name, **WIDE, **TYPES.get(name, {})) for name, *_ in cases if isinstance(name, str)
    }
    given = [(folders.get(name, name), tp, sp) for name, tp, sp in cases]
    ranks = start(count, measuring.work, tmp_path, given, tmp_path)
    alone = {name: measured_alone(folders.get(name, name)) for name, *_ in cases}
    for number, (name, tp, sp) in enumerate(cases):
        expected, whole, known = alone[name]
        if name != FOLDER / "model":
            held = [rank[number][1] for rank in ranks]
            assert max(held) < (0.9 if name == "phi3" else 1.2 / count) * whole, (name, tp, sp)
            assert ranks[0][number][2] == known, (name, tp, sp)
        for rank in ranks:
            for method, values in rank[number][0].items():
                np.testing.assert_allclose(
                    values, expected[method], rtol=0, atol=1e-5, err_msg=f"{name} {tp} {sp} {method}"
                )
                np.testing.assert_array_equal(values, ranks[0][number][0][method])


def measured_alone(folder: Path) -> tuple[dict[str, np.ndarray], int, str]:
    """What one process measures, how much all layers hold, and what the model is known by."""
    measured = MeasuredModel.load(str(folder))
    if folder == FOLDER / "model":
        return {"headkv-r": measuring.retrieve(measured, Mesh()), **measuring.rank_heads(measured, Mesh())}, 0, ""
    found = measuring.measure(measured, Mesh())
    found["resumed"] = found["distill scores"]
    whole = sum(weight.numel() for weight in measured.model.get_decoder().layers.parameters())
    return found, whole, measured.fingerprint


class TestMesh:
    def test_prompts_are_dealt_evenly(self):
        dealt = [list(Mesh(Processes(rank, 3)).share(6)) for rank in range(3)]
        assert dealt == [[0, 3], [1, 4], [2, 5]]
        assert list(Mesh().share(5)) == [0, 1, 2, 3, 4]
        with pytest.raises(
            ProfileError, match="4 prompts cannot be divided evenly among 3 processes; give a multiple of 3"
        ):
            Mesh(Processes(0, 3)).share(4)

    def test_what_a_process_has(self):
        """Of twelve: three groups, in each two share the tokens of a prompt and two of each its heads."""
        import torch

        meshes = [Mesh(Processes(rank, 12), tp=2, sp=2) for rank in range(12)]
        assert [[*mesh.share(6)] for mesh in meshes] == [[group, group + 3] for group in range(3) for _ in range(4)]
        tokens = torch.arange(1, 6)[None]
        assert [mesh.tokens(tokens)[0].tolist() for mesh in meshes[:4]] == [[1, 2, 3], [1, 2, 3], [4, 5, 0], [4, 5, 0]]
        # of eight heads two each; of attention that is replicated four
        assert [mesh.heads(8, 2) for mesh in meshes[:4]] == [slice(0, 2), slice(4, 6), slice(2, 4), slice(6, 8)]
        assert [mesh.heads(8, 4) for mesh in meshes[:4]] == [slice(0, 4)] * 2 + [slice(4, 8)] * 2

    @pytest.mark.parametrize(("tp", "sp"), [(3, 1), (2, 4), (0, 1)])
    def test_processes_that_cannot_be_grouped(self, tp, sp):
        with pytest.raises(ProfileError, match=f"4 processes cannot be grouped by {tp * sp}; start a multiple"):
            Mesh(Processes(0, 4), tp, sp)

    @pytest.mark.parametrize("kind", ["dynamic", "longrope"])
    def test_rope_that_depends_on_the_length_of_a_prompt(self, kind):
        measured = measured_model(stock("llama", num_hidden_layers=1), name="org/long")
        check_divisible(measured)
        measured.model.get_decoder().rotary_emb.rope_type = kind
        with pytest.raises(UnsupportedModel, match=f"org/long has {kind} RoPE, .* leave `sp` out"):
            check_divisible(measured)

    @pytest.mark.parametrize("family", WITH_STATES)
    def test_states_of_all_tokens(self, family):
        measured = measured_model(stock(family), name="org/next")
        with pytest.raises(UnsupportedModel, match=r"org/next has layers with states .* leave `sp` out"):
            check_divisible(measured)

    def test_factors_that_are_counted_from_the_start_of_a_prompt(self):
        measured = measured_model(stock("llama4"), name="org/scout")
        with pytest.raises(UnsupportedModel, match=r"queries of org/scout have a factor .* leave `sp` out"):
            check_divisible(measured)
