"""A training is what its arguments say: to the bit, interrupted or not, in one process or two."""

import json
import os

import numpy as np
import pytest
import torch

from kvsurgery.display.progress import silent
from kvsurgery.errors import OutputError, ProfileError, UnsupportedModel
from kvsurgery.measure.gates import add_gradient, initial_gates, rate
from kvsurgery.measure.training import GateOptions, KeptState, train_gates
from kvsurgery.measure.training_state import TrainingState
from kvsurgery.version import TOOL
from tests.helpers.families import stock
from tests.helpers.gpu_strides import lay_out_as_on_a_gpu
from tests.helpers.measured_models import measured_model

OPTIONS = {"steps": 8, "lr": 0.1, "reg": 0.5, "sink": 3, "recent": 5, "batch": 2}
DATA = {"prompts": "random tokens", "seed": 0}


def prompts(step, place):
    rng = np.random.default_rng([0, step, place])
    tokens = torch.from_numpy(rng.integers(3, 101, (1, 30 + step % 3)))
    targets = torch.zeros_like(tokens, dtype=torch.bool)
    targets[:, -6:] = True
    return tokens, targets


def recalls(step, place):
    """The last six tokens say what stands at 5 to 10."""
    tokens, targets = prompts(step, place)
    tokens[:, -6:] = tokens[:, 5:11]
    passkeys = targets.long()
    passkeys[:, 5:11] = 1
    return tokens, targets, passkeys


def tiny(**overrides):
    return measured_model(stock("llama", num_hidden_layers=2, **overrides))


@pytest.fixture(scope="module")
def measured():
    return tiny()


def train(measured, steps_before_a_stop=None, given=prompts, data=DATA, **options):
    """Train, or press Ctrl-C after so many steps."""
    keywords = {"progress": options.pop("progress", silent)}
    kept = {name: options.pop(name) for name in ("every", "resume") if name in options}
    if "checkpoint" in options:
        keywords["kept"] = KeptState(options.pop("checkpoint"), **kept)

    def stopping(step, place):
        if step == steps_before_a_stop:
            raise KeyboardInterrupt
        return given(step, place)

    return train_gates(measured, stopping, GateOptions(**{**OPTIONS, **options}), data=data, **keywords)


@pytest.fixture(scope="module")
def trained(measured):
    return train(measured)


class TestSteps:
    def test_adamw_by_hand(self, measured, trained):
        """Mean gradient of the prompts, the penalty's, AdamW without decay, the schedule, and the clamp."""
        gates = initial_gates(measured)
        mean, square = np.zeros((2, 4)), np.zeros((2, 4))
        for step, (loss, data_loss, mean_gate, sparsity) in enumerate(trained[1]):
            gates.grad = None
            losses = [
                add_gradient(measured, gates, *prompts(step, place), "distill", sink=3, recent=5) for place in (0, 1)
            ]
            assert data_loss == pytest.approx(sum(losses).item() / 2, rel=1e-4, abs=1e-9)
            assert loss == pytest.approx(data_loss + 0.5 * gates.mean().item(), rel=1e-5)
            gradient = gates.grad.double().numpy() / 2 + 0.5 / 8
            mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
            move = mean / (1 - 0.9 ** (step + 1)) / (np.sqrt(square / (1 - 0.999 ** (step + 1))) + 1e-8)
            moved = gates.detach().double().numpy() - 0.1 * rate(step, 8) * move
            gates = torch.tensor(moved.clip(0, 1), dtype=torch.float32, requires_grad=True)
            assert mean_gate == pytest.approx(gates.mean().item(), rel=1e-4)
            assert sparsity == (gates < 0.5).double().mean()
        np.testing.assert_allclose(trained[0].scores, gates.detach(), rtol=1e-3)
        assert 0 < trained[0].scores.min() < 0.9

    def test_gates_stay_within_bounds(self, measured):
        profile, _ = train(measured, lr=5.0, reg=50.0)
        assert profile.scores.min() == 0

    def test_progress_says_what_the_history_holds(self, measured, trained):
        seen = []
        train(measured, progress=lambda *state: seen.append(state))
        assert seen == [
            (step, 8, f"loss {loss:.4f}, {sparsity:.0%} of gates under 0.5")
            for step, (loss, _, _, sparsity) in enumerate(trained[1].tolist(), 1)
        ]

    def test_a_profile_that_tells_its_training(self, measured, trained):
        profile, history = trained
        assert (profile.method, profile.granularity, profile.sink, profile.recent) == ("duo", "kv", 3, 5)
        told = profile.provenance
        assert told["data"] == DATA
        assert told["final_loss"] == history[-1][0]
        assert told["tool"] == TOOL
        assert {name: told[name] for name in ("loss", "steps", "lr", "reg", "batch")} == {
            **{name: OPTIONS[name] for name in ("steps", "lr", "reg", "batch")},
            "loss": "distill",
        }

    def test_the_language_modelling_loss(self, measured, trained):
        profile, history = train(measured, loss="lm")
        assert history[0][1] > 1
        assert not np.allclose(profile.scores, trained[0].scores)

    def test_layers_with_a_window_of_their_own_score_nothing(self):
        profile, _ = train(measured_model(stock("qwen2")), steps=1)
        assert (profile.scores[:3] > 0).all()
        assert (profile.scores[3] == 0).all()

    @pytest.mark.parametrize("loss", ["distill", "lm"])
    def test_attention_may_have_the_strides_of_a_gpu(self, measured, monkeypatch, loss):
        expected, _ = train(measured, steps=2, loss=loss)
        lay_out_as_on_a_gpu(monkeypatch)
        np.testing.assert_allclose(train(measured, steps=2, loss=loss)[0].scores, expected.scores, rtol=1e-5)

    def test_heads_of_a_converted_checkpoint_count_as_the_originals(self):
        order = (2, 0, 3, 1)
        plain, _ = train(tiny())
        moved, _ = train(measured_model(stock("llama", num_hidden_layers=2), permutation=(order, (0, 1, 2, 3))))
        np.testing.assert_array_equal(moved.scores[0, list(order)], plain.scores[0])
        np.testing.assert_array_equal(moved.scores[1], plain.scores[1])


