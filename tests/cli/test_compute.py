"""`profile compute` as a user has it: a folder in, a profile out, by every method."""

import json
import math
import re
import shlex
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from kvsurgery.display import console
from kvsurgery.errors import ProfileError
from kvsurgery.measure import attention, cache_losses, own_answers, pace, settling, training, training_state
from kvsurgery.measure.prompts import Contexts
from kvsurgery.profile.cache_losses import CacheLosses
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.system.locks import reserved_file
from tests.helpers.command import done, refused, run
from tests.helpers.families import make
from tests.helpers.shards import tree
from tests.helpers.surgery import convert_folder, random_profile
from tests.helpers.tiny_recall import FOLDER, task
from tests.helpers.vocabularies import tokenizer

PROMPTS = ["--min-context", 400, "--max-context", 500, "--passkeys", 2, "--passkey-tokens", 3]
GATES = ["--sink", 4, "--recent", 16, "--steps", 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with a tokenizer of bytes, which can read the built-in text."""
    sizes = {"vocab_size": 400, "max_position_embeddings": 2048, "num_hidden_layers": 2}
    folder = make("llama", tmp_path_factory.mktemp("model") / "llama", **sizes)
    tokenizer("bytes", ["the baker carried a basket of late apples by the river"], size=400).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def scores(path="p.safetensors"):
    return HeadProfile.load(path).scores


def test_gates(folder):
    said = done("profile", "compute", folder, "--method", "duo", *GATES, *PROMPTS, "-o", "p.safetensors")
    made = HeadProfile.load("p.safetensors")
    assert (made.method, made.granularity, made.sink, made.recent) == ("duo", "kv", 4, 16)
    assert made.provenance["steps"] == 6
    assert "wrote p.safetensors" in said.out
    assert "6/6" in said.err
    [following] = [line for line in said.err.splitlines() if line.startswith("Next: kvsurgery ")]
    assert following.endswith(f"convert {folder} --profile p.safetensors --out llama-duo")
    done(*shlex.split(following)[2:])


def test_what_was_measured_is_named_without_a_path_and_found_again(folder, tmp_path):
    measure = ["--samples", 1, *PROMPTS]
    done("profile", "compute", folder, "--method", "attention", *measure, "-o", "p.safetensors")
    assert HeadProfile.load("p.safetensors").base_model == folder.name
    assert str(folder.parent).encode() not in Path("p.safetensors").read_bytes()
    done("convert", "--profile", "p.safetensors", "--sparsity", 0.5, "--out", "implied")
    done("convert", folder, "--profile", "p.safetensors", "--sparsity", 0.5, "--out", "named")
    assert tree(tmp_path / "implied") == tree(tmp_path / "named")


def test_minutes_decide_how_long_gates_are_trained(folder, monkeypatch):
    """A step that is said to take a tenth of a second for each thousand tokens."""
    monkeypatch.setattr(pace, "step_seconds", lambda *arguments: lambda tokens: tokens / 10_000)
    for name, steps in {"MOST_STEPS": 5, "WANTED_STEPS": 4, "LEAST_STEPS": 3}.items():
        monkeypatch.setattr(pace, name, steps)
    start = ["profile", "compute", folder, "--method", "duo", "--passkey-tokens", 3, "-o", "p.safetensors"]
    lengths = ["--min-context", 400, "--passkeys", 2, "--sink", 4, "--recent", 16]
    said = done(*start, *lengths, "--minutes", 0.01)
    chosen = "--steps 4 --min-context 400 --max-context 2048 --passkeys 2"
    assert f"chosen for 0.01 min: {chosen}\n" in said.err
    made = HeadProfile.load("p.safetensors").provenance
    assert (made["steps"], made["data"]["shortest"], made["data"]["longest"]) == (4, 400, 2048)
    assert (made["reg"], made["until_settled"], made["steps_done"]) == (0.05, True, 4)
    assert "settled" not in said.err
    assert "8 of 8 gates are 0.8 or more: they have not separated; " in said.err
    result = run(*start, "-o", "q.safetensors", *lengths, "--minutes", 0.001)
    assert result.code == 1
    [loading, timing, why] = result.err.splitlines()
    assert loading == f"measuring duo: loading {folder}"
    assert timing == "timing some steps of the training"
    assert "give 1 min" in why
    for name in ("MOST_STEPS", "WANTED_STEPS", "LEAST_STEPS"):
        monkeypatch.setattr(pace, name, 1)
    # of long passkeys, these prompts have room for fewer
    for size, count in ((3, 4), (64, 1)):
        sizes = ["--min-context", 400, "--sink", 4, "--recent", 16, "--passkey-tokens", size]
        said = done(*start, "-o", f"{size}.safetensors", *sizes, "--minutes", 0.01)
        assert f"--min-context 400 --max-context 2048 --passkeys {count}\n" in said.err
    assert "--minutes chooses --steps" in run(*start, "--minutes", 1, "--steps", 9).err
    done(*start, "-o", "reg.safetensors", *lengths, "--steps", 1, "--max-context", 2048, "--reg", 0.2)
    made = HeadProfile.load("reg.safetensors").provenance
    assert (made["reg"], made["until_settled"]) == (0.2, False)


def test_unknown_words_are_found_before_a_training_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(pace, "step_seconds", lambda *arguments: pytest.fail("it is timed"))
    folder = make("llama", tmp_path / "llama", vocab_size=400, max_position_embeddings=2048)
    tokenizer("words", ["bako dimi"]).save_pretrained(folder)
    why = refused("profile", "compute", folder, "--method", "duo", "--minutes", 1, "-o", "p.safetensors")
    assert "does not know all words of 'Passkeys are hidden" in why


def test_a_training_in_minutes_stops_when_gates_have_settled(folder, monkeypatch):
    """It stops as soon as it may where gates are said to have settled; these have not separated."""
    monkeypatch.setattr(pace, "step_seconds", lambda *arguments: lambda tokens: tokens / 10_000)
    for module in (settling, training, training_state):
        monkeypatch.setattr(module, "LATEST", 4)
    monkeypatch.setattr(training, "settled", lambda gates, lr: True)
    for name, steps in {"MOST_STEPS": 20, "WANTED_STEPS": 4, "LEAST_STEPS": 3}.items():
        monkeypatch.setattr(pace, name, steps)
    start = ["profile", "compute", folder, "--method", "duo", "--passkey-tokens", 3, "--sink", 4, "--recent", 16]
    start += ["--max-context", 500, "--checkpoint", "state", "--minutes", 0.01, "--reg", 0]
    said = done(*start, "-o", "p.safetensors")
    steps = int(re.search(r"--steps (\d+)", said.err)[1])
    assert "--min-context 250 --max-context 500 --passkeys 2\n" in said.err
    enough = math.ceil(0.2 * steps + 4)
    assert enough < steps
    assert f"gates settled after {enough} of {steps} steps" in said.err
    assert "8 of 8 gates are 0.8 or more: they have not separated; raise --reg" in said.err
    made = HeadProfile.load("p.safetensors")
    assert (made.provenance["steps"], made.provenance["steps_done"]) == (steps, enough)
    # the same command goes on where it stopped, and so do the options that it printed
    monkeypatch.setattr(pace, "step_seconds", lambda *arguments: pytest.fail("the time was chosen before"))
    again = done(*start, "--resume", "-o", "again.safetensors")
    assert "chosen for" not in again.err
    assert HeadProfile.load("again.safetensors") == made
    printed = shlex.split(re.search(r"chosen for 0.01 min: (.*)", said.err)[1])
    done(*start[: start.index("--max-context")], *printed, "--checkpoint", "state", "--resume", "-o", "p2.safetensors")
    assert HeadProfile.load("p2.safetensors") == made
    assert "data shortest is" in refused(*start, "--min-context", 300, "--resume", "-o", "p3.safetensors")


def test_the_estimate_of_a_training_leaves_out_what_came_before(folder, monkeypatch):
    """A clock on which choosing prompts takes an hour, and a step no time."""
    now = [0.0]

    class Slow(Contexts):
        @classmethod
        def of(cls, *arguments):
            now[0] += 3600
            return Contexts.of(*arguments)

    monkeypatch.setattr("kvsurgery.measure.prompts.Contexts", Slow)
    monkeypatch.setattr("kvsurgery.display.console.step_progress", partial(console.step_progress, clock=lambda: now[0]))
    said = done("profile", "compute", folder, "--method", "duo", *GATES, *PROMPTS, "-o", "p.safetensors")
    assert "measuring duo 0/6\n" in said.err
    assert "in all" not in said.err


def test_a_training_goes_on_from_its_checkpoint(folder):
    start = ["profile", "compute", folder, "--method", "duo", *GATES, *PROMPTS]
    done(*start, "-o", "whole.safetensors", "--curve", "curve.png", "--reg", 0.16)
    assert Path("curve.png").read_bytes().startswith(b"\x89PNG")
    done(*start, "-o", "p.safetensors", "--checkpoint", "state", "--reg", 0.16)
    # without --reg, the weight is the training's
    kept = ["--checkpoint", "state", "--resume"]
    done(*start, "-o", "again.safetensors", *kept)
    assert np.array_equal(scores("again.safetensors"), scores("whole.safetensors"))
    other = run(*start, "-o", "p2.safetensors", *kept, "--lr", 0.1)
    assert other.code == 1
    assert "lr" in other.err
    assert "reg is 0.16 there and 0.05 here" in refused(*start, "-o", "p2.safetensors", *kept, "--reg", 0.05)


def test_an_interrupted_training_says_how_to_go_on(folder, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    start = ["profile", "compute", folder, "--method", "duo", *GATES, *PROMPTS, "-o", "p.safetensors"]
    with monkeypatch.context() as patch:
        patch.setattr("kvsurgery.measure.training.training_step", interrupted)
        nothing, state = run(*start), run(*start, "--checkpoint", "state")
    assert nothing.code == state.code == 130
    assert "interrupted; nothing is kept" in nothing.err
    assert "interrupted; --resume continues from state" in state.err
    with monkeypatch.context() as patch:  # before there is a state
        patch.setattr("kvsurgery.measure.training.train_gates", interrupted)
        early = run(*start, "--checkpoint", "no-state")
    assert (early.code, "interrupted; nothing is kept" in early.err) == (130, True)
    assert not Path("p.safetensors").exists()
    done(*start, "--checkpoint", "state", "--resume")


@pytest.mark.parametrize(
    ("method", "measured_by", "other", "prompts"),
    [
        ("attention", "attention.attention_mass", ["--passkeys", 1], 3),
        ("headkv-r", "retrieval.answer", ["--lengths", 250], 2),
        ("reform", "reform.sample_ranks", ["--context", 590], 4),
    ],
)
def test_a_measurement_goes_on_with_the_same_command(
    folder, recalling, method, measured_by, other, prompts, monkeypatch
):
    """To the same profile, from results of the same prompts."""
    options = {
        "attention": ["--samples", 3, *PROMPTS],
        "headkv-r": recalling[1:],
        "reform": ["--context", 600, "--samples", 2, "--chunk", 512],
    }
    model = recalling[0] if method == "headkv-r" else folder
    start = ["profile", "compute", model, "--method", method, *options[method]]
    module, name = measured_by.split(".")
    owner = import_module(f"kvsurgery.measure.{module}")
    measure, calls = getattr(owner, name), []

    def counted(*arguments, **keywords):
        if len(calls) == stop:
            raise KeyboardInterrupt
        calls.append(1)
        return measure(*arguments, **keywords)

    stop = None
    monkeypatch.setattr(owner, name, counted)
    done(*start, "-o", "whole.safetensors")
    whole, stop = len(calls), 2
    calls.clear()
    interrupted = run(*start, "-o", "p.safetensors")
    assert interrupted.code == 130
    assert "the same command continues from p.safetensors.samples.jsonl" in interrupted.err
    assert not Path("p.safetensors").exists()
    content, stop = Path("p.safetensors.samples.jsonl").read_text(), None
    calls.clear()
    done(*start, "-o", "p.safetensors")
    assert len(calls) == whole - 2
    assert Path("p.safetensors").read_bytes() == Path("whole.safetensors").read_bytes()
    assert not Path("p.safetensors.samples.jsonl").exists()

    Path("q.safetensors.samples.jsonl").write_text(content)
    calls.clear()
    done(*start, *other, "-o", "q.safetensors")  # of other prompts, nothing is known
    assert len(calls) == prompts
    Path("r.safetensors.samples.jsonl").write_text(content.replace("0.", "0.1", 1))
    assert "r.safetensors.samples.jsonl, line 1 is damaged" in refused(*start, "-o", "r.safetensors")


def test_language_modelling_and_attention(folder):
    done("profile", "compute", folder, "--method", "duo", "--loss", "lm", *GATES, *PROMPTS[:4], "-o", "lm.safetensors")
    assert HeadProfile.load("lm.safetensors").provenance["loss"] == "lm"
    done("profile", "compute", folder, "--method", "attention", "--samples", 2, *PROMPTS, "-o", "p.safetensors")
    assert HeadProfile.load("p.safetensors").method == "attention"


def test_a_profile_is_written_before_it_is_described(folder, monkeypatch):
    """Whatever has happened meanwhile to the code that describes it."""
    monkeypatch.setitem(sys.modules, "kvsurgery.profile.summary", None)
    with pytest.raises(ImportError):
        run("profile", "compute", folder, "--method", "attention", "--samples", 2, *PROMPTS, "-o", "p.safetensors")
    assert HeadProfile.load("p.safetensors").method == "attention"


def test_gates_of_the_models_own_answers(folder):
    start = ["profile", "compute", folder, "--method", "rlkv-lite", *GATES, "--min-context", 600, "--samples", 2]
    arguments = [*start, "--max-context", 620, "--answers", "answers.jsonl"]
    done(*arguments, "-o", "p.safetensors")
    made = HeadProfile.load("p.safetensors")
    assert (made.method, made.sink, made.recent) == ("rlkv-lite", 4, 16)
    assert made.provenance["data"]["answers"] == 2
    lines = Path("answers.jsonl").read_text().splitlines()
    assert all(set(json.loads(line)) == {"prompt", "answer"} for line in lines)
    done(*arguments, "-o", "again.safetensors")
    assert np.array_equal(scores("again.safetensors"), scores())
    done("convert", folder, "--profile", "p.safetensors", "--out", "out")
    Path("answers.jsonl").write_text("[]")
    assert "answers.jsonl, line 1: expected" in refused(*arguments, "-o", "p2.safetensors")


def test_embedding_heads(folder):
    arguments = ["--context", 600, "--samples", 1, "--chunk", 512, "-o", "p.safetensors"]
    said = done("profile", "compute", folder, "--method", "reform", *arguments)
    made = HeadProfile.load("p.safetensors")
    assert len(made.embedding_heads) == 4
    assert set(made.ranking.mnr) == {"pattern", "multihop"}
    assert "reform embedding heads:" in said.out


@pytest.fixture
def recalling(here):
    """The bundled model, and options of a measurement that it answers: its words are its own."""
    words = task.vocabulary()
    filler = task.filler(np.random.default_rng(0), 1, 800)[0]
    Path("text.txt").write_text(" ".join(words[token] for token in filler))
    key, *values = words[task.FIRST_SYMBOL : task.FIRST_SYMBOL + 4]
    needle = {"needle": f"remember {key} {' '.join(values)} .", "real_needle": " ".join(values)}
    needle |= {"question": f"recall {key}", "answer": " ".join(values)}
    Path("needles.jsonl").write_text(json.dumps(needle) + "\n")
    options = ["--needles", "needles.jsonl", "--text", "text.txt", "--lengths", "256,300", "--depths", "0.2,0.6"]
    return [FOLDER / "model", *options]


def test_needles(recalling):
    said = done("profile", "compute", *recalling, "--method", "headkv-er", "-o", "p.safetensors")
    made = HeadProfile.load("p.safetensors")
    assert made.granularity == "query"
    assert made.provenance["successes"] >= 2
    assert "4/4" in said.err
    assert f"{made.provenance['successes']} right" in said.err
    # query heads 2, 3, 6 and 7 of layer 1 read facts
    assert {*np.argsort(made.scores, axis=None)[-3:]} <= {10, 11, 14, 15}


@pytest.fixture
def tenths(monkeypatch):
    """Work is timed, and then said to take a tenth of a second for each thousand tokens."""
    timed = []

    def said(real, seconds):
        def timing(*arguments, **options):
            timed.append(real(*arguments, **options))
            return seconds

        return timing

    monkeypatch.setattr(pace, "scaled_seconds", said(pace.scaled_seconds, lambda tokens: tokens / 10_000))
    monkeypatch.setattr(cache_losses, "passage_seconds", said(cache_losses.passage_seconds, 0.1))
    monkeypatch.setattr(own_answers, "token_seconds", said(own_answers.token_seconds, 0.001))
    for name, steps in {"MOST_STEPS": 5, "WANTED_STEPS": 4, "LEAST_STEPS": 3}.items():
        monkeypatch.setattr(pace, name, steps)
    return timed


@pytest.mark.parametrize(
    ("method", "typed", "numbers", "minutes", "chosen"),
    [
        (
            "attention",
            ["--passkey-tokens", 3],
            {"SAMPLES": 3, "LEAST_SAMPLES": 2},
            0.005,
            "--min-context 512 --max-context 1024 --samples 3 --passkeys 5",
        ),
        ("attention", ["--samples", 2, *PROMPTS], {}, 0.005, "--min-context 400 --max-context 500 --samples 2"),
        (
            "reform",
            ["--chunk", 512],
            {"CONTEXT": 800, "SAMPLES": 3, "LEAST_SAMPLES": 1},
            0.011,
            "--context 768 --samples 2",
        ),
        ("headkv-r", ["--lengths", "256,300"], {}, 0.004, "--lengths 256,300 --depths 0.0,0.33,0.67,1.0"),
        ("kv-bits", ["--context", 400, "--sink", 4, "--recent", 32], {"PASSAGES": 2}, 0.002, "--samples 1"),
    ],
    ids=["attention", "given", "reform", "headkv-r", "kv-bits"],
)
def test_minutes_choose_what_fits(folder, recalling, tenths, method, typed, numbers, minutes, chosen, monkeypatch):
    """Options that are printed, and give the same again when they are typed; an interrupted run keeps them."""
    words = {"kv-bits": ["--text", "text.txt"], "headkv-r": recalling[1:5]}.get(method, [])
    Path("text.txt").write_text(" ".join([Path("text.txt").read_text()] * 3))
    for name, number in numbers.items():
        monkeypatch.setattr(f"kvsurgery.measure.methods.{method.partition('-r')[0].replace('-', '_')}.{name}", number)
    start = ["profile", "compute", recalling[0] if words else folder, "--method", method, *words, *typed]
    said = done(*start, "--minutes", minutes, "-o", "p.safetensors")
    assert f"chosen for {minutes} min: {chosen}" in said.err
    assert len(tenths) == 1
    printed = shlex.split(re.search(r"chosen for .* min: (.*)", said.err)[1])
    done(*start, *printed, "-o", "typed.safetensors")
    assert Path("typed.safetensors").read_bytes() == Path("p.safetensors").read_bytes()

    few = run(*start, "--minutes", 1e-5, "-o", "q.safetensors").err
    assert "in 1e-05 min there is time for 0 " in few
    command = shlex.split(few[few.index("kvsurgery profile compute") :])
    assert command[-2:] == ["--minutes", "1"]
    assert not Path("q.safetensors").exists()
    done(*command[1:])
    assert Path("q.safetensors").exists()


def test_an_interrupted_measurement_goes_on_with_what_was_chosen(folder, tenths, monkeypatch):
    monkeypatch.setattr("kvsurgery.measure.methods.attention.LEAST_SAMPLES", 2)
    start = ["profile", "compute", folder, "--method", "attention", *PROMPTS, "--minutes", 0.003]
    done(*start, "-o", "whole.safetensors")

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kvsurgery.measure.attention.attention_profile", interrupted)
        stopped = run(*start, "-o", "p.safetensors")
    assert stopped.code == 130
    assert "the same command continues from p.safetensors.samples.jsonl" in stopped.err
    monkeypatch.setattr(pace, "scaled_seconds", lambda *arguments: pytest.fail("the time was chosen before"))
    said = done(*start, "-o", "p.safetensors")
    assert "timing" not in said.err
    assert "chosen for 0.003 min: --min-context 400 --max-context 500 --samples 4 --passkeys 2" in said.err
    assert Path("p.safetensors").read_bytes() == Path("whole.safetensors").read_bytes()


def test_a_measurement_that_is_refused_leaves_its_plan_nowhere(folder, tenths, monkeypatch):
    monkeypatch.setattr("kvsurgery.measure.methods.attention.LEAST_SAMPLES", 2)
    start = ["profile", "compute", folder, "--method", "attention", *PROMPTS, "--minutes", 0.003, "-o", "p.safetensors"]
    measure, kept = attention.attention_mass, Path("p.safetensors.samples.jsonl")

    def refuse_after(count):
        calls = []

        def measure_or_refuse(*arguments, **options):
            if kept.exists():  # the plan, or a sample too; before, some work is timed
                if len(calls) == count:
                    raise ProfileError("no more than that")
                calls.append(1)
            return measure(*arguments, **options)

        monkeypatch.setattr(attention, "attention_mass", measure_or_refuse)
        assert "no more than that" in run(*start).err
        return [path.name for path in Path().iterdir()]

    assert refuse_after(0) == []
    assert refuse_after(1) == [kept.name]
    kept.write_text(kept.read_text().replace("0.", "0.1", 1))
    assert "damaged" in refused(*start)
    assert kept.exists()


def test_two_measurements_do_not_write_one_profile(folder):
    """Neither the profile nor the state of a training; what a killed process left is no lock."""
    start = ["profile", "compute", folder, "--method", "duo", *GATES, *PROMPTS, "--checkpoint", "state"]
    with reserved_file(Path("p.safetensors")):
        assert "another process is writing p.safetensors; wait" in refused(*start, "-o", "p.safetensors")
    with reserved_file(Path("state")):
        assert "another process is writing state; wait" in refused(*start, "-o", "p.safetensors")
    Path("p.safetensors.lock").touch()
    done(*start, "-o", "p.safetensors")
    assert not [*Path().glob("*.lock")]


def test_minutes_of_own_answers(folder, tenths, monkeypatch):
    """Prompts are longer than the tasks; a training that goes on has as many answers as before."""
    monkeypatch.setattr("kvsurgery.measure.methods.rlkv_lite.SAMPLES", 3)
    monkeypatch.setattr("kvsurgery.measure.methods.rlkv_lite.LEAST_SAMPLES", 2)
    start = ["profile", "compute", folder, "--method", "rlkv-lite", "--sink", 4, "--recent", 16, "--max-context", 380]
    start += ["--checkpoint", "state", "--minutes", 0.05]
    said = done(*start, "-o", "p.safetensors")
    made = HeadProfile.load("p.safetensors")
    data = made.provenance["data"]
    assert f"--samples 3 --min-context {data['shortest']} --max-context 380 --steps 4" in said.err
    assert (data["answers"], made.provenance["steps"], made.provenance["until_settled"]) == (3, 4, True)
    monkeypatch.setattr(pace, "scaled_seconds", lambda *arguments: pytest.fail("the time was chosen before"))
    monkeypatch.setattr("kvsurgery.measure.methods.rlkv_lite.SAMPLES", 5)
    again = done(*start, "--resume", "-o", "again.safetensors")
    assert "chosen for" not in again.err
    assert HeadProfile.load("again.safetensors") == made
    other = [*start, "--min-context", data["shortest"] + 1, "--resume", "-o", "q.safetensors"]
    assert "data shortest is" in refused(*other)


def test_a_cpu_without_sizes_gets_a_time(folder, tenths, monkeypatch):
    monkeypatch.setattr("kvsurgery.measure.methods.reform.SAMPLES", 1)
    monkeypatch.setattr("kvsurgery.measure.methods.reform.CONTEXT", 600)
    said = done("profile", "compute", folder, "--method", "reform", "--chunk", 512, "-o", "p.safetensors")
    assert "chosen for 20 min: --context 600 --samples 1\n" in said.err


def test_a_model_that_answers_nothing_has_no_scores(folder):
    arguments = ["--lengths", 400, "--depths", 0.5, "-o", "p.safetensors"]
    refused = run("profile", "compute", folder, "--method", "headkv-r2", *arguments)
    assert refused.code == 1
    assert "the original model answers no set of reasoning needles in at least half of 8 trials" in refused.err
    assert not Path("p.safetensors").exists()


def test_a_converted_checkpoint_gives_the_originals_heads(folder, tmp_path):
    converted = convert_folder(folder, tmp_path / "converted", random_profile(folder, seed=1), sparsity=0.5)
    assert any(layer.order != tuple(range(4)) for layer in converted.policy.layers)
    measure = ["--method", "attention", "--samples", 1, *PROMPTS]
    done("profile", "compute", folder, *measure, "-o", "p.safetensors")
    done("profile", "compute", converted.folder, *measure, "-o", "q.safetensors")
    assert np.allclose(scores("q.safetensors"), scores("p.safetensors"), atol=1e-5)
    assert HeadProfile.load("q.safetensors").base_model == "llama"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "duo", "--needles", "x"], "--needles does not apply to --method duo"),
        (["--method", "reform", "--passkeys", "3"], "--passkeys does not apply to --method reform"),
        (["--method", "rlkv-lite", "--passkeys", "3"], "--passkeys does not apply to --method rlkv-lite"),
        (["--method", "rlkv-lite", "--text", "x.txt"], "--text does not apply to --method rlkv-lite"),
        (["--method", "rlkv-lite", "--answers", "no/x"], "there is no folder no"),
        (["--method", "duo", "--resume"], "--resume requires --checkpoint"),
        (["--method", "headkv-r", "--lengths", "1K,x"], "'x' is not a number of tokens"),
        (["--method", "duo", "--max-context", "4K"], "exceeds the 2048 positions"),
        (
            ["--method", "duo", "--min-context", "900", "--max-context", "800"],
            "there are no contexts from 900 to 800 tokens",
        ),
        (["--method", "duo", *map(str, PROMPTS), "--recent", "600"], "has nothing outside sink"),
        (["--method", "duo", "--text", "short.txt"], "short.txt has 2 tokens"),
        (["--method", "headkv-r", "--lengths", "3000"], "2048"),
        (["--method", "headkv-r", "--needles", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--method", "headkv-r2", "--needles", "word"], "sets of them are reasoning and choice"),
        (["--method", "reform", "--context", "4K", "--chunk", "4K"], "2048"),
    ],
)
def test_what_cannot_be_measured_is_refused(folder, arguments, words):
    Path("short.txt").write_text("the baker")
    result = run("profile", "compute", folder, "-o", "p.safetensors", *arguments)
    assert result.code in (1, 2)
    assert words in result.err
    assert not Path("p.safetensors").exists()


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_measured(folder):
    Path("p.safetensors").write_text("something else")
    result = run("profile", "compute", folder, "--method", "duo", "-o", "p.safetensors")
    assert result.err == "kvsurgery: p.safetensors exists; choose another file\n"
    result = run("profile", "compute", folder, "--method", "duo", "-o", "nowhere/p.safetensors")
    assert "cannot write nowhere/p.safetensors" in result.err


def test_a_family_without_support_is_refused(here):
    config = AutoConfig.for_model("gpt2", n_layer=1, n_head=2, n_embd=8, vocab_size=20)
    AutoModelForCausalLM.from_config(config).save_pretrained("gpt2")
    result = run("profile", "compute", "gpt2", "--method", "duo", "-o", "p.safetensors")
    assert result.code == 1
    assert "model_type 'gpt2' is not supported" in result.err


class TestMeasuredCaches:
    """The losses of caches, from their measurement to what they decide."""

    @pytest.fixture(scope="class")
    @staticmethod
    def place(tmp_path_factory):
        """A model with heads of 16 and a tokenizer, a profile, a text, and losses measured on it."""
        place = tmp_path_factory.mktemp("measured")
        options = {"vocab_size": 400, "head_dim": 16, "max_position_embeddings": 2048, "num_hidden_layers": 2}
        folder = make("llama", place / "llama", **options)
        tokenizer("bytes", ["the baker carried a basket of late apples by the river"], size=400).save_pretrained(folder)
        random_profile(folder).save(place / "duo.safetensors")
        words = np.random.default_rng(0).choice(["apple", "river", "clock", "letter", "map", "the", "a", "of"], 5000)
        (place / "book.txt").write_text(" ".join(words))
        arguments = ["--text", place / "book.txt", "--context", 400, "--samples", 2, "--sink", 4, "--recent", 32]
        said = done(*["profile", "compute", folder, "--method", "kv-bits", *arguments, "-o", place / "losses"])
        return place, said

    def test_it_says_what_was_measured(self, place):
        folder, said = place
        made = CacheLosses.load(folder / "losses")
        assert (made.sink, made.recent, made.context) == (4, 32, 400)
        assert made.provenance["data"] == {"text": "book.txt"}
        assert made.provenance["passages"] == 2
        assert "400 tokens of book.txt" in said.out
        assert said.out.count(" best ") == sum(len(entries) > 1 for entries in made.settings.values())
        assert "4 heads streaming" in said.out
        assert "--kv-measured" in said.err
        shown = done("profile", "show", folder / "losses", "--plot", folder / "losses.png")
        assert shown.out.splitlines() == said.out.splitlines()[1:]
        assert (folder / "losses.png").read_bytes().startswith(b"\x89PNG")

    def test_a_folder_has_no_revision(self, folder):
        options = ["--method", "headkv-r", "--needles", "none", "--revision", "main", "-o", "r"]
        refused = run("profile", "compute", folder, *options)
        assert refused.code == 2
        assert "--revision requires a Hub id" in refused.err

    def test_a_text_is_needed(self, folder):
        refused = run("profile", "compute", folder, "--method", "kv-bits", "-o", "losses")
        assert refused.code == 2
        assert "--text is missing" in refused.err

    def test_convert_takes_what_lost_least(self, place):
        folder, _ = place
        made = CacheLosses.load(folder / "losses")
        convert = ["convert", folder / "llama", "--profile", folder / "duo.safetensors", "--kv-bits", 3]
        done(*convert, "--kv-measured", folder / "losses", "--save-recipe", "recipe.toml", "--out", "out")
        written = json.loads(Path("out/config.json").read_text())["kv_surgery"]["quantization"]
        best = made.best(3)
        assert (written["rotate"], written["clip"]) == (best.rotate, best.clip)
        done("convert", folder / "llama", "--recipe", "recipe.toml", "--out", "again")
        assert tree(Path("again")) == tree(Path("out"))

    def test_fit_prints_divergences(self, place):
        folder, _ = place
        fit = ["fit", folder / "llama", "--profile", folder / "duo.safetensors", "--sink", 4, "--recent", 32]
        fit += ["--kv-measured", folder / "losses", "--context", 2000, "--plot", "fit.png"]
        least = json.loads(done(*fit, "--memory", "1GB", "--json").out)["pareto"][0]["total"]
        facts = json.loads(done(*fit, "--memory", f"{least + 300_000}B", "--json").out)
        assert facts["fit"]["divergence"] > 0
        assert all(one["divergence"] >= facts["fit"]["divergence"] for one in facts["fit"]["alternatives"])
        text = done(*fit, "--memory", f"{least + 300_000}B").out
        assert "expected divergence of the next token: " in text
        assert "next best 1" in text
        done(*shlex.split(text.splitlines()[-1])[1:])
        assert "a guess without --kv-measured" in done(*fit[:4], "--memory", "1GB", "--context", 2000).out

    def test_losses_of_another_model(self, place, folder):
        place, _ = place
        random_profile(folder).save("p.safetensors")
        measured = ["--kv-bits", 8, "--kv-measured", place / "losses"]
        refused = run("convert", folder, "--profile", "p.safetensors", *measured, "--out", "out")
        assert refused.code == 1
        assert "file of measured cache losses is of " in refused.err

    def test_a_conversion_is_checked_on_a_text(self, place):
        folder, _ = place
        (folder / "long.txt").write_text((folder / "book.txt").read_text() * 3)
        convert = ["convert", folder / "llama", "--profile", folder / "duo.safetensors", "--kv-bits", 2, "--out", "out"]
        unchecked = "Divergence of the next token from the original model: not measured."
        assert unchecked in done(*convert).out
        assert unchecked in Path("out/README.md").read_text()
        said = done(*convert, "--kv-check", folder / "long.txt")
        [line] = [line for line in said.out.splitlines() if line.startswith("Divergence of the next token at 1,024")]
        assert "nats from the original model, and " in line
        card = Path("out/README.md").read_text()
        assert line in card
        assert unchecked not in card
        done("verify", "out")
        check = json.loads(done(*convert, "--kv-check", folder / "long.txt", "--json").out)["kv_check"]
        assert 0 < check["unquantized"] < check["original"]
        assert Path("out/README.md").read_text() == card

    def test_a_check_that_cannot_be_done_is_refused_first(self, place):
        folder, _ = place
        convert = ["convert", folder / "llama", "--profile", folder / "duo.safetensors", "--out", "out", "--kv-check"]
        assert "cannot read text missing.txt: there is no such file" in run(*convert, "missing.txt").err
        Path("short.txt").write_text("a river")
        assert "tokens, 4352 are needed" in run(*convert, "short.txt").err
        assert "--dry-run" in run(*convert, folder / "book.txt", "--dry-run").err
        assert not Path("out").exists()
