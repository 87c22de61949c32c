"""Distinguish folders, Hub ids and files on the Hub, without importing huggingface_hub."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import unquote

from kvsurgery.errors import CheckpointError, HubError

HOSTS = ("huggingface.co", "hf.co")
GGUF = "GGUF file for llama.cpp; give the model in safetensors that it was made from, its folder or Hub id"
NAME = r"\w[\w.-]*"


def is_repo_name(text: str) -> bool:
    """Whether a Hub repository can have this name: `name` or `owner/name`."""
    return re.fullmatch(rf"{NAME}(/{NAME})?", text) is not None


def is_repo_id(source: str) -> bool:
    """Whether a source that is not a local folder can be a Hub repository; a local file cannot."""
    return is_repo_name(source) and not os.path.isfile(source)


def checkpoint_folder(source: str | Path) -> Path | None:
    """The folder of a checkpoint, or None if the source is a Hub id.

    Raises:
        CheckpointError: the source is neither.
    """
    if source == "":  # which `Path` takes for the working directory
        raise CheckpointError("the name of the checkpoint is empty; give a folder or a Hub id")
    folder = Path(source)
    if os.path.isdir(folder):  # unlike Path.is_dir, it answers for names that are too long
        return folder
    if folder.suffix.lower() == ".gguf" and os.path.exists(folder):
        raise CheckpointError(f"{source} is a {GGUF}")
    if os.path.exists(folder):
        raise CheckpointError(f"{source} is a file; give the folder of the checkpoint, {folder.parent}")
    if not is_repo_name(str(source)):
        raise CheckpointError(f"{source} is neither a folder nor a Hub id{did_you_mean(source)}")
    return None


def did_you_mean(folder: str | Path) -> str:
    """The end of an error about a missing folder: the folder with the most similar path, if any."""
    path = Path(folder)
    similar_path = Path(path.anchor)
    for part in path.parts[bool(path.anchor) :]:
        if not os.path.isdir(similar_path / part):
            try:
                names = {entry.name.lower(): entry.name for entry in os.scandir(similar_path) if entry.is_dir()}
            except OSError:
                return ""
            similar_names = get_close_matches(part.lower(), names, n=1, cutoff=0.7)
            if not similar_names:
                return ""
            part = names[similar_names[0]]
        similar_path /= part
    return f"; did you mean {shlex.quote(str(similar_path))}?"


def cached_origin(folder: Path) -> tuple[str, str] | None:
    """The Hub id and the commit of a folder in a cache of the Hub; None for other folders.

    A folder inside of the repository follows the id: `owner/name/folder`.
    """
    for path in (Path(os.path.abspath(folder)), folder.resolve()):
        match = re.search(rf"/models--({NAME}?)(?:--({NAME}))?/snapshots/([0-9a-f]{{40}})(/.+)?$", path.as_posix())
        if match:
            return "/".join(filter(None, match.groups()[:2])) + (match[4] or ""), match[3]
    return None


def is_address(source: str) -> bool:
    """Whether a source is an address (hf:// or a URL) and not a path."""
    return re.match(r"(hf|https?)://", source) is not None


@dataclass(frozen=True)
class HubFile:
    """A file of a model repository on the Hub; `revision` is a branch, tag or commit, None the default branch."""

    repo_id: str
    path: str
    revision: str | None = None

    @classmethod
    def parse(cls, source: str) -> HubFile | None:
        """Parse `hf://owner/repo/path[@revision]`, or the URL of a page or a download; None for a local path.

        Raises:
            HubError: it is another URL, or does not name a file of a model repository.
        """
        if not is_address(source):
            return None
        if source.startswith("hf:"):
            match = re.fullmatch(rf"hf://({NAME}/{NAME})(?:@([^/@]+))?/([^@]+?)/*(?:@([^@]+))?", source)
            if not match or match[1].startswith(("datasets/", "spaces/")) or (match[2] and match[4]):
                raise HubError(f"{source} is not a file of a model repository: write hf://owner/repo/path[@revision]")
            return cls(match[1], match[3], match[2] or match[4])
        host, _, path = re.sub(r"[?#].*", "", source).partition("://")[2].partition("/")
        if host not in (*HOSTS, os.environ.get("HF_ENDPOINT", "").partition("://")[2].strip("/") or HOSTS[0]):
            raise HubError(f"only files of the Hub are fetched: download {source} first, and give the local file")
        match = re.fullmatch(rf"({NAME}/{NAME})/(?:resolve|blob|raw|tree)/([^/]+)/(.+?)/*", path)
        if not match or match[1].startswith(("datasets/", "spaces/")):
            raise HubError(
                f"{source} is not a file of a model repository: give its page, "
                f"https://{host}/owner/repo/blob/revision/path"
            )
        return cls(match[1], unquote(match[3]), unquote(match[2]))

    @property
    def address(self) -> str:
        """The address that `parse` accepts."""
        return f"hf://{self.repo_id}/{self.path}" + (f"@{self.revision}" if self.revision else "")
