"""`kvsurgery inspect`: describe a checkpoint from its headers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from kvsurgery.cli.help import HelpPage
from kvsurgery.cli.running import check_revision, revision_option

if TYPE_CHECKING:
    from kvsurgery.conversion.inspection import Facts, Surgery


@click.command(cls=HelpPage)
@click.argument("source", metavar="SRC")
@revision_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(source: str, revision: str | None, as_json: bool) -> None:
    """Describe a checkpoint: whether it can be converted, or how it was converted.

    SRC is a folder or a Hub id. For a Hub id, only the headers are downloaded.

    \b
    kvsurgery inspect ./llama3-duo
    kvsurgery inspect meta-llama/Llama-3.1-8B-Instruct --json
    """
    from kvsurgery.conversion.inspection import inspect

    check_revision(source, revision)
    facts = inspect(source, revision)
    if as_json:
        click.echo(json.dumps(facts.to_json(), indent=2))
    else:
        _show(facts)


def _show(facts: Facts) -> None:
    from kvsurgery.display import console

    def say(line: str) -> None:
        console.stdout.print(line)

    console.stdout.print(facts.name, style="bold")
    for name, value in _rows(facts):
        say(f"  {name:<15}{value}")
    if facts.problem:
        say(f"cannot be converted: {facts.problem}")
        if facts.resembles:
            say(facts.resembles)
    elif facts.surgery is None:
        say("can be converted")
    else:
        _show_surgery(facts.surgery, facts.model_type)


def _rows(facts: Facts) -> Iterator[tuple[str, Any]]:
    from kvsurgery.display import console

    if facts.revision:
        yield "commit", facts.revision
    yield "family", facts.model_type
    if facts.dimensions:
        yield "attention", facts.dimensions
        if uncached := facts.windows.count(0):
            states = f"; the model has {console.size(facts.states)} of states a sequence, not counted as KV cache"
            note = states if facts.states else ""
            yield "states", f"{uncached} of {facts.dimensions.layers} layers have no KV cache{note}"
        elif facts.states:
            yield "states", f"{console.size(facts.states)} a sequence beside the KV cache, not counted as KV cache"
        for window, layers in Counter(filter(None, facts.windows)).items():
            heads_note = f", with {facts.sliding.heads}" if facts.sliding else ""
            kind, prefix = ("chunked", "their chunk of ") if facts.chunked else ("sliding", "")
            yield kind, f"{layers} of {facts.dimensions.layers} layers see {prefix}{window} tokens{heads_note}"
        if facts.shared:
            yield "shared", f"{facts.shared} of {facts.dimensions.layers} layers share the KV cache of earlier ones"
    if facts.context:
        yield "positions", facts.context
    yield from _ropes(facts.rope)
    if facts.parameters:
        dtypes = ", ".join(f"{count:,} in {dtype}" for dtype, count in facts.parameters.items())
        yield "parameters", dtypes
        yield "output layer", "shared with the embedding" if facts.tied else "separate" if facts.has_output else "none"
        yield "weights", f"{console.size(facts.size)} in {facts.shards} {'file' if facts.shards == 1 else 'files'}"


def _ropes(rope: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """One line per rotary embedding; models with two kinds of layers have two."""
    if rope and all(isinstance(value, dict) for value in rope.values()):
        for kind, inner in rope.items():
            yield from ((f"rope, {kind.partition('_')[0]}", line) for _, line in _ropes(inner))
    elif rope:
        settings = (f"{key.removeprefix('rope_')} {_brief(value)}" for key, value in rope.items() if key != "rope_type")
        yield "rope", ", ".join([str(rope.get("rope_type", "default")), *settings])


def _brief(value: Any) -> str:
    if isinstance(value, list):
        return f"[{len(value)} values]"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _show_surgery(surgery: Surgery, family: str | None) -> None:
    from kvsurgery.cli.plan import describe_reform, print_kv_bytes
    from kvsurgery.display import console
    from kvsurgery.emit.cache_description import describe_bits, describe_hold
    from kvsurgery.heads.kinds import FULL, OTHERS
    from kvsurgery.heads.lengths import length_name

    print_kv_bytes({**vars(surgery), "family": family})
    if surgery.revertible and surgery.options is not None:
        commit = f" at {surgery.base_revision}" if surgery.base_revision else ""
        options_text = ", ".join(f"{name} {value}" for name, value in surgery.options.items() if name != "reform")
        lines = [f"converted from {surgery.base_model}{commit} by kvsurgery {surgery.tool}: {options_text}"]
    else:
        lines = ["converted, then saved again by save_pretrained: it runs, but cannot be reverted"]
    counts = surgery.counts
    per_layer = ["-" if count is None else str(count) for count in surgery.full_heads]
    if len({*per_layer}) == 1:
        per_layer = [per_layer[0], "in each"]
    others_text = "".join(f", {counts[kind]} {kind.name}" for kind in OTHERS if counts[kind])
    if quantized := surgery.quantization:
        windows = ", long windows of streaming heads too" if quantized["streaming"] else ""
        sink_text = f"the first {quantized['sink']} and " if quantized["sink"] else ""
        unquantized = f"{sink_text}the newest {quantized['residual']} tokens unquantized"
        lines.append(f"KV cache in {describe_bits(quantized)}, {unquantized}{windows}")
    if surgery.reform:
        lines.append(describe_reform(surgery.reform))
    lines.append(f"{counts[FULL]} KV heads full{others_text}; full heads per layer: {' '.join(per_layer)}")
    if surgery.hold:
        lines.append(describe_hold(**surgery.hold, scheme=quantized["scheme"] if quantized else None))
    if not surgery.vllm.get("refusal"):
        kv_size = console.size(surgery.vllm["kv_bytes"])
        dense_size = console.size(surgery.vllm["dense_bytes"])
        longest = length_name(surgery.kv_bytes[-1]["tokens"])
        per_process = " in each process" if surgery.vllm["processes"] > 1 else ""
        lines.append(
            f"vLLM holds {kv_size} for {longest} tokens{per_process}, {dense_size} for the original "
            f"in 16 bit: {surgery.vllm['command']}"
        )
    lines += surgery.vllm["limits"]
    console.stdout.print("\n".join(lines))
