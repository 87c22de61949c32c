"""Stream checkpoints from the Hub: convert while downloading, with disk space for a single copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from huggingface_hub import constants, hf_hub_download

from kvsurgery.checkpoint.headers import Read, Shard
from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.errors import HubError
from kvsurgery.hub.download import RemoteCheckpoint, headers
from kvsurgery.hub.errors import explained
from kvsurgery.hub.ranges import RemoteFile


@dataclass(frozen=True)
class RemoteShard(Shard):
    """A remote shard with a fetched header; its tensors are fetched when they are read."""

    file: RemoteFile

    # at 64 MiB a request costs next to nothing, and a small model still has work for all connections
    read_at_once: ClassVar[int] = 64 << 20
    slow: ClassVar[bool] = True

    @property
    def state(self) -> tuple[int | str | None, ...]:
        return self.file.size, self.file.etag

    def check_unchanged(self) -> None:
        """Do nothing: every response is checked to belong to the commit."""

    def changed_after(self, moment: int) -> bool:
        """False: a commit does not change."""
        return False

    def stop(self) -> None:
        self.file.stopped.set()

    @contextmanager
    def open(self, start: int, end: int) -> Generator[Read]:
        """Request the bytes from `start` to `end`, which must be read in order.

        Raises:
            HubError: they cannot be downloaded; the line says why and what to do.
        """
        left, position = memoryview(b""), start

        def read(buffer: memoryview, offset: int) -> None:
            nonlocal left, position
            if offset != position:
                raise ValueError(f"{self.name} is read in order, and {offset} is not {position}")
            while buffer:
                if not left:
                    with explained(self.file.repo_id, self.file.commit):
                        left = memoryview(next(chunks))
                count = min(len(buffer), len(left))
                buffer[:count] = left[:count]
                buffer, left, position = buffer[count:], left[count:], position + count

        with closing(self.file.chunks(start, end)) as chunks:
            yield read


@dataclass(frozen=True)
class Streamed:
    """A checkpoint on the Hub, complete except for its weights.

    Attributes:
        folder: all files that conversion uses; each shard has its header, then a hole.
        commit: its commit.
        connections: the best number of connections.
    """

    folder: Path
    commit: str
    _files: tuple[RemoteFile, ...]

    # as many as huggingface_hub has
    connections: ClassVar[int] = 8

    @property
    def fetched(self) -> int:
        """Bytes of shards fetched so far, including headers."""
        return sum(file.fetched for file in self._files)

    @property
    def requests(self) -> int:
        """Number of requests so far."""
        return sum(file.requests for file in self._files)

    def fill(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint of the folder, with shards that fetch their tensors in place of holes."""
        files = {file.name: file for file in self._files}
        shards = tuple(RemoteShard(**vars(shard), file=files[shard.name]) for shard in checkpoint.shards)
        return replace(checkpoint, shards=shards)


@contextmanager
def stream_checkpoint(repo_id: str, revision: str | None, check: Callable[[Path], object]) -> Generator[Streamed]:
    """Fetch a checkpoint whose weights are downloaded when they are read; the folder is removed afterwards.

    Every response must belong to the commit, with the size and the checksum of the first response for its file. The
    bytes are not compared with the checksum, because no connection sees a whole file; compare the files that `revert`
    restores instead.

    Args:
        repo_id, revision, check: as in `fetch_checkpoint`.

    Raises:
        HubError: it cannot be downloaded; the line says why and what to do.
    """
    if constants.HF_HUB_OFFLINE:
        raise HubError(
            f"{repo_id} cannot be streamed while HF_HUB_OFFLINE is set: unset it, or convert without streaming"
        )
    with headers(repo_id, revision) as remote:
        check(remote.folder)
        with explained(repo_id, revision):
            _complete(repo_id, remote)
        yield Streamed(remote.folder, remote.commit, tuple(remote.shards.values()))


def _complete(repo_id: str, remote: RemoteCheckpoint) -> None:
    """Add all files of `fetch_checkpoint` except for the weights to a folder of headers."""
    needed_files, folder = remote.needed_files, remote.folder.resolve()
    for path in folder.iterdir():
        if path.name not in needed_files:
            path.unlink()
    for name in needed_files:
        target = folder / name
        if not target.resolve().is_relative_to(folder):
            raise HubError(f"{repo_id} has a file {name!r}, which does not belong in a model's folder")
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(hf_hub_download(repo_id, name, revision=remote.commit), target)
