"""Downloads from a Hub on the loopback, as a user's process sees them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.helpers.hub_handler import Fault
from tests.helpers.hub_server import Hub, serve

# one call per line of stdin; one JSON line of answer per call: a result, or the error's class and text
DRIVER = """
import json, sys, time
time.sleep = lambda seconds: None  # huggingface_hub backs off for 23 s before it gives up
from huggingface_hub import HfApi
from kvsurgery import hub
from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.errors import KVSurgeryError, UnsupportedModel
from kvsurgery.hub import ranges
ranges.LONGEST_WAIT = 0  # 31 s, likewise

def headers(repo_id, revision=None):
    with hub.headers(repo_id, revision) as remote:
        checkpoint = Checkpoint.open(remote.folder)
        tensors = [tensor.name for tensor in checkpoint.tensors]
        disk = sum(path.stat().st_blocks * 512 for path in remote.folder.iterdir())
        return {"commit": remote.commit, "tensors": tensors, "size": checkpoint.size, "disk": disk}

def fetch(repo_id, revision=None):
    folder, commit = hub.fetch_checkpoint(repo_id, revision)
    return {"folder": str(folder), "commit": commit}

def fetch_while_main_moves(repo_id):
    folder, commit = hub.fetch_checkpoint(repo_id, check=lambda _: HfApi().delete_file("LICENSE", repo_id))
    return {"folder": str(folder), "commit": commit}

def refuse(repo_id):
    def check(folder):
        raise UnsupportedModel(f"{folder}/config.json: no")
    return hub.fetch_checkpoint(repo_id, check=check)

for line in sys.stdin:
    name, arguments = json.loads(line)
    try:
        print(json.dumps(globals()[name](*arguments)))
    except KVSurgeryError as error:
        print(json.dumps({"error": type(error).__name__, "line": str(error)}))
