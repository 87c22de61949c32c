"""Rank the bundled model's embedding heads: `python examples/tiny-recall/embedding.py`, seconds on one core.

As `kvsurgery profile compute --method reform` ranks those of a language model: whose states find, from the key that is
asked for, where in the text its fact was told.
"""

from __future__ import annotations

from measure import LENGTH, load
from task import FACT, prompts

from kvsurgery import __version__
from kvsurgery.measure.reform import RankedPrompt, embedding_ranking
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.templates.kv_reform import Reform

SEED, COUNT, QUESTION = 1, 8, 2
# how long prompts are read, in tokens; as convert's options --reform-*
SETTINGS = {
    "chunk": 256,
    "encode-budget": 128,
    "window": 32,
    "keep": 16,
    "pool": 33,
    "recompute-budget": 384,
    "query-length": QUESTION,
}


def samples(seed: int, count: int, length: int) -> list[RankedPrompt]:
    """Prompts of `length` tokens, each with the tokens of the fact that its end asks for."""
    made = []
    for tokens in prompts(seed, count, length).tokens.numpy():
        [told] = (tokens[:-QUESTION] == tokens[-1]).nonzero()[0] - 1
        context, question = range(length - QUESTION), range(length - QUESTION, length)
        made.append(RankedPrompt(tokens, context, question, (range(told, told + FACT),)))
    return made


def measure(seed: int = SEED, count: int = COUNT, length: int = LENGTH) -> HeadProfile:
    """A reform profile of the bundled model, by `count` prompts of `length` tokens."""
    recurrence = Reform(
        (), SETTINGS["chunk"], SETTINGS["encode-budget"], keep=SETTINGS["keep"], window=SETTINGS["window"]
    )
    data = {"data": "recall task", "seed": seed, "tool": __version__}
    made = {"pattern": samples(seed, count, length)}
    return embedding_ranking(load(), made, recurrence=recurrence, data=data)


def main() -> None:
    print("embedding heads:", *measure().embedding_heads)


if __name__ == "__main__":
    main()
