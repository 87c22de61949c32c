"""A Hub on the loopback: the calls of huggingface_hub that download, upload and list, in memory, with faults on demand.

It follows the Hub's own contract: LFS objects are refused unless their bytes have the announced SHA-256, a commit is
atomic and moves one ref, and every revision stays readable. Xet is not offered, so clients fall back to LFS.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.helpers.hub_handler import TOKEN, Fault, Handler
from tests.helpers.hub_repo import Blob, Repo, is_lfs

# processes of commands are forked from one that has imported this; huggingface_hub reads its environment when imported
PROCESSES = multiprocessing.get_context("forkserver")
PRELOADED = "kvsurgery.cli.convert", "httpx", "httpx2", "numpy", "jinja2", "rich.progress", "tests.helpers.hub_server"
PROCESSES.set_forkserver_preload([*PRELOADED, "kvsurgery.conversion.convert", "kvsurgery.conversion.prepared"])


def command(arguments: list[str], environment: dict[str, str], outputs: list[str]) -> None:
    """Run `kvsurgery` in this process, without pauses between retries."""
    if "huggingface_hub" in sys.modules:  # other tests have started the process that is forked, with what they need
        call = f"from {__name__} import command; command({arguments!r}, {environment!r}, {outputs!r})"
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        os.execv(sys.executable, [sys.executable, "-c", call])
    for descriptor, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    from kvsurgery.cli import main
    from kvsurgery.hub import ranges

    time.sleep = lambda seconds: None
    ranges.LONGEST_WAIT = 0
    sys.argv = ["kvsurgery", *arguments]
    main()


class Hub(ThreadingHTTPServer):
    """The server and everything it stores and has seen.

    Attributes:
        cdn: whether LFS files lie elsewhere, where a signed URL leads, as they do on the Hub.
        before: called once before a request, by "METHOD path".
        requests: "METHOD path" of every request, in order.
        ranges: path, first and last byte of every range that was asked for, in order.
        received: SHA-256 of every LFS object that was sent whole, in order.
        served: bytes of bodies sent per path.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.cdn = False
        self.before: dict[str, Callable[[], None]] = {}
        self.requests: list[str] = []
        self.ranges: list[tuple[str, int, int]] = []
        self.received: list[str] = []
        self.served: dict[str, int] = {}
        self.lock = threading.RLock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are part of the tests."""

    def client_environment(self, home: Path) -> dict[str, str]:
        """Environment of a process that takes this server for the Hub, and keeps its cache in `home`."""
        keep = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}
        return keep | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home / "hf"),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            # seconds that a busy machine may take to answer
            "HF_HUB_DOWNLOAD_TIMEOUT": "300",
            "HF_HUB_ETAG_TIMEOUT": "300",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }

    def run(self, home: Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `kvsurgery` as a user of this Hub does, but without pauses between retries."""
        typed = [*map(str, arguments)]
        with TemporaryDirectory() as folder:
            outputs = [Path(folder, name) for name in ("out", "err")]
            options = {**self.client_environment(home), **environment}
            process = PROCESSES.Process(target=command, args=(typed, options, [*map(str, outputs)]))
            process.start()
            process.join()
            out, err = (path.read_text() for path in outputs)
        return subprocess.CompletedProcess(typed, process.exitcode, out, err)

    def create(self, repo_id: str, private: bool = False) -> Repo:
        """A repository with the one commit that the Hub makes."""
        repo = self.repos[repo_id] = Repo(private)
        repo.commit({".gitattributes": Blob(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")}, "main")
        return repo

    def publish(self, repo_id: str, folder: Path) -> Repo:
        """A repository with a folder's files on main, weights in LFS."""
        repo = self.create(repo_id)
        files = dict(repo.commits[repo.refs["main"]])
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            content = path.read_bytes()
            lfs = hashlib.sha256(content).hexdigest() if is_lfs(path.name) else None
            files[path.relative_to(folder).as_posix()] = Blob(content, lfs)
        repo.commit(files, "main")
        return repo


@contextmanager
def serve() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
