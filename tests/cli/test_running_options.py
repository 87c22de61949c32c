"""Options of commands that run models: one meaning, one definition; and the dtype that a slow CPU gets."""

import json

import click
import pytest

from kvsurgery.checkpoint import dtype as dtypes
from kvsurgery.cli import cli
from tests.helpers.command import done, refused, run
from tests.helpers.families import make
from tests.helpers.surgery import convert_folder
from tests.helpers.vocabularies import tokenizer

ALIKE = ("--device", "--dtype", "--seed", "--revision")
WITHOUT = {"flags": "fpu sse2 avx2 avx512f", "Features": "fp asimd"}
WITH = {"flags": "fpu avx512f avx512_bf16 amx_bf16", "Features": "fp asimd bf16 i8mm"}


def options(command, path=()):
    """Every option of a command and its subcommands, with the command's name."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from options(command.get_command(context, name), (*path, name))
    else:
        yield from ((" ".join(path), option) for option in command.params if isinstance(option, click.Option))


@pytest.mark.parametrize("flag", ALIKE)
def test_one_definition_wherever_an_option_means_the_same(flag):
    found = {
        command: (str(option.type), option.default, option.help)
        for command, option in options(cli)
        # importing records the revision of a model
        if flag in option.opts and not command.startswith("profile import")
    }
    assert len(found) > 1
    assert len(set(found.values())) == 1, found


def test_commands_that_measure_have_device_and_dtype():
    having = {flag: {command for command, option in options(cli) if flag in option.opts} for flag in ALIKE}
    assert having["--device"] == {"bench", "eval", "sweep", "profile compute"}
    assert having["--dtype"] == having["--device"] | {"verify"}


@pytest.fixture
def cpu(tmp_path, monkeypatch):
    """Say which features the CPU has: a line of /proc/cpuinfo."""

    def having(key, features):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{key}\t\t: {features}\n\nprocessor\t: 1\n")
        monkeypatch.setattr(dtypes, "CPUINFO", tmp_path / "cpuinfo")
        dtypes.cpu_features.cache_clear()

    yield having
    dtypes.cpu_features.cache_clear()


class TestFeatures:
    @pytest.mark.parametrize("key", WITH)
    def test_of_x86_and_arm(self, cpu, key):
        cpu(key, WITH[key])
        assert not dtypes.slow_on_cpu("bfloat16")
        assert dtypes.slow_on_cpu("float16")
        cpu(key, WITHOUT[key])
        assert dtypes.slow_on_cpu("bfloat16")

    def test_no_word_of_a_feature_is_part_of_another(self, cpu):
        cpu("flags", "avx512_bf16x no_amx_bf16")
        assert dtypes.slow_on_cpu("bfloat16")

    @pytest.mark.parametrize("stored", ["float32", "float64", None])
    def test_other_dtypes_are_not_slow(self, cpu, stored):
        cpu("flags", "")
        assert not dtypes.slow_on_cpu(stored)

    def test_a_system_without_the_file(self, monkeypatch, cpu, tmp_path):
        monkeypatch.setattr(dtypes, "CPUINFO", tmp_path / "nowhere")
        dtypes.cpu_features.cache_clear()
        assert dtypes.slow_on_cpu("bfloat16")


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory):
    """A converted checkpoint in bfloat16."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    make("llama", folder, vocab_size=400, dtype="bfloat16")
    text = ["the baker carried a basket of late apples by the river"]
    tokenizer("bytes", text, size=400).save_pretrained(folder)
    return convert_folder(folder, tmp_path_factory.mktemp("out") / "converted", sparsity=0.5).folder


class TestStored:
    def test_in_the_config_and_else_in_the_headers(self, bfloat16, tmp_path):
        assert dtypes.stored_dtype(bfloat16) == "bfloat16"
        config = json.loads((bfloat16 / "config.json").read_text())
        for name in ("dtype", "torch_dtype"):
            config.pop(name, None)
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert dtypes.stored_dtype(tmp_path) is None
        (tmp_path / "model.safetensors").symlink_to(bfloat16 / "model.safetensors")
        assert dtypes.stored_dtype(tmp_path) == "bfloat16"


def bench(folder, *options):
    return run("bench", folder, "--device", "cpu", "--lengths", "16", "--new-tokens", "5", "--rounds", "1", *options)


