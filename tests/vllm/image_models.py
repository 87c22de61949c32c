"""Processors of tiny models that read images, and prompts with images for them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    Gemma4AudioFeatureExtractor,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
    Llama4ImageProcessor,
    Llama4Processor,
    LlavaProcessor,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2VLImageProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    SiglipImageProcessor,
)

from tests.helpers.families import IMAGE, START

VOCABULARY = 101
TEXT = 90  # tokens before those of images
SIDE, PATCH = 16, 4  # pixels
SQUARE = {"height": SIDE, "width": SIDE}


def processor_of(family: str) -> ProcessorMixin:
    """What makes the inputs of a family's model of words such as "w5" and of images."""
    if family == "llava":
        images = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SQUARE)
        return LlavaProcessor(
            images,
            _tokenizer({"<image>": IMAGE}),
            patch_size=PATCH,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    if family.startswith("llava"):
        images = SiglipImageProcessor(size=SQUARE)
        tokenizer = _tokenizer({"<image>": IMAGE})
        return LlavaProcessor(images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="full")
    if family.startswith(("pixtral", "mistral3")):
        images = PixtralImageProcessor(size={"longest_edge": SIDE}, patch_size=PATCH)
        return PixtralProcessor(
            images, _tokenizer({"[IMG]": IMAGE, "[IMG_BREAK]": START - 1, "[IMG_END]": START - 2}), patch_size=PATCH
        )
    if family.startswith("qwen"):
        merged = 2 if family.startswith("qwen2_vl") else 1
        sizes = {"patch_size": PATCH // merged, "temporal_patch_size": 1, "merge_size": merged}
        limits = {"shortest_edge": PATCH**2, "longest_edge": SIDE**2}
        names = ("image_pad", "vision_start", "vision_end", "video_pad")
        return Qwen3VLProcessor(
            Qwen2VLImageProcessor(size=limits, **sizes),
            _tokenizer({f"<|{name}|>": IMAGE - place for place, name in enumerate(names)}),
            Qwen3VLVideoProcessor(size=limits, **sizes),
        )
    if family.startswith("llama4"):
        names = ("patch", "image", "image_start", "image_end", "tile_x_separator", "tile_y_separator")
        return Llama4Processor(
            Llama4ImageProcessor(size=SQUARE, max_patches=2),
            _tokenizer({f"<|{name}|>": IMAGE - place for place, name in enumerate(names)}),
            patch_size=PATCH,
            pixel_shuffle_ratio=1.0,
        )
    assert family.startswith("gemma4"), family
    sizes = {"patch_size": PATCH, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    names = [f"{part}_token" for part in ("image", "boi", "eoi", "audio", "boa", "eoa")]
    tokenizer = _tokenizer(
        {f"<{name}>": IMAGE - place for place, name in enumerate([*names, "|video|"])},
        {name: f"<{name}>" for name in names},
    )
    return Gemma4Processor(
        Gemma4AudioFeatureExtractor(), Gemma4ImageProcessor(**sizes), tokenizer, Gemma4VideoProcessor(**sizes)
    )


def _tokenizer(special: dict[str, int], names: dict[str, str] | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of words that are separated by spaces; `names` are the attributes that hold special tokens."""
    words = ["<pad>", "<s>", "</s>", *(f"w{index}" for index in range(3, VOCABULARY))]
    for token, index in special.items():
        words[index] = token
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([*special])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_specific_special_tokens=names or {},
    )


@dataclass(frozen=True)
class Illustrated:
    """A prompt with images: its tokens, with one for each image, and the images."""

    tokens: list[int]
    images: list[Image.Image]

    @property
    def for_vllm(self) -> dict[str, Any]:
        """The prompt as vLLM takes it."""
        return {"prompt_token_ids": self.tokens, "multi_modal_data": {"image": self.images}}

    def inputs(self, processor: Any) -> dict[str, Any]:
        """The inputs of a model of transformers."""
        text = " ".join(processor.tokenizer.convert_ids_to_tokens(self.tokens))
        inputs = processor(text=text, images=self.images, return_tensors="pt")
        return dict(inputs.to(torch.float32))  # pixels; that of Llama 4 has them in bfloat16


def illustrated(processor: Any, seed: int = 0) -> list[Illustrated]:
    """Prompts with an image at their beginning, in their midst and at their end, and one with two images. The last has
    another image in the place of the first one's."""
    draw, pixels = random.Random(seed), np.random.default_rng(seed)
    image = processor.tokenizer.convert_tokens_to_ids(processor.image_token)

    def text(count: int) -> list[int]:
        return [draw.randrange(3, TEXT) for _ in range(count)]

    def picture(width: int, height: int) -> Image.Image:
        return Image.fromarray(pixels.integers(0, 256, (height, width, 3), dtype=np.uint8))

    first = [*text(2), image, *text(90)]
    return [
        Illustrated(first, [picture(16, 16)]),
        Illustrated([*text(60), image, *text(40)], [picture(12, 20)]),
        Illustrated([*text(200), image, *text(1)], [picture(30, 16)]),
        Illustrated([*text(5), image, *text(70), image, *text(9)], [picture(16, 16), picture(16, 24)]),
        Illustrated(first, [picture(16, 16)]),
    ]
