"""Options of `kvsurgery convert`: what each of them changes in the policy and in the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvsurgery.profile.head_profile import HeadProfile
from tests.helpers.command import MODEL, PROFILE, SCORES, done, refused, run
from tests.helpers.families import make
from tests.helpers.shards import tree
from tests.helpers.surgery import random_profile


class TestOptions:
    """Each option reaches the policy."""

    @pytest.mark.parametrize(
        ("options", "streaming"),
        [
            ((), 3),
            (("--sparsity", 0.34), 2),
            (("--sparsity", 0), 0),
            (("--sparsity", 1), 6),
            (("--full-heads", 5), 1),
            (("--threshold", 0), 0),
            (("--threshold", 1), 6),
        ],
        ids=str,
    )
    def test_how_many_heads_stream(self, here: Path, options: tuple, streaming: int) -> None:
        plan = json.loads(done("convert", "--profile", PROFILE, "--dry-run", "--json", *options).out)
        assert plan["kv_heads"]["streaming"] == streaming
        lowest = sorted(SCORES.flat)[:streaming]
        counts = [sum(score in lowest for score in row) for row in SCORES]
        assert [layer["streaming"] for layer in plan["layers"]] == counts

    def test_without_groups_three_quarters_stream(self, tmp_path: Path) -> None:
        folder = make("llama-tied-mha", tmp_path / "mha")
        random_profile(folder).save(tmp_path / PROFILE)
        result = done("convert", folder, "--profile", tmp_path / PROFILE, "--dry-run")
        assert "24 of 32 KV heads stream (sparsity 0.75, sink 64, recent 256)" in result.out

    def test_sizes_reach_the_model(self, here: Path) -> None:
        done("convert", "llama", "--profile", PROFILE, "--out", "out", "--sink", 7, "--recent", 11)
        layers = json.loads(Path("out/config.json").read_text())["kv_surgery"]["layers"]
        assert {(layer["sink"], layer["recent"]) for layer in layers} == {(7, 11)}

    def test_group_reduce(self, here: Path) -> None:
        # by mean the second head of each layer leads, by maximum the third
        scores = [[0.1, 0.1, 0.5, 0.5, 0.9, 0.0]] * 2
        HeadProfile(scores, "headkv-r", "query", "llama", MODEL).save("query.safetensors")
        orders = {}
        for how in ("mean", "max"):
            done(
                "convert",
                "--profile",
                "query.safetensors",
                "--method",
                "duo",
                "--full-heads",
                2,
                "--group-reduce",
                how,
                "--out",
                how,
            )
            provenance = json.loads(Path(how, "kvsurgery.json").read_text())
            orders[how] = provenance["permutation"]
            assert provenance["options"]["group_reduce"] == how
        assert orders == {"mean": [[1, 0, 2]] * 2, "max": [[2, 0, 1]] * 2}

    def test_budgets(self, here: Path) -> None:
        scores = [[4, 4, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1]]
        HeadProfile(scores, "headkv-r2", "query", "llama", MODEL).save("query.safetensors")
        command = ("convert", "--profile", "query.safetensors", "--budget", 100, "--beta", 2)
        text = done(*command, "--dry-run").out
        assert "6 of 6 KV heads have budgets (group_reduce mean, budget 100, beta 2.0, window 8" in text
        assert "50 to 183" in text
        done(*command, "--out", "out", "--window", 4, "--kernel-size", 3, "--pool", "avg")
        section = json.loads(Path("out/config.json").read_text())["kv_surgery"]
        assert section["selection"] == {"window": 4, "kernel_size": 3, "pool": "avg", "select": "attention"}
        # shares of 50 and a pool of 300 by 4 2 0 1 1 1
        assert [layer["budgets"] for layer in section["layers"]] == [[183, 117, 50], [84, 83, 83]]
        assert "**budgeted heads** keep 100 tokens" in Path("out/README.md").read_text()
        assert "6 budgeted" in done("inspect", "out").out

    def test_budgets_from_another_profile(self, here: Path) -> None:
        shares = HeadProfile([[0.1, 0.2, 0.3], [0.4, 0.5, 0.0]], "lu-kv", "kv", "llama", MODEL)
        shares.save("shares.safetensors")
        command = ("convert", "--budgets-from", "shares.safetensors", "--budget", 100)
        text = done(*command, "--dry-run").out
        assert f"6 of 6 KV heads have budgets (budgets_from lu-kv {shares.hash[:16]}, budget 100, window 8" in text
        done(*command, "--out", "out", "--save-recipe", "recipe.toml")
        layers = json.loads(Path("out/config.json").read_text())["kv_surgery"]["layers"]
        assert [layer["budgets"] for layer in layers] == [[40, 80, 120], [160, 200, 0]]
        assert json.loads(Path("out/kvsurgery.json").read_text())["options"]["budgets_from"].endswith(shares.hash[:16])
        assert 'budgets_from = "shares.safetensors"' in Path("recipe.toml").read_text()
        done("convert", "--recipe", "recipe.toml", "--out", "again")
        assert tree(Path("again")) == tree(Path("out"))
        done("revert", "out", "--out", "back")
        # the gates choose the full heads: 1 and 2 of either layer
        mixed = ("convert", "--profile", PROFILE, "--budgets-from", "shares.safetensors", "--full-heads", 3)
        facts = json.loads(done(*mixed, "--budget", 100, "--dry-run", "--json").out)
        assert [layer["full"] for layer in facts["layers"]] == [1, 2]
        assert sum(sum(layer["budgets"]) for layer in facts["layers"]) == 300
        assert "--full-heads or --sparsity, or leave the profile out" in refused(*mixed[:5], "--budget", 9, "--dry-run")
        assert "--budget is missing" in refused(*mixed, "--dry-run")
        assert "cannot read head profile nowhere" in refused("convert", "--budgets-from", "nowhere", "--dry-run")

    def test_budgets_of_every_head(self, here: Path) -> None:
        HeadProfile([[1, 2, 3], [4, 50, 0]], "budgets", "kv", "llama", MODEL).save("budgets.safetensors")
        facts = json.loads(done("convert", "--profile", "budgets.safetensors", "--dry-run", "--json").out)
        assert [layer["budgets"] for layer in facts["layers"]] == [[1, 2, 3], [4, 50, 0]]
        assert [layer["heads"] for layer in facts["layers"]] == [[1, 2, 3], [4, 50, 0]]

    def test_budgets_that_hold(self, here: Path) -> None:
        command = ("convert", "llama", "--profile", PROFILE, "--rest", "budgeted", "--budget", 100, "--hold")
        says = "budgeted heads select again every 32 tokens, and never keep more than their budget and 40 tokens"
        assert says in done(*command, "--dry-run").out
        done(*command, "--full-heads", 2, "--kv-bits", 4, "--save-recipe", "recipe.toml", "--out", "out")
        section = json.loads(Path("out/config.json").read_text())["kv_surgery"]
        assert section["selection"] == {
            **{"window": 8, "kernel_size": 7, "pool": "max"},
            **{"hold": 32, "select": "attention"},
        }
        assert "hold = 32" in Path("recipe.toml").read_text()
        assert "4 budgeted" in (text := done("inspect", "out").out)
        assert f"{says}, and are not quantized" in text
        card = " ".join(Path("out/README.md").read_text().split())
        assert "at most 32 tokens since, after which they choose again" in card
        assert "4 bits (kivi, values rotated), except in budgeted heads" in card
        done(*command, 64, "--kv-bits", 4, "--kv-scheme", "per-token", "--out", "other")
        card = " ".join(Path("other/README.md").read_text().split())
        assert "stored in 4 bits (per-token, keys and values rotated, ranges clipped)." in card
        assert json.loads(Path("other/config.json").read_text())["kv_surgery"]["selection"]["hold"] == 64

    def test_by_what_budgeted_heads_select(self, here: Path) -> None:
        command = ("convert", "llama", "--profile", PROFILE, "--rest", "budgeted", "--budget", 100, "--select")
        says = "budgeted heads select again every 32 tokens by attention and value norm, and never"
        text = done(*command, "value-norm", "--hold", "--save-recipe", "recipe.toml", "--out", "out").out
        assert says in text
        assert says in done("inspect", "out").out
        assert json.loads(done("inspect", "out", "--json").out)["surgery"]["hold"]["select"] == "value-norm"
        assert 'select = "value-norm"' in Path("recipe.toml").read_text()
        assert "select value-norm" in done(*command, "value-norm", "--out", "other").out
        assert "select value-norm" in done("inspect", "other").out
        assert json.loads(Path("other/config.json").read_text())["kv_surgery"]["selection"]["select"] == "value-norm"
        assert "the norm of their values times the attention of its last 8 tokens" in " ".join(
            Path("other/README.md").read_text().split()
        )

    def test_a_quantized_cache(self, here: Path) -> None:
        command = ("convert", "llama", "--profile", PROFILE, "--kv-bits", 4)
        text = done(*command, "--dry-run").out
        assert "kv_bits 4, kv_scheme kivi, kv_residual 128" in text
        rows = [
            json.loads(done(*command[:4], *more, "--dry-run", "--json").out)["kv_bytes"] for more in ((), command[4:])
        ]
        assert all(one["after"] > other["after"] for one, other in zip(*rows, strict=True))
        done(*command, "--out", "out", "--kv-scheme", "per-token", "--kv-group-size", 2, "--kv-residual", 64)
        section = json.loads(Path("out/config.json").read_text())["kv_surgery"]
        assert section["quantization"] == {
            "bits": 4,
            "scheme": "per-token",
            "group_size": 2,
            "residual": 64,
            "streaming": False,
            "sink": 4,
            "rotate": "both",
            "clip": True,
        }
        card = Path("out/README.md").read_text()
        assert "The first 4 and at least the newest 64 tokens stay in the model's dtype; the other tokens are" in card
        how = "4 bits (per-token, groups of 2, keys and values rotated, ranges clipped)"
        assert f"stored in {how}, except in streaming heads." in card
        assert f"KV cache in {how}, the first 4 and the newest 64 tokens unquantized" in done("inspect", "out").out
        assert json.loads(done("inspect", "out", "--json").out)["surgery"]["quantization"] == section["quantization"]

    def test_quantized_windows(self, here: Path) -> None:
        command = ("convert", "llama", "--profile", PROFILE, "--recent", 512, "--kv-bits", 4)
        sizes = [
            json.loads(done(*command, *more, "--dry-run", "--json").out)["kv_bytes"][0]["after"]
            for more in ((), ("--kv-streaming",))
        ]
        # of three streaming heads, window and sinks of 4 channels in 4 bytes become 4 tiles, 256 tokens and the sinks
        tile = 2 * 128 * 2 + 2 * 4 * 4 + 2 * 128 * 4
        assert sizes[0] - sizes[1] == 3 * ((512 - 256) * 2 * 4 * 4 - 4 * tile)
        done(*command, "--kv-streaming", "--out", "out")
        assert json.loads(Path("out/config.json").read_text())["kv_surgery"]["quantization"]["streaming"] is True
        assert "long windows of streaming heads too" in done("inspect", "out").out

    def test_details_of_bits_without_bits(self, here: Path) -> None:
        result = run("convert", "llama", "--profile", PROFILE, "--out", "out", "--kv-group-size", 2, "--kv-residual", 1)
        assert result.code == 2
        assert "--kv-group-size and --kv-residual requires --kv-bits" in result.err

    def test_kinds_that_contradict_each_other(self, here: Path) -> None:
        result = run("convert", "llama", "--profile", PROFILE, "--out", "out", "--method", "duo", "--rest", "budgeted")
        assert result.code == 2
        assert "--method duo means --rest streaming" in result.err


class TestWithoutAProfile:
    """Every head stays full, and the cache is quantized."""

    def test_the_cache_is_that_of_a_profile_that_keeps_all(self, here: Path) -> None:
        printed = done("convert", "llama", "--kv-bits", 4, "--out", "out").out
        assert "all 6 KV heads stay full (kv_bits 4" in printed
        assert "profile" not in printed
        done("verify", "out", "--source", "llama")
        done("convert", "llama", "--profile", PROFILE, "--sparsity", 0, "--kv-bits", 4, "--out", "all")
        found, kept = (json.loads(Path(out, "config.json").read_text())["kv_surgery"] for out in ("out", "all"))
        assert found["quantization"] == kept["quantization"]
        assert [layer["blocks"] for layer in found["layers"]] == [layer["blocks"] for layer in kept["layers"]]
        assert "| head profile | none: every head stays full |" in Path("out/README.md").read_text()
        assert json.loads(done("convert", "llama", "--kv-bits", 4, "--dry-run", "--json").out)["profile"] is None
        done("revert", "out", "--out", "back")
        for shard in Path("llama").glob("*.safetensors"):
            assert Path("back", shard.name).read_bytes() == shard.read_bytes()

    def test_a_recipe_says_the_same(self, here: Path) -> None:
        done("convert", "llama", "--kv-bits", 8, "--kv-rotate", "both", "--save-recipe", "kv8.toml", "--out", "out")
        done("convert", "llama", "--recipe", "kv8.toml", "--out", "again")
        assert tree(Path("out")) == tree(Path("again"))

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--kv-bits", 4, "--full-heads", 3), "--full-heads requires a profile with scores"),
            (("--kv-bits", 4, "--budget", 9), "--budget requires a profile with scores"),
            (("--kv-bits", 4, "--hold", 32), "--hold requires a profile with scores"),
            (("--kv-bits", 4, "--method", "duo"), "--rest requires a profile with scores"),
        ],
    )
    def test_what_needs_scores(self, here: Path, options: tuple, words: str) -> None:
        assert words in refused("convert", "llama", *options, "--out", "out")
        assert not Path("out").exists()

    def test_something_is_asked_for(self, here: Path) -> None:
        missing = "--profile is missing: the file with the scores that decide which heads stay full"
        for command, more in (
            (
                ("convert", "llama", "--out", "out"),
                "; without one, --kv-bits 8, 4, 3 or 2 quantizes the cache of every head\n",
            ),
            (("convert", "llama", "--out", "out", "--fit", "1GB", "--context", "1K"), "\n"),
            (("fit", "llama", "--memory", "1GB", "--context", "1K"), "\n"),
        ):
            result = run(*command)
            assert result.code == 2
            assert missing + more in result.err

    def test_long_prompts_take_a_profile(self, here: Path) -> None:
        result = run("convert", "llama", "--kv-bits", 4, "--method", "reform", "--out", "out")
        assert "--method reform takes a reform profile alone" in result.err
        assert not Path("out").exists()

    def test_the_checkpoint_is_named(self, here: Path) -> None:
        assert "no checkpoint is given" in refused("convert", "--kv-bits", 4, "--out", "out")


def test_sizes_of_a_kind_of_heads_ask_for_that_kind(here):
    def rest(*options):
        return json.loads(done("convert", "llama", "--profile", PROFILE, *options, "--dry-run", "--json").out)[
            "policy"
        ]["rest"]

    assert rest() == rest("--sink", 4) == "streaming"
    assert rest("--budget", 9) == rest("--window", 4, "--budget", 9) == "budgeted"
