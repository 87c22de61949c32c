"""README, docs and examples: links lead somewhere, commands exist, and those that can run here print what is shown."""

from __future__ import annotations

import ast
import doctest
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import urlparse

import click
import pytest

from kvsurgery.cli import cli
from tests.docs.pages import (
    PAGES,
    ROOT,
    Command,
    anchors,
    blocks,
    every_command,
    inline_code,
    links,
    numbers,
    script,
    session,
)
from tests.helpers.command import done

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TARGETS = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
# options of lm_eval, of which pages speak
OF_LM_EVAL = {
    "--apply_chat_template",
    "--confirm_run_unsafe_code",
    "--include_path",
    "--metadata",
    "--model_args",
    "--use_cache",
}
OF_VLLM = {
    "--disable-hybrid-kv-cache-manager",
    "--enable-dbo",
    "--ubatch-size",
    "--kv-cache-dtype",
    "--kv-sharing-fast-prefill",
    "--language-model-only",
    "--max-model-len",
    "--max-num-batched-tokens",
    "--max-num-seqs",
    "--no-enable-prefix-caching",
    "--tensor-parallel-size",
}
OF_SCRIPTS = {"--wheel", "--new", "--cases", "--given", "--first", "--writer"}
OF_OTHERS = OF_LM_EVAL | OF_VLLM | OF_SCRIPTS
RUNNING = [page for page in PAGES if blocks(page, "console")]
INTERACTIVE = [page for page in PAGES if blocks(page, "pycon")]
SHOWN = doctest.ELLIPSIS | doctest.REPORT_NDIFF  # how output may differ, and how a difference is shown


def option_names(group: click.Group) -> set[str]:
    """Every option of every command."""
    names = {"--help", "--help-all", *(name for parameter in group.params for name in parameter.opts)}
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            names |= option_names(command)
        else:
            names |= {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return names


def parse(words: list[str]) -> None:
    """Parse the arguments of kvsurgery without running the command.

    Raises:
        click.UsageError: a command or an option does not exist, or a value is not one that it takes.
    """
    command = cli
    while isinstance(command, click.Group):
        name = words[0]
        if (found := command.get_command(click.Context(command), name)) is None:
            raise click.UsageError(f"no such command: {name}")
        command, words = found, words[1:]
    command.make_context("", list(words))


def comparable(text: str) -> str:
    """Output without trailing spaces and empty lines, which pages leave out."""
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines() if line.strip())


