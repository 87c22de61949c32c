"""Checkpoints that are served by vLLM in this process, and what transformers generates from the same checkpoint."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.model_executor.models import registry
from vllm.platforms import current_platform

from kvsurgery.checkpoint.source import read_config
from kvsurgery.templates.kv_layout import KVLayout
from kvsurgery.vllm.budgeted import BudgetedGroups
from tests.helpers.families import WITH_IMAGES, make, with_published_experts
from tests.helpers.surgery import Converted, convert_folder, random_profile

SINK, RECENT = 20, 40
BUDGETED = {"sink": None, "recent": None, "rest": "budgeted", "budget": 24}
BLOCK = 32  # what the CPU's kernels take
# the CPU's kernels have heads from 32
LARGE_HEADS = {"hidden_size": 256, "head_dim": 32, "max_position_embeddings": 1024}

replace_kernels = cache(current_platform.register_triton_kernel_overrides)

# of each prompt, the new tokens, and for each of them the log probabilities of the likeliest at its place
Generated = list[tuple[list[int], list[dict[int, float]]]]
NEAR = 4


def converted(family: str, folder: Path, model: dict[str, Any] | None = None, **options: Any) -> Converted:
    """A tiny checkpoint of a family with half of its heads streaming, by default: where no window of the model's own is
    in the way, all of the first layer's and none of the third's. `model` overrides its config."""
    source = make(family, folder / "stock", **{**LARGE_HEADS, **(model or {})})
    if family in WITH_IMAGES:
        rename_as_published(source)
    profile = random_profile(source)
    scores = profile.scores.copy()
    scores[0], scores[2] = 0, 1
    options = {"sink": SINK, "recent": RECENT, "sparsity": 0.5, **options}
    return convert_folder(source, folder / "converted", replace(profile, scores=scores), **options)


def rename_as_published(folder: Path) -> None:
    """Give a model that reads images the published names of CLIP's or SigLIP's tower, and Qwen3-VL's experts their
    published axes; vLLM does not know those of transformers 5."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    if read_config(folder)["model_type"] == "qwen3_vl_moe":
        save_file(with_published_experts(weights), path, {"format": "pt"})
    if "vision_tower.embeddings.patch_embedding.weight" in weights:
        save_file(
            {name.replace("vision_tower.", "vision_tower.vision_model."): weight for name, weight in weights.items()},
            path,
            {"format": "pt"},
        )


def prompts(vocabulary: int = 101, lengths: tuple[int, ...] = (5, 45, 130, 300), seed: int = 0) -> list[list[int]]:
    """Random token ids of several lengths; the last two prompts begin alike."""
    draw = random.Random(seed)
    rows = [[draw.randrange(3, vocabulary) for _ in range(length)] for length in lengths]
    return [*rows, rows[-1][:200] + rows[1]]


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[LLM]:
    """vLLM with a checkpoint loaded."""
    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "block_size": BLOCK,
        "skip_tokenizer_init": True,
        "distributed_executor_backend": "uni",
        "disable_log_stats": False,
    }
    # vLLM collects garbage several times: of this engine, rather than of all that imports have made
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("freeze", "unfreeze"):
            patch.setattr(gc, name, lambda: None)
        # a model class is looked at in a process of its own, for the sake of CUDA; that imports everything again
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        # replaces kernels in all modules, and stumbles over some of them the next time
        patch.setattr(type(current_platform), "register_triton_kernel_overrides", staticmethod(replace_kernels))
        llm = LLM(str(folder), **defaults | options)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()


def generate(llm: LLM, rows: Sequence[list[int] | dict[str, Any]], new: int = 24, **sampling: Any) -> Generated:
    """New tokens of each prompt, greedily by default; a prompt is its tokens, or what vLLM takes instead."""
    defaults = {"temperature": 0, "max_tokens": new, "ignore_eos": True, "logprobs": NEAR}
    request = sampling.pop("lora_request", None)
    parameters = SamplingParams(**{**defaults, **sampling})
    asked = [row if isinstance(row, dict) else {"prompt_token_ids": row} for row in rows]
    results = llm.generate(asked, parameters, use_tqdm=False, lora_request=request)
    outputs = [result.outputs[0] for result in results]
    return [
        ([*output.token_ids], [{token: entry.logprob for token, entry in step.items()} for step in output.logprobs])
        for output in outputs
    ]


