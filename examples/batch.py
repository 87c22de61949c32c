"""A batch of documents of different lengths, padded on the left, with a question each.

python examples/batch.py
"""

from __future__ import annotations

import torch
from bundled import DUO, MODEL, kv_bytes, kvsurgery, load, scratch, task
from transformers import AutoTokenizer, PreTrainedModel

LENGTHS = (300, 500, 800, 1000, 1400, 1800)  # tokens
ANSWER = task.VALUES + 1


def main() -> None:
    with scratch():
        kvsurgery("convert", MODEL, *DUO, "--out", "tiny-duo")
        tokenizer = AutoTokenizer.from_pretrained("tiny-duo", padding_side="left")  # so that all end together
        prompts = [task.prompts(seed=length, count=1, length=length) for length in LENGTHS]
        documents = [tokenizer.batch_decode(prompt.tokens[:, 1:])[0] for prompt in prompts]
        batch = tokenizer(documents, padding=True, return_tensors="pt", return_token_type_ids=False)
        print(f"{len(documents)} documents, padded to {batch.input_ids.shape[1]:,} tokens")

        def answers(model: PreTrainedModel) -> tuple[list[str], int]:
            """What the model says to each document, and the bytes of the cache of all."""
            output = model.generate(**batch, max_new_tokens=ANSWER, return_dict_in_generate=True)
            return tokenizer.batch_decode(output.sequences[:, -ANSWER:]), kv_bytes(output.past_key_values)

        original, before = answers(load(MODEL))
        model = load("tiny-duo")
        converted, after = answers(model)
        for document, first, second, prompt in zip(documents, original, converted, prompts, strict=True):
            right = second.startswith(tokenizer.batch_decode(prompt.answers)[0])
            print(
                f"{len(document.split()) + 1:5,} tokens  {document[-11:]}  {second}  "
                f"{'right' if right else 'wrong'}, {'as' if first == second else 'not as'} the original"
            )
        print(f"KV cache of the batch: {before:,} bytes before, {after:,} after")

        # a document's answer does not depend on what it is padded with
        alone = tokenizer(documents[0], return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            difference = model(**alone).logits[0, -1] - model(**batch).logits[0, -1]
        print(f"the shortest one alone: logits differ by at most ≈ {difference.abs().max():.0e}")


if __name__ == "__main__":
    main()
