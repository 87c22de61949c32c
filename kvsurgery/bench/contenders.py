"""The contenders of a benchmark: the converted model, and the original with each cache of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, DynamicCache, GenerationConfig, PreTrainedModel, QuantizedCache

from kvsurgery.bench.caches import WIDTHS, stored_bytes, unusable
from kvsurgery.bench.memory import free_bytes
from kvsurgery.checkpoint.dtype import stored_dtype
from kvsurgery.checkpoint.experts import expert_share
from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.source import read_config, read_weights
from kvsurgery.display import console
from kvsurgery.errors import CheckpointError, KVSurgeryError
from kvsurgery.evaluate.answering import GATHERED_ALONE
from kvsurgery.evaluate.checkpoint import copy_code, load
from kvsurgery.evaluate.results import CONVERTED, ORIGINAL
from kvsurgery.system.processes import Processes
from kvsurgery.templates.kv_cache import CACHE
from kvsurgery.templates.kv_layout import KVLayout
from kvsurgery.templates.kv_reform import Reform


@dataclass(frozen=True, eq=False)
class Contender:
    """A model with one kind of cache.

    Attributes:
        name: in the results.
        model: in evaluation mode.
        make: makes an empty cache for a number of prompt tokens, with room for the new tokens.
        layout: `KVLayout` of the model's heads, as the converted model keeps them.
        reform: `Reform`, if the model gathers tokens of long prompts.
        shared: whether processes share the model.
    """

    name: str
    model: PreTrainedModel
    make: Callable[[int, int], Any]
    layout: Any
    reform: Any = None
    shared: bool = False

    def reads_at_once(self, tokens: int) -> bool:
        """Whether a prompt goes through the whole model; of longer ones, `generate` gathers tokens first."""
        return self.reform is None or tokens <= self.reform.recompute_budget

    def predicted(self, batch: int, tokens: int, new: int) -> int | None:
        """KV bytes of the converted model, computed from its config; None for others."""
        if self.name != CONVERTED:
            return None
        if not self.reads_at_once(tokens):
            tokens = self.reform.recompute_budget
        return self.layout.kv_bytes(batch, tokens, new, itemsize=self.model.dtype.itemsize)

    def unreadable_reason(self, batch: int, tokens: int, new: int) -> str | None:
        """The reason why prompts of this size cannot be read here; None if they can."""
        if self.shared and not self.reads_at_once(tokens):
            return GATHERED_ALONE
        positions = self.model.config.get_text_config().max_position_embeddings
        if self.reads_at_once(tokens) and tokens + new > positions:
            return f"{tokens:,} and {new:,} new tokens are beyond its {positions:,} positions"
        needed_bytes = self.predicted(batch, tokens, new)
        available_bytes = free_bytes(self.model.device)
        if self.name == ORIGINAL:
            needed_bytes = self.layout.dense_bytes(batch, tokens, new, itemsize=self.model.dtype.itemsize)
        if needed_bytes is not None and needed_bytes > available_bytes:
            return f"its KV cache takes {console.size(needed_bytes)}, {console.size(available_bytes)} are free"
        return None


def load_models(
    folder: Path,
    source: Path | None,
    processes: Processes = Processes(),
    dtype: str = "auto",
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The converted model and the original, both on a device and in one dtype, by default the stored one.

    The original runs with SDPA, or with eager attention if it has soft caps. Without a source, it is the stock class
    with the converted model's parameters, which then take memory only once: apart from the order of heads, the folder
    is the original checkpoint. With a source, or if processes share the models, both models are in memory.

    Raises:
        CheckpointError: a model cannot be loaded, or their shapes differ.
        KVSurgeryError: their weights do not fit into memory.
    """
    config, is_distributed = read_config(folder), processes.world > 1
    weights = [_stored_bytes(folder)]
    if source is not None:
        shapes = [Model.of(model_config).dimensions for model_config in (_stock_config(config), read_config(source))]
        if shapes[0] != shapes[1]:
            raise CheckpointError(f"{source} is not the original of {folder}: {shapes[1]}, not {shapes[0]}")
        weights.append(_stored_bytes(source))
    elif is_distributed:
        weights *= 2
    device = torch.device(processes.device)
    # processes share the memory of a machine, and have a GPU each
    weights_dtype = None if dtype == "auto" else stored_dtype(folder)
    scale = getattr(torch, dtype).itemsize / getattr(torch, weights_dtype).itemsize if weights_dtype else 1
    needed_bytes = round(scale * sum(weights)) // (1 if device.type == "cpu" else processes.world)
    available_bytes = free_bytes(device)
    if needed_bytes > available_bytes:
        can_share = source is not None and not is_distributed
        hint = "; leave the source out: the original is then measured over the same weights" if can_share else ""
        raise KVSurgeryError(
            f"weights take {console.size(needed_bytes)}, {console.size(available_bytes)} are free on "
            f"{device.type}{hint}"
        )
    with processes.first():  # one process copies the code
        copy_code(folder)
    converted = load(folder, device=str(device), dtype=dtype, tp=processes.world)
    if source is None and not is_distributed:
        return converted, shared_stock_model(converted, AutoConfig.from_pretrained(folder))
    return converted, load(source or folder, device=str(device), dtype=dtype, tp=processes.world, stock=True)


