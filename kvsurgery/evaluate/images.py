"""Prompts with images: a checkpoint's processor makes tokens of them, which the model replaces by what it sees."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvsurgery.checkpoint.family import load_family
from kvsurgery.checkpoint.source import read_config
from kvsurgery.errors import TextError, UnsupportedModel, needs_trust, untrusted
from kvsurgery.text.chat import around_turn
from kvsurgery.text.tokens import first_tokens, special_ids, text_of

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from transformers import ProcessorMixin

PLACEHOLDER_ATTRIBUTE = "image_token"  # where a processor that reads images has the text that stands for one


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """A prompt with images, which are read from their files whenever they are needed: many would not fit in memory.

    Attributes:
        processor: of the checkpoint.
        text: has the processor's placeholder where an image belongs.
        paths: the images, in this order.
    """

    processor: ProcessorMixin
    text: str
    paths: tuple[Path, ...]

    def tokens(self) -> np.ndarray:
        """int64 [tokens], in which an image has as many tokens as the model makes of it.

        Raises:
            TextError: an image cannot be read.
            UnsupportedModel: the processor fails.
        """
        return self._processed()["input_ids"][0].numpy()

    def inputs(self) -> dict[str, torch.Tensor]:
        """What the model takes beside the tokens.

        Raises:
            TextError, UnsupportedModel: as `tokens`.
        """
        inputs = self._processed()
        return {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}

    def _processed(self) -> dict[str, torch.Tensor]:
        images = [_image(path) for path in self.paths]
        try:
            features = self.processor(
                text=self.text, images=images or None, return_tensors="pt", add_special_tokens=False
            )
        except Exception as error:  # whatever a processor raises
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UnsupportedModel(f"the checkpoint's processor cannot read a prompt with images: {reason}") from error
        return dict(features)


def image_processor(checkpoint: Path, trust_remote_code: bool = False) -> ProcessorMixin:
    """The processor of a checkpoint that reads images.

    Raises:
        UnsupportedModel: the model reads none, or not among its token embeddings; or there is no processor, or one with
            code that is not trusted.
        CheckpointError: its config.json cannot be used.
    """
    from transformers import AutoProcessor

    model_type = read_config(checkpoint).get("model_type")
    if not load_family(str(model_type)).modeling.image_inputs:
        raise UnsupportedModel(
            f"{checkpoint} is a {model_type} model; questions about images are for LLaVA, Pixtral and Mistral 3"
        )
    try:
        processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
        if not hasattr(processor, PLACEHOLDER_ATTRIBUTE):  # transformers falls back to the tokenizer
            raise ValueError("its processor's files are missing")
    except Exception as error:  # what transformers raises differs by family and version
        if needs_trust(error):
            raise untrusted(checkpoint, "processor") from error
        reason = str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__
        raise UnsupportedModel(f"{checkpoint} cannot read images: {reason}") from error
    return processor


def image_prompt(processor: ProcessorMixin, parts: Sequence[str], paths: Sequence[Path]) -> ImagePrompt:
    """A user's turn, in which an image lies between two parts of the text.

    Special tokens in the text become spaces: they would be taken for images, or for the end of the turn.

    Args:
        parts: one more than there are images.

    Raises:
        UnsupportedModel: the chat template cannot be used.
    """
    tokenizer, placeholder = processor.tokenizer, getattr(processor, PLACEHOLDER_ATTRIBUTE)
    special_texts = [tokenizer.convert_ids_to_tokens(token) for token in special_ids(tokenizer)]
    special_pattern = re.compile("|".join(map(re.escape, sorted([*special_texts, placeholder], key=len, reverse=True))))
    text = placeholder.join(special_pattern.sub(" ", part) for part in parts)
    prefix, suffix = around_turn(processor, as_parts=True) or (text_of(tokenizer, first_tokens(tokenizer)), "")
    return ImagePrompt(processor, prefix + text + suffix, tuple(paths))


def _image(path: Path) -> Image:
    from PIL import Image as pillow

    try:
        with pillow.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]
        raise TextError(f"cannot read the image {path}: {reason}") from error