class TestResume:
    def test_equal_arguments_give_equal_bits(self, trained):
        profile, history = train(tiny())
        assert profile.scores.tobytes() == trained[0].scores.tobytes()
        assert history.tobytes() == trained[1].tobytes()

    @pytest.mark.parametrize("stop", [0, 1, 5, 7])
    def test_an_interrupted_training_resumed_is_the_whole_one(self, measured, trained, tmp_path, stop):
        path = tmp_path / "state.safetensors"
        with pytest.raises(KeyboardInterrupt):
            train(measured, stop, checkpoint=path, every=3)
        steps = []
        profile, history = train(measured, checkpoint=path, resume=True, progress=lambda step, *_: steps.append(step))
        assert steps == list(range(stop + 1, 9))
        assert profile == trained[0]
        assert history.tobytes() == trained[1].tobytes()

    def test_a_killed_training_goes_on_from_its_last_checkpoint(self, measured, trained, tmp_path, monkeypatch):
        path = tmp_path / "state.safetensors"

        class Killed(BaseException):
            pass

        def killed(step, place):
            if step == 7:
                raise Killed
            return prompts(step, place)

        with pytest.raises(Killed):
            train(measured, given=killed, checkpoint=path, every=3)
        steps = []
        profile, _ = train(measured, checkpoint=path, resume=True, progress=lambda step, *_: steps.append(step))
        assert steps == [7, 8]
        assert profile == trained[0]
        assert os.listdir(tmp_path) == [path.name]

    def test_a_finished_training_resumes_to_its_result(self, measured, trained, tmp_path):
        path = tmp_path / "state.safetensors"
        train(measured, checkpoint=path)
        profile, history = train(measured, steps_before_a_stop=0, checkpoint=path, resume=True)
        assert profile == trained[0]
        assert history.tobytes() == trained[1].tobytes()

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"steps": 9}, "steps is 8 there and 9 here"),
            ({"lr": 0.2, "reg": 0.1}, "lr is 0.1 there and 0.2 here, reg is 0.5 there and 0.1 here"),
            ({"loss": "lm"}, "loss is distill there and lm here"),
            ({"data": {**DATA, "seed": 1}}, "data seed is 0 there and 1 here"),
            ({"data": {"prompts": "random tokens"}}, "data seed is 0 there and None here"),
        ],
    )
    def test_another_training_is_refused(self, measured, tmp_path, changed, message):
        path = tmp_path / "state.safetensors"
        with pytest.raises(KeyboardInterrupt):
            train(measured, 2, checkpoint=path)
        with pytest.raises(ProfileError, match=f"belongs to another training: {message}$"):
            train(measured, checkpoint=path, resume=True, **changed)

    def test_another_model_is_refused(self, measured, tmp_path):
        path = tmp_path / "state.safetensors"
        with pytest.raises(KeyboardInterrupt):
            train(measured, 2, checkpoint=path)
        with pytest.raises(ProfileError, match=r"weights is .* there and .* here"):
            train(measured_model(stock("llama", seed=1, num_hidden_layers=2)), checkpoint=path, resume=True)
        with pytest.raises(ProfileError, match=r"model is random there and other here$"):
            train(
                measured_model(stock("llama", num_hidden_layers=2), name="other"),
                checkpoint=path,
                resume=True,
            )

    def test_what_is_there_is_not_overwritten(self, measured, tmp_path):
        path = tmp_path / "state.safetensors"
        with pytest.raises(KeyboardInterrupt):
            train(measured, 2, checkpoint=path)
        with pytest.raises(OutputError, match="contains a training after 2 steps; continue it with `resume`"):
            train(measured, checkpoint=path)
        other = tmp_path / "notes.txt"
        other.write_text("mine")
        with pytest.raises(ProfileError, match=r"notes.txt is not a training checkpoint"):
            train(measured, checkpoint=other)
        assert other.read_text() == "mine"

    def test_a_path_that_cannot_be_written_fails_before_the_work(self, measured, tmp_path):
        with pytest.raises(OutputError, match="cannot write training checkpoint"):
            train(measured, steps_before_a_stop=0, checkpoint=tmp_path / "no" / "state.safetensors")

    def test_nothing_to_resume(self, measured, tmp_path):
        with pytest.raises(ProfileError, match=r"there is no training checkpoint .*state\.safetensors to resume"):
            train(measured, checkpoint=tmp_path / "state.safetensors", resume=True)

    @pytest.mark.parametrize("damage", ["cut", "shape", "latest", "number", "dtype", "version", "facts", "no object"])
    def test_a_damaged_checkpoint_is_refused(self, measured, tmp_path, damage):
        path = tmp_path / "state.safetensors"
        with pytest.raises(KeyboardInterrupt):
            train(measured, 2, checkpoint=path)
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        if damage == "cut":
            content = content[:-4]
        elif damage == "number":
            start = 8 + size + header["mean"]["data_offsets"][0]
            content = content[:start] + np.float32(0.5).tobytes() + content[start + 4 :]
        else:
            if damage == "shape":
                header["mean"]["shape"] = [4, 2]
            elif damage == "latest":
                header["latest"]["shape"] = [4, 2, 2]
            elif damage == "dtype":
                header["gates"]["dtype"] = "I32"
            elif damage == "version":
                header["__metadata__"]["version"] = "1"
            else:
                header["__metadata__"]["facts"] = {"facts": "{", "no object": "[]"}[damage]
            text = json.dumps(header).encode()
            content = len(text).to_bytes(8, "little") + text + content[8 + size :]
        path.write_bytes(content)
        with pytest.raises(ProfileError, match="training checkpoint"):
            train(measured, checkpoint=path, resume=True)


