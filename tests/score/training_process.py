"""One process of several that share the work, as `torchrun` starts it: `training_process.py MODEL OUT`."""

import sys

import numpy as np
import torch

from kvsurgery.score.attention import attention_profile
from kvsurgery.score.ranks import started_ranks
from kvsurgery.score.training import GateOptions, train_gates
from tests.score.test_gate_training import DATA, OPTIONS, prompts, recalls


def main() -> None:
    model, out = sys.argv[1:]
    torch.set_num_threads(1)
    with started_ranks("cpu") as ranks:
        subject = ranks.load(model)
        weights = list(subject.model.model.parameters())
        assert sum(weight.to_local().numel() for weight in weights) < 0.6 * sum(weight.numel() for weight in weights)
        found = {"attention": attention_profile(subject, recalls, 4, data=DATA, ranks=ranks).scores}
        for loss in ("distill", "lm"):
            options = GateOptions(**OPTIONS, loss=loss)
            profile, history = train_gates(subject, prompts, options, data=DATA, ranks=ranks)
            found |= {f"{loss}_scores": profile.scores, f"{loss}_history": history}
            assert profile.base_model == model
        np.savez(f"{out}/{ranks.rank}.npz", **found)


if __name__ == "__main__":
    main()
