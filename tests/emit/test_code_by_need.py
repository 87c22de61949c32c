"""A converted checkpoint loads with the code that its heads need, and says so where config.json asks for more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.families import stock
from tests.helpers.surgery import Converted, convert_folder

TOKENS = torch.arange(5, 45)[None]


def converted(folder: Path, **options: int) -> Converted:
    """A small Llama with a budget of 6 tokens for each head."""
    stock("llama").save_pretrained(folder / "llama")
    return convert_folder(folder / "llama", folder / "out", rest="budgeted", budget=6, sparsity=1.0, **options)


def test_budgets_that_hold_bring_their_code(tmp_path: Path) -> None:
    made = converted(tmp_path, hold=10)
    assert (made.folder / "kv_hold.py").is_file()
    with torch.no_grad():
        cache = made.model(TOKENS).past_key_values
        held = [made.model(TOKENS, past_key_values=cache).past_key_values.allocated_bytes() for _ in range(3)]
    assert held == held[:1] * 3


def test_without_it_a_config_that_holds_is_refused(tmp_path: Path) -> None:
    made = converted(tmp_path)
    assert not (made.folder / "kv_hold.py").exists()
    assert made.model.generate(TOKENS, max_new_tokens=3, min_new_tokens=3).shape == (1, 43)
    config = json.loads((made.folder / "config.json").read_text())
    config["kv_surgery"]["selection"]["hold"] = 10
    (made.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match=r"kv_hold\.py is not beside it; convert the model again, with --hold"):
        made.load()(TOKENS)
