"""The converted folder without its code: the stock class, the original's logits, and its dense KV cache.

python examples/stock.py
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from bundled import DUO, MODEL, kv_bytes, kvsurgery, load, scratch, task
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def main() -> None:
    with scratch(), torch.no_grad():
        kvsurgery("convert", MODEL, *DUO, "--out", "tiny-duo")
        config = json.loads(Path("tiny-duo/config.json").read_text())
        print(f"config.json says: {config['model_type']}, {', '.join(config['architectures'])}")

        original, tokens = load(MODEL), task.prompts(seed=1, count=2, length=512).tokens
        expected = original(tokens)

        # without trust_remote_code nothing in the folder is run
        model = AutoModelForCausalLM.from_pretrained("tiny-duo").eval()
        found = model(tokens)
        print(f"AutoModelForCausalLM gives {type(model).__module__}.{type(model).__name__}")
        print(f"logits differ from the original's by at most ≈ {(found.logits - expected.logits).abs().max():.0e}")
        same = (found.logits.argmax(-1) == expected.logits.argmax(-1)).all()
        print(f"every next token is the same: {'yes' if same else 'no'}")
        print(f"KV cache: {kv_bytes(found.past_key_values):,} bytes, {kv_bytes(expected.past_key_values):,} before")

        # as an engine reads it: a class it knows, tensors by their names; what else the config says is left alone
        known = LlamaForCausalLM(LlamaConfig(**config)).eval()
        known.load_state_dict(load_file("tiny-duo/model.safetensors"))
        print(
            f"read by names into LlamaForCausalLM: {'equal' if known(tokens).logits.equal(found.logits) else 'other'}"
        )


if __name__ == "__main__":
    main()
