"""What answering beyond the context costs is measured for every method, and the docs say what came out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.real_model import beyond_context, beyond_cost
from tests.docs.pages import figures

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/results/long-prompts.md"
CHOOSING = [method.name for method in beyond_context.choosing(beyond_context.SETTINGS)]
NAMES = CHOOSING + [method.name for method in beyond_context.recurrent(beyond_context.SETTINGS, [])]


@pytest.mark.usefixtures("small_budgets")
def test_a_run_goes_on_from_its_file(
    beyond_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    results = tmp_path / "cost.json"
    command = ["beyond_cost.py", beyond_folder, "--profile", beyond_folder / "reform.safetensors"]
    command += ["--text", beyond_folder / "text.txt", "--lengths", 180, 220, "--texts", 1]
    command += ["--json", results, "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in command])
    beyond_cost.main()
    assert "| 220 | REFORM |" in capsys.readouterr().out
    found = json.loads(results.read_text())
    [[short], [long]] = found["results"].values()
    assert (sorted(short), sorted(long)) == (sorted(NAMES), sorted(NAMES[1:]))
    assert all(min(each["waiting"], each["answering"], each["token"]) > 0 for each in (*short.values(), *long.values()))
    # where tokens are chosen by the question, only their ids wait; with REFORM also embeddings of whole chunks
    assert long["truncation"]["waiting"] == 8 * 220
    head_dim = beyond_context.stock(beyond_folder).config.head_dim
    assert long["REFORM"]["waiting"] >= 8 * 220 + 128 * 2 * 4 * head_dim
    short["REFORM"]["token"] = "kept"
    del long["H2O"]
    results.write_text(json.dumps(found))
    monkeypatch.setattr(beyond_cost, "table", lambda found: [])
    beyond_cost.main()
    [[short], [long]] = json.loads(results.read_text())["results"].values()
    assert short["REFORM"]["token"] == "kept"
    assert "H2O" in long
    sys.argv[-1] = "bfloat16"
    with pytest.raises(SystemExit):
        beyond_cost.main()
    assert "measured with other settings" in capsys.readouterr().err


def test_the_model_does_not_count(beyond_folder: Path) -> None:
    model, rows = beyond_context.stock(beyond_folder), torch.zeros(10, 4)
    assert (
        beyond_cost.tensor_bytes({"model": model, "weight": model.lm_head.weight, "rows": [rows, rows[2:]]}, model)
        == 160
    )


def test_the_documents_say_what_was_measured() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "beyond-cost.json").read_text())
    (short, _), [long] = found["results"].values()
    reform, h2o, full = long["REFORM"], long["H2O"], short["full attention"]
    assert 0.4 < reform["read"] / h2o["read"] < 0.5
    grown = reform["waiting"] - short["REFORM"]["waiting"] - 8 * 24000  # but for the ids
    assert round(grown / 24000 / 2**10, 2) == pytest.approx(1, abs=0.03)
    full_token = full["waiting"] // (8000 + beyond_context.ROOM)
    shown = {f"{reform['waiting'] / 2**20:.0f}", f"{32000 * full_token / 2**20:,.0f}"}
    assert shown <= figures(PAGE, "**REFORM** reads")
    assert f"{long['StreamingLLM']['waiting'] / 2**20:.0f}" in figures(PAGE, "**H2O and StreamingLLM**")
