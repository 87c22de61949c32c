"""`kvsurgery profile` as a user runs it: profiles are shown, compared and merged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvsurgery.cli.profile import profile
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.embedding_heads import EmbeddingHead, Ranking
from kvsurgery.profile.head_profile import HeadProfile
from tests.cli.profile_command import refusal, run, working_folder  # noqa: F401  (a fixture)
from tests.helpers.command import done
from tests.helpers.shards import llama_checkpoint

DIMENSIONS = ModelDimensions(layers=2, query_heads=4, kv_heads=2, head_dim=8)


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
        run("show", saved, "--plot", "heads.png")
        assert Path("heads.png").read_bytes().startswith(b"\x89PNG")

    def test_json_stays_json_beside_a_plot(self, saved):
        result = CliRunner().invoke(profile, ["show", str(saved), "--json", "--plot", "heads.png"])
        assert json.loads(result.stdout)["method"] == "duo"

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
        assert "has embedding heads and no " in refusal(*command.split(), "reform.safetensors")
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
            "A: duo.safetensors, of llama (2 layers, 4 query heads, 2 KV heads of 8)",
            "duo scores of 2 x 2 KV heads: 0 to 1, mean 0.5625, 2 of 4 at the maximum",
            "B: r.safetensors, of llama (2 layers, 4 query heads, 2 KV heads of 8)",
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
        assert "Next: kvsurgery convert --profile p.safetensors --out " in output
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

    @pytest.mark.parametrize("out", ["1.safetensors", "./1.safetensors", "gone/../1.safetensors", "link.safetensors"])
    def test_no_input_is_overwritten(self, seeds, out):
        Path("link.safetensors").symlink_to("1.safetensors")
        before = Path("1.safetensors").read_bytes()
        result = CliRunner().invoke(profile, ["merge", *seeds, "-o", out])
        assert result.exit_code == 2
        assert "is one of the profiles to merge" in result.output
        assert Path("1.safetensors").read_bytes() == before

    def test_refusals_leave_nothing(self, seeds):
        assert refusal("merge", seeds[0], "-o", "p") == "one profile alone cannot be merged; give two or more"
        assert "cannot read head profile nowhere" in refusal("merge", seeds[0], "nowhere", "-o", "p")
        assert refusal("merge", *seeds, "-o", "R.json").startswith("R.json exists; ")
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
