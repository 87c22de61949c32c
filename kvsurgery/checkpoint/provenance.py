"""`kvsurgery.json`: the origin of a converted checkpoint, and everything needed to verify and revert it.

It has no timestamps and no paths, so the same input gives the same bytes. A checksum over the whole file detects
accidental changes that no other hash covers: in the original side files, and in the lists of tensors and files.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvsurgery.checkpoint.files import reading
from kvsurgery.checkpoint.journal import JOURNAL, PART, check_finished
from kvsurgery.errors import CheckpointError
from kvsurgery.system.repo_id import did_you_mean

PROVENANCE = "kvsurgery.json"
FORMAT = "kvsurgery.provenance"
VERSION = 1
MAX_BYTES = 1 << 30
# people edit cards and add pictures; such a change is not damage
EDITABLE = (".gif", ".jpeg", ".jpg", ".md", ".png", ".svg", ".webp")
HASH = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Provenance:
    """Provenance of a converted checkpoint. Hashes are BLAKE3, in hexadecimal.

    Attributes:
        tool: version of this tool.
        source, revision: the original: Hub id or folder name, and commit if known.
        family: its model family.
        permutation: per layer, the source KV head at each place.
        profile: hash of the head profile; None without one.
        policy: hash of the policy.
        options: the options that decided the policy.
        headers: by shard, hash of its header.
        tensors: by tensor, hash of the source's bytes.
        emitted: by emitted file, its hash; None for a file that people may edit.
        copied: by copied file, including the index, its hash; before version 0.2, None for a file that people may edit.
        originals: by replaced or omitted file, the source's bytes.
        left_out: files that `revert` does not restore, such as weights in other formats; folders end with a slash.
    """

    tool: str
    source: str
    revision: str | None
    family: str
    permutation: tuple[tuple[int, ...], ...]
    profile: str | None
    policy: str
    options: Mapping[str, Any]
    headers: Mapping[str, str]
    tensors: Mapping[str, str]
    emitted: Mapping[str, str | None]
    copied: Mapping[str, str | None]
    originals: Mapping[str, bytes]
    left_out: tuple[str, ...]

    def serialize(self) -> bytes:
        """The file's bytes; equal provenance gives equal bytes."""
        originals = {name: base64.b64encode(content).decode() for name, content in self.originals.items()}
        content = {"format": FORMAT, "version": VERSION, **vars(self), "originals": originals}
        content["checksum"] = blake3(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def read(cls, folder: Path) -> Provenance:
        """The provenance of a converted checkpoint.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        path = folder / PROVENANCE
        if not os.path.isdir(folder):
            raise CheckpointError(f"{folder} is not a folder{did_you_mean(folder)}")
        if not path.exists():
            check_finished(folder)
            raise CheckpointError(
                f"{folder} has no {PROVENANCE}: it was not converted by kvsurgery, or save_pretrained wrote it again, "
                "so it cannot be reverted"
            )
        try:
            if not path.is_file() or path.stat().st_size > MAX_BYTES:
                raise ValueError(f"it is not a file of at most {MAX_BYTES} bytes")
            with reading(path):
                raw = path.read_bytes()
            return cls.parse(raw)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error

    @classmethod
    def parse(cls, raw: bytes) -> Provenance:
        """Read and check the file's bytes.

        Raises:
            ValueError: the file is malformed; the message says how.
        """
        content = json.loads(raw)
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        version = content.pop("version", None)
        checksum = content.pop("checksum", None)
        if version != VERSION:
            raise ValueError(f"its version is {version}; this tool reads {VERSION}")
        if content.keys() != cls.__dataclass_fields__.keys():
            raise ValueError("it does not have the fields of its version")
        _check(content)
        content["permutation"] = tuple(tuple(order) for order in content["permutation"])
        content["left_out"] = tuple(content["left_out"])
        content["originals"] = {name: _decode(name, text) for name, text in content["originals"].items()}
        result = cls(**content)
        if checksum != json.loads(result.serialize())["checksum"]:
            raise ValueError("its checksum is wrong, so it was changed after the conversion")
        return result


def is_editable(name: str) -> bool:
    """Whether people may edit or remove a file, such as the model card or a picture, without damage."""
    return name.lower().endswith(EDITABLE)


def _check(content: dict[str, Any]) -> None:
    for field in ("tool", "source", "family"):
        _require(isinstance(content[field], str), field)
    _require(isinstance(content["revision"], str | None), "revision")
    _require(_is_hash(content["policy"]), "policy")
    _require(content["profile"] is None or _is_hash(content["profile"]), "profile")
    _require(isinstance(content["options"], dict), "options")
    orders = content["permutation"]
    _require(isinstance(orders, list) and all(_is_order(order) for order in orders), "permutation")
    for field, optional in (("headers", False), ("tensors", False), ("emitted", True), ("copied", True)):
        table = content[field]
        _require(isinstance(table, dict), field)
        _require(all(_is_hash(value) or (optional and value is None) for value in table.values()), field)
    _require(isinstance(content["originals"], dict), "originals")
    left_out = content["left_out"]
    _require(isinstance(left_out, list) and all(isinstance(name, str) for name in left_out), "left_out")
    for field in ("headers", "emitted", "copied", "originals"):
        for name in content[field]:
            _require(_is_safe(name), f"file name {name!r}")
    restored_files = [*content["headers"], *content["copied"], *content["originals"]]
    _require(len(restored_files) == len(set(restored_files)), "list of files")
    _require(bool({"config.json", "adapter_config.json"} & content["originals"].keys()), "originals")


def _require(condition: bool, subject: str) -> None:
    if not condition:
        raise ValueError(f"bad {subject}")


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and HASH.fullmatch(value) is not None


def _is_order(order: Any) -> bool:
    return isinstance(order, list) and all(type(head) is int for head in order)


def _is_safe(name: str) -> bool:
    """Whether a name stays inside its folder and is not one of a run in progress."""
    parts = name.split("/")
    return (
        all(part not in ("", ".", "..") for part in parts)
        and "\0" not in name
        and not name.endswith(PART)
        and parts[0] not in (JOURNAL, PROVENANCE)
    )


def _decode(name: str, text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise ValueError(f"bad bytes of {name}: {error}") from error
