"""Train a small byte-level Llama on text files, for benchmarks that need attention to real text: a few minutes.

    python benchmarks/byte_model.py pride_and_prejudice.txt --out /tmp/byte-model

Four layers, hidden 256, 8 query and 2 KV heads of 64, context 1,024. The last tenth of every text is held out; prints
bits per byte there and saves a stock checkpoint with a tokenizer whose tokens are bytes.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

HELD_OUT = 10  # one part in so many
SPECIAL = ("<pad>", "<bos>", "<eos>")
# length, batch, share of the steps: short contexts are cheap, and most of what there is to learn
STAGES = [(256, 8, 0.7), (512, 4, 0.2), (1024, 2, 0.1)]


def split(path: Path) -> tuple[str, str]:
    """A text's part to train on, and its last tenth."""
    text = path.read_text(encoding="utf-8")
    cut = len(text) - len(text) // HELD_OUT
    return text[:cut], text[cut:]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: len(SPECIAL) + index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)


def build() -> LlamaForCausalLM:
    """The model, with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(SPECIAL) + 256,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=4096,
            rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def encoded(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> torch.Tensor:
    """Texts one after the other as token ids, int64 [tokens]."""
    return torch.tensor([token for text in texts for token in tokenizer(text, verbose=False)["input_ids"]])


def train(model: LlamaForCausalLM, tokens: torch.Tensor, steps: int, seed: int) -> None:
    """Muon on the layers' matrices, AdamW on embeddings, head and norms; the rate falls to zero over the last 60%."""
    generator = torch.Generator().manual_seed(seed)
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if all(weight is not matrix for matrix in matrices)]
    optimisers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    lengths = [(length, batch) for length, batch, share in STAGES for _ in range(round(share * steps))]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimiser, lambda step: min(1, (step + 1) / 20, (len(lengths) - step) / (0.6 * len(lengths)))
        )
        for optimiser in optimisers
    ]
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # elsewhere bfloat16 is many times slower than float32
    start, recent = time.monotonic(), []
    for step, (length, batch) in enumerate(lengths):
        starts = torch.randint(len(tokens) - length, (batch,), generator=generator)
        rows = torch.stack([tokens[begin : begin + length + 1] for begin in starts.tolist()])
        with torch.autocast("cpu", torch.bfloat16, enabled=fast):
            logits = model(rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, schedule in zip(optimisers, schedules, strict=True):
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
        recent.append(loss.item() / math.log(2))
        if (step + 1) % 50 == 0:
            bits, recent = sum(recent) / len(recent), []
            seconds = time.monotonic() - start
            print(f"{step + 1:4} of {len(lengths)}, {length:4} tokens, {seconds:4.0f} s: {bits:.3f} bits", flush=True)


@torch.inference_mode()
def bits_per_byte(model: LlamaForCausalLM, tokens: torch.Tensor, length: int = 1024) -> float:
    """Mean over whole windows of `length` tokens, each from scratch; the first token of a window is not predicted."""
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    losses = [
        F.cross_entropy(model(row[None, :-1], use_cache=False).logits[0], row[1:]).item() for row in rows.unbind()
    ]
    return sum(losses) / len(losses) / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", type=Path, nargs="+", metavar="TEXT", help="UTF-8 text files")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    torch.manual_seed(arguments.seed)
    tokenizer, model = byte_tokenizer(), build()
    parts = [split(path) for path in arguments.texts]
    train(model, encoded(tokenizer, [text for text, _ in parts]), arguments.steps, arguments.seed)
    model.eval()
    for path, (_, text) in zip(arguments.texts, parts, strict=True):
        print(f"{path.name}, held out: {bits_per_byte(model, encoded(tokenizer, [text])):.3f} bits per byte")
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
