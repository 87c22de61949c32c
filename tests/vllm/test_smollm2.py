"""A real language model: SmolLM2, where its checkpoint has been made."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from kvsurgery.profile.head_profile import HeadProfile
from tests.helpers.surgery import convert_folder
from tests.vllm.serving import assert_equal, engine, generate, reference

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "smollm2"
MODEL = FOLDER / "model"
TOKENS = (5, 150, 400)


@pytest.mark.skipif(
    not (MODEL / "model.safetensors").is_file(), reason=f"no {MODEL}: run `python examples/smollm2/make.py`"
)
def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    profile = HeadProfile.load(FOLDER / "gates.safetensors")
    checkpoint = convert_folder(MODEL, tmp_path / "out", profile, sparsity=0.5, sink=16, recent=64)
    text = AutoTokenizer.from_pretrained(MODEL)((ROOT / "README.md").read_text())["input_ids"]
    rows = [text[:length] for length in TOKENS]
    with engine(checkpoint.folder) as llm:
        assert_equal(generate(llm, rows, 12), reference(checkpoint.model, rows, 12))
