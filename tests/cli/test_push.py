"""`kvsurgery push` against a Hub on the loopback, with the faults that networks have."""

import hashlib
import re
import shutil
from pathlib import Path

import pytest

from kvsurgery.conversion.inspection import inspect_checkpoint
from kvsurgery.report import write_report
from kvsurgery.templates.kv_layout import ROUNDING_FILE
from tests.helpers.families import make
from tests.helpers.hub_handler import Fault
from tests.helpers.hub_repo import Blob
from tests.helpers.hub_server import Hub, serve
from tests.helpers.losses import losses
from tests.helpers.surgery import convert_folder, random_profile
from tests.report import builders

FOREVER = float("inf")


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """A converted checkpoint in several shards; tests must not change it."""
    place = tmp_path_factory.mktemp("shards")
    return convert_folder(make("llama", place / "stock", shard="100KB"), place / "duo").folder


@pytest.fixture(scope="module")
def report(converted, tmp_path_factory):
    """What `eval` writes of the converted checkpoint; tests must not change it."""
    folder = tmp_path_factory.mktemp("report")
    task = builders.task("needle|[x](y) <b>", 0.97, 0.94, cells=builders.needle().cells)
    facts = inspect_checkpoint(converted, "duo").to_json()
    builders.results(checkpoint=facts, tasks=(task,)).save(folder)
    write_report(folder)
    (folder / "samples.jsonl").write_text("what the user asked")
    return folder


@pytest.fixture
def hub():
    with serve() as server:
        yield server


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def on_hub(hub: Hub, revision: str = "main") -> dict[str, bytes]:
    """The files of a revision but the one that the Hub makes itself."""
    files = hub.repos["surgeon/duo"].files(revision)
    del files[".gitattributes"]
    return files


def shards(folder: Path) -> dict[str, str]:
    """SHA-256 of every shard."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}


def the_line(result) -> str:
    """A failed command's last word: one line, no traceback, nothing on stdout."""
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    [line] = [line for line in result.stderr.splitlines() if line.startswith("kvsurgery: ")]
    assert result.stderr.endswith(line + "\n")
    return line


def test_the_hub_gets_the_folder_in_one_commit(hub, converted, tmp_path):
    folder = Path(shutil.copytree(converted, tmp_path / "duo"))
    (folder / "model.safetensors.part").write_text("half")
    (folder / ".cache").mkdir()
    (folder / ".cache/.lock").write_text("")
    result = hub.run(tmp_path, "push", folder, "duo")
    assert (result.returncode, result.stdout) == (0, f"{hub.url}/surgeon/duo\n"), result.stderr
    assert on_hub(hub) == contents(converted)
    assert not hub.repos["surgeon/duo"].private
    assert len(hub.repos["surgeon/duo"].commits) == 2


def test_factors_by_which_keys_are_rounded_are_pushed_and_fetched(hub, tmp_path):
    source, measured = make("qwen3", tmp_path / "stock"), tmp_path / "losses.safetensors"
    losses(random_profile(source).model, rounded=True).save(measured)
    folder = convert_folder(source, tmp_path / "duo", sparsity=0.5, kv_bits=3, kv_measured=str(measured)).folder
    assert hub.run(tmp_path, "push", folder, "duo").returncode == 0
    assert on_hub(hub)[ROUNDING_FILE] == (folder / ROUNDING_FILE).read_bytes()


def test_pushing_again_changes_nothing(hub, converted, tmp_path):
    assert hub.run(tmp_path, "push", converted, "surgeon/duo").returncode == 0
    before, hub.received = dict(hub.repos["surgeon/duo"].refs), []
    again = hub.run(tmp_path, "push", converted, "surgeon/duo")
    assert (again.returncode, again.stdout) == (0, f"{hub.url}/surgeon/duo\n")
    assert hub.repos["surgeon/duo"].refs == before
    assert hub.received == []


def test_after_a_lost_connection_only_the_missing_shards_are_sent(hub, converted, tmp_path):
    first, *others = shards(converted).values()
    hub.faults = [Fault(f"PUT /lfs/{first}", drop=20_000, times=FOREVER)]
    lost = hub.run(tmp_path, "push", converted, "surgeon/duo")
    assert lost.returncode == 1
    assert "run again" in the_line(lost)
    assert on_hub(hub) == {}
    arrived = {*hub.received}  # shards are sent at the same time, and some may not have been when one was lost
    assert arrived <= {*others}

    hub.faults, hub.received = [], []
    assert hub.run(tmp_path, "push", converted, "surgeon/duo").returncode == 0
    assert on_hub(hub) == contents(converted)
    assert sorted(hub.received) == sorted({first, *others} - arrived)


@pytest.mark.parametrize("fault", [Fault("PUT", drop=20_000), Fault("PUT", status=500)], ids=["dropped", "500"])
def test_one_fault_in_an_upload_is_survived(hub, converted, tmp_path, fault):
    hub.faults = [fault]
    assert hub.run(tmp_path, "push", converted, "surgeon/duo").returncode == 0
    assert fault.times == 0
    assert on_hub(hub) == contents(converted)


