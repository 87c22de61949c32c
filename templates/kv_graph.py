"""Decode steps as CUDA graphs: the host starts a whole step at once.

A graph belongs to one cache and is good while its storage stays where it is, thus for one batch and one capacity. What
changes from step to step is written into tensors that the graph reads: the token, its position, how many columns there
are. Where a step cannot be captured, it runs as it always does.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle
from transformers.utils import logging

from .kv_cache import CACHE, KVSurgeryCache
from .kv_layout import has_states, text_config

logger = logging.get_logger(__name__)
EAGER_STEPS = 2  # steps over the same storage before one is captured; they compile what there is to compile
WORTHWHILE = 8  # steps to come, for which a capture pays: on an H100 it paid after two or three
# arguments of a forward that a graph can stand for; others must be unset
ARGUMENTS = {
    *("input_ids", "attention_mask", "position_ids", CACHE, "use_cache", "cache_position"),
    *("logits_to_keep", "return_dict", "image_sizes"),
}
# outputs that a config may ask for beside logits
OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
UNFIT: weakref.WeakSet = weakref.WeakSet()  # models of which a capture has failed
# whose hooks a replay may leave out: this checkpoint's, and those of transformers that record outputs on request
INERT_HOOKS = f"{__package__}.", "transformers.utils."


class DecodeGraph:
    """The captured decode step of a model over one `KVSurgeryCache`, made when it pays."""

    def __init__(self):
        self.tables: list = []  # of the layers, when steps were last counted
        self.steps = 0
        self.graph = None
        self.hooked = False  # as of the hooks registered so far
        self.registered: int | None = None
        self.attributes: list[dict] = []  # of the model's modules then

    def step(self, forward: Callable, model: torch.nn.Module, arguments: dict, cache: KVSurgeryCache) -> Any:
        """What `forward` returns for one token per row, from the graph; None: it has to run itself.

        Args:
            arguments: those of `forward`; the cache has been told of the step.
        """
        if model in UNFIT or not fits(model, arguments) or self._hooked(model):
            return None
        for layer in cache.layers:
            layer.make_room(1)
        tables = [layer.storage.made for layer in cache.layers]
        if any(table is None for table in tables):  # the kernels have not run over this storage
            return None
        if len(tables) != len(self.tables) or any(a is not b for a, b in zip(tables, self.tables, strict=True)):
            self.tables, self.steps, self.graph = tables, 0, None
        ids, positions = arguments["input_ids"], arguments.get("position_ids")
        if positions is None:
            positions = torch.full((1, 1), cache.columns.expected - 1, device=ids.device)
        positions = positions.expand(len(ids), 1)
        graph = self.graph
        if graph is None:
            self.steps += 1
            if self.steps <= EAGER_STEPS or cache.columns.reserved - cache.columns.expected < WORTHWHILE:
                return None
            pack(cache)
            graph = self._capture(forward, model, ids, positions, cache)
            if graph is None:
                return None
        else:
            pack(cache)
            self.ids.copy_(ids)
            self.positions.copy_(positions)
        graph.replay()
        for layer in cache.layers:
            layer.advance(1)
        return self.kind(logits=self.logits.clone(), **{CACHE: cache})

    def _hooked(self, model: torch.nn.Module) -> bool:
        """`hooked`, which walks over all modules only after a hook was registered, and until hooks are gone.

        torch counts the hooks of a process. accelerate does not; its hooks are attributes of modules.
        """
        next_hook_id = RemovableHandle.next_id
        if self.hooked or self.registered != next_hook_id or any("_hf_hook" in fields for fields in self.attributes):
            self.registered, self.hooked = next_hook_id, hooked(model)
            self.attributes = [vars(module) for module in model.modules()]
        return self.hooked

    def _capture(
        self,
        forward: Callable,
        model: torch.nn.Module,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: KVSurgeryCache,
    ) -> torch.cuda.CUDAGraph | None:
        with torch.inference_mode(False):  # later steps may be outside of an inference mode
            self.ids = ids.clone()
            self.positions = positions.clone()
        lengths = [layer.seen for layer in cache.layers]
        try:
            self.graph, output = capture(
                lambda: forward(
                    model, input_ids=self.ids, position_ids=self.positions, use_cache=True, **{CACHE: cache}
                ),
                ids.device,
            )
            self.kind, self.logits = type(output), output.logits
        except RuntimeError as error:
            logger.warning_once(f"decode steps run without a CUDA graph: {error}")
            UNFIT.add(model)
        for layer, length in zip(cache.layers, lengths, strict=True):
            layer.seen = length  # capturing computes nothing
        return None if model in UNFIT else self.graph


def pack(cache: KVSurgeryCache) -> None:
    """Quantize the tiles and select the tokens that are due before a step."""
    for layer in cache.layers:
        layer.pack()


def fits(model: torch.nn.Module, arguments: dict) -> bool:
    """Whether a graph can stand for a forward of these arguments: inference, one token, nothing else asked for."""
    ids, config = arguments.get("input_ids"), model.config
    if ids is None or not capturable(ids) or ids.shape[1] != 1 or model.training or torch.is_grad_enabled():
        return False
    if split_over_devices(model) or waits_for_the_device(text_config(config)):
        return False
    if has_states(text_config(config)):  # the stock cache may move its states
        return False
    if arguments.get("return_dict") is False or not getattr(config, "return_dict", True):
        return False
    if any(getattr(part, name, False) for part in (config, text_config(config)) for name in OUTPUTS):
        return False
    return all(name in ARGUMENTS or value is None or value is False for name, value in arguments.items())


def hooked(model: torch.nn.Module) -> bool:
    """Whether a module has forward hooks that a replay would not call, torch's or accelerate's.

    Backward hooks do nothing in inference.
    """
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return True
    for module in model.modules():
        if "_hf_hook" in vars(module) or "_old_forward" in vars(module):  # accelerate's
            return True
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not str(getattr(hook, "__module__", "")).startswith(INERT_HOOKS):
                return True
    return False


def waits_for_the_device(config: Any) -> bool:
    """Whether a step of a model needs the host.

    There experts are chosen, some kinds of RoPE, and positions that factors of queries follow (Llama 4)."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope_types = {parameters.get("rope_type") for parameters in (rope, *rope.values()) if isinstance(parameters, dict)}
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    return bool(rope_types & {"dynamic", "longrope"} or experts or getattr(config, "attn_temperature_tuning", False))


def split_over_devices(model: torch.nn.Module) -> bool:
    """Whether a forward of a model waits for other processes or moves between devices."""
    mapped_devices = set(getattr(model, "hf_device_map", {}).values())
    is_sharded = hasattr(next(model.parameters(), None), "device_mesh")
    return len(mapped_devices) > 1 or is_sharded or getattr(model, "_device_mesh", None) is not None


def capturable(states: torch.Tensor) -> bool:
    """Whether what happens to a tensor can be captured where it is."""
    if not states.is_cuda or torch.compiler.is_compiling() or torch.is_autocast_enabled("cuda"):
        return False
    return not torch.cuda.is_current_stream_capturing()


def capture(work: Callable[[], Any], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of what `work` launches, and what it returns: tensors that every replay fills."""
    graph = torch.cuda.CUDAGraph()
    current_stream = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)  # torch's own is of the first device that it captured on
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            output = work()
    except RuntimeError:
        torch.cuda.set_stream(current_stream)  # a capture that fails leaves its own
        raise
    return graph, output
