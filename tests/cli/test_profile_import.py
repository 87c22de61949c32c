"""`kvsurgery profile import`: published files in, a profile or one clear line out."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvsurgery.cli.profile import profile
from kvsurgery.cli.profile.importing import headkv
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.importers.headkv import HEADKV_METHODS
from tests.cli.profile_command import LLAMA, refusal, run, working_folder  # noqa: F401  (a fixture)
from tests.helpers.hub_repo import Blob
from tests.helpers.hub_server import serve


class TestImport:
    @pytest.mark.parametrize("path", ["gates", "gates/full_attention_heads.tsv"])
    def test_duo(self, here, path):
        output = run("import", "duo", path, "--model", "llama", "-o", "p.safetensors")
        made = HeadProfile.load("p.safetensors")
        assert made.scores.tolist() == [[1, 0], [0.25, 1]]
        assert (made.method, made.granularity, made.base_model, made.base_revision) == ("duo", "kv", "llama", None)
        assert (made.sink, made.recent, made.model.head_dim) == (8, 16, 8)
        assert "2 of 4 at the maximum" in output
        assert "Next: kvsurgery convert llama --profile p.safetensors --out llama-duo" in output

    def test_headkv(self, here):
        run("import", "headkv", "R.json", "--model", "llama", "-o", "p.safetensors", "--method", "headkv-r2")
        made = HeadProfile.load("p.safetensors")
        assert (made.method, made.granularity) == ("headkv-r2", "query")
        np.testing.assert_array_equal(made.scores, [[h / 16 for h in range(4)], [0.25 + h / 16 for h in range(4)]])

    def test_headkv_is_copy_scores_unless_told(self, here):
        run("import", "headkv", "R.json", "--model", "llama", "-o", "p.safetensors")
        assert HeadProfile.load("p.safetensors").method == "headkv-r"

    def test_methods_are_those_of_the_library(self):
        [option] = [option for option in headkv.params if option.name == "method"]
        assert tuple(option.type.choices) == HEADKV_METHODS

    def test_config_json_stands_for_its_folder(self, here):
        run("import", "duo", "gates", "--model", "llama/config.json", "-o", "one")
        run("import", "duo", "gates", "--model", "llama", "-o", "other")
        assert Path("one").read_bytes() == Path("other").read_bytes()

    @pytest.mark.parametrize("source", ["llama", "./llama/", "{here}/llama", "{here}/llama/config.json"])
    def test_the_model_is_named_without_its_path(self, here, source):
        run("import", "duo", "gates", "--model", source.format(here=here), "-o", "p.safetensors")
        assert HeadProfile.load("p.safetensors").base_model == "llama"
        assert str(here).encode() not in Path("p.safetensors").read_bytes()

    def test_another_name_for_the_model(self, here):
        options = ("--model", "llama", "--base-model", "meta-llama/Tiny", "--revision", "abc", "-o", "p.safetensors")
        run("import", "duo", "gates", *options)
        made = HeadProfile.load("p.safetensors")
        assert (made.base_model, made.base_revision) == ("meta-llama/Tiny", "abc")

    def test_the_model_itself_is_not_overwritten(self, here):
        before = Path("llama/config.json").read_bytes()
        line = refusal("import", "duo", "gates", "--model", "llama", "-o", "llama/config.json")
        assert line == "llama/config.json exists; choose another file"
        assert Path("llama/config.json").read_bytes() == before

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("duo", "nowhere", "--model", "llama"), "cannot read nowhere: No such file or directory"),
            (("duo", "R.json", "--model", "llama"), "R.json, line 1: "),
            (("headkv", "gates/full_attention_heads.tsv", "--model", "llama"), "full_attention_heads.tsv is not JSON"),
            (("duo", "gates", "--model", "wide"), "gates/full_attention_heads.tsv holds 2 x 2 scores, but wide has 3"),
            (("headkv", "R.json", "--model", "wide"), "R.json holds 8 heads, but wide has 3 layers of 6 query heads"),
            (("duo", "gates", "--model", "gates"), "model_type"),
            (("duo", "gates", "--model", "broken"), "config.json is not JSON"),
            (("duo", "gates", "--model", "empty"), "cannot read empty/config.json"),
            (("duo", "gates", "--model", "./nowhere"), "./nowhere is neither a folder nor a Hub id"),
            (("duo", "gates", "--model", "R.json/config.json/x"), "is neither a folder nor a Hub id"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
    )
    def test_refusals_leave_nothing(self, here, arguments, message):
        for name in ("wide", "broken", "empty"):
            (here / name).mkdir()
        wide = {**LLAMA, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
        (here / "wide/config.json").write_text(json.dumps(wide))
        (here / "broken/config.json").write_text("{")
        assert message in refusal("import", *arguments, "-o", "p.safetensors")
        assert not list(here.glob("p.safetensors*"))

    def test_a_profile_or_a_binary_file_is_not_imported(self, here):
        HeadProfile(np.eye(2), "duo", "kv", "llama", ModelDimensions(2, 4, 2, 8)).save("own")
        Path("weights").write_bytes(b"1\0\xff")
        for method in ("duo", "headkv"):
            assert "own is already a head profile" in refusal("import", method, "own", "--model", "llama", "-o", "p")
        line = refusal("import", "duo", "weights", "--model", "llama", "-o", "p")
        assert line == "weights is not a table of tab-separated numbers"

    @pytest.mark.parametrize(
        "arguments",
        [
            ("duo", "gates", "-o", "p"),
            ("duo", "gates", "--model", "llama"),
            ("headkv", "R.json", "--model", "llama", "-o", "p", "--method", "duo"),
            ("duo", "gates", "--model", "llama", "-o", "p", "--method", "headkv-r"),
            ("razor", "gates", "--model", "llama", "-o", "p"),
        ],
        ids=" ".join,
    )
    def test_usage(self, here, arguments):
        result = CliRunner().invoke(profile, ["import", *arguments])
        assert result.exit_code == 2
        assert not Path("p").exists()


class TestImportFromTheHub:
    def command(self, hub, here, *arguments, **environment):
        return hub.run(here, "profile", "import", "duo", "gates", "-o", "p.safetensors", *arguments, **environment)

    def test_only_the_config_is_read(self, here):
        (here / "llama/model.safetensors").write_bytes(b"weights that nobody needs for this")
        with serve() as hub:
            commit = hub.publish("org/llama", here / "llama").refs["main"]
            done = self.command(hub, here, "--model", "org/llama")
            assert done.returncode == 0, done.stderr
            files = {request.rpartition("/")[2] for request in hub.requests if "/resolve/" in request}
            assert files == {"config.json"}
        made = HeadProfile.load(here / "p.safetensors")
        assert (made.base_model, made.base_revision) == ("org/llama", commit)
        # and again without the Hub, from its cache
        (here / "p.safetensors").unlink()
        done = self.command(hub, here, "--model", "org/llama", HF_HUB_OFFLINE="1")
        assert done.returncode == 0, done.stderr
        assert HeadProfile.load(here / "p.safetensors") == made

    def test_revision(self, here):
        with serve() as hub:
            repo = hub.publish("org/llama", here / "llama")
            old = repo.refs["main"]
            repo.commit({"config.json": Blob(json.dumps({**LLAMA, "num_hidden_layers": 9}).encode())}, "main")
            done = self.command(hub, here, "--model", "org/llama", "--revision", old)
            assert done.returncode == 0, done.stderr
        assert HeadProfile.load(here / "p.safetensors").base_revision == old

    @pytest.mark.parametrize("trouble", ["unknown", "gated", "down"])
    def test_one_line_of_trouble(self, here, trouble):
        with serve() as hub:
            hub.publish("org/llama", here / "llama").gated = trouble == "gated"
            name = "org/nothing" if trouble == "unknown" else "org/llama"
            environment = {"HF_ENDPOINT": "http://127.0.0.1:9"} if trouble == "down" else {}
            done = self.command(hub, here, "--model", name, **environment)
        assert done.returncode == 1
        lines = done.stderr.splitlines()
        assert lines[-1].startswith("kvsurgery: ")
        assert name in lines[-1]
        assert "Traceback" not in done.stderr
        assert not list(here.glob("p.safetensors*"))


class TestFilesOfTheHub:
    """Published files that lie in a repository of the Hub."""

    @pytest.fixture
    def hub(self, here):
        with serve() as server:
            (here / "repo/gates tau0.5").mkdir(parents=True)
            for name in ("full_attention_heads.tsv", "config.json"):
                (here / "repo/gates tau0.5" / name).write_bytes((here / "gates" / name).read_bytes())
            (here / "repo/R.json").write_bytes((here / "R.json").read_bytes())
            (here / "repo/README.md").write_text("scores")
            server.repo = server.publish("org/scores", here / "repo")
            yield server

    def imported(self, hub, here, *arguments, **environment):
        """The provenance of a profile, or the line of an error."""
        (here / "p.safetensors").unlink(missing_ok=True)
        command = ("profile", "import", *arguments, "--model", "llama", "-o", "p.safetensors")
        done = hub.run(here, *command, **environment)
        assert "Traceback" not in done.stderr
        if done.returncode == 0:
            return HeadProfile.load(here / "p.safetensors").provenance
        assert done.returncode == 1
        assert not list(here.glob("p.safetensors*"))
        [line] = [line for line in done.stderr.splitlines() if line.startswith("kvsurgery: ")]
        return line

    def test_a_folder_with_its_config(self, hub, here):
        commit, path = hub.repo.refs["main"], "gates tau0.5/full_attention_heads.tsv"
        local = self.imported(hub, here, "duo", "gates")
        quoted = path.replace(" ", "%20")
        for source in ("hf://org/scores/gates tau0.5", f"{hub.url}/org/scores/resolve/{commit}/{quoted}?download=true"):
            made = self.imported(hub, here, "duo", source)
            assert made.pop("hub") == [{"repo_id": "org/scores", "path": path, "revision": commit}]
            assert made == local
            assert HeadProfile.load(here / "p.safetensors").recent == 16
        offline = self.imported(hub, here, "duo", "hf://org/scores/gates tau0.5", HF_HUB_OFFLINE="1")
        assert offline["hub"][0]["revision"] == commit

    def test_an_old_revision_and_several_files(self, hub, here):
        import torch

        old = hub.repo.refs["main"]
        torch.save(torch.tensor([[1.0, 0.5], [0.0, 2.0]]), here / "repo/a.pt")
        torch.save(torch.tensor([[0.0, 1.5], [0.5, 1.0]]), here / "repo/b.pt")
        hub.publish("org/scores", here / "repo")
        made = self.imported(hub, here, "kvzip", "hf://org/scores/a.pt", "hf://org/scores/b.pt")
        assert [file["path"] for file in made["hub"]] == ["a.pt", "b.pt"]
        assert HeadProfile.load(here / "p.safetensors").scores.tolist() == [[1, 1.5], [0.5, 2]]
        assert "org/scores has no revision" in self.imported(hub, here, "headkv", f"hf://org/scores/R.json@{old}")

    @pytest.mark.parametrize(
        ("source", "line"),
        [
            ("hf://org/scores/missing.tsv", "org/scores has no missing.tsv at this revision; "),
            ("hf://org/scores/R.json@v2", "org/scores has no revision 'v2'; "),
            ("hf://org/nothing/full.tsv", "org/nothing is not on http"),
            ("hf://org/scores/README.md", "README.md, line 1: 'scores' is not a number"),
            ("https://github.com/org/scores/a.tsv", "download https://github.com/org/scores/a.tsv first"),
        ],
        ids=["file", "revision", "repository", "content", "GitHub"],
    )
    def test_one_line_of_trouble(self, hub, here, source, line):
        assert line in self.imported(hub, here, "duo", source)

    def test_gated_offline_down_and_too_large(self, hub, here):
        source = "hf://org/scores/R.json"
        offline = self.imported(hub, here, "headkv", source, HF_HUB_OFFLINE="1")
        assert offline == "kvsurgery: org/scores is not in the cache, and HF_HUB_OFFLINE is set: unset it"
        down = self.imported(hub, here, "headkv", source, HF_ENDPOINT="http://127.0.0.1:9")
        assert "cannot reach http://127.0.0.1:9 for org/scores" in down
        hub.repo.gated = True
        assert "org/scores is gated: accept its terms" in self.imported(hub, here, "headkv", source)
        hub.repo.gated = False
        limit = "from kvsurgery.profile.importers import files; files.LARGEST_SCORES_FILE = 9"
        script = f"{limit}; from kvsurgery.cli import main; main()"
        command = [sys.executable, "-c", script, "profile", "import", "headkv", source, "--model", "llama", "-o", "q"]
        done = subprocess.run(command, env=hub.client_environment(here), capture_output=True, text=True, check=False)
        assert (done.returncode, "R.json has " in done.stderr) == (1, True)
        assert not list((here / "hf").rglob("R.json"))