@pytest.mark.parametrize("step", ["repos/create", "preupload", "objects/batch", "commit/main", "tree/"])
def test_a_500_at_any_step_is_survived_or_reported_and_mended_by_a_second_run(hub, converted, tmp_path, step):
    hub.faults = [Fault(step)]
    first = hub.run(tmp_path, "push", converted, "surgeon/duo")
    if first.returncode:
        assert "500" in the_line(first)
        assert hub.run(tmp_path, "push", converted, "surgeon/duo").returncode == 0
    assert hub.faults[0].times == 0
    assert on_hub(hub) == contents(converted)
    assert len(hub.received) == len(shards(converted))


@pytest.mark.parametrize("token", ["", "hf_expired"], ids=["none", "expired"])
def test_without_a_valid_token_nothing_happens(hub, converted, tmp_path, token):
    result = hub.run(tmp_path, "push", converted, "surgeon/duo", HF_TOKEN=token)
    assert result.returncode == 1
    assert result.stderr == the_line(result) + "\n"
    assert "hf auth login" in result.stderr
    assert hub.repos == {}


def test_a_name_that_no_repository_has_is_refused_first(hub, converted, tmp_path):
    result = hub.run(tmp_path, "push", converted, "some/body/duo", HF_TOKEN="none")
    assert result.returncode == 2
    assert "'some/body/duo' is not a repository name" in result.stderr


def test_a_token_without_the_right_is_one_line(hub, converted, tmp_path):
    result = hub.run(tmp_path, "push", converted, "somebody/duo")
    assert result.returncode == 1
    assert "somebody/duo" in the_line(result)
    assert hub.repos == {}


def test_a_pull_stepleaves_main_as_it_is(hub, converted, tmp_path):
    result = hub.run(tmp_path, "push", converted, "surgeon/duo", "--create-pr")
    assert (result.returncode, result.stdout) == (0, f"{hub.url}/surgeon/duo/discussions/1\n"), result.stderr
    assert on_hub(hub) == {}
    assert on_hub(hub, "refs/pr/1") == contents(converted)


def test_private_means_private(hub, converted, tmp_path):
    assert hub.run(tmp_path, "push", converted, "surgeon/duo", "--private").returncode == 0
    assert hub.repos["surgeon/duo"].private
    hub.repos["surgeon/duo"].private = False
    refused = hub.run(tmp_path, "push", converted, "surgeon/duo", "--private")
    assert refused.returncode == 1
    assert "public" in the_line(refused)


def test_damage_on_the_hub_is_found(hub, converted, tmp_path):
    assert hub.run(tmp_path, "push", converted, "surgeon/duo").returncode == 0
    repo = hub.repos["surgeon/duo"]
    files = repo.commits[repo.refs["main"]]
    name, oid = list(shards(converted).items())[1]
    flipped = bytearray(files[name].content)
    flipped[-1] ^= 1
    files[name] = Blob(bytes(flipped), lfs=oid)
    result = hub.run(tmp_path, "push", converted, "surgeon/duo")
    assert result.returncode == 3
    assert name in the_line(result)


def put(hub: Hub, *names: str, **contents: bytes) -> None:
    """Files in the repository that is pushed to, from before the push."""
    repo = hub.repos.get("surgeon/duo") or hub.create("surgeon/duo")
    files = {name: Blob(b"old") for name in names} | {name: Blob(content) for name, content in contents.items()}
    repo.commit({**repo.commits[repo.refs["main"]], **files}, "main")


CHANGING = (
    "adapter_config.json",
    "custom_generate/generate.py",
    "model.safetensors",
    "model-00009-of-00009.safetensors",
    "model.fp16.safetensors",
    "pytorch_model.bin",
    "kv_budget.py",
    "chat_template.jinja",
    "vocab.txt",
)
HARMLESS = ("README.md", "LICENSE", "notes.txt", "figures/memory.png", "config.json")


