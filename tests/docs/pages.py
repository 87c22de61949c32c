"""The pages that users read, taken apart: links, headings, and the commands in their blocks.

The language of a fenced block decides what happens to its commands: those of `console` and `pycon` blocks run, page by
page in a folder of their own, and print what the page shows; those of `sh`, `text` and `python` blocks are only parsed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)


@dataclass(frozen=True)
class Command:
    """A command line of a page, and the output that the page shows below it ("" for none)."""

    line: str
    output: str = ""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)

    @property
    def kvsurgery(self) -> list[str] | None:
        """The arguments of kvsurgery, also where torchrun or python starts it; None for another program."""
        words = self.words
        if words[:1] == ["kvsurgery"]:
            return words[1:]
        if words[:1] in (["torchrun"], ["python"]) and "kvsurgery" in words:
            place = words.index("kvsurgery")
            return words[place + 1 :] if words[place - 1] == "-m" else None
        return None


@cache
def tokens(page: str) -> list[Token]:
    """The page as a flat list of Markdown tokens, those inside of paragraphs included."""
    blocks = MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text())
    return [part for block in blocks for part in (block, *(block.children or ()))]


def links(page: str) -> Iterator[str]:
    """Targets of links and images, also of those in HTML."""
    for token in tokens(page):
        if target := token.attrGet("href") or token.attrGet("src"):
            yield unquote(target)
        if token.type in ("html_block", "html_inline"):
            yield from re.findall(r'(?:href|src|srcset)="([^"]+)"', token.content)


def anchors(page: str) -> set[str]:
    """What a link to a heading of the page may have after #, as GitHub makes it."""
    titles = (after.content for token, after in pairwise(tokens(page)) if token.type == "heading_open")
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def blocks(page: str, *languages: str) -> list[str]:
    """The contents of the fenced blocks in these languages."""
    return [token.content for token in tokens(page) if token.type == "fence" and token.info in languages]


def inline_code(page: str) -> list[str]:
    """The texts between backticks in sentences and tables."""
    return [token.content for token in tokens(page) if token.type == "code_inline"]


def numbers(text: str) -> set[str]:
    """The figures of a text, percent signs included; those within names, such as v3.2, are none."""
    return set(re.findall(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?%?", text))


def figures(page: str, topic: str) -> set[str]:
    """The figures of the paragraphs and list items of a page that name a topic, however they are worded."""
    texts = [" ".join(token.content.split()) for token in tokens(page) if token.type == "inline"]
    found = [text for text in texts if topic in text]
    assert found, f"{page} does not name {topic}"
    return set().union(*map(numbers, found))


def session(block: str) -> list[Command]:
    """The commands of a block in which a line that begins with $ is a command, and other lines are its output."""
    lines = block.replace("\\\n", " ").splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    between = pairwise([*starts, len(lines)])
    return [Command(lines[start][2:], "\n".join(lines[start + 1 : end])) for start, end in between]


def script(block: str) -> list[Command]:
    """The commands of a block that has one on every line."""
    return [Command(line) for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def every_command(page: str) -> list[Command]:
    """All commands of a page: in blocks, and in sentences where they are written out."""
    in_sessions = [command for block in blocks(page, "console", "text") for command in session(block)]
    in_scripts = [command for block in blocks(page, "sh") for command in script(block)]
    in_sentences = [Command(code) for code in inline_code(page) if re.match(r"(python|pip install|make) \S", code)]
    return in_sessions + in_scripts + in_sentences
