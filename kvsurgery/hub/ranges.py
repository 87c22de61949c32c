"""`RemoteFile`: read a file of one commit by HTTP ranges, resume broken connections, and refuse changed files.

Every request starts at the Hub's resolve URL. Its redirect to a CDN has a signature that expires soon, so URLs of the
CDN are never reused. Files in Xet storage are served through the same URL.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from kvsurgery.errors import HubError
from kvsurgery.hub.errors import in_transport

# requests in a row that bring no byte
RETRIES = 5
# seconds
LONGEST_WAIT = 300


class RemoteFile:
    """One file of a commit.

    Attributes:
        repo_id, commit, name: the file.
        size: in bytes, known after the first request.
        etag: the Hub's checksum of the content; None if it sends none.
        fetched, requests: the bytes of content received so far, and the number of requests.
        stopped: when set, nothing is retried.
    """

    def __init__(self, repo_id: str, commit: str, name: str) -> None:
        self.repo_id, self.commit, self.name = repo_id, commit, name
        self.size: int | None = None
        self.etag: str | None = None
        self.fetched = self.requests = 0
        self.stopped = threading.Event()
        self._lock = threading.Lock()

    def chunks(self, start: int, end: int) -> Generator[bytes]:
        """Read the bytes from `start` to `end`, or to the end of the file, in pieces.

        Raises:
            HubError: the file changed since the first request, or the server does not support ranges.
            Exception: any error of huggingface_hub that retrying does not solve.
        """
        failures = 0
        while start < self._last(end):
            try:
                with self._answer(start, end) as body:
                    for chunk in body:
                        self._count(fetched=len(chunk))
                        if start == end:
                            break  # more than was asked for
                        chunk = chunk[: end - start]
                        start, failures = start + len(chunk), 0
                        yield chunk
                if start < self._last(end):
                    raise _Broken(f"{self.name} ended {self._last(end) - start} bytes early")
            except _Empty:
                self.size = 0
            except Exception as error:
                failures += 1
                if failures > RETRIES or not _is_transient(error) or self.stopped.wait(wait(error, failures)):
                    raise

    def _last(self, end: int) -> int:
        """`end`, or the end of the file if that is known and comes first."""
        return end if self.size is None else min(end, self.size)

    @contextmanager
    def _answer(self, start: int, end: int) -> Generator[Iterator[bytes]]:
        """The body of one response, after its headers were checked."""
        url = hf_hub_url(self.repo_id, self.name, revision=self.commit)
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        options = {"headers": headers, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}
        self._count(requests=1)
        session: Any = get_session()  # of httpx, or of requests before huggingface_hub 1
        if callable(session.stream):
            with session.stream("GET", url, follow_redirects=True, **options) as response:
                self._check(response, start, end)
                yield response.iter_raw()
        else:
            with session.get(url, stream=True, **options) as response:
                self._check(response, start, end)
                # read, which urllib3 1 has alone, loses a piece that is not filled when the connection breaks
                read = getattr(response.raw, "read1", response.raw.read)
                yield iter(lambda: read(64 << 10), b"")

    def _check(self, response: Any, start: int, end: int) -> None:
        responses = [*response.history, response]
        status = response.status_code
        hosts = {urlsplit(str(reply.url)).netloc for reply in responses}
        if status in (400, 401, 403) and len(hosts) > 1:
            raise _Broken(f"the storage of {self.name} answers {status}")
        if status == 416 and self.size is None:
            raise _Empty
        if status in (404, 416) and self.size is not None:
            raise HubError(f"{self.repo_id}: {self.name} changed while it was read ({status}); convert again")
        hf_raise_for_status(response)
        if status != 206:
            raise HubError(f"{constants.ENDPOINT} ignores Range requests, so {self.name} cannot be read in parts")
        content_range = response.headers.get("Content-Range", "")
        range_match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", content_range)
        size = int(range_match[3]) if range_match else -1
        etag = _first_header(responses, "X-Linked-Etag") or _first_header(responses, "ETag")
        if self.size is None:
            self.size, self.etag = size, etag
        commit = _first_header(responses, "X-Repo-Commit")
        if (size, etag) != (self.size, self.etag) or commit not in (None, self.commit):
            raise HubError(f"{self.repo_id}: {self.name} changed while it was read; convert again")
        if range_match is None or (int(range_match[1]), int(range_match[2])) != (start, min(end, size) - 1):
            raise HubError(
                f"{constants.ENDPOINT} sends {content_range!r} of {self.name}, not bytes {start} to {end - 1}"
            )

    def _count(self, fetched: int = 0, requests: int = 0) -> None:
        with self._lock:
            self.fetched += fetched
            self.requests += requests


class _Broken(Exception):
    """A connection broke, or a signature expired, before the end."""


class _Empty(Exception):
    """The file is empty, so that no range exists."""


def _first_header(responses: list[Any], header: str) -> str | None:
    """A header of the first response that has it; the storage behind a redirect sends neither commit nor checksum."""
    return next(
        (response.headers[header].removeprefix("W/") for response in responses if header in response.headers), None
    )


def _is_transient(error: Exception) -> bool:
    """Whether a retry may succeed."""
    response = getattr(error, "response", None)
    if response is not None:
        return response.status_code in (408, 429) or response.status_code >= 500
    return isinstance(error, _Broken) or in_transport(error)


def wait(error: Exception, failures: int) -> int:
    """Seconds to wait before a retry: as the server asks for in a header, else with exponential backoff from one."""
    response, wait_match = getattr(error, "response", None), None
    if response is not None:
        wait_match = re.fullmatch(r"(\d+)", response.headers.get("Retry-After", ""))
        if response.status_code == 429:
            wait_match = wait_match or re.search(r";\s*t=(\d+)", response.headers.get("RateLimit", ""))
    return min(int(wait_match[1]) if wait_match else 2 ** (failures - 1), LONGEST_WAIT)
