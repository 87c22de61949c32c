"""`convert --stream`: whatever a connection does, what comes out is what converting a local copy gives."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvsurgery.checkpoint.headers import read_shard
from kvsurgery.checkpoint.journal import JOURNAL
from kvsurgery.hub import ranges
from tests.helpers.command import Result
from tests.helpers.families import make
from tests.helpers.hub_handler import Fault
from tests.helpers.hub_repo import Blob
from tests.helpers.hub_server import Hub, serve
from tests.helpers.quantized import quantize
from tests.helpers.shards import tree
from tests.helpers.surgery import random_profile

FOREVER = float("inf")
# one process for all commands, since most of a short one is imports; requests small enough that shards take several
SHELL = """
import json, sys
from kvsurgery.hub import ranges, stream
from tests.helpers.command import run
ranges.LONGEST_WAIT = 0
stream.RemoteShard.read_at_once = 30_000
for line in sys.stdin:
    print(json.dumps(vars(run(*json.loads(line)))), flush=True)
"""
LARGE = {
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
WEIGHTS = r"/model-.*safetensors$"


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock checkpoint in three shards, with side files of all kinds; tests must not change it."""
    folder = make("llama", tmp_path_factory.mktemp("hub") / "stock", shard="100KB")
    for name in (
        "README.md",
        "LICENSE",
        "templates/tool.jinja",
        "modeling_custom.py",
        "pytorch_model.bin",
        "onnx/m.onnx",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    random_profile(folder).save(folder.parent / "profile.safetensors")
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serve() as hub:
        yield hub


@pytest.fixture(scope="module")
def shell(server: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Result]]:
    """Run `kvsurgery` in a process that takes the server for the Hub."""
    process = subprocess.Popen(
        [sys.executable, "-c", SHELL],
        env=server.client_environment(tmp_path_factory.mktemp("home")),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(*arguments: Any) -> Result:
        process.stdin.write(json.dumps([str(argument) for argument in arguments]) + "\n")
        process.stdin.flush()
        return Result(**json.loads(process.stdout.readline()))

    yield run
    process.stdin.close()
    assert process.wait() == 0


@pytest.fixture
def hub(server: Hub, stock: Path) -> Hub:
    server.publish("surgeon/stock", stock)
    server.faults, server.requests, server.ranges, server.served, server.cdn = [], [], [], {}, False
    return server


def command(stock: Path, out: Path, *options: Any) -> list[Any]:
    profile = stock.parent / "profile.safetensors"
    return ["convert", "surgeon/stock", "--profile", profile, "--out", out, "--sink", 3, "--recent", 5, *options]


@pytest.fixture
def convert(hub: Hub, stock: Path, shell: Callable[..., Result], tmp_path: Path) -> Callable[..., Result]:
    return lambda *options: shell(*command(stock, tmp_path / "out", "--stream", *options))


@pytest.fixture(scope="module")
def expected(
    server: Hub, stock: Path, shell: Callable[..., Result], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """What comes of a copy in the Hub's cache."""
    server.publish("surgeon/stock", stock)
    out = tmp_path_factory.mktemp("cached") / "out"
    assert shell(*command(stock, out)).code == 0
    return tree(out)


def size(stock: Path) -> int:
    return sum(path.stat().st_size for path in stock.glob("*.safetensors"))


def served(hub: Hub) -> int:
    return sum(count for path, count in hub.served.items() if re.search(WEIGHTS, path))


def refused(result: Result, words: str) -> None:
    """A command failed with one line, but for a progress bar's."""
    assert result.code == 1, result
    assert result.out == ""
    [line] = [line for line in result.err.splitlines() if line.strip() and not line.startswith("converting")]
    assert line.startswith("kvsurgery: ")
    assert re.search(words, line), line


def test_the_same_as_a_local_copy_without_the_copy(
    hub: Hub, stock: Path, shell: Callable[..., Result], convert: Callable[..., Result], expected: dict, tmp_path: Path
) -> None:
    # a private repository, and signed URLs of another host, which wants no token; some of them have expired
    hub.repos["surgeon/stock"].private = hub.cdn = True
    hub.faults = [Fault(r"GET /cdn/.*model-00002", status=403, skip=3, times=2)]
    result = convert("--json")
    assert result.code == 0, result.err
    assert tree(tmp_path / "out") == expected
    facts = json.loads(result.out)
    assert served(hub) == facts["fetched"] + 2 * len(b'{"error": "fault 403"}') == size(stock) + 44
    requests = [request for request in hub.requests if "/resolve/" in request and re.search(WEIGHTS, request)]
    assert len(requests) == facts["requests"] < facts["tensors"]["moved"] + facts["tensors"]["copied"]
    assert all(facts["revision"] in request for request in requests)

    assert shell("verify", tmp_path / "out", "--source", stock).code == 0
    assert shell("revert", tmp_path / "out", "--out", tmp_path / "back").code == 0
    files = hub.repos["surgeon/stock"].commits[facts["revision"]]
    for path in (tmp_path / "back").glob("*.safetensors"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == files[path.name].lfs
    again = convert()
    assert "nothing to do" in again.out


@pytest.mark.parametrize("name", ["bitsandbytes-nf4", "fp8-block", "gptq-4"])
def test_quantized_weights_for_several_processes(
    hub: Hub, shell: Callable[..., Result], tmp_path: Path, name: str
) -> None:
    """Streamed as converted from a copy, and back to the bytes of the Hub."""
    source = make("llama", tmp_path / "source", **LARGE)
    quantize(source, name)
    random_profile(source).save(tmp_path / "profile.safetensors")
    hub.publish("surgeon/quantized", source)
    options = "--profile", tmp_path / "profile.safetensors", "--tp", 2, "--sparsity", 0.5
    for folder, place in (("streamed", ("surgeon/quantized", "--stream")), ("local", (source,))):
        result = shell("convert", *place, *options, "--out", tmp_path / folder)
        assert result.code == 0, result.err
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("streamed", "local")]
    assert weights[0] == weights[1] != (source / "model.safetensors").read_bytes()
    assert shell("revert", tmp_path / "streamed", "--out", tmp_path / "back").code == 0
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (503, {}, 4),
        (503, {"Retry-After": "7"}, 7),
        (503, {"RateLimit": '"resolvers";r=0;t=55'}, 4),
        (429, {"RateLimit": '"resolvers";r=0;t=55'}, 55),
        (429, {"Retry-After": "86400"}, ranges.LONGEST_WAIT),
        (429, {"Retry-After": "Sat, 21 Nov 2026 07:28:00 GMT"}, 4),
    ],
)
def test_waiting_as_the_server_asks(status: int, headers: dict[str, str], seconds: int) -> None:
    error = OSError()
    error.response = SimpleNamespace(status_code=status, headers=headers)
    assert ranges.wait(error, failures=3) == seconds


