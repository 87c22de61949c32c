"""Every file that conversion emits beside the weights, as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvsurgery.checkpoint.dtype import loading_dtype
from kvsurgery.checkpoint.files import reading
from kvsurgery.checkpoint.quantization import Quantization
from kvsurgery.checkpoint.side_code import SideCode
from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.emit.card import model_card
from kvsurgery.emit.config import converted_config, converted_generation_config, to_json
from kvsurgery.emit.modeling import Needs, code_files
from kvsurgery.emit.rounding import rounding_file
from kvsurgery.errors import CheckpointError
from kvsurgery.policy.policy import Policy
from kvsurgery.profile.cache_losses import CacheLosses
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.templates.kv_layout import ROUNDING_FILE


@dataclass(frozen=True)
class Emitted:
    """What conversion writes beside the weights.

    Attributes:
        config: the content of config.json.
        files: every file by name, config.json among them.
    """

    config: Mapping[str, Any]
    files: Mapping[str, bytes]


def emit(
    checkpoint: Checkpoint, policy: Policy, profile: HeadProfile | None, losses: CacheLosses | None = None
) -> Emitted:
    """Make config.json, the modeling code, the model card, and other files where they are needed.

    These are generation_config.json where it has to change, and measured factors where keys are rounded by them.

    Raises:
        UnsupportedModel, CheckpointError: the source's config or generation config is not what surgery covers.
    """
    family = checkpoint.model.family
    config = converted_config(checkpoint.model, policy, loading_dtype(checkpoint.config, checkpoint.shards))
    readme, generation = checkpoint.folder / "README.md", checkpoint.folder / "generation_config.json"
    with reading(readme):
        original_card = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    weights = Quantization.of(config)
    files = code_files(family, Needs.of(policy, None if weights is None else weights.layout))
    side_code = SideCode.of(checkpoint.folder)
    for name in side_code.files.keys() & files.keys():
        raise CheckpointError(
            f"{checkpoint.folder / name} is code of the tokenizer, and conversion writes a file of this name; "
            "rename it there"
        )
    card = model_card(
        checkpoint.name, config, profile, policy, files, original_card, family.replicated, side_code, family.states
    )
    files["README.md"] = card.encode(errors="replace")
    if generation.is_file():
        with reading(generation):
            original_generation = generation.read_bytes()
        converted_generation = converted_generation_config(original_generation)
        if converted_generation != original_generation:
            files["generation_config.json"] = converted_generation
    if any(layer.rounded_by_queries for layer in policy.layers):
        assert losses is not None  # as the policy was decided by them
        files[ROUNDING_FILE] = rounding_file(policy.layout, losses)
    files["config.json"] = to_json(config)
    return Emitted(config, files)
