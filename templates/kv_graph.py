"""Decode steps as CUDA graphs: the host starts a whole step at once.

A graph belongs to one cache and is good while its storage stays where it is, thus for one batch and one capacity. What
changes from step to step is written into tensors that the graph reads: the token, its position, how many columns there
are. Where a step cannot be captured, it runs as it always does.
"""

import weakref

import torch

EAGER_STEPS = 2  # steps over the same storage before one is captured; they compile what there is to compile
WORTHWHILE = 16  # steps to come, for which a capture pays
# arguments of a forward that a graph can stand for; others must be unset
ARGUMENTS = {
    *("self", "input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "cache_position"),
    *("logits_to_keep", "return_dict", "kwargs"),
}
UNFIT: weakref.WeakSet = weakref.WeakSet()  # models with something in their step that waits for the device


class DecodeGraph:
    """The captured decode step of a model over one `KVSurgeryCache`, made when it pays."""

    def __init__(self):
        self.tables: list = []  # of the layers, when steps were last counted
        self.steps = 0
        self.graph = None

    def step(self, forward, model: torch.nn.Module, given: dict, cache):
        """What `forward` returns for one token per row, from the graph; None: it has to run itself.

        Args:
            given: the arguments of `forward`; the cache has been told of the step.
        """
        if model in UNFIT or not fits(model, given):
            return None
        for layer in cache.layers:
            layer.make_room(1)
        tables = [layer.table for layer in cache.layers]
        if any(table is None for table in tables):  # the kernels have not run over this storage
            return None
        if len(tables) != len(self.tables) or any(a is not b for a, b in zip(tables, self.tables, strict=True)):
            self.tables, self.steps, self.graph = tables, 0, None
        ids, positions = given["input_ids"], given.get("position_ids")
        if positions is None:
            positions = torch.full((1, 1), cache.columns.expected - 1, device=ids.device)
        if self.graph is None:
            self.steps += 1
            if self.steps <= EAGER_STEPS or cache.columns.reserved - cache.columns.expected < WORTHWHILE:
                return None
            self._pack(cache)
            if not self._capture(forward, model, ids, positions, cache):
                return None
        else:
            self._pack(cache)
            self.ids.copy_(ids)
            self.positions.copy_(positions)
        self.graph.replay()
        for layer in cache.layers:
            layer.advance(1)
        return self.kind(logits=self.logits.clone(), past_key_values=cache)

    @staticmethod
    def _pack(cache) -> None:
        from . import kv_cuda

        for layer in cache.layers:
            kv_cuda.pack(layer)

    def _capture(self, forward, model, ids: torch.Tensor, positions: torch.Tensor, cache) -> bool:
        with torch.inference_mode(False):  # later steps may be outside of an inference mode
            self.ids, self.positions = ids.clone(), positions.clone()
        seen = [layer.seen for layer in cache.layers]
        try:
            self.graph, output = capture(
                lambda: forward(
                    model, input_ids=self.ids, position_ids=self.positions, past_key_values=cache, use_cache=True
                ),
                ids.device,
            )
            self.kind, self.logits = type(output), output.logits
        except RuntimeError:
            UNFIT.add(model)
        for layer, columns in zip(cache.layers, seen, strict=True):
            layer.seen = columns  # capturing computes nothing
        return model not in UNFIT


def fits(model: torch.nn.Module, given: dict) -> bool:
    """Whether a graph can stand for a forward of these arguments: inference, one token, nothing else asked for."""
    ids = given.get("input_ids")
    if ids is None or not capturable(ids) or ids.shape[1] != 1 or model.training or torch.is_grad_enabled():
        return False
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1 or given.get("return_dict") is False:
        return False
    return all(name in ARGUMENTS or value is None or value is False for name, value in given.items())


def capturable(states: torch.Tensor) -> bool:
    """Whether what happens to a tensor can be captured where it is."""
    return states.is_cuda and not torch.compiler.is_compiling() and not torch.cuda.is_current_stream_capturing()


def capture(work, device: torch.device):
    """A CUDA graph of what `work` launches, and what it returns: tensors that every replay fills."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        output = work()
    return graph, output