def test_the_index_has_every_page() -> None:
    listed = set(links("docs/README.md"))
    assert {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")} - listed == {"README.md"}


@pytest.mark.parametrize("page", PAGES)
class TestPage:
    def test_links_lead_somewhere(self, page: str) -> None:
        for link in links(page):
            url = urlparse(link)
            if url.scheme:
                assert url.scheme == "https", link
                assert "." in url.netloc, link
                continue
            target = (ROOT / page).parent / url.path if url.path else ROOT / page
            assert target.exists(), link
            if url.fragment:
                assert url.fragment in anchors(target.resolve().relative_to(ROOT).as_posix()), link

    def test_blocks_are_marked(self, page: str) -> None:
        assert not blocks(page, ""), "a fenced block without a language: console, sh, text, python or pycon"

    def test_python_blocks_are_python(self, page: str) -> None:
        for block in blocks(page, "python"):
            ast.parse(block)

    def test_commands_exist(self, page: str) -> None:
        for command in every_command(page):
            check(command)

    def test_options_in_sentences_exist(self, page: str) -> None:
        known = option_names(cli) | OF_OTHERS
        for code in inline_code(page):
            if code.split()[0] not in ("python", "torchrun", "pip", "make", "git"):
                assert set(re.findall(r"(?<!\S)--[\w-]+", code)) <= known, code


def check(command: Command) -> None:
    """A command of kvsurgery parses; scripts, their options, extras and make targets exist."""
    if (words := command.kvsurgery) is not None:
        if words:
            try:
                parse(words)
            except click.UsageError as error:
                pytest.fail(f"{command.line}: {error.format_message()}")
        return
    program, *words = command.words
    if program in ("python", "torchrun") and (paths := [word for word in words if word.endswith(".py")]):
        path = paths[0]
        text = (ROOT / path).read_text()
        if "import comparison" in text:  # whose command line it is
            text += (ROOT / "benchmarks" / "comparison.py").read_text()
        for option in (word for word in words[words.index(path) :] if word.startswith("--")):
            assert f'"{option}"' in text, command.line
    elif program == "pip":
        for extras in re.findall(r"(?:kvsurgery|\.)\[([\w,]+)\]", command.line):
            assert set(extras.split(",")) <= EXTRAS.keys(), command.line
    elif program == "make":
        assert {word for word in words if "=" not in word} <= set(TARGETS), command.line


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNING)
def test_a_page_prints_what_it_shows(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its console blocks, in one folder that has the examples; `...` stands for any text. `pip install` is left out."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for command in (command for block in blocks(page, "console") for command in session(block)):
        if (words := command.kvsurgery) is not None:
            printed = done(*words).out
        elif command.words[0] == "python":
            run = [sys.executable, *command.words[1:]]
            printed = subprocess.run(run, check=True, capture_output=True, text=True).stdout
        else:
            assert command.words[:2] == ["pip", "install"], f"{command.line} cannot run here: use a sh block"
            continue
        if command.output:
            compare(command, printed)


@pytest.mark.parametrize("page", INTERACTIVE)
def test_python_prints_what_a_page_shows(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pycon blocks, one after another in a folder that has the examples."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    assert not differences(page, "".join(blocks(page, "pycon")))


def differences(page: str, session: str) -> str:
    """Where a Python session prints something else than it shows; empty if it does not."""
    found: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=SHOWN).run(
        doctest.DocTestParser().get_doctest(session, {}, page, page, 0), out=found.append
    )
    return "".join(found)


def compare(command: Command, printed: str) -> None:
    """Fail with a diff where a command has not printed what its page shows."""
    example = doctest.Example(command.line, comparable(command.output))
    checker = doctest.OutputChecker()
    if not checker.check_output(example.want, comparable(printed), SHOWN):
        pytest.fail(f"$ {command.line}\n{checker.output_difference(example, comparable(printed), SHOWN)}")


class TestTheTestItself:
    def test_figures_are_told_from_names(self) -> None:
        assert numbers("v3.2, 4-bit: 1,024 tokens, 9.5% (+0 [-3, 12])") == {"4", "1,024", "9.5%", "0", "-3", "12"}

    def test_a_wrong_option_is_found(self) -> None:
        with pytest.raises(pytest.fail.Exception, match="--nope"):
            check(Command("kvsurgery convert ./llama3 --nope"))

    def test_a_wrong_value_is_found(self) -> None:
        with pytest.raises(pytest.fail.Exception, match="'5'"):
            check(Command("kvsurgery convert ./llama3 --profile p.safetensors --out o --kv-bits 5"))

    def test_torchrun_is_parsed(self) -> None:
        with pytest.raises(pytest.fail.Exception, match="no such command"):
            check(Command("torchrun --nproc-per-node 2 -m kvsurgery evaluate ./llama3"))

    def test_other_output_is_found(self) -> None:
        compare(Command("inspect", "family llama\n...\nend"), "family llama  \n\nfour\nheads\nend")
        with pytest.raises(pytest.fail.Exception, match="family"):
            compare(Command("inspect", "family llama"), "family qwen")

    def test_other_output_of_python_is_found(self) -> None:
        assert differences("a page", ">>> 2 + 2\n4\n") == ""
        assert "+ 4" in differences("a page", ">>> 2 + 2\n5\n")

    def test_scripts_have_a_command_on_every_line(self) -> None:
        [first, second] = script("kvsurgery fit \\\n  --json # comment\nmake demo\n")
        assert first.kvsurgery == ["fit", "--json"]
        assert second.kvsurgery is None
