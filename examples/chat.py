"""A chat over several turns that continues the cache of the last one, with streaming heads and with budgeted heads.

python examples/chat.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from bundled import DUO, MODEL, PROFILE, kv_bytes, kvsurgery, load, scratch, task
from transformers import PreTrainedModel

ANSWER = task.VALUES + 1  # tokens
rng = np.random.default_rng(2)
FACTS = task.facts(rng, 1, 6)[0]  # a key and three values each


def told(facts: Sequence[np.ndarray], length: int) -> list[int]:
    """Tokens that tell facts, spread over other text."""
    tokens = task.filler(rng, 1, length)[0]
    for start, fact in zip(np.linspace(8, length - 50, len(facts)).astype(int), facts, strict=True):
        tokens[start : start + task.FACT] = [task.REMEMBER, *fact, task.STOP]
    return tokens.tolist()


# what the user says in each turn, and the fact that is asked for at its end
TURNS = [
    ("four facts, one is asked for", [task.BOS, *told(FACTS[:4], 900)], 0),
    ("two more, a new one is asked for", told(FACTS[4:], 300), 4),
    ("one from the first turn", told([], 300), 1),
    ("the one that was asked for before", [], 0),
]


def chat(name: str, model: PreTrainedModel) -> torch.Tensor:
    """Hold the conversation; returns all its tokens [1, tokens]."""
    print(f"\n{name}")
    conversation, cache = torch.empty(1, 0, dtype=torch.long), None
    for what, said, fact in TURNS:
        turn = torch.tensor([[*said, task.RECALL, FACTS[fact, 0]]])
        conversation = torch.cat([conversation, turn], 1)
        # all that was said goes in; what the cache has is not read again
        output = model.generate(
            conversation, past_key_values=cache, max_new_tokens=ANSWER, return_dict_in_generate=True
        )
        answer, conversation, cache = output.sequences[0, -ANSWER:-1], output.sequences, output.past_key_values
        right = "right" if answer.tolist() == FACTS[fact, 1:].tolist() else "wrong"
        print(f"  {what:34} {conversation.shape[1]:5,} tokens {kv_bytes(cache):9,} bytes  {right}")
    return conversation


def main() -> None:
    with scratch():
        budgets = ("--profile", PROFILE, "--rest", "budgeted", "--full-heads", 0, "--budget", 8)
        kvsurgery("convert", MODEL, *DUO, "--out", "tiny-duo")
        kvsurgery("convert", MODEL, *budgets, "--out", "tiny-budgets")
        chat("original", load(MODEL))
        chat("4 full heads, 8 streaming", load("tiny-duo"))
        model = load("tiny-budgets")
        conversation = chat("12 budgeted heads, 8 tokens of the prompt each on average", model)

        # without a cache the whole conversation is a prompt, and heads choose again, with this question in sight
        question = torch.tensor([[task.RECALL, FACTS[1, 0]]])
        again = model.generate(torch.cat([conversation, question], 1), max_new_tokens=task.VALUES)
        right = "right" if again[0, -task.VALUES :].tolist() == FACTS[1, 1:].tolist() else "wrong"
        print(f"\nthe fact of the third turn, the conversation read anew: {right}")


if __name__ == "__main__":
    main()
