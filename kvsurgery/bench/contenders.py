"""The contenders: the converted model, and the original with each cache that transformers has for it."""

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
        make: an empty cache for a prompt of this many tokens, with room for the new ones.
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
        """Why such prompts cannot be read here; None if they can. Bytes of quantized caches are not predicted."""
        if self.shared and not self.reads_at_once(tokens):
            return GATHERED_ALONE
        positions = self.model.config.get_text_config().max_position_embeddings
        if self.reads_at_once(tokens) and tokens + new > positions:
            return f"{tokens:,} and {new:,} new tokens are beyond its {positions:,} positions"
        needed_bytes, available_bytes = self.predicted(batch, tokens, new), free_bytes(self.model.device)
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

    The original runs with SDPA, eager where it has soft caps. Without a source, it is the stock class over the
    converted model's own parameters, which take memory once: the folder is the original's checkpoint but for the order
    of heads. With one, or where processes share each of them, both lie in memory.

    Raises:
        CheckpointError: one of them cannot be loaded, or they are not of one shape.
        KVSurgeryError: their weights do not fit.
    """
    config, is_distributed = read_config(folder), processes.world > 1
    weights = [_stored_bytes(folder)]
    if source is not None:
        shapes = [Model.of(model_config).dimensions for model_config in (_stock_config(config), read_config(source))]
        if shapes[0] != shapes[1]:
            raise CheckpointError(f"{source} is not what {folder} was made of: {shapes[1]}, not {shapes[0]}")
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
    with processes.first():  # the code is copied by one
        copy_code(folder)
    converted = load(folder, device=str(device), dtype=dtype, tp=processes.world)
    if source is None and not is_distributed:
        return converted, shared_stock_model(converted, AutoConfig.from_pretrained(folder))
    return converted, load(source or folder, device=str(device), dtype=dtype, tp=processes.world, stock=True)


def _stored_bytes(folder: Path) -> int:
    """Bytes of a checkpoint's weights, which may be links to another disk."""
    return sum(shard.size for shard in read_weights(folder)[0])


def _stock_config(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in ("kv_surgery", "auto_map")}


def shared_stock_model(converted: PreTrainedModel, config: Any) -> PreTrainedModel:
    """The stock model of a config over the parameters and buffers of a converted one."""
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
        module._parameters, module._buffers = dict(twin._parameters), dict(twin._buffers)
        # what rotary embeddings remember of their frequencies is an attribute in transformers 4
        vars(module).update({key: value for key, value in vars(twin).items() if torch.is_tensor(value)})
    return model.eval()


def contenders(
    converted: PreTrainedModel, original: PreTrainedModel, part: tuple[int, int] = (0, 1)
) -> Iterator[Contender]:
    """The converted model, the original with its DynamicCache, and with every backend of QuantizedCache.

    The latter have as many bits as the converted model's cache, where they can and it is quantized, else 4.

    Args:
        part: which of the parts of all heads the models have here, and how many there are.
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
    """The contenders that run here, and why the others do not."""
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

    All weights of the text model and the output layer count, except for an input embedding that is not the output layer
    too. Of the experts count as many as the tokens of a batch can choose.
    """
    decoder, share = model.get_decoder(), expert_share(model.config, batch)
    embedding, head = decoder.get_input_embeddings().weight, model.get_output_embeddings().weight
    parameters = {name: part for name, part in decoder.named_parameters() if part is not embedding and part is not head}
    parameter_bytes = {
        name: stored_bytes(part) * (share if ".experts." in name else 1) for name, part in parameters.items()
    }
    return stored_bytes(head) + round(sum(parameter_bytes.values()))
