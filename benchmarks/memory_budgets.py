"""What `fit` chooses for a memory budget, beside the best of all widths, as measured on a language model.

    python benchmarks/memory_budgets.py MODEL losses.safetensors book.txt --json memory-budgets.json

The losses are those of `kvsurgery profile compute --method kv-bits`, measured on another text. They price the policies,
and their streaming heads are those of the recipe. Full heads are ranked by a profile, or by these losses. For every
memory, the policies are the choice, and of each width the one with the most full heads that fits. Each is measured as
the converted model computes it: streaming heads stream while the prompt is read. The divergence is the mean
Kullback-Leibler divergence, in nats, of the distribution of the next token from the original's on the tokens that
follow 1,024. An interrupted run continues from its JSON file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers.utils import logging

from benchmarks.provenance import record_versions
from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.measure.cache_losses import TrialSizes
from kvsurgery.measure.cache_trial import EXACT, CacheTrial, Window
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.policy.evidence import Evidence
from kvsurgery.policy.fit import Fit, fit
from kvsurgery.policy.memory import Footprint
from kvsurgery.policy.prices import Candidate
from kvsurgery.profile.cache_losses import CacheLosses
from kvsurgery.profile.full_heads import best_heads
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Demand, Recipe
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.tokens import first_tokens

MIB = 1 << 20


def fit_result(model: Path, profile: HeadProfile, losses: str, memory: int, context: int) -> Fit:
    """What `kvsurgery fit` finds."""
    cache_losses = CacheLosses.load(losses)
    recipe = Recipe.of(
        fit=Demand(memory, context),
        rest="streaming",
        sink=cache_losses.sink,
        recent=cache_losses.recent,
        kv_measured=losses,
    )
    checkpoint = Checkpoint.open(model)
    return fit(recipe, Evidence(profile, losses=cache_losses), checkpoint.model.layers, Footprint.of(checkpoint))


def compared_policies(fit: Fit) -> list[Candidate]:
    """The choice, and of each width the policy with the most full heads that fits."""
    best: dict[int | str, Candidate] = {}
    for candidate in sorted(fit.candidates, key=lambda one: one.full_heads):
        if candidate.total <= fit.demand.memory:
            best[candidate.bits] = candidate
    return [fit.choice, *(policy for policy in best.values() if policy != fit.choice)]


def policy_name(candidate: Candidate) -> str:
    """A policy in words."""
    return f"{candidate.full_heads} heads in {candidate.bits} bits"


def table(report: Mapping[str, Any]) -> list[str]:
    """Lines of Markdown: for each memory the choice, what was expected and measured, and the best of all widths."""
    lines = [
        "| memory | choice of `fit` | expected | measured | best of all widths | measured | choice above best |",
        "|---|---|---|---|---|---|---|",
    ]
    means = {name: fmean(passage[name] for passage in report["losses"].values()) for name in report["policies"]}
    for mib, row in report["budgets"].items():
        choice, best = row["choice"], min(row["policies"], key=lambda name: means[name])
        lines.append(
            f"| {mib} MiB | {choice} | {report['policies'][choice]['expected']:.4f} | {means[choice]:.4f} | {best} | "
            f"{means[best]:.4f} | {means[choice] / means[best] - 1:.0%} |"
        )
    return lines


def rows_of(policies: Sequence[Candidate], profile: HeadProfile, caches: Sequence[Any]) -> torch.Tensor:
    """What each head's cache is, by its place among `caches`: int64 [policies, layers, kv_heads].

    Layers that have a window of their own keep it.
    """
    assert profile.scores is not None  # no reform profile
    widths = {cache.bits: index for index, cache in enumerate(caches, 1) if not isinstance(cache, Window)} | {16: EXACT}
    own_window, rows = ~torch.from_numpy(profile.eligible)[:, None], []
    for policy in policies:
        is_full = torch.from_numpy(best_heads(profile.scores, profile.eligible, policy.full_heads))
        rows.append(torch.where(is_full, widths[policy.bits], len(caches)).masked_fill(own_window, EXACT))
    return torch.stack(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock checkpoint with a tokenizer")
    parser.add_argument("losses", metavar="LOSSES", help="file of measured cache losses of this model")
    parser.add_argument("text", metavar="TEXT", help="UTF-8 text that the losses were not measured on")
    parser.add_argument("--profile", type=Path, help="ranks full heads  [default: the losses]")
    parser.add_argument("--memory", type=int, nargs="+", default=[620, 626, 632, 640, 650], help="in MiB")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--passages", type=int, default=12)
    parser.add_argument("--json", type=Path, required=True, help="figures of every passage; known ones are kept")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    losses = CacheLosses.load(arguments.losses)
    profile = HeadProfile.load(arguments.profile) if arguments.profile else losses.head_profile
    budgets, policies = {}, {}
    for memory in arguments.memory:
        fit = fit_result(arguments.model, profile, arguments.losses, memory * MIB, arguments.context)
        compared = compared_policies(fit)
        policies |= {policy_name(policy): policy for policy in compared}
        budgets[memory] = {"choice": policy_name(fit.choice), "policies": [policy_name(policy) for policy in compared]}
    caches = [
        policy.quantization
        for policy in {policy.bits: policy for policy in policies.values() if policy.quantization}.values()
    ]
    caches.append(Window(losses.sink, losses.recent))

    sizes = TrialSizes(passages=arguments.passages)
    measured = MeasuredModel.load(arguments.model, dtype="float32")
    report: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {"losses": {}}
    report |= {
        "budgets": budgets,
        "policies": {name: {"expected": policy.loss, "total": policy.total} for name, policy in policies.items()},
        "ranked_by": profile.method,
        "measured_on": losses.text,
        "read": Path(arguments.text).name,
        **vars(sizes),
    }
    text = Haystack.read(arguments.text, measured.text, sizes.passages * sizes.length)
    for number, passage in enumerate(sizes.of(text.tokens, first_tokens(measured.text))):
        passage_losses = report["losses"].setdefault(str(number), {})
        if missing_policies := [name for name in policies if name not in passage_losses]:
            trial = CacheTrial(measured.model, measured.layers, passage[None], sizes.context, caches)
            rows = rows_of([policies[name] for name in missing_policies], profile, caches)
            passage_losses |= dict(zip(missing_policies, trial.converted_divergence(rows).tolist(), strict=True))
            record_versions(report, f"passage {number}")
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(table(report)))


if __name__ == "__main__":
    main()
