"""Head profiles that lie on the Hub, wherever a command or a recipe takes one."""

import json
from pathlib import Path

import pytest

from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe
from tests.helpers.command import tree
from tests.helpers.families import make
from tests.helpers.hub_server import serve
from tests.helpers.losses import losses
from tests.helpers.surgery import random_profile

ADDRESS = "hf://org/scores/heads/duo.safetensors"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, and a profile of it in a folder to publish."""
    place = tmp_path_factory.mktemp("address")
    make("llama", place / "llama")
    (place / "repo/heads").mkdir(parents=True)
    random_profile(place / "llama").save(place / "repo/heads/duo.safetensors")
    (place / "repo/README.md").write_text("scores")
    return place


@pytest.fixture
def hub(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serve() as server:
        server.repo = server.publish("org/scores", place / "repo")
        server.commit = server.repo.refs["main"]
        yield server


def done(hub, *arguments, **environment):
    ended = hub.run(Path(), *arguments, **environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_convert_and_recipe(hub, place):
    options = [place / "llama", "--sparsity", 0.5]
    Path("recipes").mkdir()
    done(hub, "convert", *options, "--profile", place / "repo/heads/duo.safetensors", "--out", "local")
    done(hub, "convert", *options, "--profile", ADDRESS, "--save-recipe", "recipes/duo.toml", "--out", "out")
    local, found = tree(Path("local")), tree(Path("out"))
    assert {name for name in found if found[name] != local[name]} == {"README.md", "kvsurgery.json"}
    assert f"file `{ADDRESS}@{hub.commit}`" in Path("out/README.md").read_text()
    assert Recipe.load("recipes/duo.toml").profiles == (f"{ADDRESS}@{hub.commit}",)

    # read again by a recipe in another folder, and without a network
    recipe = ["convert", place / "llama", "--recipe", "recipes/duo.toml", "--out", "again"]
    done(hub, *recipe, HF_HUB_OFFLINE="1")
    assert tree(Path("again")) == found


def test_measured_losses(hub, place):
    """A conversion decides by them what it decides by the local file."""
    profile = HeadProfile.load(place / "repo/heads/duo.safetensors")
    measured = losses(profile.model, profile.base_model, profile.windows)
    for folder in (Path(), place / "repo/heads"):
        measured.save(folder / "losses.safetensors")
    hub.publish("org/scores", place / "repo")
    options = [place / "llama", "--profile", place / "repo/heads/duo.safetensors", "--kv-bits"]
    address = ADDRESS.replace("duo", "losses")
    done(hub, "convert", *options, 8, "--kv-measured", "losses.safetensors", "--out", "local")
    done(hub, "convert", *options, 8, "--kv-measured", address, "--out", "out")
    local, found = (json.loads(Path(folder, "config.json").read_text()) for folder in ("local", "out"))
    assert found == local
    assert found["kv_surgery"]["quantization"]["rotate"] == measured.best(8).rotate
    options += ["auto", "--kv-budget", 12, "--kv-measured", address, "--sparsity", 0.5, "--save-recipe", "auto.toml"]
    done(hub, "convert", *options, "--dry-run")
    assert Recipe.load("auto.toml").measured == f"{address}@{hub.repos['org/scores'].refs['main']}"


def test_budgets_and_other_commands(hub, place):
    local = place / "repo/heads/duo.safetensors"
    planned = ["convert", place / "llama", "--profile", local, "--rest", "budgeted", "--budgets-from", ADDRESS]
    planned += ["--save-recipe", "budgets.toml"]
    plan = json.loads(done(hub, *planned, "--sparsity", 0.5, "--budget", 9, "--dry-run", "--json"))
    assert Recipe.load("budgets.toml").budgets_from == f"{ADDRESS}@{hub.commit}"
    assert plan["policy"]["budgets_from"].startswith("duo ")
    address = f"{ADDRESS}@{hub.commit}"
    assert json.loads(done(hub, "profile", "show", ADDRESS, "--json"))["provenance"]["file"] == address
    assert json.loads(done(hub, "profile", "compare", local, ADDRESS, "--json"))["spearman"] == pytest.approx(1)
    done(hub, "profile", "merge", address, local, "-o", "merged.safetensors")
    sources = HeadProfile.load("merged.safetensors").provenance["sources"]
    assert address in [source["provenance"].get("file") for source in sources]
    fit = ["fit", place / "llama", "--profile", ADDRESS, "--memory", "1GB", "--context", 100]
    assert f"--profile {ADDRESS}" in done(hub, *fit)


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("hf://org/scores/none.safetensors", "org/scores has no none.safetensors at this revision; "),
        (f"{ADDRESS}@v9", "org/scores has no revision 'v9'; "),
        ("hf://org/scores/README.md", "hf://org/scores/README.md@COMMIT is not a head profile"),
        ("hf://org/scores", "hf://org/scores is not a file of a model repository: write hf://owner/repo/path"),
    ],
    ids=["file", "revision", "content", "address"],
)
def test_one_line_of_trouble(hub, place, address, line):
    ended = hub.run(Path(), "convert", place / "llama", "--profile", address, "--out", "out")
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"kvsurgery: {line}".replace("COMMIT", hub.commit))
    assert len(ended.stderr.splitlines()) == 1
    assert not Path("out").exists()


def test_without_a_network(hub, place):
    command = ["profile", "show", ADDRESS]
    for environment, line in (
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot reach http://127.0.0.1:9 for org/scores"),
        ({"HF_HUB_OFFLINE": "1"}, "org/scores is not in the cache, and HF_HUB_OFFLINE is set: unset it"),
    ):
        ended = hub.run(Path(), *command, **environment)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr.startswith(f"kvsurgery: {line}")
