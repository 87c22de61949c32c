"""REFORM's embedding heads, whose states find the tokens that a question needs (Song et al. 2025, arXiv 2506.01215)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from kvsurgery.errors import ProfileError
from kvsurgery.heads.dimensions import ModelDimensions

STATES = ("q", "k", "v")
# ranked states and, for comparison, the inputs of a layer and the attention of the question's tokens
RANKED_KINDS = (*STATES, "hidden", "attention")
RANKING_TASKS = ("pattern", "multihop")  # finding a fact by words of the question, and over an intermediate step
CHOSEN_HEADS = 4
PATTERN_DEPTH = Fraction(7, 10)  # pattern heads are of layers below it, as a share of all


@dataclass(frozen=True, order=True)
class EmbeddingHead:
    """The states of one head in one layer; `head` counts query heads for q, KV heads for k and v.

    Raises:
        ProfileError: no model can have such a head.
    """

    layer: int
    state: Literal["q", "k", "v"]
    head: int

    def __post_init__(self) -> None:
        if self.state not in STATES or any(type(place) is not int or place < 0 for place in (self.layer, self.head)):
            raise ProfileError(
                f"an embedding head is a layer, one of q, k and v, and a head; got "
                f"{str(self.layer)[:20]!r}, {str(self.state)[:20]!r} and {str(self.head)[:20]!r}"
            )

    @classmethod
    def parse(cls, values: Any) -> tuple[EmbeddingHead, ...]:
        """Parse lists [layer, state, head] of a file into heads.

        Raises:
            ProfileError: the value has another form.
        """
        if not isinstance(values, list) or any(not isinstance(item, list) or len(item) != 3 for item in values):
            raise ProfileError(f"embedding heads are a list of [layer, state, head], got {str(values)[:40]}")
        return tuple(cls(*item) for item in values)

    def within(self, model: ModelDimensions) -> bool:
        """Whether a model of these dimensions has this head."""
        return self.layer < model.layers and self.head < columns_of(self.state, model)

    def __str__(self) -> str:
        return f"{self.state}{self.layer}.{self.head}"


@dataclass(frozen=True, eq=False)
class Ranking:
    """How well every head's states find the tokens that answer a question, by task.

    Attributes:
        mnr: by task and kind, float32 [layers, heads] in [0, 1]: the mean normalized rank of those tokens among all of
            the context, 0 = always first. Heads are query heads for q and attention, KV heads for k and v; hidden
            states, which have none, are [layers, 1].

    Raises:
        ProfileError: no or unknown tasks, a kind that is missing or unknown, or a number out of range.
    """

    mnr: Mapping[str, Mapping[str, np.ndarray]]

    def __post_init__(self) -> None:
        if not self.mnr or not set(self.mnr) <= set(RANKING_TASKS):
            raise ProfileError(
                f"a ranking is over {' or '.join(RANKING_TASKS)}, got {', '.join(map(str, self.mnr)) or 'nothing'}"
            )
        mnr = {task: {} for task in RANKING_TASKS if task in self.mnr}
        for task, kinds in mnr.items():
            if set(self.mnr[task]) != set(RANKED_KINDS):
                raise ProfileError(
                    f"the {task} ranking is of {', '.join(RANKED_KINDS)}, got {', '.join(self.mnr[task])}"
                )
            for kind in RANKED_KINDS:
                ranks = np.array(self.mnr[task][kind], dtype=np.float32, order="C")
                ranks += 0  # no negative zeros: equal rankings are equal bytes
                if ranks.ndim != 2 or not ((ranks >= 0) & (ranks <= 1)).all():  # which NaN is not
                    raise ProfileError(f"ranks of {task}.{kind} are not [layers, heads] numbers in [0, 1]")
                ranks.flags.writeable = False
                kinds[kind] = ranks
        object.__setattr__(self, "mnr", mnr)

    def check(self, model: ModelDimensions) -> None:
        """Raise ProfileError if the shape of a rank array does not match the model."""
        for name, ranks in self.tensors().items():
            expected_shape = (model.layers, columns_of(name.rpartition(".")[2], model))
            if ranks.shape != expected_shape:
                raise ProfileError(
                    f"{name} has shape {list(ranks.shape)}, {list(expected_shape)} is needed for {model}"
                )

    def best(self, task: str) -> list[EmbeddingHead]:
        """All heads by their rank in a task, best first; ties by layer, then state, then head."""
        rank_pairs = [
            (self.mnr[task][state][layer, head], EmbeddingHead(layer, state, head))
            for state in STATES
            for layer, head in np.ndindex(*self.mnr[task][state].shape)
        ]
        return [head for _, head in sorted(rank_pairs)]

    def pick(self) -> tuple[EmbeddingHead, ...]:
        """Pick the four heads that make a token's embedding, ordered by layer, state and head.

        These are the best two pattern heads in layers below 70% of the depth, and the best two of the remaining
        multi-hop heads. If only one task was measured, all four come from it.
        """
        heads: list[EmbeddingHead] = []
        for task, kinds in self.mnr.items():
            layer_limit = len(kinds["q"]) * (PATTERN_DEPTH if task == "pattern" else 1)
            remaining = (head for head in self.best(task) if head.layer < layer_limit and head not in heads)
            heads += [head for head, _ in zip(remaining, range(CHOSEN_HEADS // len(self.mnr)), strict=False)]
        return tuple(sorted(heads))

    def tensors(self) -> dict[str, np.ndarray]:
        """The tensors of a file, by name: `mnr.pattern.q`, ..."""
        return {f"mnr.{task}.{kind}": ranks for task, kinds in self.mnr.items() for kind, ranks in kinds.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, np.ndarray]) -> Ranking:
        """The ranking from the tensors that `tensors` returned.

        Raises:
            ProfileError: as the class itself, and for a tensor of another name.
        """
        mnr: dict[str, dict[str, np.ndarray]] = {}
        for name, ranks in tensors.items():
            prefix, _, place = name.partition(".")
            task, _, kind = place.partition(".")
            if prefix != "mnr":
                raise ProfileError(f"unknown tensor {name!r}")
            mnr.setdefault(task, {})[kind] = ranks
        return cls(mnr)


def columns_of(kind: str, model: ModelDimensions) -> int:
    """The number of heads of a kind in a layer."""
    return {"k": model.kv_heads, "v": model.kv_heads, "hidden": 1}.get(kind, model.query_heads)
