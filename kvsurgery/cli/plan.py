"""What `kvsurgery convert` says: the plan as data, and the plan and the result as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvsurgery.conversion.prepared import PreparedConversion
from kvsurgery.display import console
from kvsurgery.emit.cache_description import describe_bits, describe_hold
from kvsurgery.emit.card import kv_table, loaded_dtype, rank_table
from kvsurgery.emit.config import hub_code_keys
from kvsurgery.heads.kinds import BUDGETED, FULL, OTHERS, STREAMING, WINDOW, HeadKind, head_list, kinds_of
from kvsurgery.heads.lengths import length_name
from kvsurgery.heads.section import quantization_section
from kvsurgery.policy.fit import Fit
from kvsurgery.policy.prices import Candidate
from kvsurgery.recipe_tables import BY_LAYER
from kvsurgery.vllm.forecast import serving_limits


def plan_facts(prepared: PreparedConversion) -> dict[str, Any]:
    """The plan as plain data."""
    checkpoint, decision, plan = prepared.checkpoint, prepared.decision, prepared.plan
    policy, profile = decision.policy, decision.profile
    config, replicated = prepared.emitted.config, checkpoint.model.family.replicated
    moved_tensors = set(plan.moved)
    return {
        "source": checkpoint.name,
        "revision": checkpoint.revision,
        "family": plan.family,
        "model": asdict(plan.dimensions),
        "profile": {
            "base_model": profile.base_model,
            "method": profile.method,
            "hash": profile.hash,
            "file": profile.address,
        }
        if profile
        else None,
        "policy": {**policy.options, "hash": policy.hash},
        "kv_heads": {
            "eligible": policy.eligible,
            **{kind.name: count for kind, count in policy.counts.items() if not kind.own},
        },
        "rounded": policy.rounded,
        "quantization": quantization_section(policy.layout),
        "left_out_of_config": hub_code_keys(checkpoint.config),
        "layers": [
            {
                "heads": list(head_list(layer)),
                "full": layer.full,
                "streaming": layer.streaming,
                "budgets": list(layer.budgets),
                "window": layer.recent if layer.native else None,
                "bits": layer.quantization.bits if layer.quantization else None,
            }
            for layer in policy.layers
        ],
        "tensors": {"moved": len(moved_tensors), "copied": len(plan.moves) - len(moved_tensors)},
        **({"fit": fit_facts(decision.fit)} if decision.fit else {}),
        "replicated": replicated,
        "ranks": rank_table(config, replicated),
        "bytes_to_write": checkpoint.size + sum(map(len, prepared.emitted.files.values())),
        "kv_dtype": loaded_dtype(config),
        "kv_bytes": kv_table(config),
        "vllm_limits": list(serving_limits(config)),
    }


def fit_facts(fit: Fit) -> dict[str, Any]:
    """What had to fit, and what fills the memory: bytes."""
    return {
        **asdict(fit.demand),
        "chunk": fit.choice.chunk,
        "weights": fit.footprint.weights,
        "kv_bytes": fit.choice.kv_bytes,
        "workspace": fit.choice.workspace,
        "total": fit.choice.total,
        **loss_facts(fit.choice, fit),
        "alternatives": [candidate_facts(candidate, fit) for candidate in fit.alternatives],
    }


def candidate_facts(candidate: Candidate, fit: Fit) -> dict[str, Any]:
    """A candidate as plain data."""
    names = ("full_heads", "rest", "budget", "kv_bytes", "total")
    facts = {name: getattr(candidate, name) for name in names}
    return {**facts, **loss_facts(candidate, fit), "bits": width(candidate, fit)}


def loss_facts(candidate: Candidate, fit: Fit) -> dict[str, float]:
    """What a candidate is expected to lose: its divergence where losses were measured, else the score that it keeps."""
    return {"kept": 1 - candidate.loss} if fit.losses is None else {"divergence": candidate.loss}


def width(candidate: Candidate, fit: Fit) -> int | str:
    """Bits of what full and budgeted heads keep."""
    return candidate.quantization.bits if candidate.quantization else 8 * fit.footprint.itemsize


def print_plan(facts: Mapping[str, Any]) -> None:
    """Policy, heads of each layer, KV bytes, and what there is to do."""
    print_policy(facts)
    counts = kinds_of(layer["heads"] for layer in facts["layers"])
    other_kinds = [kind for kind in OTHERS if counts[kind]]
    bits, windows, budgets = facts["policy"].get("kv_bits") in BY_LAYER, WINDOW in counts, BUDGETED in counts
    columns = [
        "layer",
        FULL.label,
        *["bits"] * bits,
        *(kind.label for kind in other_kinds),
        *[WINDOW.label] * windows,
        *["budgets"] * budgets,
    ]
    rows = [
        (
            index,
            layer["full"],
            *[layer["bits"] or "unquantized"] * bits,
            *(_count(layer["heads"], kind) for kind in other_kinds),
            *[layer["window"] or ""] * windows,
            *[_span(layer["budgets"])] * budgets,
        )
        for index, layer in enumerate(facts["layers"])
        if layer["heads"]  # linear attention has none
    ]
    console.stdout.print(console.table("KV heads per layer", columns, rows))
    print_kv_bytes(facts)
    tensors = facts["tensors"]
    console.stdout.print(
        f"{tensors['moved']} tensors permuted, {tensors['copied']} copied; "
        f"{console.size(facts['bytes_to_write'])} to write"
    )


def _count(heads: list[str | int], kind: HeadKind) -> int:
    """Heads of a kind in a layer; those with the model's own window stream too."""
    counts = kinds_of([heads])
    return counts[kind] + (counts[WINDOW] if kind is STREAMING else 0)


