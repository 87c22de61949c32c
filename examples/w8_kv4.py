"""8-bit weights beside a 4-bit KV cache.

python examples/w8_kv4.py    # pip install optimum-quanto
"""

from __future__ import annotations

from bundled import DUO, MODEL, kv_bytes, kvsurgery, load, scratch, task
from transformers import PreTrainedModel, QuantoConfig

QUESTIONS, LENGTH = 16, 1024


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights as they lie in memory, codes and scales."""
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def main() -> None:
    with scratch():
        kvsurgery("convert", MODEL, *DUO, "--kv-bits", 4, "--out", "tiny-duo-kv4")
        models = {
            "original": load(MODEL),
            "converted, KV4": load("tiny-duo-kv4"),
            "converted, W8 + KV4": load("tiny-duo-kv4", quantization_config=QuantoConfig(weights="int8")),
        }
        questions = task.prompts(seed=4, count=QUESTIONS, length=LENGTH)
        for name, model in models.items():
            recall = task.exact_match(model, questions)
            cache = model.generate(questions.tokens[:1], max_new_tokens=4, return_dict_in_generate=True).past_key_values
            weights, kept = weight_bytes(model), kv_bytes(cache)
            print(f"{name:20} weights {weights:9,} bytes  KV cache {kept:9,} bytes  recall {recall:.0%}")


if __name__ == "__main__":
    main()
