"""What the page of Qwen2.5-Coder-1.5B says of the profiles that are shipped with it."""

from __future__ import annotations

from kvsurgery.profile.comparison import compare
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.importers.reform import import_reform
from tests.docs.pages import ROOT, figures

FOLDER = "examples/qwen2.5-coder-1.5b"
PAGE = f"{FOLDER}/README.md"


def profile(name: str) -> HeadProfile:
    return HeadProfile.load(ROOT / FOLDER / f"{name}.safetensors")


def test_how_many_full_heads_profiles_share() -> None:
    shown = set()
    for other in ("attention", "r2"):
        [half] = [overlap for overlap in compare(profile("er"), profile(other)).overlaps if overlap.sparsity == 0.5]
        shown |= {str(half.full), str(half.shared), f"{half.full * half.chance:.0f}"}
    assert shown <= figures(PAGE, "**Which heads**")


def test_how_often_the_model_answered() -> None:
    trials = [profile(name).provenance for name in ("er", "r2")]
    shown = {str(trial[name]) for trial in trials for name in ("trials", "successes")}
    assert shown <= figures(PAGE, "**Reasoning**")


def test_where_the_heads_of_the_paper_rank() -> None:
    measured, paper = profile("reform"), import_reform("Qwen2.5-Coder-1.5B-Instruct")
    assert measured.ranking is not None
    assert measured.embedding_heads is not None
    assert paper.embedding_heads is not None
    best = {task: measured.ranking.best(task) for task in measured.ranking.mnr}
    ranks = [[order.index(head) + 1 for order in best.values()] for head in paper.embedding_heads]
    shown = {str(min(found)) for found in ranks} | {str(len(order)) for order in best.values()}
    text = (ROOT / PAGE).read_text()
    assert all(str(head) in text for head in (*measured.embedding_heads, *paper.embedding_heads))
    assert {f"{rank}th" if len(rank) < 3 else rank for rank in shown} <= {word.strip(".,") for word in text.split()}