def _span(budgets: list[int]) -> str:
    return f"{min(budgets)} to {max(budgets)}" if budgets else ""


def print_policy(facts: Mapping[str, Any]) -> None:
    """Which model becomes what, after which profile."""
    policy, profile, heads = facts["policy"], facts["profile"], facts["kv_heads"]
    hidden_options = ("hash", "method", "rest", "reform")
    options = ", ".join(f"{name} {value}" for name, value in policy.items() if name not in hidden_options)
    eligible, other_kinds = heads["eligible"], [kind for kind in OTHERS if heads[kind.name]]
    changes = ", ".join(f"{heads[kind.name]} of {eligible} KV heads {kind.verb}" for kind in other_kinds)
    changes = changes or f"all {eligible} KV heads stay full"
    lines = [f"{facts['source']}, {facts['family']}: {changes}" + (f" ({options})" if options else "")]
    if profile:
        lines.append(f"profile: {profile['method']}, measured on {profile['base_model']}")
    if change := facts["rounded"]:
        difference = f"{abs(change)} {'more' if change > 0 else 'fewer'} than asked for"
        lines.append(f"{heads['full']} full heads, {difference}: a multiple of {policy['tp']} in every layer")
    if facts["quantization"] and policy["kv_bits"] in BY_LAYER:
        lines.append(f"KV cache in {describe_bits(facts['quantization'])}")
    if "hold" in policy:
        scheme = policy["kv_scheme"] if facts["quantization"] else None
        lines.append(describe_hold(policy["window"], policy["hold"], policy["select"], scheme))
    if "reform" in policy:
        lines.append(describe_reform(policy["reform"]))
    elif facts["kv_bytes"][-1]["after"] >= facts["kv_bytes"][-1]["before"]:
        nothing_saved = "this saves nothing: the KV cache is as large as the original's"
        lines.append("the original fits this memory; nothing has to be converted" if "fit" in facts else nothing_saved)
    if keys := facts["left_out_of_config"]:
        lines.append(
            f"left out of config.json, and kept for revert: {', '.join(keys)}; with these keys, transformers may run "
            "code of the Hub without trust_remote_code"
        )
    console.stdout.print("\n".join(lines) + "\n")
    if "fit" in facts:
        print_fit(facts["fit"], policy.get("tp", 1))


