"""Long prompts whose lengths differ from step to step: what they have in common, and the plain ones."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from kvsurgery.errors import ProfileError
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.lengths import LONGEST_PROMPT, SHORTEST_PROMPT

CONTEXTS = 8  # times the longest context: text to draw pieces from


@dataclass(frozen=True)
class Contexts:
    """Lengths of prompts, in tokens, both ends included, and the seed of all that is drawn."""

    shortest: int
    longest: int
    seed: int = 0

    @classmethod
    def of(
        cls, measured: MeasuredModel, shortest: int = SHORTEST_PROMPT, longest: int | None = None, seed: int = 0
    ) -> Contexts:
        """Lengths that a model has positions for; by default up to 32,000 tokens, or its maximum.

        Raises:
            ProfileError: it has not, or the shortest is longer than the longest.
        """
        if longest is None:
            longest = min(LONGEST_PROMPT, measured.max_context)
        if longest > measured.max_context:
            raise ProfileError(
                f"a context of {longest} tokens exceeds the {measured.max_context} positions of {measured.name}; "
                "give a smaller `max_context`"
            )
        if not 1 < shortest <= longest:
            raise ProfileError(
                f"there are no contexts from {shortest} to {longest} tokens; give a smaller `min_context`"
            )
        if seed < 0:
            raise ProfileError(f"seed must be >= 0, got {seed}")
        return cls(shortest, longest, seed)

    def read(self, source: str | None, tokenizer: PreTrainedTokenizerBase) -> Haystack:
        """Text to fill prompts with, as `Haystack.read` takes it: a file, or enough of what has no end."""
        is_file = source is not None and os.path.exists(source)
        return Haystack.read(source, tokenizer, self.longest * (1 if is_file else CONTEXTS), self.seed)

    def length(self, step: int) -> int:
        """Tokens of the prompts of a step: all alike, so that processes do not wait for each other."""
        return int(np.random.default_rng([self.seed, step]).integers(self.shortest, self.longest + 1))

    def rng(self, step: int, place: int) -> np.random.Generator:
        """What draws the prompt at one place of a step's batch."""
        return np.random.default_rng([self.seed, step, 1 + place])


@dataclass(frozen=True)
class Passages:
    """Pieces of text, every token of which is to be predicted: what the `lm` loss is measured on.

    The paper's language-modelling ablation is next-token prediction over natural text; all tokens count, those that a
    short window predicts too. That is why it finds retrieval heads less well.
    """

    contexts: Contexts
    haystack: Haystack

    @property
    def facts(self) -> dict[str, Any]:
        """For a profile's provenance."""
        return {"prompts": "passages", **asdict(self.contexts), **self.haystack.facts}

    def __call__(self, step: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens int64 [1, tokens] and targets bool [1, tokens]."""
        piece = self.haystack.piece(self.contexts.rng(step, place), self.contexts.length(step))
        tokens = torch.from_numpy(piece)[None]
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