"""


@pytest.fixture
def hub():
    with serve() as server:
        yield server


@pytest.fixture
def call(hub, tmp_path):
    """Run calls of DRIVER in one fresh process and give their answers."""

    def run(*calls, **environment):
        process = subprocess.run(
            [sys.executable, "-c", DRIVER],
            input="\n".join(json.dumps((name, arguments)) for name, *arguments in calls),
            env={**hub.client_environment(tmp_path), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        answers = [json.loads(line) for line in process.stdout.splitlines()]
        return answers if len(calls) > 1 else answers[0]

    return run


@pytest.fixture
def model(tmp_path) -> Path:
    """Two shards of 2 MB, side files, and what nobody wants to download."""
    folder = tmp_path / "model"
    (folder / "original").mkdir(parents=True)
    names = {f"layers.{layer}.weight": f"model-{layer + 1:05}-of-00002.safetensors" for layer in range(2)}
    for seed, (tensor, shard) in enumerate(names.items()):
        weights = np.random.default_rng(seed).standard_normal((512, 1024)).astype(np.float32)
        save_file({tensor: weights}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer [v1].json").write_text("{}")
    (folder / "LICENSE").write_text("as is")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    for name in ("pytorch_model.bin", "model.fp32.safetensors", "original/consolidated.00.pth", "model.gguf"):
        (folder / name).write_bytes(b"weights nobody wants")
    return folder


WANTED = {
    ".gitattributes",
    "LICENSE",
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer [v1].json",
}


def weight_bytes(hub: Hub) -> int:
    return sum(count for path, count in hub.served.items() if path.endswith(".safetensors"))


def header_bytes(folder: Path) -> int:
    return sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in folder.glob("model-*.safetensors"))


def test_headers_come_without_a_byte_of_weights(hub, call, model):
    repo = hub.publish("surgeon/model", model)
    found = call(("headers", "surgeon/model"))
    assert weight_bytes(hub) == header_bytes(model)
    assert found["commit"] == repo.refs["main"]
    assert found["tensors"] == ["layers.0.weight", "layers.1.weight"]
    assert found["size"] == sum(path.stat().st_size for path in model.glob("model-*.safetensors"))
    assert found["disk"] < found["size"] / 10


def test_a_refusal_comes_before_the_weights_and_names_the_repository(hub, call, model):
    hub.publish("surgeon/model", model)
    refused = call(("refuse", "surgeon/model"))
    assert refused == {"error": "UnsupportedModel", "line": "surgeon/model/config.json: no"}
    assert weight_bytes(hub) == header_bytes(model)


def test_fetched_files_are_the_published_ones(hub, call, model):
    repo = hub.publish("surgeon/model", model)
    tag = repo.refs["v1"] = repo.refs["main"]
    repo.commit({}, "main")
    fetched = call(("fetch", "surgeon/model", "v1"))
    folder = Path(fetched["folder"])
    assert fetched["commit"] == tag
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: (model / name).read_bytes() for name in WANTED
    }


def test_a_moving_branch_gives_files_of_one_commit(hub, call, model):
    commit = hub.publish("surgeon/model", model).refs["main"]
    fetched = call(("fetch_while_main_moves", "surgeon/model"))
    assert hub.repos["surgeon/model"].refs["main"] != commit
    assert fetched["commit"] == commit
    assert (Path(fetched["folder"]) / "LICENSE").exists()


def test_a_broken_download_goes_on_and_a_second_one_sends_no_weights(hub, call, model):
    hub.publish("surgeon/model", model)
    hub.faults = [Fault(r"GET /surgeon/model/resolve/[0-9a-f]{40}/model-00002", times=float("inf"))]
    broken = call(("fetch", "surgeon/model"))
    assert broken["error"] == "HubError"
    assert "500" in broken["line"]
    hub.faults.clear()
    fetched = call(("fetch", "surgeon/model"))
    for name in WANTED:
        assert (Path(fetched["folder"]) / name).read_bytes() == (model / name).read_bytes()
    hub.served.clear()
    assert call(("fetch", "surgeon/model")) == fetched
    assert weight_bytes(hub) == header_bytes(model)


def test_offline_the_cache_serves(hub, call, model):
    hub.publish("surgeon/model", model)
    fetched = call(("fetch", "surgeon/model"))
    hub.requests.clear()
    again, headers, other = call(
        ("fetch", "surgeon/model"), ("headers", "surgeon/model"), ("fetch", "surgeon/unknown"), HF_HUB_OFFLINE="1"
    )
    assert again == fetched
    assert headers["commit"] == fetched["commit"]
    assert other["error"] == "HubError"
    assert "HF_HUB_OFFLINE" in other["line"]
    assert hub.requests == []


def test_what_cannot_be_fetched_is_one_line_with_the_fix(hub, call, model):
    hub.publish("surgeon/model", model)
    hub.publish("surgeon/gated", model).gated = True
    hub.publish("surgeon/secret", model).private = True
    hub.create("surgeon/empty")
    answers = call(
        ("fetch", "surgeon/gated"),
        ("fetch", "surgeon/unknown"),
        ("fetch", "surgeon/model", "v9"),
        ("fetch", "surgeon/empty"),
        ("fetch", "not/a/name"),
    )
    anonymous = call(("fetch", "surgeon/secret"), ("fetch", "surgeon/unknown"), HF_TOKEN="")
    nowhere = call(("fetch", "surgeon/model"), HF_ENDPOINT="http://127.0.0.1:9")
    fixes = [
        ("surgeon/gated", f"accept its terms at {hub.url}/surgeon/gated"),
        ("surgeon/unknown", "check the name"),
        ("surgeon/model", "'v9'"),
        ("surgeon/empty", "config.json"),
        ("not/a/name", "owner/name"),
        ("surgeon/secret", "hf auth login"),
        ("surgeon/unknown", "hf auth login"),
        ("surgeon/model", "check the network"),
    ]
    for (name, fix), answer in zip(fixes, [*answers, *anonymous, nowhere], strict=True):
        assert answer["error"] == "HubError"
        assert name in answer["line"]
        assert fix in answer["line"]
        assert "\n" not in answer["line"]


@pytest.mark.parametrize(
    ("status", "fix"),
    [(401, "hf auth login"), (403, "another token"), (409, "fault 409"), (429, "wait"), (503, "wait")],
    ids=str,
)
def test_a_hub_that_refuses_everything_is_one_line(hub, call, status, fix):
    hub.faults = [Fault("/surgeon/", status=status, times=float("inf"))]
    answer = call(("fetch", "surgeon/model"))
    assert answer["error"] == "HubError"
    assert "surgeon/model" in answer["line"]
    assert str(status) in answer["line"]
    assert fix in answer["line"]


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\xff" * 64, b"\x04" + bytes(7) + b"[1]["], ids=lambda c: str(len(c))
)
def test_a_malformed_remote_shard_is_refused_by_its_repository_name(hub, call, model, content):
    repo = hub.publish("surgeon/model", model)
    name = "model-00002-of-00002.safetensors"
    files = repo.commits[repo.refs["main"]]
    files[name] = type(files[name])(content, lfs="0" * 64)
    answer = call(("headers", "surgeon/model"))
    assert answer["error"] == "CheckpointError"
    assert f"surgeon/model/{name}" in answer["line"]


def test_an_index_cannot_point_outside_the_folder(hub, call, model, tmp_path):
    index = {"weight_map": {"a": "../../escaped.safetensors", "b": "original/b.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "original/b.safetensors").write_bytes(b"")
    hub.publish("surgeon/model", model)
    answer = call(("headers", "surgeon/model"), TMPDIR=str(tmp_path))
    assert answer["error"] == "CheckpointError"
    assert "../../escaped.safetensors" in answer["line"]
    assert not list(tmp_path.rglob("escaped*"))


def test_pickled_weights_are_refused_without_downloading_them(hub, call, model):
    for path in model.glob("model*"):
        path.unlink()
    hub.publish("surgeon/model", model)
    answer = call(("headers", "surgeon/model"))
    assert answer["error"] == "UnsupportedModel"
    assert "pytorch_model.bin" in answer["line"]
    assert 'from_pretrained("surgeon/model"' in answer["line"]
    assert not any("pytorch_model" in request for request in hub.requests)
