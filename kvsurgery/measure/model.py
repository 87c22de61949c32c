"""`MeasuredModel`: a model whose heads are measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from blake3 import blake3
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvsurgery import hub
from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.model_code import note_model_code
from kvsurgery.checkpoint.provenance import PROVENANCE, Provenance
from kvsurgery.checkpoint.quantization import check_known
from kvsurgery.checkpoint.source import CONFIG, read_config
from kvsurgery.conversion.converted import original_fingerprint
from kvsurgery.errors import CheckpointError, UnsupportedModel, needs_trust, not_loaded, untrusted
from kvsurgery.heads.dimensions import ModelDimensions, ModelLayers
from kvsurgery.profile.head_profile import Granularity, HeadProfile
from kvsurgery.profile.origin import ModelOrigin
from kvsurgery.system.processes import tensor_parallel
from kvsurgery.system.repo_id import checkpoint_folder

HASHED = 4  # numbers of a weight, by which a model is known again


@dataclass(frozen=True)
class MeasuredModel:
    """A stock model, and what a profile of it says about it.

    Attributes:
        model: in evaluation mode. Of a converted checkpoint the stock class, whose heads lie in the new order.
        tokenizer: None where the model is measured on token ids.
        name, revision: the original's Hub id or the name of its folder, and its commit where known.
        dimensions: of attention.
        layers: what attention each has.
        permutation: per layer, the original KV head at each place; None: they lie as they did.
        replicated: whether every process of tensor parallelism has all heads.
        no_reform: why REFORM cannot read its prompts, None where it can.
        source_fingerprint: of the original's weights; None of a Hub id, whose commit says as much.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    revision: str | None
    dimensions: ModelDimensions
    layers: ModelLayers
    permutation: tuple[tuple[int, ...], ...] | None = None
    replicated: bool = False
    no_reform: str | None = None
    source_fingerprint: str | None = None

    @classmethod
    def load(
        cls,
        source: str,
        revision: str | None = None,
        *,
        device: str | None = None,
        dtype: str = "auto",
        parts: int = 1,
        tp: int = 1,
        fsdp: int = 1,
        trust_remote_code: bool = False,
    ) -> MeasuredModel:
        """A checkpoint folder, original or converted, or a Hub id.

        Args:
            source, revision: what to load.
            device: default is CUDA where there is one.
            dtype: of the weights; "auto" is the checkpoint's.
            parts: how many processes the KV heads of a layer are to be shared by.
            tp, fsdp: over how many processes weights are shared, as `tensor_parallel` has them.
            trust_remote_code: run code that the tokenizer names.

        Raises:
            CheckpointError: not a checkpoint, or one that was converted and then saved again.
            UnsupportedModel: a family without a patch, quantized weights that transformers does not know, or KV heads
                that this many processes cannot share evenly.
            KVSurgeryError: this version of transformers cannot share layers so.
        """
        local_folder, provenance = checkpoint_folder(source), None
        folder = local_folder
        if folder is None:
            folder, revision = hub.fetch_config(source, revision)
            origin = ModelOrigin(source, revision)
        else:
            origin = ModelOrigin.of_folder(folder)
        config = read_config(folder)
        check_known(config, source)
        note_model_code(config)
        if "kv_surgery" in config:
            provenance = _provenance(folder, source)
            weights = original_fingerprint(folder) if local_folder else None
            origin = ModelOrigin(provenance.source, provenance.revision, weights)
            config = json.loads(provenance.originals[CONFIG])
        known = Model.of(config)
        layers = _measurable_layers(known, origin.name)
        weights = local_folder or source
        hub_options = {} if local_folder else {"revision": revision}
        dimensions = known.dimensions
        if dimensions.kv_heads % parts:
            raise UnsupportedModel(
                f"{parts} processes cannot share the {dimensions.kv_heads} KV heads of a layer of {origin.name} evenly"
            )
        tokenizer = _tokenizer(weights, {**hub_options, "trust_remote_code": trust_remote_code})
        norm = "model.language_model.norm" if known.family.text else "model.norm"
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        parallel = tensor_parallel(device, tp, fsdp, (norm, "lm_head")) if tp > 1 else {}
        try:
            model_class = getattr(transformers, [*known.family.classes][-1])
            model = model_class.from_pretrained(weights, dtype=dtype, **hub_options, **parallel).to(device).eval()
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            raise not_loaded(source, error) from error
        return cls(
            model.requires_grad_(False),
            tokenizer,
            origin.name,
            origin.revision,
            dimensions,
            layers,
            provenance.permutation if provenance else None,
            known.family.replicated,
            known.family.no_reform,
            origin.fingerprint,
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer, the model's own sliding window in tokens, or None for full attention."""
        return tuple(self.layers.windows)

    def full_layers(self) -> list[int]:
        """Layers with full attention and a KV cache of their own.

        Raises:
            UnsupportedModel: there is none.
        """
        layers = self.layers.eligible.nonzero()[0].tolist()
        if not layers:
            raise UnsupportedModel(f"no layer of {self.name} has full attention: no head reads the whole context")
        return layers

    def cached_layers(self) -> dict[int, int]:
        """From each layer with full attention to the place in `full_layers` of the layer whose KV cache it reads."""
        places = {layer: place for place, layer in enumerate(self.full_layers())}
        return places | {layer: places[own] for layer, own in self.layers.sources.items() if own in places}

    @property
    def fingerprint(self) -> str:
        """A hash of the first numbers of every weight, to know the model again, sharded or not."""
        digest = blake3()
        for name, weight in sorted(decoder_of(self.model).named_parameters()):
            # of a sharded weight, the first process has the first rows, or the first columns
            first_numbers = (weight.to_local() if hasattr(weight, "to_local") else weight)[:1].flatten()[:HASHED]
            # a copy, since memory that numpy sees cannot be freed when weights are sharded again
            digest.update(name.encode() + first_numbers.clone().cpu().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:32]

    @property
    def max_context(self) -> int:
        """Tokens that the model has positions for."""
        return self.model.config.get_text_config().max_position_embeddings

    @property
    def text(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            UnsupportedModel: there is none.
        """
        if self.tokenizer is None:
            raise UnsupportedModel(f"{self.name} has no tokenizer; heads are measured on text")
        return self.tokenizer

    def last_states(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states after the final norm, [batch, tokens, hidden], of tokens at positions, both [batch, tokens].

        The whole model is called, since its weights may be shared from its root on; of logits it makes one.
        """
        states = []
        hook = decoder_of(self.model).register_forward_hook(lambda *call: states.append(call[-1].last_hidden_state))
        try:
            self.model(tokens, position_ids=positions, use_cache=False, logits_to_keep=last_token(tokens))
        finally:
            hook.remove()
        return states[0]

    def profile(
        self, scores: np.ndarray | None, method: str, granularity: Granularity | None, **facts: Any
    ) -> HeadProfile:
        """A profile of scores [layers, heads] that were measured on `model`, by the original's head indices.

        Args:
            facts: what else `HeadProfile` has: sink, recent, provenance; embedding heads by the original's indices.
        """
        if scores is not None:
            scores = self.by_original_head(scores)
        return HeadProfile(
            scores,
            method,
            granularity,
            self.name,
            self.dimensions,
            self.revision,
            windows=self.windows,
            fingerprint=self.source_fingerprint,
            **facts,
        )

    def by_original_head(self, scores: np.ndarray) -> np.ndarray:
        """Scores [layers, KV heads or query heads] of the model's heads, in the order of the original's."""
        if self.permutation is None:
            return scores
        groups = scores.reshape(self.dimensions.layers, self.dimensions.kv_heads, -1)
        original_groups = groups.copy()
        for layer, order in enumerate(self.permutation):
            if self.windows[layer] is None:  # others stay, and may have another number of heads
                original_groups[layer, list(order)] = groups[layer]
        return original_groups.reshape(scores.shape)


def _provenance(folder: Path, source: str) -> Provenance:
    """Where the heads of a converted checkpoint were.

    Raises:
        CheckpointError: nothing says it any more.
    """
    if not (folder / PROVENANCE).exists():
        raise CheckpointError(
            f"{source} was converted, but has no {PROVENANCE} that says where its heads were; "
            "give the original, or the folder that `kvsurgery convert` wrote"
        )
    return Provenance.read(folder)


def _measurable_layers(model: Model, name: str) -> ModelLayers:
    """What attention each layer of a model has.

    Raises:
        UnsupportedModel: its heads cannot be measured.
    """
    oldest = model.family.modeling.oldest
    if oldest and oldest > int(transformers.__version__.split(".")[0]):
        raise UnsupportedModel(
            f"the heads of {name} cannot be measured with transformers {transformers.__version__}, which computes "
            f"something else with {model.family.modeling.title}; install transformers {oldest}"
        )
    return model.layers


def _tokenizer(weights: str | Path, options: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    try:
        return AutoTokenizer.from_pretrained(weights, **options)
    except Exception as error:  # what transformers raises where there is none differs by family and version
        if needs_trust(error):
            raise untrusted(weights, "tokenizer") from error
        return None


def last_token(tokens: torch.Tensor) -> torch.Tensor:
    """What to give as `logits_to_keep` of tokens [batch, tokens], for one logit.

    For a number, transformers leaves earlier queries out of layers that share a KV cache.
    """
    return torch.tensor([tokens.shape[1] - 1], device=tokens.device)


def decoder_of(model: PreTrainedModel) -> Any:
    """Embedding, layers and final norm of a causal language model, without its output layer."""
    decoder = model.get_decoder()
    return getattr(decoder, "model", decoder)  # transformers 5 returns Llama 4 with its output layer