def _stored_bytes(folder: Path) -> int:
    """Bytes of a checkpoint's weight files, which may be links to another disk."""
    return sum(shard.size for shard in read_weights(folder)[0])


def _stock_config(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in ("kv_surgery", "auto_map")}


def shared_stock_model(converted: PreTrainedModel, config: Any) -> PreTrainedModel:
    """The stock model of a config, with the parameters and buffers of a converted model."""
    stock_class = next(
        base
        for base in type(converted).__mro__
        if issubclass(base, PreTrainedModel) and base.__module__.startswith("transformers.")
    )
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    with torch.device("meta"):
        model = stock_class._from_config(config, dtype=converted.dtype, attn_implementation=attention)
    for name, module in model.named_modules():
        twin = converted.get_submodule(name)
        module._parameters = dict(twin._parameters)
        module._buffers = dict(twin._buffers)
        # what rotary embeddings remember of their frequencies is an attribute in transformers 4
        vars(module).update({key: value for key, value in vars(twin).items() if torch.is_tensor(value)})
    return model.eval()


def contenders(
    converted: PreTrainedModel, original: PreTrainedModel, part: tuple[int, int] = (0, 1)
) -> Iterator[Contender]:
    """The converted model, the original with its DynamicCache, and the original with each QuantizedCache backend.

    These backends use the bits of the converted model's cache if it is quantized and they support them, else 4.

    Args:
        part: the index of the part of the heads that this process has, and the number of parts.
    """
    for model in (converted, original):
        model.generation_config = GenerationConfig(pad_token_id=0)  # greedy, without an end token
    rank, count = part
    layout = KVLayout.from_config(converted.config).parts(count)[rank]
    reform = Reform.from_config(converted.config)
    with torch.no_grad():
        cache_class = type(converted(torch.zeros(1, 1, dtype=torch.long, device=converted.device))[CACHE])

    def head_level(prompt: int, new: int) -> Any:
        cache = cache_class(converted.config, prompt + new)
        cache.expect_prompt(prompt)
        return cache

    yield Contender(CONVERTED, converted, head_level, layout, reform, count > 1)
    yield Contender(ORIGINAL, original, lambda prompt, new: DynamicCache(config=original.config), layout)
    for backend, widths in WIDTHS.items():
        bits = layout.quantization.bits if layout.quantization and layout.quantization.bits in widths else 4
        make = partial(QuantizedCache, backend, original.config, nbits=bits)
        yield Contender(f"{ORIGINAL}, {backend} int{bits}", original, lambda prompt, new, make=make: make(), layout)


def usable_contenders(candidates: Iterator[Contender]) -> tuple[list[Contender], dict[str, str]]:
    """The contenders that run here, and the reasons why the others do not."""
    runnable_contenders, left_out = [], {}
    for contender in candidates:
        is_required = contender.name in (CONVERTED, ORIGINAL)
        reason = "" if is_required else unusable(lambda candidate=contender: candidate.make(1, 1))
        if reason:
            left_out[contender.name] = reason
        else:
            runnable_contenders.append(contender)
    return runnable_contenders, left_out


def step_weights(model: PreTrainedModel, batch: int) -> int:
    """Bytes of weights that a decode step reads.

    All weights of the text model and the output layer count, except for an input embedding that is not tied to the
    output layer. The number of experts that count is the largest that the tokens of a batch can choose.
    """
    decoder = model.get_decoder()
    share = expert_share(model.config, batch)
    embedding = decoder.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    parameters = {name: part for name, part in decoder.named_parameters() if part is not embedding and part is not head}
    parameter_bytes = {
        name: stored_bytes(part) * (share if ".experts." in name else 1) for name, part in parameters.items()
    }
    return stored_bytes(head) + round(sum(parameter_bytes.values()))