class TestChoice:
    def measured(self, folder, *options):
        result = bench(folder, "--json", *options)
        assert result.code == 0, result.err
        found = json.loads(result.out)
        rows = {row["contender"]: row for row in found["rows"]}
        assert rows["converted"]["kv_bytes"] == rows["converted"]["predicted"]
        return found["settings"]["dtype"], rows["converted"]["kv_bytes"], result.err

    def test_float32_where_the_cpu_is_slow(self, cpu, bfloat16):
        cpu("flags", WITHOUT["flags"])
        dtype, kv_bytes, said = self.measured(bfloat16)
        assert dtype == "float32"
        assert "measuring in float32: this CPU has no bfloat16 instructions; --dtype bfloat16" in said
        dtype, half, said = self.measured(bfloat16, "--dtype", "bfloat16")
        assert (dtype, 2 * half) == ("bfloat16", kv_bytes)
        assert "instructions" not in said

    def test_the_checkpoint_s_own_where_it_is_fast(self, cpu, bfloat16):
        cpu("flags", WITH["flags"])
        dtype, _, said = self.measured(bfloat16)
        assert dtype == "bfloat16"
        assert "instructions" not in said

    def test_logits(self, cpu, bfloat16):
        cpu("flags", WITHOUT["flags"])
        compared = done("verify", bfloat16, "--logits", "--json")
        assert json.loads(compared.out)["logits"]["dtype"] == "float32"
        assert "measuring in float32" in compared.err
        explicit = done("verify", bfloat16, "--logits", "--json", "--dtype", "bfloat16")
        assert json.loads(explicit.out)["logits"]["dtype"] == "bfloat16"
        assert "--dtype requires --logits" in run("verify", bfloat16, "--dtype", "bfloat16").err

    def test_evaluation_and_profile(self, cpu, bfloat16, tmp_path, monkeypatch):
        cpu("flags", WITHOUT["flags"])
        monkeypatch.chdir(tmp_path)
        task = ["--tasks", "perplexity", "--lengths", "64", "--samples", "1", "--continuation", "8"]
        found = done("eval", bfloat16, *task, "--out", "report", "--json")
        assert json.loads(found.out)["settings"]["dtype"] == "float32"
        assert found.err.count("measuring in float32") == 1
        prompts = ["--min-context", 300, "--max-context", 400, "--passkeys", 2, "--passkey-tokens", 3, "--samples", 1]
        measured = done("profile", "compute", bfloat16, "--method", "attention", *prompts, "-o", "p.safetensors")
        assert measured.err.count("measuring in float32") == 1


@pytest.mark.parametrize("command", [["bench"], ["eval"]])
def test_a_folder_that_is_not_there_is_no_hub_id_on_any_cpu(cpu, command):
    cpu("flags", WITHOUT["flags"])
    assert "nowhere is not a folder" in refused(*command, "nowhere")


@pytest.mark.parametrize("device", ["gpu", "cuda:", "CPU", "cuda:x"])
def test_what_is_no_device(device):
    result = run("bench", "nowhere", "--device", device)
    assert result.code == 2
    assert "is not a device; write cpu, cuda or cuda:1" in result.err


def test_a_device_that_is_not_there(bfloat16):
    assert "torch cannot use the device cuda" in refused("eval", bfloat16, "--device", "cuda")


@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "llama", "--samples", 0),
        ("eval", "llama", "--lengths", 0),
        ("eval", "llama", "--chunk", 0),
        ("eval", "llama", "--tp", 0),
        ("bench", "llama", "--rounds", 0),
        ("bench", "llama", "--batches", 0),
        ("profile", "compute", "llama", "--method", "duo", "-o", "p", "--sp", 0),
        ("profile", "compute", "llama", "--method", "headkv-r", "-o", "p", "--lengths", 0),
        ("verify", ""),
        ("eval", "llama", "--out", ""),
        ("profile", "import", "reform", "Pixtral-12B-2409", "-o", ""),
    ],
    ids=lambda arguments: " ".join(map(str, arguments)),
)
def test_numbers_out_of_range_and_empty_paths_are_wrong_usage(arguments):
    result = run(*arguments)
    assert (result.code, result.out) == (2, "")
    assert "Error: Invalid value for" in result.err
