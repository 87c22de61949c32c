"""Families that read images: prompts of text alone and with images, in chunks, and once more from the prefix cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.families import IMAGE, WITH_IMAGES, WITH_STATES
from tests.vllm.image_models import TEXT, illustrated, processor_of
from tests.vllm.models import MODELS
from tests.vllm.serving import (
    BLOCK,
    assert_equal,
    cached_tokens,
    converted,
    engine,
    fill_caches,
    generate,
    prompts,
    reference,
)
from tests.vllm.substitutes import substitute

# their towers are shown with other text models, and their text models in test_families.py
REST = ("mistral3", "gemma4-images", "qwen3_5_moe-images")
# served with the original's cache
UNSERVED = ("glm4v-images", "glm46v-images", "glm4v_moe-images")
TEXT_ONLY = "gemma3-images"
BOTH_WAYS = (TEXT_ONLY, "gemma4-vision-images")


@pytest.mark.parametrize("family", [name for name in WITH_IMAGES if name not in (*REST, *BOTH_WAYS, *UNSERVED)])
def test_tokens_are_those_of_the_emitted_model(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    substitute(monkeypatch)
    text_model, _ = WITH_IMAGES[family]
    checkpoint, processor = converted(family, tmp_path, model=MODELS.get(text_model)), processor_of(family)
    processor.save_pretrained(checkpoint.folder)
    texts, pictures = prompts(vocabulary=TEXT), illustrated(processor)
    rows = [*texts, *(prompt.for_vllm for prompt in pictures)]
    inputs = [prompt.inputs(processor) for prompt in pictures]
    # transformers would take a generated image token for part of an image
    wanted = reference(checkpoint.model, [*texts, *inputs], suppress_tokens=[IMAGE])
    # tokens that are not certain, so that attention counts, and that depend on the image
    assert all(min(max(place.values()) for place in places) < -0.01 for _, places in wanted)
    assert wanted[-1] != wanted[len(texts)]
    limits = {"image": 2, **({"video": 0} if hasattr(processor, "video_token") else {})}
    options = {"max_num_batched_tokens": 48, "long_prefill_token_threshold": 48, "skip_tokenizer_init": False}
    with engine(checkpoint.folder, limit_mm_per_prompt=limits, **options) as llm:
        if text_model in WITH_STATES:
            fill_caches(llm, float("nan"))
        assert_equal(generate(llm, rows, logit_bias={IMAGE: -100}), wanted)
        before = cached_tokens(llm)
        assert_equal(generate(llm, rows, logit_bias={IMAGE: -100}), wanted)
        lengths = [*map(len, texts), *(row["input_ids"].shape[1] for row in inputs)]
        assert cached_tokens(llm) - before >= sum((length - 1) // BLOCK * BLOCK for length in lengths) - 2 * BLOCK


def test_text_where_images_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3, where tokens of an image see each other in both directions."""
    substitute(monkeypatch)
    model = {**MODELS[WITH_IMAGES[TEXT_ONLY][0]], "tie_word_embeddings": False}
    checkpoint, texts = converted(TEXT_ONLY, tmp_path, model=model), prompts(vocabulary=TEXT)
    wanted = reference(checkpoint.model, texts, suppress_tokens=[IMAGE])
    with engine(checkpoint.folder, language_model_only=True) as llm:
        assert_equal(generate(llm, texts, logit_bias={IMAGE: -100}), wanted)
