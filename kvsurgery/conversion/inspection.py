"""Describe a checkpoint from its headers: whether it can be converted, or how it was."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from kvsurgery.checkpoint.dtype import loading_dtype
from kvsurgery.checkpoint.family import supported
from kvsurgery.checkpoint.model import Model, unsupported_heads
from kvsurgery.checkpoint.model_code import check_stock, lacks_code, saved_again
from kvsurgery.checkpoint.provenance import PROVENANCE, Provenance
from kvsurgery.checkpoint.source import Checkpoint, read_config
from kvsurgery.conversion.plan import check_complete, plan_moves
from kvsurgery.conversion.resemblance import resemblance
from kvsurgery.emit.card import kv_table, loaded_dtype, rank_table
from kvsurgery.emit.config import both_rope_spellings
from kvsurgery.errors import CheckpointError, UnsupportedModel
from kvsurgery.heads.dimensions import ModelDimensions, ModelLayers
from kvsurgery.heads.kinds import BUDGETED, STREAMING, HeadKind, counts, decided_kinds, head_list
from kvsurgery.heads.section import quantization_section
from kvsurgery.system.repo_id import cached_origin, checkpoint_folder
from kvsurgery.templates.kv_layout import KVLayout, text_config
from kvsurgery.templates.kv_reform import Reform
from kvsurgery.vllm.forecast import forecast_or_refusal, serving_limits

# keys of converted or quantized checkpoints, for which `Model.of` refuses a config
NOT_STOCK = ("kv_surgery", "auto_map", "quantization_config")


@dataclass(frozen=True)
class Surgery:
    """How a checkpoint was converted.

    Attributes:
        full_heads: per layer, KV heads that keep every token; None where the model's own window applies, where
            attention is linear, or where the layer shares the KV cache of an earlier one.
        heads: per layer, what each KV head is: "full", "streaming", "window" (the model's own), or a budget in tokens;
            in the original's order, or in the converted one's where that is not known. A layer that shares the KV cache
            of an earlier one has that one's.
        streaming, budgeted: KV heads that stream, and that have a budget, in the layers with full attention.
        quantization: how the cache of full and budgeted heads is quantized, the fields of `kv_layout.Quantization`, if
            it is; a list by layer where they differ.
        hold: tokens after which budgeted heads select again, their observation `window`, and by what they `select`, if
            their budgets hold.
        reform: how long prompts are read, if they are read by REFORM.
        kv_dtype: in which the checkpoint is loaded with `dtype="auto"`, as far as config.json says.
        kv_bytes: `tokens`, and the bytes of one sequence's KV cache in this dtype, `before` and `after`; the
            last row is for the model's own maximum.
        ranks: `processes` of tensor parallelism, and the `kv_bytes` at this maximum that each of them holds; empty
            where heads are laid out for one.
        replicated: whether transformers gives each of them all heads.
        vllm: the `command` that serves the folder with vLLM over a number of `processes`, and the bytes of the KV
            cache in each, at this maximum: `kv_bytes`, and `dense_bytes` of the original model; or else a `refusal`.
            `limits` are lines that say what vLLM does not do.
        base_model, base_revision: what was converted.
        options: how the heads were decided.
        tool: version that did it.
        revertible: False after `save_pretrained`, which loses the provenance that the four above come from.
    """

    full_heads: tuple[int | None, ...]
    heads: tuple[tuple[str | int, ...], ...]
    streaming: int
    budgeted: int
    quantization: Mapping[str, Any] | None
    reform: Mapping[str, Any] | None
    kv_dtype: str
    kv_bytes: tuple[Mapping[str, Any], ...]
    ranks: tuple[Mapping[str, Any], ...]
    replicated: bool
    vllm: Mapping[str, Any]
    hold: Mapping[str, Any] | None = None
    base_model: str | None = None
    base_revision: str | None = None
    options: Mapping[str, Any] | None = None
    tool: str | None = None
    revertible: bool = False

    @property
    def counts(self) -> Counter[HeadKind]:
        """Number of KV heads of each kind in layers with full attention."""
        return decided_kinds(self.heads, self.full_heads)


@dataclass(frozen=True)
class Facts:
    """A checkpoint in numbers.

    Attributes:
        name, revision: folder or Hub id, and the commit of the latter.
        model_type: as config.json has it.
        dimensions: attention dimensions, None where the family is unknown; where layers differ, of full attention.
        sliding: dimensions of layers with a sliding window, None where they are the same.
        windows: per layer, the model's own sliding window in tokens, 0 without a KV cache and None for full attention.
        shared: layers that share the KV cache of an earlier one.
        chunked: whether a token sees its own chunk instead of a window.
        states: bytes of a sequence's states in layers without a KV cache, in 16 bit; not in `kv_bytes`.
        context: positions of the model.
        rope: its rotary embedding, as transformers 5 spells it.
        parameters: by dtype; empty where there are no safetensors weights.
        shards, size: weight files, and their bytes.
        tied: whether the output layer is the embedding.
        has_output: whether an output layer of its own is stored.
        problem: why it cannot be converted; None if it can be or was.
        resembles: for an unknown family, the most similar known one and what differs.
        surgery: how it was converted, if it was.
    """

    name: str
    revision: str | None
    model_type: str | None
    dimensions: ModelDimensions | None
    sliding: ModelDimensions | None
    windows: tuple[int | None, ...]
    shared: int
    chunked: bool
    states: int
    context: int | None
    rope: Mapping[str, Any]
    parameters: Mapping[str, int]
    shards: int
    size: int
    tied: bool
    has_output: bool
    problem: str | None
    resembles: str | None
    surgery: Surgery | None

    def to_json(self) -> dict[str, Any]:
        """All fields in plain JSON values."""
        return {**asdict(self), "supported": self.problem is None}


def inspect(source: str | Path, revision: str | None = None) -> Facts:
    """Describe a checkpoint, a folder or a Hub id; for a Hub id, only headers are downloaded.

    Raises:
        CheckpointError: it is malformed, or neither a folder nor a Hub id.
        HubError: the Hub cannot be reached, or refuses.
    """
    name = str(source)
    folder = checkpoint_folder(source)
    if folder is not None:
        _, commit = cached_origin(folder) or (name, None)
        return inspect_checkpoint(folder, name, commit)
    from kvsurgery import hub

    with hub.headers(name, revision) as remote:
        return inspect_checkpoint(remote.folder, name, remote.commit)


def inspect_checkpoint(folder: Path, name: str, revision: str | None = None) -> Facts:
    """Describe a checkpoint folder, or the stand-in that `hub.headers` makes of a remote one.

    Raises:
        CheckpointError: it is malformed; one that is only unsupported is described.
    """
    config = read_config(folder)
    problem, checkpoint = None, None
    try:
        checkpoint = Checkpoint.open(folder, name, revision)
    except UnsupportedModel as error:
        problem = str(error)
    if "kv_surgery" in config and checkpoint is not None:
        config = {**config, "dtype": loading_dtype(config, checkpoint.shards)}
    model = _stock_model(config)
    replicated = model is not None and model.family.replicated
    surgery = _surgery(folder, name, config, replicated) if "kv_surgery" in config else None
    if checkpoint is not None and surgery is None:
        problem = _problem(checkpoint)
    if surgery is not None and not surgery.revertible and lacks_code(folder, config):
        problem = saved_again(folder, config)
    parameters: Counter[str] = Counter()
    for tensor in checkpoint.tensors if checkpoint else ():
        parameters[tensor.dtype] += math.prod(tensor.shape)
    dimensions, layers, states = _attention(model)
    return Facts(
        name=name,
        revision=revision,
        model_type=config.get("model_type"),
        dimensions=dimensions,
        sliding=None if layers.sliding == dimensions else layers.sliding,
        windows=tuple(layers.windows),
        shared=len(layers.sources),
        chunked=layers.chunked,
        states=states,
        context=text_config(config).get("max_position_embeddings"),
        rope=_rope(text_config(config)),
        parameters=dict(parameters.most_common()),
        shards=len(checkpoint.shards) if checkpoint else 0,
        size=checkpoint.size if checkpoint else 0,
        tied=checkpoint is not None and not checkpoint.has_output and (model is None or model.is_tied),
        has_output=checkpoint is not None and checkpoint.has_output,
        problem=problem,
        resembles=resemblance(checkpoint) if checkpoint and _could_get_patch(config) else None,
        surgery=surgery,
    )


def _problem(checkpoint: Checkpoint) -> str | None:
    """Why a stock checkpoint cannot be converted, whatever the policy."""
    try:
        check_stock(checkpoint.folder, checkpoint.config)
        model = checkpoint.model
        if None not in model.windows:
            return "no layer has full attention; there is nothing to convert"
        moves = plan_moves(checkpoint.tensors, model, model.layer_heads)
        loading_dtype(checkpoint.config, checkpoint.shards)
        check_complete(checkpoint.name, model, moves)
    except UnsupportedModel as error:
        return str(error)
    return None


def _could_get_patch(config: Mapping[str, Any]) -> bool:
    """Whether a family has no patch but could get one, as a patch can describe its heads."""
    return config.get("model_type") not in supported() and not unsupported_heads(text_config(config))


def _stock_model(config: Mapping[str, Any]) -> Model | None:
    """The model of a config without the keys that hide its family; None where the family is not known."""
    try:
        return Model.of({key: value for key, value in config.items() if key not in NOT_STOCK})
    except UnsupportedModel:
        return None


def _attention(model: Model | None) -> tuple[ModelDimensions | None, ModelLayers, int]:
    """Attention dimensions, layers, and bytes of a sequence's states, as far as they are known."""
    try:
        if model is not None:
            return model.dimensions, model.layers, model.state_bytes()
    except UnsupportedModel:
        pass
    return None, ModelLayers(ModelDimensions(0, 0, 0, 0), ()), 0


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return {**config, **both_rope_spellings(config)}.get("rope_parameters") or {}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the RoPE settings of config.json are malformed: {error!r}") from error


def _hold(layout: KVLayout) -> dict[str, Any] | None:
    selection = layout.selection
    if selection is None or selection.hold is None:
        return None
    return {name: getattr(selection, name) for name in ("window", "hold", "select")}


def _surgery(folder: Path, name: str, config: Mapping[str, Any], replicated: bool) -> Surgery:
    try:
        layout = KVLayout.from_config(config)
        reform = Reform.from_config(config)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    heads = tuple(map(head_list, layout.attended))
    head_counts = counts(layout)
    surgery = Surgery(
        full_heads=tuple(None if layer.native or not layer.heads else layer.full for layer in layout.layers),
        heads=heads,
        streaming=head_counts[STREAMING],
        budgeted=head_counts[BUDGETED],
        quantization=quantization_section(layout),
        reform=asdict(reform) if reform else None,
        kv_dtype=loaded_dtype(config),
        kv_bytes=tuple(kv_table(config)),
        ranks=tuple(rank_table(config, replicated)),
        replicated=replicated,
        vllm=_serving(name, config),
        hold=_hold(layout),
    )
    if not (folder / PROVENANCE).exists():
        return surgery
    provenance = Provenance.read(folder)
    try:
        heads = tuple(
            tuple(kind for _, kind in sorted(zip(order, kinds, strict=True), key=itemgetter(0)))
            for order, kinds in zip(provenance.permutation, heads, strict=True)
        )
    except ValueError as error:
        raise CheckpointError(f"{folder}: {PROVENANCE} and config.json are not of the same layers and heads") from error
    return replace(
        surgery,
        heads=heads,
        base_model=provenance.source,
        base_revision=provenance.revision,
        options=provenance.options,
        tool=provenance.tool,
        revertible=True,
    )


def _serving(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    prediction = forecast_or_refusal(config)
    limits = serving_limits(config)
    if isinstance(prediction, str):
        return {"refusal": prediction, "limits": limits}
    return {
        "limits": limits,
        "command": prediction.command(name),
        "processes": prediction.processes,
        "kv_bytes": prediction.kv_bytes,
        "dense_bytes": prediction.dense_bytes,
    }
