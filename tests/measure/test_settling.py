"""Gates have settled when more steps would hardly change which heads are full, and a training stops there."""

import numpy as np
import pytest
import torch

from kvsurgery.display.progress import silent
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.measure import settling, training, training_state
from kvsurgery.measure.settling import LATEST, settled
from kvsurgery.measure.training import GateOptions, KeptState, outcome, train_gates
from kvsurgery.measure.training_state import HISTORY
from tests.helpers.families import stock
from tests.helpers.measured_models import measured_model
from tests.measure.head_profiles import profile

HEADS, LR = 100, 0.02
FEW = 10  # steps that are compared, in trainings of a few steps


def trajectory(start, change=0.0, noise=0.0):
    """float32 [LATEST, heads]: gates that change by `change` a step, and tremble."""
    steps = np.arange(LATEST)[:, None]
    rng = np.random.default_rng(0)
    moved = np.asarray(start) + change * steps + noise * rng.standard_normal((LATEST, len(start)))
    return moved.clip(0, 1).astype(np.float32)


class TestTrajectories:
    spread = np.linspace(0, 1, HEADS)

    @pytest.mark.parametrize("value", [0.0, 0.9, 1.0])
    def test_gates_that_are_all_alike(self, value):
        """They stand still, and rank no head."""
        assert not settled(trajectory(np.full(HEADS, value)), LR)

    @pytest.mark.parametrize("value", [0.0, 0.1])
    @pytest.mark.parametrize("ranked", [100, 75, 71, 70, 50, 33])
    def test_the_lowest_gates_tie(self, ranked, value):
        """75 heads may be full, and all but one in twenty of them have to be ranked."""
        gates = np.linspace(1, 0.2, HEADS)
        gates[ranked:] = value
        assert settled(trajectory(gates), LR) == (ranked >= 71)
        assert settled(trajectory(gates[::-1]), LR) == (ranked >= 71)

    def test_ties_away_from_the_cuts(self):
        """Heads that are full at all shares, or at none but all of them, may tie."""
        gates = self.spread.copy()
        gates[:20], gates[80:] = 0, 1
        assert settled(trajectory(gates), LR)

    @pytest.mark.parametrize("noise", [0.0, 0.02])
    def test_gates_that_tremble_where_they_are(self, noise):
        assert settled(trajectory(self.spread, noise=noise), LR)

    @pytest.mark.parametrize("falling", [1, 5, 6, 50, 100])
    def test_gates_that_fall(self, falling):
        """One in twenty may."""
        change = np.zeros(HEADS)
        change[-falling:] = -0.002
        assert settled(trajectory(self.spread, change), LR) == (falling <= 5)

    def test_slow_gates_that_change_places(self):
        """None of them moves far, but half of the full heads are others."""
        close = np.repeat([0.50, 0.51], HEADS // 2) + self.spread / 1000
        change = np.repeat([0.0005, 0.0], HEADS // 2)
        assert np.abs(change).max() < settling.MOST_MOVED * LR / 2
        assert not settled(trajectory(close, change), LR)
        assert settled(trajectory(close, change[::-1]), LR)

    def test_no_matter_when_within_the_latest_steps(self):
        """A jump of all gates is seen until it is long past."""
        for jump in range(LATEST // 4, 3 * LATEST // 4):
            gates = trajectory(np.linspace(0.5, 1, HEADS))
            assert settled(gates, LR)
            gates[jump:] -= 0.3
            assert not settled(gates, LR)

    @pytest.mark.parametrize("heads", [1, 2, 3, 8])
    def test_one_head_of_few_falls(self, heads):
        start = np.linspace(1, 0, heads)
        assert settled(trajectory(start), LR)
        assert not settled(trajectory(start, np.where(start == 1, -0.002, 0)), LR)


def outcome_of(mean_gates: list[float] | np.ndarray = (1.0,), steps: int | None = None, **fields) -> list[str]:
    """What a training says whose mean gate was this after each step, of as many or of `steps`."""
    history = np.zeros((len(mean_gates), len(HISTORY)))
    history[:, HISTORY.index("mean_gate")] = mean_gates
    facts = {"steps": steps or len(history), "steps_done": len(history), "lr": LR}
    return outcome(profile(**fields, provenance=facts), history)


class TestOutcome:
    @pytest.mark.parametrize(
        ("mean_gates", "advice"),
        [
            (np.linspace(1, 0.6, 200), "train longer, or raise `reg`"),
            (np.linspace(1, 0.6, 200).clip(0.78), "raise `reg`"),
            (np.linspace(1, 0.6, 200).clip(0.82), "raise `reg`"),
            ([1.0], "train longer, or raise `reg`"),
        ],
        ids=["falling", "still by the middle", "still for long", "one step"],
    )
    def test_gates_that_have_not_separated(self, mean_gates, advice):
        """More steps help those that still fall."""
        scores = np.array([[0.8, 0.9], [1.0, 0.1], [0.8, 0.2]], np.float32)
        assert outcome_of(mean_gates, scores=scores) == [
            f"4 of 6 gates are 0.8 or more: they have not separated; {advice}"
        ]

    def test_gates_that_have_settled_without_separating(self):
        """They fell earlier, and more steps would not help."""
        scores = np.array([[0.8, 0.9], [1.0, 0.1], [0.8, 0.2]], np.float32)
        mean_gates = np.linspace(1, 0.4, 100).clip(0.64)
        settled_line, line = outcome_of(mean_gates, steps=400, scores=scores)
        assert settled_line.startswith("gates settled after 100 of 400 steps")
        assert line == "4 of 6 gates are 0.8 or more: they have not separated; raise `reg`"

    @pytest.mark.parametrize(("at_0", "told"), [(0, False), (25, False), (26, True), (57, True), (100, True)])
    def test_gates_that_have_collapsed(self, at_0, told):
        """Where three quarters of the heads cannot be chosen by their gates, a line says how many can."""
        gates = np.linspace(0.1, 0.7, HEADS, dtype=np.float32)
        gates[:at_0] = 0
        model = ModelDimensions(layers=25, query_heads=8, kv_heads=4, head_dim=16)
        lines = outcome_of(scores=gates.reshape(25, 4), model=model)
        line = f"{at_0} of 100 gates are 0: they have collapsed and rank alike; "
        line += f"to keep more than {100 - at_0} heads full, lower `reg` or train fewer steps"
        assert lines == ([line] if told else [])

    def test_layers_without_gates_do_not_count(self):
        scores = np.array([[0.1, 0.2], [0.0, 0.0], [0.3, 0.4]], np.float32)
        assert outcome_of(scores=scores, windows=(None, 64, None)) == []
        assert len(outcome_of(scores=scores, windows=(None, None, None))) == 1


class TestTraining:
    options = GateOptions(steps=40, lr=0.1, reg=1.0, sink=3, recent=5, until_settled=True)

    @pytest.fixture(autouse=True)
    def few_steps(self, monkeypatch):
        for module in (settling, training, training_state):
            monkeypatch.setattr(module, "LATEST", FEW)

    @pytest.fixture(scope="class")
    @staticmethod
    def measured():
        return measured_model(stock("llama", num_hidden_layers=2))

    def train(self, measured, stop=None, kept=None, progress=silent, **changed):
        def prompts(step, place):
            if step == stop:
                raise KeyboardInterrupt
            rng = np.random.default_rng([0, step, place])
            tokens = torch.from_numpy(rng.integers(3, 101, (1, 30)))
            targets = torch.zeros_like(tokens, dtype=torch.bool)
            targets[:, -6:] = True
            return tokens, targets

        options = GateOptions(**{**vars(self.options), **changed})
        return train_gates(measured, prompts, options, data={"seed": 0}, kept=kept, progress=progress)

    def test_it_stops_once_the_gates_stand_still(self, measured):
        profile, history = self.train(measured)
        assert 8 + FEW < len(history) < 40
        mean_gates = history[:, 2]
        assert abs(mean_gates[-FEW] - mean_gates[-1]) < 0.05 < 0.2 < mean_gates[8] - mean_gates[-1]
        assert (profile.scores > 0).mean() >= max(settling.SHARES)
        assert profile.provenance["steps"] == 40
        assert profile.provenance["steps_done"] == len(history)
        assert profile.provenance["until_settled"] is True

    def test_never_when_all_gates_fall_to_0(self, measured):
        """With so much weight on the mean gate they stand still there, and rank no head."""
        profile, history = self.train(measured, reg=50.0)
        assert (history[-2 * FEW :, 2] == 0).all()
        assert len(history) == 40
        assert outcome(profile, history) == [
            "8 of 8 gates are 0: they have collapsed and rank alike; "
            "to keep more than 0 heads full, lower `reg` or train fewer steps"
        ]

    def test_its_steps_are_those_of_the_whole_training(self, measured):
        seen = []
        _, history = self.train(measured, progress=lambda step, steps, note: seen.append((step, steps)))
        whole, all_of_it = self.train(measured, until_settled=False)
        assert whole.provenance["steps_done"] == len(all_of_it) == 40
        np.testing.assert_array_equal(history, all_of_it[: len(history)])
        assert seen == [(step, 40) for step in range(1, len(history) + 1)]

    @pytest.mark.parametrize("steps", [11, 12, 13, 30, 40])
    def test_never_by_the_steps_of_the_warm_up(self, measured, steps, monkeypatch):
        monkeypatch.setattr(training, "settled", lambda gates, lr: True)
        _, history = self.train(measured, steps=steps)
        assert len(history) == min(steps, -(-steps // 5) + FEW)

    def test_not_while_they_fall(self, measured):
        _, history = self.train(measured, lr=0.03, steps=30)
        assert history[-1][2] > 0.2
        assert len(history) == 30

    def test_a_resumed_training_stops_at_the_same_step(self, measured, tmp_path):
        whole, history = self.train(measured)
        for stop in (1, len(history) - 2, len(history) - 1):
            path = tmp_path / f"{stop}.safetensors"
            with pytest.raises(KeyboardInterrupt):
                self.train(measured, stop, KeptState(path))
            profile, again = self.train(measured, kept=KeptState(path, resume=True))
            assert profile == whole
            assert again.tobytes() == history.tobytes()
            # what has stopped does not go on
            profile, again = self.train(measured, 0, KeptState(path, resume=True))
            assert profile == whole
            assert again.tobytes() == history.tobytes()