def reference(
    model: torch.nn.Module, rows: Sequence[list[int] | Mapping[str, Any]], new: int = 24, **options: Any
) -> Generated:
    """What a model of transformers generates greedily; a prompt is its tokens, or the inputs of the model."""
    generated = []
    for row in rows:
        inputs = row if isinstance(row, Mapping) else {"input_ids": torch.tensor([row])}
        ids = inputs["input_ids"]
        result = model.generate(
            **{**inputs, "attention_mask": torch.ones_like(ids)},
            max_new_tokens=new,
            min_new_tokens=new,
            eos_token_id=None,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
        tokens = result.sequences[0, ids.shape[1] :]
        likeliest = torch.cat(result.logits).float().log_softmax(-1).topk(NEAR)
        places = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        generated.append((tokens.tolist(), [dict(zip(*place, strict=True)) for place in places]))
    return generated


def reference_by_token(
    model: torch.nn.Module, row: list[int], new: int = 24
) -> tuple[list[int], list[dict[int, float]]]:
    """What a model generates greedily that reads a prompt token by token, thus from codes."""
    tokens, likelihoods, cache = [*row], [], None
    with torch.inference_mode():
        for place in range(len(row) + new - 1):
            step = model(torch.tensor([[tokens[place]]]), past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            if place >= len(row) - 1:
                likeliest = step.logits[0, -1].float().log_softmax(-1).topk(NEAR)
                tokens.append(int(likeliest.indices[0]))
                likelihoods.append(dict(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)))
    return tokens[len(row) :], likelihoods


def assert_equal(got: Generated, wanted: Generated, tolerance: float = 1e-3) -> None:
    """The same tokens, with log probabilities that differ by less than the tolerance. Where two tokens are as likely to
    within it, either may come, and the rest of that text is not compared."""
    for (tokens, ours), (wanted_tokens, theirs) in zip(got, wanted, strict=True):
        assert len(tokens) == len(wanted_tokens)
        for place, (token, wanted_token) in enumerate(zip(tokens, wanted_tokens, strict=True)):
            likelihoods = theirs[place]
            assert likelihoods.get(token, -math.inf) == pytest.approx(likelihoods[wanted_token], abs=tolerance), place
            assert ours[place][token] == pytest.approx(likelihoods[token], abs=tolerance)
            if token != wanted_token:
                break


def fill_caches(llm: LLM, value: float) -> None:
    """Set all keys, values and states that vLLM holds to a value, and the bytes of all codes to their largest."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    for layer in layers:
        cache = getattr(layer, "kv_cache", ())  # experts have none
        for part in [cache] if isinstance(cache, torch.Tensor) else cache:
            part.fill_(value if part.is_floating_point() else 255)


def pool(llm: LLM) -> Any:
    """The blocks of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool


def assert_held_as_forecast(llm: LLM, layout: KVLayout, prompt: list[int], quantized: bool = False) -> None:
    """A request with a complete prompt holds the blocks that are forecast for it where heads have budgets."""
    free = pool(llm).get_num_free_blocks()
    parameters = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    llm.llm_engine.add_request("measured", {"prompt_token_ids": prompt}, parameters)
    held = []
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        held.append(free - pool(llm).get_num_free_blocks())
    cache = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    assert held[-2] * block_bytes(llm) == BudgetedGroups(layout, BLOCK, 4, quantized).sequence_bytes(len(prompt))
    sizes = [group.kv_cache_spec.block_size for group in cache.kv_cache_groups]
    assert max(held) == sum(math.ceil(len(prompt) / size) for size in sizes)  # while the prompt is read


def block_bytes(llm: LLM) -> int:
    """Bytes of a block of an engine in this process."""
    cache = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    return cache.kv_cache_tensors[0].size // cache.num_blocks


def cached_tokens(llm: LLM) -> int:
    """Tokens of prompts that came from the prefix cache so far."""
    return _metric(llm, "vllm:prefix_cache_hits")


def preemptions(llm: LLM) -> int:
    """Requests that lost their blocks so far, to be computed again."""
    return _metric(llm, "vllm:num_preemptions")


def rejected_drafts(llm: LLM) -> int:
    """Tokens of speculative decoding that the model did not choose so far."""
    return _metric(llm, "vllm:spec_decode_num_draft_tokens") - _metric(llm, "vllm:spec_decode_num_accepted_tokens")


def _metric(llm: LLM, name: str) -> int:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)
