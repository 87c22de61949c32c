"""Modeling code that `auto_map` in config.json names: the model's own, or that of a conversion."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsurgery.checkpoint.provenance import PROVENANCE
from kvsurgery.checkpoint.side_code import SIDE_CLASSES
from kvsurgery.errors import UnsupportedModel, short

logger = logging.getLogger(__name__)
EMITTED = "modeling_kvsurgery_"  # how the names of emitted modeling files begin


def model_references(config: Mapping[str, Any]) -> dict[str, str]:
    """The code references of a model and its config, by auto class, without those of a tokenizer or a processor."""
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, Mapping):
        return {}
    return {auto: str(code) for auto, code in auto_map.items() if code and auto not in SIDE_CLASSES}


def saved_again(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Describe a converted checkpoint that was saved again without its provenance; None for any other folder."""
    if ("kv_surgery" not in config and not _emitted_modules(config)) or (folder / PROVENANCE).exists():
        return None
    if not lacks_code(folder, config):
        return (
            f"{folder} is a converted checkpoint that save_pretrained wrote again: it runs, but without {PROVENANCE} "
            "it cannot be converted, verified or reverted; give the original, or the folder that `convert` wrote"
        )
    return (
        f"{folder} is a converted checkpoint that was saved as a stock model, without its code: it loads as stock, "
        "its heads in the converted order; to run it with the smaller cache, copy the .py files of the converted "
        "folder into it; to convert, verify or revert, give the original or the folder that `convert` wrote"
    )


def lacks_code(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a converted checkpoint lacks its modeling file, or the section `kv_surgery` that this reads."""
    modules = _emitted_modules(config)
    is_complete = bool(modules) and all((folder / f"{module}.py").exists() for module in modules)
    return not (is_complete and "kv_surgery" in config)


def _emitted_modules(config: Mapping[str, Any]) -> set[str]:
    references = (code.rpartition("--")[2] for code in model_references(config).values())
    return {code.partition(".")[0] for code in references if code.startswith(EMITTED)}


def check_stock(folder: Path, config: Mapping[str, Any], ignore_model_code: bool = False) -> None:
    """Check that a checkpoint is the stock model of its family.

    Args:
        folder, config: the checkpoint.
        ignore_model_code: treat a model with code of its own as the stock model of its `model_type`.

    Raises:
        UnsupportedModel: it is already converted, or has modeling code of its own.
    """
    if explanation := saved_again(folder, config):
        raise UnsupportedModel(explanation)
    code = model_references(config)
    if "kv_surgery" not in config and code and not ignore_model_code:
        reference = short(next(iter(code.values())))
        raise UnsupportedModel(
            f"config.json names modeling code of the model's own, {reference}; conversion replaces it "
            "by the class of transformers, which may compute something else; if that class loads this checkpoint "
            "correctly, set `code.ignore_model_code`"
        )


def note_model_code(config: Mapping[str, Any]) -> None:
    """Log a warning if the class of transformers is about to run in place of a model's own code."""
    if "kv_surgery" not in config and (code := model_references(config)):
        logger.warning(
            "config.json names modeling code of the model's own, %s; the class of transformers runs in its place, and "
            "may compute something else",
            short(next(iter(code.values()))),
        )
