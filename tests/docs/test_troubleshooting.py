"""Messages that the page on troubleshooting explains are messages that the code has, the emitted code or the tool's."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^(?:\| )?`([a-z][^`]{24,})`", PAGE, re.MULTILINE)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_in_the_code(message: str) -> None:
    """Dots stand for what the code fills in."""
    paths = [*(ROOT / "templates").glob("*.py"), *(ROOT / "kvsurgery").glob("*/**/*.py")]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in paths))
    pattern = r"[^\n]{1,80}".join(re.escape(part) for part in message.split("..."))
    assert re.search(pattern, code)


def test_messages_are_found() -> None:
    assert len(MESSAGES) >= 6
