"""Answer questions about long documents: within the model's context, and four times beyond it.

python examples/long_document.py
"""

from __future__ import annotations

import sys

import torch
from bundled import DUO, MODEL, kvsurgery, load, scratch, task
from embedding import SETTINGS, measure
from transformers import PreTrainedModel

WITHIN, BEYOND, DOCUMENTS = 2000, 16_384, 4
QUESTION = 2  # tokens: "recall" and a key


def answered(model: PreTrainedModel, questions: task.Prompts, last: int = BEYOND) -> str:
    """How many of the questions are answered from the documents' last tokens, one by one."""
    right = task.exact_match(model, task.Prompts(questions.tokens[:, -last:], questions.answers), batch=1)
    return f"{round(right * DOCUMENTS)} of {DOCUMENTS}"


def main() -> None:
    with scratch():
        kvsurgery("convert", MODEL, *DUO, "--out", "tiny-duo")
        measure().save("reform.safetensors")
        sizes = [word for name, size in SETTINGS.items() for word in (f"--reform-{name}", size)]
        kvsurgery("convert", MODEL, "--profile", "reform.safetensors", *DUO, *sizes, "--out", "tiny-long")
        original, duo, long = load(MODEL), load("tiny-duo"), load("tiny-long")

        questions = task.prompts(seed=2, count=DOCUMENTS, length=WITHIN)
        print(f"\n{WITHIN:,} tokens, within the context of {original.config.max_position_embeddings:,}")
        print(f"  original                     {answered(original, questions)}")
        print(f"  duo, 4 of 12 heads full      {answered(duo, questions)}")

        questions = task.prompts(seed=3, count=DOCUMENTS, length=BEYOND)
        print(f"{BEYOND:,} tokens, four times the context")
        print(f"  original, its last 4,096     {answered(original, questions, last=4096)}")
        print(f"  the same heads with REFORM   {answered(long, questions)}")

        # what was kept of one document
        document = questions.tokens[:1]
        _, [kept] = long.generate(
            document, query_length=QUESTION, return_gathered=True, progress=sys.stderr.isatty(), max_new_tokens=4
        )
        told = (document[0, :-1] == document[0, -1]).nonzero()[0].item() - 1
        fact = torch.arange(told, told + task.FACT)
        print(f"{len(kept)} tokens of the first document were kept, from {kept.min():,} to {kept.max():,}")
        print(f"its fact, at {told:,}, is among them: {'yes' if torch.isin(fact, kept).all() else 'no'}")


if __name__ == "__main__":
    main()