class TestWhatTheRepositoryHas:
    def test_files_that_change_what_is_loaded_are_refused_before_any_work(self, hub, converted, tmp_path):
        put(hub, *CHANGING, *HARMLESS)
        before = dict(hub.repos["surgeon/duo"].refs)
        line = the_line(hub.run(tmp_path, "push", converted, "surgeon/duo"))
        assert all(name in line for name in CHANGING)
        assert "--delete-others" in line
        assert not any(f" {harmless}" in line for harmless in HARMLESS)
        assert not any(request.startswith(("POST", "PUT")) for request in hub.requests)
        assert hub.repos["surgeon/duo"].refs == before

    def test_such_files_are_deleted_by_the_commit_that_uploads(self, hub, converted, tmp_path):
        put(hub, "model.safetensors", "adapter_config.json", "custom_generate/generate.py", *HARMLESS)
        count = len(hub.repos["surgeon/duo"].commits)
        result = hub.run(tmp_path, "push", converted, "surgeon/duo", "--delete-others")
        assert result.returncode == 0, result.stderr
        kept = dict.fromkeys(HARMLESS, b"old")
        assert on_hub(hub) == kept | contents(converted)
        assert len(hub.repos["surgeon/duo"].commits) == count + 1

    def test_rules_of_git_that_would_drop_or_change_files(self, hub, converted, tmp_path):
        repo = hub.create("surgeon/duo")
        attributes = repo.files()[".gitattributes"]
        rules = {".gitignore": b"*.json\n", ".gitattributes": attributes + b"*.json text eol=crlf\n"}
        put(hub, **rules)
        refused = the_line(hub.run(tmp_path, "push", converted, "surgeon/duo"))
        assert ".gitattributes, .gitignore;" in refused
        for arguments in (["--delete-others"], []):
            result = hub.run(tmp_path, "push", converted, "surgeon/duo", *arguments)
            assert result.returncode == 0, result.stderr
            assert repo.files() == contents(converted) | {".gitignore": b"", ".gitattributes": attributes}

    def test_a_pull_request_leaves_them_on_main(self, hub, converted, tmp_path):
        put(hub, "model.safetensors")
        result = hub.run(tmp_path, "push", converted, "surgeon/duo", "--create-pr", "--delete-others")
        assert result.returncode == 0, result.stderr
        assert on_hub(hub) == {"model.safetensors": b"old"}
        assert on_hub(hub, "refs/pr/1") == contents(converted)

    def test_a_change_during_the_upload_is_refused(self, hub, converted, tmp_path):
        hub.create("surgeon/duo")
        hub.before = {"POST /api/models/surgeon/duo/commit/main": lambda: put(hub, "adapter_config.json")}
        line = the_line(hub.run(tmp_path, "push", converted, "surgeon/duo"))
        assert "meanwhile" in line
        assert on_hub(hub) == {"adapter_config.json": b"old"}


def test_only_a_sound_converted_checkpoint_is_pushed(hub, converted, tmp_path):
    folder = Path(shutil.copytree(converted, tmp_path / "duo"))
    shard = next(folder.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    damaged = hub.run(tmp_path, "push", folder, "surgeon/duo")
    assert damaged.returncode == 3
    assert "duo" in the_line(damaged)
    (folder / "kvsurgery.json").unlink()
    foreign = hub.run(tmp_path, "push", folder, "surgeon/duo")
    assert foreign.returncode == 1
    assert "kvsurgery.json" in the_line(foreign)
    assert hub.repos == {}


def test_an_adapter_in_the_folder_is_not_uploaded(hub, converted, tmp_path):
    folder = Path(shutil.copytree(converted, tmp_path / "duo"))
    (folder / "adapter_config.json").write_text("{}")
    assert "adapter" in the_line(hub.run(tmp_path, "push", folder, "surgeon/duo"))
    assert hub.requests == []


class TestReport:
    def test_the_card_shows_what_lies_beside_it(self, hub, converted, report, tmp_path):
        before = contents(converted)
        result = hub.run(tmp_path, "push", converted, "duo", "--report", report)
        assert result.returncode == 0, result.stderr
        files = on_hub(hub)
        beside = {name: content for name, content in files.items() if name.startswith("report/")}
        pictures = {f"report/{name}.png" for name in ("heads", "kv-memory", "tasks", "needle")}
        assert beside.keys() == {"report/index.html", *pictures}
        assert all(content == (report / name.partition("/")[2]).read_bytes() for name, content in beside.items())
        card = files["README.md"].decode()
        assert card.startswith(before["README.md"].decode().rstrip())
        assert set(re.findall('src="([^"]*)"', card)) == pictures
        assert r"| needle\|\[x\](y) \<b\> | string_match_all | 200 | 97.0% (95.0–99.0%) | 94.0% (92.0–96.0%) |" in card
        assert "−3.0, worse |" in card
        assert len(hub.repos["surgeon/duo"].commits) == 2
        assert {**files, "README.md": before["README.md"]} == before | beside
        assert contents(converted) == before

    def test_again_changes_nothing(self, hub, converted, report, tmp_path):
        folder = Path(shutil.copytree(converted, tmp_path / "duo"))
        for _ in range(2):
            assert hub.run(tmp_path, "push", folder, "duo", "--report", report).returncode == 0
            # as after a download
            (folder / "README.md").write_bytes(on_hub(hub)["README.md"])
        assert len(hub.repos["surgeon/duo"].commits) == 2

    @pytest.mark.parametrize("fault", ["other", "page"])
    def test_what_is_no_report_of_it_is_refused_at_once(self, hub, converted, report, tmp_path, fault):
        folder = Path(shutil.copytree(report, tmp_path / "report"))
        if fault == "other":
            builders.results().save(folder)
        else:
            (folder / "index.html").unlink()
        words = {"other": "of another checkpoint", "page": "no index.html"}[fault]
        result = hub.run(tmp_path, "push", converted, "duo", "--report", folder)
        assert result.returncode == 1
        assert words in the_line(result)
        assert hub.requests == []
