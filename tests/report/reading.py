"""A page as a program reads it: its elements, and the text of its tables."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

VOID = ("meta", "wbr", "br", "img", "link")


class Page(HTMLParser):
    """An HTML page.

    Attributes:
        elements: every start tag with its attributes.
        text: of everything but style sheets.
        tables: by caption, rows of cells' texts.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text, self._open, self._caption = "", [], ""
        self.feed(path.read_text(encoding="utf-8"))
        assert not self._open, self._open

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "caption":
            self._caption = ""
        elif tag == "tr":
            self.tables.setdefault(self._caption, []).append([])
        elif tag in ("td", "th"):
            self.tables[self._caption][-1].append("")
        elif tag == "small" and "tr" in self._open:
            self.handle_data(" ")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" in self._open:
            return
        self.text += data
        if "caption" in self._open:
            self._caption += data
        elif "td" in self._open or "th" in self._open:
            self.tables[self._caption][-1][-1] += data

    def table(self, caption: str) -> list[list[str]]:
        """Rows of the table whose caption begins so, with single spaces."""
        [rows] = [rows for name, rows in self.tables.items() if name.startswith(caption)]
        return [[" ".join(cell.split()) for cell in row] for row in rows]

    def values(self, attribute: str) -> list[str]:
        """Of every element that has the attribute."""
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]

    @property
    def tags(self) -> set[str]:
        """Of all elements."""
        return {tag for tag, _ in self.elements}


def numbers(text: str) -> list[str]:
    """The numbers of a sentence, in order, with their percent signs."""
    return re.findall(r"\d+(?:[.,]\d+)*%?", text)
