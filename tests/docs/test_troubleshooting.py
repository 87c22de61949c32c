"""Messages that the page on troubleshooting explains are messages that the emitted code has."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^(?:\| )?`([a-z][^`]{24,})`", PAGE, re.MULTILINE)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_in_the_emitted_code(message: str) -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "templates").glob("*.py"))
    assert message in re.sub(r'"\s*\n\s*f?"', "", code)


def test_messages_are_found() -> None:
    assert len(MESSAGES) >= 6
