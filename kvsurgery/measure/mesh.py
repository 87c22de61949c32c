"""`Mesh`: how processes divide the measuring of a model: its prompts, the tokens of each, and its heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from kvsurgery.errors import ProfileError, UnsupportedModel
from kvsurgery.measure.attention_hooks import Attend
from kvsurgery.measure.model import MeasuredModel, decoder_of
from kvsurgery.system.processes import Processes


@dataclass(frozen=True)
class Mesh:
    """Processes, numbered by prompts, then by the tokens of one, then by heads: those that share heads are neighbors.

    Attributes:
        processes: all of them.
        tp: how many share the heads and weights of every layer: transformers' tensor parallelism.
        sp: how many share the tokens of a prompt. Attention is over whole sequences, of a part of the heads each, for
            which processes exchange what they have: DeepSpeed's Ulysses (Jacobs et al. 2023, arXiv 2309.14509).

    Raises:
        ProfileError: they cannot be grouped so.
    """

    processes: Processes = field(default_factory=Processes)
    tp: int = 1
    sp: int = 1

    def __post_init__(self) -> None:
        size = self.tp * self.sp
        if min(self.tp, self.sp) < 1 or self.processes.world % size:
            raise ProfileError(
                f"{self.processes.world} processes cannot be grouped by {size}; start a multiple: "
                f"torchrun --nproc-per-node {max(size, 1)}"
            )

    @property
    def groups(self) -> int:
        """How many prompts are measured at a time."""
        return self.processes.world // (self.tp * self.sp)

    @property
    def group(self) -> int:
        """Which of the groups this process is in."""
        return self.processes.rank // (self.tp * self.sp)

    def load(
        self,
        source: str,
        revision: str | None = None,
        *,
        dtype: str = "auto",
        sharded: bool = True,
        trust_remote_code: bool = False,
    ) -> MeasuredModel:
        """Load the model on every process, each with a part of the weights.

        They are split by heads (tensor parallelism), and then over all groups (FSDP2).

        Without tensor parallelism the processes of a machine take turns, so that its memory holds one whole model at a
        time, and each reads the whole checkpoint; `lm_head` is not sharded.

        Args:
            sharded: whether groups share weights, for which all have to compute layers equally often.
            trust_remote_code: run code that the tokenizer names.

        Raises:
            UnsupportedModel: a layer's KV heads cannot be shared evenly, or a prompt's tokens.
            KVSurgeryError: this version of transformers does not share weights in both ways.
        """
        device, parts = self.processes.device, self.tp * self.sp
        options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
        if self.processes.world == 1 or not (sharded or self.tp > 1):
            return MeasuredModel.load(source, revision, device=device, **options)
        if self.tp > 1:
            fsdp = self.processes.world // self.tp
            measured = MeasuredModel.load(
                source, revision, device=device, parts=parts, tp=self.tp, fsdp=fsdp, **options
            )
        else:
            with self.processes.in_turns():
                measured = MeasuredModel.load(source, revision, device="cpu", parts=parts, **options)
                self._shard(measured)
        if self.sp > 1:
            check_divisible(measured)
        return measured

    def _shard(self, measured: MeasuredModel) -> None:
        """Keep a part of every layer's frozen weights here, gathered when the layer is computed."""
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh(torch.device(self.processes.device).type, range(self.processes.world))
        decoder = decoder_of(measured.model)
        for layer in decoder.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(decoder, mesh=mesh)
        measured.model.to(self.processes.device)

    def share(self, prompts: int) -> range:
        """Numbers of the prompts that this process takes.

        Raises:
            ProfileError: they cannot be dealt evenly.
        """
        if prompts % self.groups:
            raise ProfileError(
                f"{prompts} prompts cannot be divided evenly among {self.groups} processes; give a multiple of "
                f"{self.groups}"
            )
        return range(self.group, prompts, self.groups)

    def tokens(self, sequences: torch.Tensor) -> torch.Tensor:
        """This process's part, [batch, tokens / sp], of a tensor [batch, tokens].

        Where they do not divide, zeros come last, which no token before them attends to.
        """
        return F.pad(sequences, (0, -sequences.shape[1] % self.sp)).chunk(self.sp, 1)[self._sequence_part]

    def heads(self, count: int, local_count: int) -> slice:
        """The slice of a layer's `count` heads that this process holds, `local_count` of them."""
        split_by_tp = local_count * self.sp < count  # by tensor parallelism too
        position = self._sequence_part + (self.processes.rank % self.tp * self.sp if split_by_tp else 0)
        return slice(position * local_count, (position + 1) * local_count)

    def copies(self, measured: MeasuredModel) -> int:
        """How many processes measure the same heads over the same prompts."""
        return self.tp if measured.replicated else 1

    def local_head_count(self, measured: MeasuredModel, heads: int) -> int:
        """How many of a layer's heads a process has."""
        return heads * self.copies(measured) // self.tp

    def total(self, local_sums: np.ndarray, copies: int) -> np.ndarray:
        """The sum over groups of what processes have measured, each [layers, its own heads]: float64 [layers, heads].

        Args:
            copies: how many processes of a group measure the same heads.
        """
        local_count = local_sums.shape[1]
        sums = torch.zeros(len(local_sums), local_count * self.tp // copies, dtype=torch.float64)
        sums[:, self.heads(sums.shape[1], local_count)] = torch.from_numpy(local_sums).double() / copies
        return self.processes.add(sums.to(self.processes.device)).cpu().numpy()

    def over_sequences(self, attend: Attend) -> Attend:
        """`attend` for processes that each have a part of the tokens: it sees all tokens, of some heads."""
        if self.sp == 1:
            return attend

        @wraps(attend)
        def function(stock, module, query, key, value, *rest, **options):
            states = (self._exchanged(states) for states in (query, key, value))
            if (sinks := options.get("s_aux")) is not None:
                options["s_aux"] = sinks.chunk(self.sp)[self._sequence_part]
            output, weights = attend(stock, module, *states, *rest, **options)
            return self._exchanged(output), weights

        return function

    def _exchanged(self, states: torch.Tensor) -> torch.Tensor:
        """Exchange this process's part of states along dimension 2 for its part along dimension 1."""
        from torch.distributed.tensor import DTensor, Shard

        dtensor = DTensor.from_local(states, self._sharing, [Shard(2)])
        return dtensor.redistribute(placements=[Shard(1)]).to_local()

    @property
    def _sequence_part(self) -> int:
        return self.processes.rank // self.tp % self.sp

    @cached_property
    def _sharing(self) -> DeviceMesh:
        """The processes that share the tokens of this one's prompts, and have the same heads."""
        ranks = torch.arange(self.processes.world).view(self.groups, self.sp, self.tp)
        device = torch.device(self.processes.device).type
        return DeviceMesh(device, ranks, mesh_dim_names=("prompts", "tokens", "heads"))["tokens"]


def check_divisible(measured: MeasuredModel) -> None:
    """Refuse a model with more than attention that depends on a whole prompt, of which a process sees its own part.

    Such are states in place of a KV cache, RoPE by the length of a prompt, and queries with a factor by their place.

    Raises:
        UnsupportedModel: it does.
    """
    if measured.layers.stateful:
        raise UnsupportedModel(
            f"{measured.name} has layers with states of all earlier tokens, so that processes cannot share the tokens "
            "of a prompt; leave `sp` out"
        )
    kinds = getattr(getattr(decoder_of(measured.model), "rotary_emb", None), "rope_type", None)
    by_length = {"dynamic", "longrope"}.intersection(kinds.values() if isinstance(kinds, dict) else [kinds])
    if by_length:
        raise UnsupportedModel(
            f"{measured.name} has {by_length.pop()} RoPE, which depends on the length of a prompt, so that processes "
            "cannot share its tokens; leave `sp` out"
        )
    if getattr(measured.model.config.get_text_config(), "attn_temperature_tuning", False):
        raise UnsupportedModel(
            f"queries of {measured.name} have a factor that stock code counts from the start of the prompt, so that "
            "processes cannot share its tokens; leave `sp` out"
        )
