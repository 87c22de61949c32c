"""Every example prints what its page shows."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGES = sorted(page.stem for page in EXAMPLES.glob("*.md") if page.stem != "README")
# what an example needs beyond the tool, and where it comes from
NEEDS = {"harness": ("lm_eval", "lm-eval"), "w8_kv4": ("optimum.quanto", "optimum-quanto")}
# huggingface_hub reads where the Hub is when it is imported; torchrun's processes print for themselves
OWN_PROCESS = ("push", "several_processes")
# said by versions of transformers that want a vocabulary to divide; the bundled model's does not
REFUSED = "must be divisible by the tensor parallel size"


def shown(page: str) -> str:
    """The one block of a page that holds what its script printed."""
    [block] = re.findall(r"^```text\n(.*?)^```$", (EXAMPLES / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    return block


def comparable(text: str) -> list[str]:
    """Its lines, without the figures after ≈, which depend on the machine."""
    return [re.sub(r"\s*≈ \S+", " ≈", line.rstrip()) for line in text.splitlines()]


def test_what_is_compared():
    assert comparable("differ by ≈ 2e-05\nthe   rest ") == comparable("differ by ≈ 1.5e-06\nthe   rest")
    assert comparable("12 of 16") != comparable("13 of 16")
    assert comparable("none    0%    ≈ 44%") != comparable("none   50%    ≈ 44%")


def test_the_index_has_every_page_and_every_page_its_script():
    index = (EXAMPLES / "README.md").read_text()
    for page in PAGES:
        assert f"]({page}.md)" in index
        assert f"]({page}.py)" in (EXAMPLES / f"{page}.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_an_example_prints_what_its_page_shows(page, monkeypatch, capsys):
    if page in NEEDS:
        module, package = NEEDS[page]
        pytest.importorskip(module, reason=f"pip install {package}")
    script = EXAMPLES / f"{page}.py"
    if page in OWN_PROCESS:
        done = subprocess.run([sys.executable, script], capture_output=True, text=True)
        if REFUSED in done.stderr:
            pytest.skip("this transformers does not split a vocabulary of 295")
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    else:
        monkeypatch.setattr(sys, "path", [str(EXAMPLES), str(EXAMPLES / "tiny-recall"), *sys.path])
        monkeypatch.setattr(sys, "argv", [str(script)])
        runpy.run_path(str(script), run_name="__main__")
        printed = capsys.readouterr().out
    assert comparable(printed) == comparable(shown(page))
