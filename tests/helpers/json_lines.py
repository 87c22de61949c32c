"""Files of JSON lines, as benchmarks are published."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write a file with one object on each line, and give its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
