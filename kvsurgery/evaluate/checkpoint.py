"""Checkpoints to evaluate, original or converted: their tokenizer, their model, and their fingerprint."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from blake3 import blake3
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.model_code import lacks_code, note_model_code, saved_again
from kvsurgery.checkpoint.provenance import PROVENANCE, Provenance
from kvsurgery.checkpoint.quantization import check_known
from kvsurgery.checkpoint.source import CONFIG, read_config, read_weights
from kvsurgery.emit.config import auto_class
from kvsurgery.errors import CheckpointError, UnsupportedModel, needs_trust, not_loaded, untrusted
from kvsurgery.evaluate.sample import Reader
from kvsurgery.system.processes import tensor_parallel
from kvsurgery.templates.kv_layout import KVLayout
from kvsurgery.text.tokens import end_tokens

GENERATION_CONFIG = "generation_config.json"
SAMPLED_BYTES = 256  # first bytes of every tensor, which a fingerprint covers


def is_converted(folder: str | Path) -> bool:
    """Whether a folder's config.json says that its heads were converted.

    Raises:
        CheckpointError: there is no config.json.
    """
    return "kv_surgery" in read_config(folder)


def check_original(folder: Path, converted: Path) -> None:
    """Check that a folder may be what a checkpoint was converted from, as far as its config.json shows.

    Raises:
        CheckpointError: it was converted itself, or another config was converted.
    """
    config = read_config(folder)
    if "kv_surgery" in config:
        raise CheckpointError(f"{folder} is a converted checkpoint; give the original that {converted} was made of")
    if not (converted / PROVENANCE).exists():  # it was saved again
        return
    origin = Provenance.read(converted)
    if config != json.loads(origin.originals["config.json"]):
        raise CheckpointError(
            f"{folder} is not what {converted} was converted from: its config.json differs; give the original, "
            f"recorded as {origin.source}"
        )


def read_text_config(folder: str | Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of a checkpoint's text model, as transformers reads it.

    Raises:
        CheckpointError: it cannot.
    """
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()
    except (OSError, ValueError) as error:
        if needs_trust(error):
            raise untrusted(folder, "config") from error
        raise not_loaded(folder, error) from error


def reader_of(folder: str | Path, seed: int = 0, trust_remote_code: bool = False) -> Reader:
    """The tokenizer and the context of a checkpoint, which questions are written for.

    Raises:
        UnsupportedModel: it has no tokenizer, or one with code that is not trusted.
        CheckpointError: its config.json cannot be used.
    """
    read_config(folder)
    config = read_text_config(folder, trust_remote_code)
    tokenizer = _tokenizer(folder, trust_remote_code)
    return Reader(tokenizer, config.max_position_embeddings, config.vocab_size, seed, Path(folder), trust_remote_code)


def copy_code(folder: str | Path) -> None:
    """Let transformers copy a converted checkpoint's code; only one process may do it at a time."""
    config = read_config(folder)
    if "kv_surgery" in config:
        get_class_from_dynamic_module(config["auto_map"][auto_class(config)], folder)


def load(folder: str | Path, *, device: str, dtype: str = "auto", tp: int = 1, stock: bool = False) -> PreTrainedModel:
    """A model in evaluation mode that decodes greedily, whatever its checkpoint samples with, up to its end tokens.

    Of a converted checkpoint the emitted code runs. Stock models with a soft cap run eager, since SDPA leaves it out.

    Args:
        dtype: of the weights; "auto" is the checkpoint's.
        tp: processes that share it by tensor parallelism.
        stock: load the stock class, of a converted checkpoint too.

    Raises:
        CheckpointError: it cannot be loaded, or was not converted for this many processes.
        UnsupportedModel: a family without a patch, or quantized weights that transformers does not know.
    """
    config = read_config(folder)
    check_known(config, folder)
    converted = "kv_surgery" in config
    if converted and not stock:
        if lacks_code(Path(folder), config):
            raise CheckpointError(saved_again(Path(folder), config) or f"{folder} lacks the code of its conversion")
        check_processes(folder, tp)
    note_model_code(config)
    name = auto_class(config) if converted else [*Model.of(config).family.classes][-1]
    options = tensor_parallel(device, tp) if tp > 1 else {}
    if converted and not stock:
        options["trust_remote_code"] = True
    elif config.get("attn_logit_softcapping"):
        options["attn_implementation"] = "eager"
    try:
        model = getattr(transformers, name).from_pretrained(folder, dtype=dtype, **options).to(device).eval()
    except torch.OutOfMemoryError as error:
        raise CheckpointError(f"the weights of {folder} do not fit on {device}; try `dtype` bfloat16") from error
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise not_loaded(folder, error) from error
    defaults = model.generation_config
    ends = end_tokens(defaults)
    pad_token = defaults.pad_token_id if defaults.pad_token_id is not None else [*ends, 0][0]
    model.generation_config = GenerationConfig(eos_token_id=ends or None, pad_token_id=pad_token)
    return model


def check_processes(folder: str | Path, tp: int) -> None:
    """Check that a checkpoint, if it is converted, was converted for this many processes that share it.

    Raises:
        CheckpointError: it was not.
    """
    config = read_config(folder)
    counts = KVLayout.from_config(config).processes if "kv_surgery" in config else (tp,)
    if tp not in counts:
        raise CheckpointError(
            f"{tp} processes are to share {folder}, which was converted for {' or '.join(map(str, counts))}; start "
            f"as many, or convert it with `tp` {tp}"
        )


def fingerprint(folder: str | Path) -> str:
    """A hash of a checkpoint's configs and provenance, its headers and the first bytes of every tensor.

    Raises:
        CheckpointError, UnsupportedModel: it is malformed, or has no safetensors weights.
    """
    folder = Path(folder)
    digest = blake3()
    for name in (CONFIG, GENERATION_CONFIG, PROVENANCE):
        if (folder / name).exists():
            digest.update((folder / name).read_bytes())
    for shard in read_weights(folder)[0]:
        digest.update(shard.header)
        with open(shard.path, "rb") as file:
            for tensor in shard.tensors:
                file.seek(tensor.start)
                digest.update(file.read(min(SAMPLED_BYTES, tensor.size)))
    return digest.hexdigest()[:32]


def _tokenizer(folder: str | Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        assert tokenizer is not None  # its type in transformers allows None
        return tokenizer
    except Exception as error:  # what transformers raises where there is none differs by family and version
        if needs_trust(error):
            raise untrusted(folder, "tokenizer") from error
        raise UnsupportedModel(
            f"{folder} has no tokenizer that can be loaded; put the original's tokenizer files into it"
        ) from error
