"""Convert a model, generate with it, and compare the answer and the KV cache with the original's.

python examples/generate.py
"""

from __future__ import annotations

from bundled import DUO, MODEL, kv_bytes, kvsurgery, load, scratch, task
from transformers import AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

NEW = 4  # tokens of an answer


def main() -> None:
    with scratch():
        kvsurgery("convert", MODEL, *DUO, "--out", "tiny-duo")
        tokenizer = AutoTokenizer.from_pretrained("tiny-duo")
        prompt = tokenizer.decode(task.prompts(seed=1, count=1, length=1024).tokens[0, 1:])
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        tokens = inputs.input_ids.shape[1]
        print(f"prompt of {tokens:,} tokens: {prompt[:20]} ... {prompt[-20:]}")

        for name, model in (("original", load(MODEL)), ("converted", load("tiny-duo"))):
            output = model.generate(**inputs, max_new_tokens=NEW, return_dict_in_generate=True)
            answer = tokenizer.decode(output.sequences[0, tokens:])
            print(f"{name:9}  {answer}  KV cache {kv_bytes(output.past_key_values):,} bytes")

        # the checkpoint's own arithmetic, from its config alone
        emitted = get_class_from_dynamic_module("kv_layout.KVLayout", "tiny-duo")
        layout = emitted.from_config(model.config)  # ty: ignore[missing-attribute]  # the checkpoint's class
        for tokens in (1024, 131_072):
            after, before = layout.kv_bytes(1, tokens, NEW, itemsize=4), layout.dense_bytes(1, tokens, NEW, itemsize=4)
            print(f"predicted for {tokens:,} tokens: {after:,} bytes, {after / before:.0%} of the original's")


if __name__ == "__main__":
    main()
