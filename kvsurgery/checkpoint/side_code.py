"""Code of a checkpoint's tokenizer or processor, which `auto_map` in their configs names.

A reference is `module.Class`, with a file in the folder, or `owner/repo--module.Class`, with a file that transformers
downloads from another repository whenever the tokenizer is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kvsurgery.checkpoint.headers import check_regular, reading
from kvsurgery.checkpoint.source import CONFIG
from kvsurgery.errors import CheckpointError, short

SIDE_CONFIGS = (
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
    "feature_extractor_config.json",
)
# auto classes whose code is not that of the model; config.json may name it too
SIDE_CLASSES = ("AutoTokenizer", "AutoProcessor", "AutoImageProcessor", "AutoVideoProcessor", "AutoFeatureExtractor")
MAX_CODE_BYTES = 4 << 20
# relative imports, as transformers finds them
RELATIVE_IMPORT = re.compile(r"^\s*(?:import\s+\.(\S+)\s*$|from\s+\.(\S+)\s+import)", re.MULTILINE)


@dataclass(frozen=True)
class SideCode:
    """The code of a tokenizer or a processor.

    Attributes:
        files: by name, the bytes of the files in the folder, with those that they import.
        remote: references into other repositories.
    """

    files: dict[str, bytes]
    remote: tuple[str, ...]

    @classmethod
    def of(cls, folder: Path) -> SideCode:
        """The code that the configs of a folder name.

        Raises:
            CheckpointError: a name leads out of the folder or to a missing file, or a config is malformed.
        """
        files: dict[str, bytes] = {}
        remote: list[str] = []
        for config, reference in references(folder):
            repo, separator, name = reference.rpartition("--")
            if separator:
                remote.append(f"{repo}--{name}")
                continue
            module, dot, _ = name.partition(".")
            if not dot:
                raise CheckpointError(f"{folder / config} names code as {short(reference)}; it should be module.Class")
            _add(files, folder, f"{module}.py", f"{config} names it as code")
        return cls(files, tuple(dict.fromkeys(remote)))


def side_references(config: dict[str, Any]) -> dict[str, Any]:
    """The entries of `auto_map` in config.json for a tokenizer or a processor."""
    auto_map = config.get("auto_map")
    return {name: auto_map[name] for name in SIDE_CLASSES if name in auto_map} if isinstance(auto_map, dict) else {}


def references(folder: Path) -> Iterator[tuple[str, str]]:
    """All code references of a folder's tokenizer and processor, each with the name of its config.

    Raises:
        CheckpointError: a config is malformed.
    """
    for config in (CONFIG, *SIDE_CONFIGS):
        path = folder / config
        if not path.exists():
            continue
        check_regular(path)
        try:
            with reading(path):
                content = json.loads(path.read_bytes())
            maps = [side_references(content)] if config == CONFIG else [*_auto_maps(content)]
        except (ValueError, RecursionError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{path} is not JSON: {error}") from error
        for item in _flat(maps):
            if not isinstance(item, str):
                raise CheckpointError(f"{path} names code as {short(item)}; it should be module.Class")
            yield config, item


def _auto_maps(content: Any) -> Iterator[Any]:
    """Every `auto_map` in a config and in the configs inside it."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        if key == "auto_map":
            yield value
        elif isinstance(value, dict | list):
            yield from _auto_maps(value)


def _flat(value: Any) -> Iterator[Any]:
    """Flatten lists and dicts; null stands for a missing slow or fast tokenizer."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _flat(item)
    elif value is not None:
        yield value


def _add(files: dict[str, bytes], folder: Path, name: str, reason: str) -> None:
    """Add a file of the folder and the files that it imports."""
    if name in files:
        return
    path = folder / name
    if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute() or "\\" in name or "\0" in name:
        raise CheckpointError(f"{folder}: {short(name)} leads out of the folder, and {reason}; remove it")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, and {reason}; fetch it again, or remove the name")
    if path.stat().st_size > MAX_CODE_BYTES:
        raise CheckpointError(f"{path} is too large to be code, and {reason}; remove the name")
    with reading(path):
        files[name] = path.read_bytes()
    parent = PurePosixPath(name).parent
    for match in RELATIVE_IMPORT.finditer(files[name].decode(errors="replace")):
        module = match[1] or match[2]
        # a further dot in front is the folder above
        steps = len(module) - len(module.lstrip("."))
        parts = module.strip(".").split(".")
        place = parent.joinpath(*[".."] * steps, *parts)
        _add(files, folder, f"{place}.py", f"{name} imports it")
