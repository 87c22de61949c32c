"""Decode steps as CUDA graphs: the host starts a whole step at once.

A graph belongs to one cache and is good while its storage stays where it is, thus for one batch and one capacity. What
changes from step to step is written into tensors that the graph reads: the token, its position, how many columns there
are. Where a step cannot be captured, it runs as it always does.
"""

import torch

EAGER_STEPS = 2  # steps over the same storage before one is captured; they compile what there is to compile
WORTHWHILE = 16  # steps to come, for which a capture pays
# arguments of a forward that a graph can stand for; others must be unset
ARGUMENTS = {
    *("input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "cache_position"),
    *("logits_to_keep", "return_dict", "kwargs"),
}


class DecodeGraph:
    """The captured decode step of a model over one `KVSurgeryCache`, made when it pays."""

    def __init__(self):
        self.tables: list = []  # of the layers, when steps were last counted
        self.steps = 0
        self.graph = None
        self.possible = True

    def step(self, forward, model: torch.nn.Module, given: dict, cache):
        """What `forward` returns for one token per row, from the graph; None: it has to run itself.

        Args:
            given: the arguments of `forward`; the cache has been told of the step.
        """
        if not self.possible or not _fits(model, given):
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
        self.ids, self.positions = ids.clone(), positions.clone()
        seen = [layer.seen for layer in cache.layers]
        try:
            self.graph, output = capture(
                lambda: forward(
                    model, input_ids=self.ids, position_ids=self.positions, past_key_values=cache, use_cache=True
                )
            )
            self.kind, self.logits = type(output), output.logits
        except RuntimeError:  # something in this model waits for the device
            self.possible = False
        for layer, columns in zip(cache.layers, seen, strict=True):
            layer.seen = columns  # capturing computes nothing
        return self.possible


def _fits(model: torch.nn.Module, given: dict) -> bool:
    ids = given.get("input_ids")
    if ids is None or not ids.is_cuda or ids.shape[1] != 1 or model.training or torch.is_grad_enabled():
        return False
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1 or given.get("return_dict") is False:
        return False
    return not any(value for name, value in given.items() if name not in ARGUMENTS)


def capture(work):
    """A CUDA graph of what `work` launches, and what it returns: tensors that every replay fills."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = work()
    return graph, output
