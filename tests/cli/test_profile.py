"""`kvsurgery profile` as a user runs it: files in, a profile or one clear line out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvsurgery.cli.profile import profile
from kvsurgery.cli.profile.importing import headkv
from kvsurgery.dimensions import ModelDimensions
from kvsurgery.errors import KVSurgeryError
from kvsurgery.score.embedding_heads import EmbeddingHead, Ranking
from kvsurgery.score.importers import HEADKV_METHODS
from kvsurgery.score.profile import HeadProfile
from tests.command import done
from tests.hub_server import Blob, serve
from tests.shards import llama_checkpoint

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DIMENSIONS = ModelDimensions(layers=2, query_heads=4, kv_heads=2, head_dim=8)
GATES = "1.0\t-0.001\n0.25\t1.0\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with a model's config, DuoAttention's files and HeadKV's."""
    monkeypatch.chdir(tmp_path)
    for folder in ("llama", "gates"):
        (tmp_path / folder).mkdir()
    (tmp_path / "llama/config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "gates/full_attention_heads.tsv").write_text(GATES)
    (tmp_path / "gates/config.json").write_text('{"sink_size": 8, "recent_size": 16}')
    heads = {f"{layer}-{head}": [layer / 2, head / 8] for layer in (1, 0) for head in (2, 3, 1, 0)}
    (tmp_path / "R.json").write_text(json.dumps(heads))
    return tmp_path


def run(*arguments):
    """What a successful command prints."""
    result = CliRunner().invoke(profile, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refusal(*arguments):
    """The one line of a command that fails."""
    with pytest.raises(KVSurgeryError) as raised:
        CliRunner().invoke(profile, list(map(str, arguments)), catch_exceptions=False, standalone_mode=False)
    line = str(raised.value)
    assert "\n" not in line
    return line


class TestImport:
    @pytest.mark.parametrize("path", ["gates", "gates/full_attention_heads.tsv"])
    def test_duo(self, here, path):
        output = run("import", "duo", path, "--model", "llama", "-o", "p.safetensors")
        made = HeadProfile.load("p.safetensors")
        assert made.scores.tolist() == [[1, 0], [0.25, 1]]
        assert (made.method, made.granularity, made.base_model, made.base_revision) == ("duo", "kv", "llama", None)
        assert (made.sink, made.recent, made.model.head_dim) == (8, 16, 8)
        assert "2 of 4 at the maximum" in output
        assert "kvsurgery convert --profile p.safetensors --out DIR" in output

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

    def test_another_name_for_the_model(self, here):
        options = ("--model", "llama", "--base-model", "meta-llama/Tiny", "--revision", "abc", "-o", "p.safetensors")
        run("import", "duo", "gates", *options)
        made = HeadProfile.load("p.safetensors")
        assert (made.base_model, made.base_revision) == ("meta-llama/Tiny", "abc")

    def test_the_model_itself_is_not_overwritten(self, here):
        before = Path("llama/config.json").read_bytes()
        line = refusal("import", "duo", "gates", "--model", "llama", "-o", "llama/config.json")
        assert line == "llama/config.json exists and is not a head profile; give another output file"
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
            (("duo", "gates", "--model", "./nowhere"), "./nowhere is no model folder, no config.json and no Hub id"),
            (("duo", "gates", "--model", "R.json/config.json/x"), "no model folder"),
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
    """In a process of its own: huggingface_hub reads its endpoint when it is imported."""

    def command(self, here, endpoint, *arguments, **environment):
        script = "import time; time.sleep = lambda s: None\nfrom kvsurgery.cli import main; main()"
        return subprocess.run(
            [sys.executable, "-c", script, "profile", "import", "duo", "gates", "-o", "p.safetensors", *arguments],
            cwd=here,
            env={**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(here / "hf"), **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    def test_only_the_config_is_read(self, here):
        (here / "llama/model.safetensors").write_bytes(b"weights that nobody needs for this")
        with serve() as hub:
            commit = hub.publish("org/llama", here / "llama").refs["main"]
            done = self.command(here, hub.url, "--model", "org/llama")
            assert done.returncode == 0, done.stderr
            files = {request.rpartition("/")[2] for request in hub.requests if "/resolve/" in request}
            assert files == {"config.json"}
        made = HeadProfile.load(here / "p.safetensors")
        assert (made.base_model, made.base_revision) == ("org/llama", commit)
        # and again without the Hub, from its cache
        (here / "p.safetensors").unlink()
        done = self.command(here, hub.url, "--model", "org/llama", HF_HUB_OFFLINE="1")
        assert done.returncode == 0, done.stderr
        assert HeadProfile.load(here / "p.safetensors") == made

    def test_revision(self, here):
        with serve() as hub:
            repo = hub.publish("org/llama", here / "llama")
            old = repo.refs["main"]
            repo.commit({"config.json": Blob(json.dumps({**LLAMA, "num_hidden_layers": 9}).encode())}, "main")
            done = self.command(here, hub.url, "--model", "org/llama", "--revision", old)
            assert done.returncode == 0, done.stderr
        assert HeadProfile.load(here / "p.safetensors").base_revision == old

    @pytest.mark.parametrize("trouble", ["unknown", "gated", "down"])
    def test_one_line_of_trouble(self, here, trouble):
        with serve() as hub:
            hub.publish("org/llama", here / "llama").gated = trouble == "gated"
            name = "org/nothing" if trouble == "unknown" else "org/llama"
            endpoint = "http://127.0.0.1:9" if trouble == "down" else hub.url
            done = self.command(here, endpoint, "--model", name)
        assert done.returncode == 1
        lines = done.stderr.splitlines()
        assert lines[-1].startswith("kvsurgery: ")
        assert name in lines[-1]
        assert "Traceback" not in done.stderr
        assert not list(here.glob("p.safetensors*"))


class TestShow:
    @pytest.fixture
    def saved(self, here):
        run("import", "duo", "gates", "--model", "llama", "-o", "p.safetensors")
        return here / "p.safetensors"

    def test_plain_where_it_is_piped(self, saved):
        assert run("show", saved) == (
            "llama (2 layers, 4 query heads, 2 KV heads of 8)\n"
            "duo scores of 2 x 2 KV heads: 0 to 1, mean 0.5625, 2 of 4 at the maximum\n"
            "right: full KV heads of the layer at sparsity 0.25, 0.5, 0.75\n"
            "\n"
            "layer|0   | 25 50 75\n"
            "    0|@@  |  1  1  1\n"
            "    1|::@@|  2  1  0\n"
            "\n"
            "scale| .:-=+*#%@| 0 to 1\n"
        )

    def test_readable_without_unicode(self, saved):
        command = [sys.executable, "-m", "kvsurgery", "profile", "show", str(saved)]
        environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
        done = subprocess.run(command, env=environment, capture_output=True, check=True)
        assert b"    0|@@  |  1  1  1" in done.stdout.splitlines()
        assert done.stdout.isascii()

    def test_json(self, saved):
        found = json.loads(run("show", saved, "--json"))
        made = HeadProfile.load(saved)
        np.testing.assert_array_equal(np.float32(found["scores"]), made.scores)
        assert found["model"] == {"layers": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 8}
        assert found["full_heads_per_layer"] == {"0.25": [1, 2], "0.5": [1, 1], "0.75": [1, 0]}
        assert (found["hash"], found["at_max"], found["sink"], found["recent"]) == (made.hash, 2, 8, 16)
        assert found["provenance"]["source"] == "full_attention_heads.tsv"

    def test_a_name_that_looks_like_markup(self, here):
        run("import", "duo", "gates", "--model", "llama", "--base-model", "[bold]llama[/]", "-o", "p.safetensors")
        assert run("show", "p.safetensors").startswith("[bold]llama[/] (2 layers")

    def test_plot(self, saved):
        pytest.importorskip("matplotlib")
        run("show", saved, "--plot", "heads.png")
        assert Path("heads.png").read_bytes().startswith(b"\x89PNG")

    def test_json_stays_json_beside_a_plot(self, saved):
        pytest.importorskip("matplotlib")
        result = CliRunner().invoke(profile, ["show", str(saved), "--json", "--plot", "heads.png"])
        assert json.loads(result.stdout)["method"] == "duo"

    def test_plot_without_matplotlib(self, saved, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert "pip install 'kvsurgery[plot]'" in refusal("show", saved, "--plot", "heads.png")
        assert not Path("heads.png").exists()

    @pytest.mark.parametrize("name", ["R.json", "nowhere", "."])
    def test_refusals(self, here, name):
        assert "head profile" in refusal("show", name)


class TestShowEmbeddingHeads:
    HEADS = (EmbeddingHead(0, "q", 3), EmbeddingHead(1, "k", 1))

    def save(self, ranking=None):
        made = HeadProfile(None, "reform", None, "[b]org[/]", DIMENSIONS, embedding_heads=self.HEADS, ranking=ranking)
        made.save("reform.safetensors")

    def tables(self):
        """The titles and rows of what `show` prints."""
        first, second, *lines = run("show", "reform.safetensors").splitlines()
        assert first == "[b]org[/] (2 layers, 4 query heads, 2 KV heads of 8)"
        assert second == "reform embedding heads: q0.3, k1.1"
        words = [line.split() for line in lines if line.strip() and "─" not in line]
        starts = [at for at, line in enumerate(words) if line[:3] == ["state", "layer", "head"]]
        return {
            " ".join(words[at - 1]): words[at + 1 : end and end - 1]
            for at, end in zip(starts, [*starts[1:], None], strict=True)
        }

    def test_those_picked_and_the_best_of_each_task(self, here):
        ranks = {"q": [[0.1, 0.2, 0.3, 0.4]] * 2, "k": [[0.5, 0.6], [0.7, 0.8]], "v": np.full((2, 2), 0.9)}
        ranks |= {"hidden": [[0.25], [0.15]], "attention": [[0.3, 0.35, 0.05, 0.4]] * 2}
        self.save(Ranking({"pattern": ranks, "multihop": {kind: 1 - np.array(of) for kind, of in ranks.items()}}))
        picked, pattern, multihop = self.tables().values()
        assert picked == [["q", "0", "3", "0.4000", "0.6000"], ["k", "1", "1", "0.8000", "0.2000"]]
        assert [row[:4] for row in pattern] == [
            ["q", "0", "0", "0.1000"],
            ["q", "1", "0", "0.1000"],
            ["q", "0", "1", "0.2000"],
            ["q", "1", "1", "0.2000"],
            ["q", "0", "2", "0.3000"],
            ["hidden", "1", "0", "0.1500"],
            ["attention", "0", "2", "0.0500"],
        ]
        assert [row[0] for row in multihop] == ["v", "v", "v", "v", "k", "hidden", "attention"]

    def test_without_ranks(self, here):
        self.save()
        assert self.tables() == {"embedding heads": [["q", "0", "3"], ["k", "1", "1"]]}

    def test_json(self, here):
        self.save()
        found = json.loads(run("show", "reform.safetensors", "--json"))
        assert found["embedding_heads"][0] == {"layer": 0, "state": "q", "head": 3}

    @pytest.mark.parametrize("command", ["show --plot heads.png", "compare p", "merge -o merged p"])
    def test_what_needs_scores(self, here, command):
        self.save()
        run("import", "duo", "gates", "--model", "llama", "-o", "p")
        assert "has embedding heads and no scores" in refusal(*command.split(), "reform.safetensors")
        assert not Path("heads.png").exists()
        assert not Path("merged").exists()


class TestCompare:
    @pytest.fixture
    def saved(self, here):
        run("import", "duo", "gates", "--model", "llama", "-o", "duo.safetensors")
        run("import", "headkv", "R.json", "--model", "llama", "-o", "r.safetensors")
        return "duo.safetensors", "r.safetensors"

    def test_kv_heads_against_query_heads(self, saved):
        # gates 1 0 .25 1 have places 3.5 1 2 3.5, means of R 1/32 5/32 9/32 13/32 have 1 2 3 4
        lines = run("compare", *saved).splitlines()
        assert lines[:9] == [
            "A: llama (2 layers, 4 query heads, 2 KV heads of 8)",
            "duo scores of 2 x 2 KV heads: 0 to 1, mean 0.5625, 2 of 4 at the maximum",
            "B: llama (2 layers, 4 query heads, 2 KV heads of 8)",
            "headkv-r scores of 2 x 4 query heads: 0 to 0.4375, mean 0.2188, 1 of 8 at the maximum",
            "ranks of KV heads: A, B, and the layer's mean |B - A| as a share of the scale",
            "",
            "layer|0   |0   | diff",
            "    0|%%::|::++|  44%",
            "    1|++%%|##@@|  19%",
        ]
        assert lines[12:15] == [
            "Spearman rank correlation of 4 KV heads: 0.105",
            "layers that differ most: 0 (44%), 1 (19%)",
            "",
        ]
        rows = [line.split() for line in lines if line.strip().startswith("0.")]
        assert rows == [
            ["0.25", "3", "of", "4", "2", "66.7%", "75.0%", "0.500"],
            ["0.5", "2", "of", "4", "1", "50.0%", "50.0%", "0.333"],
            ["0.75", "1", "of", "4", "0", "0.0%", "25.0%", "0.000"],
        ]

    def test_json(self, saved):
        pytest.importorskip("matplotlib")
        result = CliRunner().invoke(profile, ["compare", *saved, "--json", "--plot", "d.png", "--group-reduce", "max"])
        found = json.loads(result.stdout)
        assert (found["unit"], found["group_reduce"], found["a"]["method"]) == ("rank", "max", "duo")
        assert np.shape(found["difference"]) == (2, 2)
        assert result.stderr == "wrote d.png\n"
        assert Path("d.png").read_bytes().startswith(b"\x89PNG")

    def test_another_name_is_told_and_another_model_refused(self, saved):
        run("import", "duo", "gates", "--model", "llama", "-o", "other", "--base-model", "org/[b]llama")
        result = CliRunner().invoke(profile, ["compare", "duo.safetensors", "other"])
        assert result.exit_code == 0
        assert result.stderr == "the profiles name different models of equal dimensions, llama and org/[b]llama\n"
        assert "Spearman rank correlation of 4 KV heads: 1.000" in result.stdout
        wide = ModelDimensions(layers=2, query_heads=4, kv_heads=4, head_dim=8)
        HeadProfile(np.eye(2, 4), "duo", "kv", "wide", wide).save("wide.safetensors")
        assert refusal("compare", "duo.safetensors", "wide.safetensors") == (
            "llama and wide are different models (kv_heads 2 and 4); give profiles of one model"
        )


class TestMerge:
    @pytest.fixture
    def seeds(self, here):
        """Three profiles of the checkpoint `model`."""
        llama_checkpoint(here / "model", shards=2)
        dimensions = ModelDimensions(layers=2, query_heads=6, kv_heads=3, head_dim=4)
        names = [f"{seed}.safetensors" for seed in range(3)]
        for seed, name in enumerate(names):
            scores = np.random.default_rng(seed).random((2, 3))
            HeadProfile(scores, "duo", "kv", "model", dimensions, provenance={"seed": seed}).save(name)
        return names

    @pytest.mark.parametrize("how", ["mean", "max", "rank-product"])
    def test_the_result_converts_whatever_the_order(self, seeds, how):
        output = run("merge", *seeds, "--how", how, "-o", "p.safetensors")
        assert output.startswith("wrote p.safetensors\nmodel (2 layers")
        assert "next: kvsurgery convert --profile p.safetensors --out DIR" in output
        run("merge", *reversed(seeds), "--how", how, "-o", "q.safetensors")
        assert Path("p.safetensors").read_bytes() == Path("q.safetensors").read_bytes()
        assert json.loads(run("show", "p.safetensors", "--json"))["provenance"]["merge"] == how
        done("convert", "--profile", "p.safetensors", "--out", "out")
        done("verify", "out", "--source", "model")

    def test_mean_unless_told(self, seeds):
        run("merge", *seeds, "-o", "p.safetensors")
        mean = np.mean([HeadProfile.load(name).scores for name in seeds], axis=0, dtype=np.float64)
        np.testing.assert_allclose(HeadProfile.load("p.safetensors").scores, mean, rtol=1e-6)

    def test_names(self, seeds):
        run("merge", *seeds, "-o", "p.safetensors", "--base-model", "org/model")
        assert HeadProfile.load("p.safetensors").base_model == "org/model"

    @pytest.mark.parametrize("out", ["1.safetensors", "./1.safetensors"])
    def test_no_input_is_overwritten(self, seeds, out):
        before = Path("1.safetensors").read_bytes()
        result = CliRunner().invoke(profile, ["merge", *seeds, "-o", out])
        assert result.exit_code == 2
        assert "is one of the profiles to merge" in result.output
        assert Path("1.safetensors").read_bytes() == before

    def test_refusals_leave_nothing(self, seeds):
        assert refusal("merge", seeds[0], "-o", "p") == "one profile alone cannot be merged; give two or more"
        assert "cannot read head profile nowhere" in refusal("merge", seeds[0], "nowhere", "-o", "p")
        assert refusal("merge", *seeds, "-o", "R.json").startswith("R.json exists and is not a head profile")
        assert not Path("p").exists()


class TestHelp:
    @pytest.mark.parametrize(
        "command",
        ["", "import", "import duo", "import headkv", "show", "compare", "merge"],
        ids=lambda name: name or "profile",
    )
    def test_every_help_has_an_example(self, command):
        # the usage line has the group's own name only
        assert f"kvsurgery profile {command}".rstrip() in run(*command.split(), "--help")

    def test_help_loads_nothing_heavy(self):
        script = (
            "import sys; from click.testing import CliRunner; from kvsurgery.cli.profile import profile\n"
            "assert CliRunner().invoke(profile, ['import', 'duo', '--help']).exit_code == 0\n"
            "print({'torch', 'transformers', 'numpy', 'huggingface_hub', 'matplotlib'} & set(sys.modules))"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "set()"