def describe_reform(reform: Mapping[str, Any]) -> str:
    """How long prompts are read, in a line, from its settings in a policy's options or a config."""
    return (
        f"prompts over {reform['recompute_budget']} tokens: {reform['compressor']}, chunks of {reform['chunk']} beside "
        f"{reform['encode_budget']} tokens"
    )


def print_fit(fit: Mapping[str, Any], processes: int) -> None:
    """How a memory is filled, that of each process."""
    total = console.size(fit["total"])
    weights = console.size(fit["weights"])
    cache = console.size(fit["kv_bytes"])
    workspace = console.size(fit["workspace"])
    whole_prompt = fit["chunk"] == fit["context"] - fit["new_tokens"]
    prefill = "one-shot prefill" if whole_prompt else f"prefill_chunk_size={fit['chunk']}"
    devices_note = f" on each of {processes} devices" if processes > 1 else ""
    console.stdout.print(
        f"{total} of {console.size(fit['memory'])}{devices_note} for {fit['batch']} x {fit['context']:,} tokens: "
        f"weights {weights}, KV cache {cache}, workspace {workspace} with {prefill}\n"
        f"{_expected_loss(fit)}\n"
    )


def _expected_loss(fit: Mapping[str, Any]) -> str:
    """What is expected to be lost, in a line."""
    if "divergence" in fit:
        return f"expected divergence of the next token: {fit['divergence']:.2g} nats, from the measured losses of heads"
    return f"{fit['kept']:.2%} of the score kept; this is a guess without --kv-measured, so 2 bits are not considered"


def print_result(result: Mapping[str, Any]) -> None:
    """What a conversion wrote, and how fast."""
    out, seconds, new_bytes = result["out"], result["seconds"], result["bytes"] - result["resumed"]
    if result["already_done"]:
        line = f"{out} is this conversion already; nothing to do"
    elif result["updated"]:
        line = f"updated {out} after its source: {', '.join(result['updated'])}; the weights are the same"
    else:
        resumed_note = f", {console.size(result['resumed'])} of them in an earlier run" if result["resumed"] else ""
        fetched_note = ""
        if "fetched" in result:
            fetched_note = f", {console.size(result['fetched'])} fetched in {result['requests']} requests"
        rate = f"{new_bytes / seconds / 1e9:.2f} GB/s" if new_bytes > 1e9 else f"{new_bytes / seconds / 1e6:.1f} MB/s"
        line = (
            f"wrote {out}: {console.size(result['bytes'])} of weights{resumed_note}{fetched_note}, in {seconds:.1f} s, "
            f"{rate}"
        )
    console.stdout.print(line)


def print_kv_bytes(facts: Mapping[str, Any]) -> None:
    """Tables of the KV cache: at several lengths, and at the last one in each process of tensor parallelism.

    Args:
        facts: `kv_bytes`: of each length, `tokens`, and bytes `before` and `after`; `kv_dtype`: of the model;
            `ranks`: `processes`, and the `kv_bytes` of each; empty where heads are laid out for one; `replicated`:
            whether every process of this `family` has all heads.
    """
    rows = [
        (
            length_name(row["tokens"]),
            console.size(row["before"]),
            console.size(row["after"]),
            f"{row['after'] / row['before']:.2f}",
        )
        for row in facts["kv_bytes"]
    ]
    title = f"KV cache of one sequence, model in {facts['kv_dtype']}"
    console.stdout.print(console.table(title, ["tokens", "before", "after", "ratio"], rows))
    _print_ranks(facts, rows[-1][0])


def _print_ranks(facts: Mapping[str, Any], tokens: str) -> None:
    rows = [
        (rank["processes"], *(console.size(extreme(rank["kv_bytes"])) for extreme in (min, max)))
        for rank in facts["ranks"]
    ]
    if not rows:
        return
    title = f"KV cache of a process, tensor parallelism, {tokens} tokens"
    console.stdout.print(console.table(title, ["processes", "at least", "at most"], rows))
    if facts["replicated"]:
        console.stdout.print(f"transformers replicates the attention of {facts['family']}: processes save no KV cache")