def test_connections_that_break(
    hub: Hub, stock: Path, convert: Callable[..., Result], expected: dict, tmp_path: Path
) -> None:
    chance = random.Random(0)
    hub.faults = [Fault(WEIGHTS, skip=6, cut=chance.uniform(0.3, 0.95), reset=number % 4 == 0) for number in range(20)]
    # between them the Hub is busy now and then
    hub.faults[15:15], hub.faults[10:10], hub.faults[5:5] = (
        [Fault(WEIGHTS, skip=6, status=status)] for status in (500, 503, 429)
    )
    result = convert("--json")
    assert result.code == 0, result.err
    assert not any(fault.times for fault in hub.faults)
    assert tree(tmp_path / "out") == expected
    assert json.loads(result.out)["bytes"] == size(stock)


def test_what_arrived_is_not_asked_for_again(hub: Hub, stock: Path, convert: Callable[..., Result]) -> None:
    # an orderly end loses nothing of what was sent, whether it was announced or not
    hub.faults = [Fault(WEIGHTS, cut=0.5, skip=6, times=3, short=short) for short in (False, True)]
    facts = json.loads(convert("--json").out)
    assert served(hub) == facts["fetched"] == size(stock)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(WEIGHTS, status=401), "hf auth login"),
        (Fault(WEIGHTS, status=403), "another token"),
        (Fault(WEIGHTS, status=404), r"model-.* changed while it was read \(404\)"),
        (Fault(WEIGHTS, status=416), r"model-.* changed while it was read \(416\)"),
        (Fault(WEIGHTS, status=500), "answers 500 .* run the same command again"),
        (Fault(WEIGHTS, drop=0), "check the network"),
        (Fault(WEIGHTS, cut=0.0), "check the network"),
        (Fault(WEIGHTS, cut=0.0, short=True), "bytes early"),
        (Fault(WEIGHTS, ignore=True), "ignores Range"),
        (Fault(WEIGHTS, shift=True), "not bytes"),
    ],
    ids=["401", "403", "404", "416", "500", "drop", "nothing", "short", "200", "shifted"],
)
def test_what_does_not_pass_is_one_line(
    hub: Hub, convert: Callable[..., Result], expected: dict, tmp_path: Path, fault: Fault, words: str
) -> None:
    # headers come, and a few tensors
    fault.skip, fault.times = 8, FOREVER
    hub.faults = [fault]
    refused(convert(), words)
    left = set(tree(tmp_path / "out"))
    assert JOURNAL in left
    assert "config.json" not in left
    hub.faults = []
    assert convert().code == 0
    assert tree(tmp_path / "out") == expected