class TestRefusals:
    def test_a_loss_that_is_no_number(self, tmp_path):
        measured, path = tiny(), tmp_path / "state.safetensors"

        def until_it_breaks(step, place):
            if step == 3:
                with torch.no_grad():
                    measured.model.model.layers[1].self_attn.o_proj.weight[0, 0] = float("inf")
            return prompts(step, place)

        with pytest.raises(ProfileError, match=r"the loss is (nan|inf) in step 4, .*try bfloat16 or float32"):
            train(measured, given=until_it_breaks, checkpoint=path, every=1)
        assert len(TrainingState._read(path)[0].history) == 3

    def test_a_prompt_within_the_window(self, measured):
        with pytest.raises(ProfileError, match="30 tokens has nothing outside sink 10 and recent 20"):
            train(measured, sink=10, recent=20)

    def test_a_model_without_full_attention(self):
        with pytest.raises(UnsupportedModel, match="no layer of random"):
            train(measured_model(stock("qwen2", max_window_layers=0)))

    @pytest.mark.parametrize(
        "options",
        [{"steps": 0}, {"batch": 0}, {"sink": -1}, {"recent": 0}, {"lr": 0.0}, {"lr": float("nan")}, {"reg": -1.0}],
    )
    def test_options_out_of_range(self, options):
        with pytest.raises(ProfileError, match=next(iter(options))):
            GateOptions(**options)
        with pytest.raises(ProfileError, match="unknown loss"):
            GateOptions(loss="mse")
