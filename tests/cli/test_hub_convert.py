"""From the Hub and back to it: convert what lies there, push the result, load it by its name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.families import make
from tests.helpers.hub_handler import Fault
from tests.helpers.hub_repo import Blob
from tests.helpers.hub_server import Hub, serve
from tests.helpers.surgery import convert_folder, random_profile

FOREVER = float("inf")
LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, dtype=torch.float32)
print(type(model).__module__.rpartition(".")[2], model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4).tolist())
"""


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> Path:
    """A stock checkpoint in several shards, with its profile beside the folder; tests must not change it."""
    folder = make("llama", tmp_path_factory.mktemp("hub") / "stock", shard="100KB")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Stock\n")
    random_profile(folder).save(folder.parent / "profile.safetensors")
    return folder


@pytest.fixture
def hub(stock):
    with serve() as server:
        server.publish("surgeon/stock", stock)
        yield server


def convert(hub: Hub, stock: Path, home: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    profile, out = stock.parent / "profile.safetensors", home / "out"
    command = ("convert", "surgeon/stock", "--profile", profile, "--out", out, "--sink", 3, "--recent", 5, *options)
    return hub.run(home, *command, **environment)


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("model*.safetensors*")}


def test_a_model_of_the_hub_becomes_what_its_folder_does(hub, stock, tmp_path):
    result = convert(hub, stock, tmp_path)
    assert result.returncode == 0, result.stderr
    local = convert_folder(stock, tmp_path / "local").folder
    assert weights(tmp_path / "out") == weights(local)
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((local / "config.json").read_text())
    provenance = json.loads((tmp_path / "out/kvsurgery.json").read_text())
    assert (provenance["source"], provenance["revision"]) == ("surgeon/stock", hub.repos["surgeon/stock"].refs["main"])
    assert "license: mit" in (tmp_path / "out/README.md").read_text()

    assert hub.run(tmp_path, "revert", tmp_path / "out", "--out", tmp_path / "back").returncode == 0
    back = {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()}
    assert back == hub.repos["surgeon/stock"].files()


def test_a_dry_run_and_a_refusal_fetch_headers_only(hub, stock, tmp_path):
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in stock.glob("*.safetensors"))

    def fetched() -> int:
        return sum(count for path, count in hub.served.items() if path.endswith(".safetensors"))

    assert convert(hub, stock, tmp_path, "--dry-run").returncode == 0
    assert fetched() == headers
    repo = hub.repos["surgeon/stock"]
    files = repo.commits[repo.refs["main"]]
    quantized = {**json.loads(files["config.json"].content), "quantization_config": {"bits": 4}}
    repo.commit({**files, "config.json": Blob(json.dumps(quantized).encode())}, "main")
    refused = convert(hub, stock, tmp_path)
    assert refused.returncode == 1
    assert "quantized" in refused.stderr
    assert fetched() == 2 * headers
    assert not (tmp_path / "out").exists()

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    refused = convert(hub, stock, tmp_path)
    assert "out is not empty" in refused.stderr
    assert fetched() == 2 * headers


def test_a_download_that_failed_goes_on(hub, stock, tmp_path):
    name = sorted(weights(stock))[1]
    hub.faults = [Fault(f"GET /surgeon/stock/resolve/.*/{name}", drop=0, times=FOREVER)]
    failed = convert(hub, stock, tmp_path)
    assert failed.returncode == 1
    assert [line for line in failed.stderr.splitlines() if line.startswith("kvsurgery: ")] == [
        failed.stderr.splitlines()[-1]
    ]
    assert not (tmp_path / "out").exists()
    hub.faults = []
    assert convert(hub, stock, tmp_path).returncode == 0
    assert weights(tmp_path / "out") == weights(convert_folder(stock, tmp_path / "local").folder)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "no network"])
def test_what_cannot_be_downloaded_leaves_nothing(hub, stock, tmp_path, gated):
    hub.repos["surgeon/stock"].gated = gated
    result = convert(hub, stock, tmp_path, **({} if gated else {"HF_ENDPOINT": "http://127.0.0.1:9"}))
    assert result.returncode == 1
    assert result.stderr.startswith("kvsurgery: ")
    assert len(result.stderr.splitlines()) == 1
    assert ("accept its terms" if gated else "check the network") in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_pushed_model_loads_by_its_name(hub, stock, tmp_path):
    converted = convert_folder(stock, tmp_path / "duo")
    assert hub.run(tmp_path, "push", converted.folder, "surgeon/duo").returncode == 0
    expected = converted.load().generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4).tolist()
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, "surgeon/duo"],
        env=hub.client_environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert loaded.stdout == f"modeling_kvsurgery_llama {expected}\n", loaded.stderr