def test_a_gated_repository_leaves_nothing(hub: Hub, convert: Callable[..., Result], tmp_path: Path) -> None:
    hub.repos["surgeon/stock"].gated = True
    refused(convert(), "accept its terms")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("longer", [0, 64], ids=["other bytes", "more bytes"])
def test_a_file_that_changes_is_refused(hub: Hub, convert: Callable[..., Result], tmp_path: Path, longer: int) -> None:
    repo = hub.repos["surgeon/stock"]
    files = repo.commits[repo.refs["main"]]
    name = "model-00003-of-00003.safetensors"

    def change() -> None:
        content = files[name].content[:-1] + bytes(1 + longer)
        files[name] = Blob(content, hashlib.sha256(content).hexdigest())

    # in the middle of the second shard
    hub.faults = [Fault("/model-00002", cut=0.5, skip=3, then=change)]
    refused(convert("--jobs", 1), f"{name} changed while it was read")
    assert not (tmp_path / "out" / name).exists()
    assert not (tmp_path / "out/config.json").exists()
    # in another run the header has changed too, or its checksum
    refused(convert(), "another source" if not longer else "the file has")


def test_killed_and_repeated(
    hub: Hub, stock: Path, convert: Callable[..., Result], expected: dict, tmp_path: Path
) -> None:
    out, extents = tmp_path / "out", {}
    for path in stock.glob("*.safetensors"):
        for tensor in read_shard(path).tensors:
            extents[tensor.name] = (path.name, tensor.start, tensor.end)

    def finished() -> set[str]:
        lines = (out / JOURNAL).read_bytes().split(b"\n")[1:-1] if (out / JOURNAL).exists() else []
        return {tensor for line in lines for tensor in json.loads(line)["tensors"]}

    before: set[str] = set()
    for shard, cut, jobs in (("00001", 0.4, 1), ("00001", 0.9, 1), ("00002", 0.5, 1), ("00003", 0.7, 8)):
        hub.ranges.clear()
        process = subprocess.Popen(
            [sys.executable, "-m", "kvsurgery", *map(str, command(stock, out, "--stream", "--jobs", jobs))],
            env={**hub.client_environment(tmp_path), "TMPDIR": str(tmp_path)},
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

        def kill(process: subprocess.Popen = process, before: frozenset = frozenset(before)) -> None:
            # once something of what it was sent is in the journal
            while finished() <= before and process.poll() is None:
                time.sleep(0.01)
            process.kill()

        hub.faults = [Fault(f"/model-{shard}", cut=cut, skip=2, then=kill)]
        assert process.wait() == -9
        assert before < finished()
        fetched_again(hub, extents, before)
        before = finished()
    hub.ranges.clear()
    facts = json.loads(convert("--json").out)
    fetched_again(hub, extents, before)
    assert facts["fetched"] == size(stock) - sum(extents[tensor][2] - extents[tensor][1] for tensor in before)
    assert facts["resumed"] > 0
    assert tree(out) == expected


def fetched_again(hub: Hub, extents: dict[str, tuple[str, int, int]], finished: set[str]) -> None:
    """No range overlaps a finished tensor."""
    for tensor in finished:
        name, start, end = extents[tensor]
        for path, first, last in hub.ranges:
            assert not path.endswith(name) or last <= start or end <= first, (tensor, path, first, last)


def test_an_unfinished_shard_that_was_lost(
    hub: Hub, convert: Callable[..., Result], expected: dict, tmp_path: Path
) -> None:
    for lose in (Path.unlink, lambda part: part.write_bytes(b"")):
        hub.faults = [Fault("/model-00002", status=401, skip=4, times=FOREVER)]
        refused(convert(), "401")
        parts = list((tmp_path / "out").glob("*.part"))
        assert parts
        for part in parts:
            lose(part)
        hub.faults = []
        assert convert().code == 0
        assert tree(tmp_path / "out") == expected
        shutil.rmtree(tmp_path / "out")


def test_where_there_is_nothing_to_stream(
    hub: Hub, stock: Path, shell: Callable[..., Result], convert: Callable[..., Result], tmp_path: Path
) -> None:
    folder = shell("convert", stock, *command(stock, tmp_path / "out", "--stream")[2:])
    assert folder.code == 2
    assert "--stream requires a Hub id" in folder.err
    assert convert("--dry-run").code == 0
    assert served(hub) == sum(len(read_shard(path).header) for path in stock.glob("*.safetensors"))
    offline = hub.run(tmp_path, *command(stock, tmp_path / "out", "--stream"), HF_HUB_OFFLINE="1")
    assert offline.returncode == 1
    assert "HF_HUB_OFFLINE" in offline.stderr
    assert not (tmp_path / "out").exists()
