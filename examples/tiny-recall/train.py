"""Train the bundled model: `OMP_NUM_THREADS=1 python examples/tiny-recall/train.py`, a few minutes on one core.

A Llama of 3 layers that recalls facts over 1,024 tokens. It would not learn that in minutes by itself; three things
help it, each found to be needed:

1. A positional prior: at the start, KV heads 0-2 of the first layer already look 1, 2 and 4 tokens back.
2. A warm-up on pure repeated blocks, from which the copying (induction) heads grow.
3. A clean split: in half of the batches of up to 512 tokens, KV heads 0 and 2 of layer 1 see only sink and recent
   tokens. So the long-range work settles in the other two, and which heads may stream is partly *designed*.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from ablation import restricted
from safetensors.torch import save_file
from task import (
    BOS,
    EOS,
    FACT,
    FILLER,
    MAX_FACTS,
    PAD,
    RECALLED,
    SPECIAL,
    UNK,
    Batch,
    exact_match,
    prompts,
    repeated_blocks,
    texts,
    vocabulary,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

# length, batch, steps; the first stage is the repeated blocks
STAGES = [(48, 24, 250), (128, 12, 150), (256, 8, 100), (512, 4, 150), (1024, 2, 100), (2048, 1, 150)]
STEPS = sum(steps for _, _, steps in STAGES)
FILLER_WEIGHT = 0.5
PRIOR = 20.0  # attention score before the softmax

STREAMING = torch.zeros(3, 4, dtype=torch.bool)
STREAMING[1, [0, 2]] = True
SINK, RECENT = 4, 32
STREAMING_LENGTH = 512

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(vocabulary()),
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "dtype": "float32",
    # transformers 5 reads the first, 4 the other two
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "rope_theta": 100_000.0,
    "rope_scaling": None,
}


def initialize(model: LlamaForCausalLM) -> None:
    """Random weights, with the positional prior in layer 0.

    Every embedding shares one constant direction, as large as what tells the tokens apart. Queries and keys of KV heads
    0-2 read that constant, rotated against each other by the head's offset: their score peaks, at `PRIOR`, where the
    key lies that many tokens back.
    """
    config = model.config
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            std = {"model.embed_tokens.weight": 1.0, "lm_head.weight": 0.02}.get(name, weight.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= 0.3
            torch.nn.init.normal_(weight, std=std)
    constant = F.normalize(torch.randn(config.hidden_size), dim=0)
    model.model.embed_tokens.weight.data += math.sqrt(config.hidden_size) * constant
    seen = math.sqrt(config.hidden_size / 2)  # of the constant, after RMSNorm

    attention = model.model.layers[0].self_attn
    assert isinstance(attention, LlamaAttention)
    dim, group = CONFIG["head_dim"], CONFIG["num_attention_heads"] // CONFIG["num_key_value_heads"]
    fast = torch.arange(3)  # the fastest rotations tell neighboring tokens apart
    angle = CONFIG["rope_theta"] ** (-2 * fast / dim)
    amplitude = math.sqrt(PRIOR * math.sqrt(dim) / len(fast)) / seen
    for head, offset in enumerate((1, 2, 4)):
        query, key = torch.zeros(dim), torch.zeros(dim)
        query[fast] = amplitude
        key[fast], key[fast + dim // 2] = amplitude * torch.cos(offset * angle), amplitude * torch.sin(offset * angle)
        attention.k_proj.weight.data[head * dim :][:dim] += torch.outer(key, constant)
        for member in range(head * group, (head + 1) * group):
            attention.q_proj.weight.data[member * dim :][:dim] += torch.outer(query, constant)


def sample(rng: np.random.Generator, step: int, length: int, batch: int) -> Batch:
    """Training data of one step: few or many facts, queries in between or all at the end."""
    if step < STAGES[0][2]:
        return repeated_blocks(rng, batch, length + 1)
    most = min(MAX_FACTS, length // (2 * FACT))
    least = max(1, most // 2) if rng.random() < 0.7 else 1
    facts = int(rng.integers(least, most + 1))
    queries = facts if length <= 128 else round(1.5 * facts)
    return texts(rng, batch, length + 1, facts, queries, at_end=rng.random() < 0.3)


def losses(model: LlamaForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Mean cross-entropy of recalled values and of filler, and the share of values predicted right."""
    logits = model(batch.tokens[:, :-1], use_cache=False).logits
    target, kind = batch.tokens[:, 1:], batch.kind[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(target)
    recalled, filler = kind == RECALLED, kind == FILLER
    right = (logits.argmax(-1) == target)[recalled].float().mean().item()
    return loss[recalled].mean(), loss[filler].mean() if filler.any() else loss.new_zeros(()), right


def rate(step: int) -> float:
    """Share of the peak learning rate: up over 20 steps, level, down to a twentieth over the last 40%."""
    return min(1, (step + 1) / 20, max(0.05, (STEPS - step) / (0.4 * STEPS)))


def train(model: LlamaForCausalLM, seed: int) -> None:
    """Muon on the layers' matrices, AdamW on embeddings, head and norms."""
    rng = np.random.default_rng(seed)
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if all(weight is not matrix for matrix in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    lengths = [(length, batch) for length, batch, steps in STAGES for _ in range(steps)]
    start, history = time.monotonic(), []
    for step, (length, size) in enumerate(lengths):
        batch = sample(rng, step, length, size)
        if length <= STREAMING_LENGTH and rng.random() < 0.5:
            with restricted(model, STREAMING, sink=SINK, recent=RECENT):
                recall, filler, right = losses(model, batch)
        else:
            recall, filler, right = losses(model, batch)
        (recall + FILLER_WEIGHT * filler).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        history.append((recall.item(), filler.item(), right))
        if (step + 1) % 25 == 0:
            loss, text, share = np.mean(history[-25:], axis=0)
            seconds = time.monotonic() - start
            print(f"{step + 1:4} of {STEPS}, {length:4} tokens, {seconds:4.0f} s:", end=" ")
            print(f"recall loss {loss:.3f}, values right {share:.3f}, filler loss {text:.3f}", flush=True)


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """A checkpoint and a tokenizer that transformers 4.57 and 5 load by themselves."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    words = {word: index for index, word in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=SPECIAL[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[BOS]} $A", special_tokens=[(SPECIAL[BOS], BOS)]
    )
    tokenizer.add_special_tokens([SPECIAL[index] for index in (PAD, BOS, EOS, UNK)])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in {
        "config.json": CONFIG,
        "generation_config.json": {key: CONFIG[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONFIG["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            **{f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")},
        },
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    initialize(model)
    train(model, options.seed)
    save(model, options.out)
    model.eval()
    for length in (512, 1024, 2048):
        print(f"{length} tokens: exact match {exact_match(model, prompts(length, 200, length)):.3f}", flush=True)


if __name__ == "__main__":
    main()
