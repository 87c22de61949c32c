"""The source of a conversion, and warnings about missing tensors, vLLM, memory and bits."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from kvsurgery.cli.help import in_options
from kvsurgery.cli.running import check_revision
from kvsurgery.errors import short
from kvsurgery.recipe import Recipe
from kvsurgery.system.repo_id import checkpoint_folder

if TYPE_CHECKING:
    from kvsurgery.conversion.prepared import PreparedConversion
    from kvsurgery.conversion.request import Request


def request_of(source: str | None, revision: str | None, recipe: Recipe) -> Request:
    """The checkpoint, profiles and recipe of a command.

    Raises:
        UsageError: a revision is given with a folder.
    """
    from kvsurgery.conversion.request import Request

    request = Request.of(source, revision, recipe)
    check_revision(request.place, revision)
    return request


def source_folder(source: str, converted: Path) -> Path:
    """The source's folder; a Hub id is downloaded at the revision that was converted."""
    folder = checkpoint_folder(source)
    if folder is not None:
        return folder
    from kvsurgery import hub
    from kvsurgery.checkpoint.provenance import Provenance
    from kvsurgery.checkpoint.source import ADAPTER_CONFIG

    provenance = Provenance.read(converted)
    if ADAPTER_CONFIG in provenance.originals:
        return hub.fetch_adapter(source, provenance.revision)
    return hub.fetch_checkpoint(source, provenance.revision)[0]


def warn_about_towers(prepared: PreparedConversion) -> None:
    """Print which parts of a checkpoint are converted without a check for missing tensors."""
    from kvsurgery.display import console

    for prefix, kind in prepared.checkpoint.model.unknown_modules.items():
        console.stderr.print(
            f"the tensors of {prefix.rstrip('.')} are copied without a check for missing ones, because their type "
            f"{short(kind)} is not known; transformers names missing tensors when it loads the checkpoint"
        )


def warn_about_serving(prepared: PreparedConversion) -> None:
    """Print which features of the conversion vLLM refuses or ignores."""
    from kvsurgery.display import console
    from kvsurgery.vllm.forecast import serving_limits

    for line in serving_limits(prepared.emitted.config):
        console.stderr.print(in_options(line))


def warn_about_memory(prepared: PreparedConversion, request: Request) -> None:
    """Print what `fit` does not account for, and the command that measures losses."""
    from kvsurgery.display import console

    fit, positions = prepared.decision.fit, prepared.checkpoint.positions
    if fit is None:
        return
    demand = fit.demand
    if positions is not None and positions < demand.context:
        console.stderr.print(f"--context {demand.context} exceeds the {positions} positions of the model")
    budgeted = prepared.policy.recipe.budgeted
    if fit.choice.budget and not demand.new_tokens and budgeted and budgeted.hold is None:
        console.stderr.print(
            "budgeted heads keep every generated token; `kvsurgery fit --new-tokens` reserves memory for them"
        )
    if fit.losses is None:
        _suggest_measuring(request)


def warn_about_widths(prepared: PreparedConversion, request: Request) -> None:
    """Print that 2 bits may lose much, and the command that measures losses, where it measures such a cache."""
    from kvsurgery.display import console

    quantization = prepared.policy.quantization
    if quantization is None or request.evidence.losses is not None:
        return
    if (quantization.bits, quantization.scheme, quantization.group_size) == (2, "kivi", None):
        console.stderr.print(
            "2 bits lose many facts of long texts on some models; measured losses say how to store them"
        )
        _suggest_measuring(request)


def _suggest_measuring(request: Request) -> None:
    """Print the command that measures losses."""
    from kvsurgery.display import console

    model_words = [request.place, *(["--revision", request.revision] if request.revision else [])]
    measure = ["kvsurgery", "profile", "compute", *model_words, "--method", "kv-bits", "--text", "TEXT"]
    command = shlex.join([*measure, "-o", "losses.safetensors"])
    console.stderr.print(f"Measure cache losses, for --kv-measured losses.safetensors: {command}")
