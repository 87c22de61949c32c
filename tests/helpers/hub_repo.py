"""Repositories of the loopback Hub: files, commits, refs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Blob:
    """One file of one commit; an LFS file's identity is the SHA-256 that was committed, whatever is stored under it."""

    content: bytes
    lfs: str | None = None

    @property
    def git_oid(self) -> str:
        data = self.content
        if self.lfs:
            data = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.lfs}\nsize {len(data)}\n".encode()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def entry(self, path: str) -> dict:
        """A file as the listings show it; an LFS file's checksum is that of the stored bytes."""
        result = {"type": "file", "path": path, "size": len(self.content), "oid": self.git_oid}
        if self.lfs:
            result["lfs"] = {
                "oid": hashlib.sha256(self.content).hexdigest(),
                "size": len(self.content),
                "pointerSize": 134,
            }
        return result


@dataclass
class Repo:
    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, Blob], ref: str) -> str:
        listing = "".join(f"{path}\0{blob.git_oid}\n" for path, blob in sorted(files.items()))
        sha = hashlib.sha1(f"{len(self.commits)} {self.refs.get(ref)}\n{listing}".encode()).hexdigest()
        self.commits[sha] = files
        self.refs[ref] = sha
        return sha

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """What a user sees at a revision."""
        return {path: blob.content for path, blob in self.commits[self.refs.get(revision, revision)].items()}


def is_lfs(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf", ".model"))
