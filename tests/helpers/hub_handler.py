"""The calls of the loopback Hub: what each request answers, by the Hub's contract."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

from tests.helpers.hub_repo import Blob, Repo, is_lfs

if TYPE_CHECKING:
    from tests.helpers.hub_server import Hub

TOKEN = "hf_loopback"
USER = "surgeon"


@dataclass
class Fault:
    """For requests whose "METHOD path" matches, `times` of them after the first `skip`.

    The answer is `status`, or the connection drops after `drop` bytes of the request's body; with `cut` the answer is
    right, but the connection ends, or with `reset` breaks, after so much of its body, once `then` was called; with
    `short` its length says so. `ignore` leaves the Range header out of account, `shift` the first byte it asks for.
    """

    pattern: str
    status: int = 500
    drop: int | None = None
    times: float = 1
    skip: int = 0
    cut: float | None = None
    reset: bool = False
    then: Callable[[], None] | None = None
    short: bool = False
    ignore: bool = False
    shift: bool = False

    def strikes(self, request: str) -> bool:
        """Whether this request is one of those, which counts it."""
        if not self.times or not re.search(self.pattern, request):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True


class Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str, code: str | None = None, **body: str) -> None:
        self.status, self.body = status, {"error": message, **body}
        self.headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}


class Dropped(Exception):
    """The connection is gone."""


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None: ...

    def answer_request(self) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        request = f"{self.command} {url.path}"
        try:
            with self.server.lock:
                self.server.requests.append(request)
                self.server.before.pop(request, lambda: None)()
                self.fault = fault = next((f for f in self.server.faults if f.strikes(request)), None)
            self.read_body(fault)
            if fault and fault.cut is None and not (fault.ignore or fault.shift):
                raise Refusal(fault.status, f"fault {fault.status}")
            for method, pattern, handle in ROUTES:
                if method == self.command.replace("HEAD", "GET") and (match := re.fullmatch(pattern, url.path)):
                    with self.server.lock:
                        answer = handle(self, *map(unquote, match.groups()))
                    if callable(answer):  # a body that may take its time, while others are served
                        answer()
                    elif answer is not None:
                        self.reply(200, json.dumps(answer).encode())
                    return
            raise Refusal(404, f"no route for {request}")
        except Refusal as refusal:
            self.reply(refusal.status, json.dumps(refusal.body).encode(), refusal.headers)
        except (Dropped, ConnectionError):
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = answer_request

    def read_body(self, fault: Fault | None) -> None:
        """Read the whole body, or part of it and reset the connection."""
        length = int(self.headers.get("Content-Length", 0))
        if fault and fault.drop is not None:
            self.rfile.read(min(fault.drop, length))
            self.reset()
        self.body = self.rfile.read(length)

    def reset(self) -> None:
        """Break the connection: linger 0 sends RST, as a lost link does, rather than an orderly end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        raise Dropped

    def reply(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        cut = self.fault is not None and self.fault.cut is not None
        sent = content[: int(self.fault.cut * len(content))] if cut else content
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(sent if cut and self.fault.short else content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        path = urlsplit(self.path).path
        with self.server.lock:
            self.server.served[path] = self.server.served.get(path, 0) + len(sent)
        self.wfile.write(sent)
        if cut and not self.fault.short:
            if self.fault.then:
                self.fault.then()
            if self.fault.reset:
                self.reset()
            raise Dropped

    @property
    def logged_in(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def need_login(self) -> None:
        if not self.logged_in:
            raise Refusal(401, "Invalid username or password.")

    def repo(self, repo_id: str) -> Repo:
        repo = self.server.repos.get(repo_id)
        if repo is None or (repo.private and not self.logged_in):
            # the Hub does not tell a stranger which names exist
            raise Refusal(404 if self.logged_in else 401, "Repository not found", "RepoNotFound")
        return repo

    def snapshot(self, repo: Repo, revision: str) -> tuple[str, dict[str, Blob]]:
        sha = repo.refs.get(revision, revision)
        if sha not in repo.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha, repo.commits[sha]

    def whoami(self) -> dict:
        self.need_login()
        return {"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": {"role": "write"}}}

    def create_repo(self) -> dict:
        self.need_login()
        asked = json.loads(self.body)
        repo_id = f"{asked.get('organization') or USER}/{asked['name']}"
        url = f"{self.server.url}/{repo_id}"
        if repo_id in self.server.repos:
            raise Refusal(409, "You already created this model repo", url=url)
        if not repo_id.startswith(f"{USER}/"):
            raise Refusal(403, "You don't have the rights to create a model under this namespace")
        # huggingface_hub 2 says visibility, 0.x says private
        self.server.create(repo_id, private=asked.get("private", False) or asked.get("visibility") == "private")
        return {"url": url, "name": repo_id}

    def model_info(self, repo_id: str, revision: str = "main") -> dict:
        repo = self.repo(repo_id)
        sha, files = self.snapshot(repo, revision)
        siblings = [{"rfilename": path} for path in sorted(files)]
        return {"id": repo_id, "sha": sha, "private": repo.private, "gated": repo.gated, "siblings": siblings}

    def preupload(self, repo_id: str, revision: str) -> dict:
        self.need_login()
        _, files = self.snapshot(self.repo(repo_id), revision)
        asked = json.loads(self.body)
        hosted = files[".gitignore"].content.decode() if ".gitignore" in files else ""
        ignored = asked.get("gitIgnore", hosted).split()
        answer = []
        for file in asked["files"]:
            path, blob = file["path"], files.get(file["path"])
            oid = blob and (blob.lfs or blob.git_oid)
            mode = "lfs" if is_lfs(path) else "regular"
            is_ignored = any(fnmatchcase(path, pattern) for pattern in ignored)
            answer.append({"path": path, "uploadMode": mode, "shouldIgnore": is_ignored, "oid": oid})
        return {"files": answer}

    def lfs_batch(self, repo_id: str) -> dict:
        self.need_login()
        self.repo(repo_id)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            oid = wanted["oid"]
            if oid not in self.server.objects:
                verify = {"href": f"{self.server.url}/lfs-verify"}
                wanted = {**wanted, "actions": {"upload": {"href": f"{self.server.url}/lfs/{oid}"}, "verify": verify}}
            objects.append(wanted)
        return {"transfer": "basic", "objects": objects}

    def lfs_put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refusal(400, "the content's SHA-256 is not the announced one")
        self.server.objects[oid] = self.body
        self.server.received.append(oid)
        self.reply(200)

    def lfs_verify(self) -> dict:
        asked = json.loads(self.body)
        if len(self.server.objects.get(asked["oid"], b"")) != asked["size"]:
            raise Refusal(404, "object not found")
        return {}

    def commit(self, repo_id: str, revision: str) -> dict:
        self.need_login()
        repo = self.repo(repo_id)
        files = dict(self.snapshot(repo, revision)[1])
        for line in self.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            match operation["key"]:
                case "header":
                    if value.get("parentCommit", repo.refs[revision]) != repo.refs[revision]:
                        raise Refusal(412, "A commit has happened since. Please refresh and try again.")
                case "file":
                    files[value["path"]] = Blob(base64.b64decode(value["content"]))
                case "lfsFile":
                    if value["oid"] not in self.server.objects:
                        raise Refusal(400, f"LFS pointer of {value['path']} points to a file that does not exist")
                    files[value["path"]] = Blob(self.server.objects[value["oid"]], lfs=value["oid"])
                case "deletedFile":
                    del files[value["path"]]
        number = 1 + sum(ref.startswith("refs/pr/") for ref in repo.refs)
        create_pr = "create_pr" in self.query
        sha = repo.commit(files, f"refs/pr/{number}" if create_pr else revision)
        url = f"{self.server.url}/{repo_id}"
        answer = {"success": True, "commitOid": sha, "commitUrl": f"{url}/commit/{sha}"}
        return answer | ({"pullRequestUrl": f"{url}/discussions/{number}"} if create_pr else {})

    def tree(self, repo_id: str, revision: str) -> list:
        _, files = self.snapshot(self.repo(repo_id), revision)
        return [blob.entry(path) for path, blob in sorted(files.items())]

    def resolve(self, repo_id: str, revision: str, path: str) -> Callable[[], None]:
        repo = self.repo(repo_id)
        if repo.gated and path != "README.md":
            raise Refusal(403, f"Access to model {repo_id} is restricted", "GatedRepo")
        sha, files = self.snapshot(repo, revision)
        if path not in files:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        blob = files[path]
        headers = {"ETag": f'"{blob.lfs or blob.git_oid}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if blob.lfs:
            headers |= {"X-Linked-Etag": f'"{blob.lfs}"', "X-Linked-Size": str(len(blob.content))}
        if blob.lfs and self.server.cdn:
            self.server.objects[blob.lfs] = blob.content
            # another host, as browsers and HTTP clients see it
            elsewhere = self.server.url.replace("127.0.0.1", "localhost")
            return partial(
                self.reply, 302, b"", {**headers, "Location": f"{elsewhere}/cdn/{repo_id}/{path}?oid={blob.lfs}"}
            )
        return self.content(blob.content, headers)

    def storage(self, path: str) -> Callable[[], None]:
        if "Authorization" in self.headers:
            raise Refusal(400, "Only one auth mechanism allowed")
        [oid] = self.query["oid"]
        return self.content(self.server.objects[oid], {"ETag": '"of the storage"'})

    def content(self, content: bytes, headers: dict[str, str]) -> Callable[[], None]:
        headers = {**headers, "Content-Type": "application/octet-stream"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted or (self.fault and self.fault.ignore):
            return partial(self.reply, 200, content, headers)
        start, stop = int(wanted[1]), min(int(wanted[2] or len(content)) + 1, len(content))
        if start >= len(content):
            raise Refusal(416, "Range Not Satisfiable")
        if self.fault and self.fault.shift:
            start += 1
        self.server.ranges.append((urlsplit(self.path).path, start, stop))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        return partial(self.reply, 206, content[start:stop], headers)


NAME = r"([\w.-]+/[\w.-]+)"

ROUTES: list[tuple[str, str, Callable]] = [
    ("GET", "/api/whoami-v2", Handler.whoami),
    ("POST", "/api/repos/create", Handler.create_repo),
    ("POST", "/api/validate-yaml", lambda self: {"errors": [], "warnings": []}),
    ("GET", f"/api/models/{NAME}", Handler.model_info),
    ("GET", f"/api/models/{NAME}/revision/(.+)", Handler.model_info),
    ("GET", f"/api/models/{NAME}/tree/([^/]+)", Handler.tree),
    ("POST", f"/api/models/{NAME}/preupload/([^/]+)", Handler.preupload),
    ("POST", f"/api/models/{NAME}/commit/([^/]+)", Handler.commit),
    ("POST", f"/{NAME}.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("PUT", "/lfs/([0-9a-f]{64})", Handler.lfs_put),
    ("POST", "/lfs-verify", Handler.lfs_verify),
    ("GET", f"/{NAME}/resolve/([^/]+)/(.+)", Handler.resolve),
    ("GET", "/cdn/(.+)", Handler.storage),
]
