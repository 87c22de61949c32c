"""Code completion over a repository that a cache holds: does it still know what was read before the question came?

    pip install kvpress optimum-quanto bm25s    # rows of what is not installed are left out
    python benchmarks/real_model/repository.py MODEL --profile er.safetensors --measured losses.safetensors \\
        --sdists sdists --json repository.json

The model reads files of a Python package. Then the beginning of another file of this package follows a copy of the
cache, and after it a line that uses a name that the files define (`code_lines.py`). A line is right where each of its
tokens from the name on is the most likely one after those before it: exactly then greedy decoding completes the line so
from there. Packages are downloaded by pip where the folder lacks them, and checked by SHA-256. An interrupted run
continues from its JSON file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from benchmarks.peers.held import held_bytes
from benchmarks.provenance import record_versions
from benchmarks.real_model.code_lines import Line, Repository, repository
from benchmarks.real_model.reused import ReusedOutputs
from benchmarks.real_model.sdists import SDISTS, Sdist, python_files
from benchmarks.real_model.trials import cache_copy, continued
from benchmarks.real_model.which_cache import ORIGINAL, Contender, contenders
from benchmarks.recurrent_methods import part_scores
from kvsurgery.display import console
from kvsurgery.evaluate.results import Interval
from kvsurgery.evaluate.statistics import interval, resampled_means
from kvsurgery.text.tokens import text_of

WITHOUT = "original, without the repository"
RETRIEVAL = "BM25, 1024 tokens for each question"
SETTINGS = ("length", "questions", "before", "new", "seed", "dtype")


@dataclass(frozen=True)
class Without(Contender):
    """The stock model, which reads nothing before a question."""

    name: str = WITHOUT
    keeps_states: bool = False

    def selected(self, text: np.ndarray, question: np.ndarray) -> np.ndarray:
        """Nothing."""
        return text[:0]

    def read(self, model: PreTrainedModel, text: torch.Tensor) -> Any:
        """An empty cache."""
        return self.cache(model)


@dataclass(frozen=True)
class Retrieval(Contender):
    """The stock model, which reads parts of a text that BM25 finds by the question: it knows the question first."""

    name: str = RETRIEVAL
    series: str = "BM25"
    keeps_states: bool = False
    parts: int = 8
    part: int = 128  # tokens

    def selected(self, text: np.ndarray, question: np.ndarray) -> np.ndarray:
        """The best parts of a text [tokens], in its order."""
        scores = part_scores([*text.tolist(), *question.tolist()], len(text), self.part)
        places = scores.topk(min(self.parts, len(scores))).indices.sort().values.tolist()
        return np.concatenate([text[place * self.part :][: self.part] for place in places])


def all_rows(losses: Path | None, profile: Path) -> dict[str, Contender]:
    """What is compared by name, those first whose comparison says most."""
    by_name = {row.name: row for row in (Without(), Retrieval(), *contenders(losses, [profile]))}
    names = [
        ORIGINAL,
        WITHOUT,
        "kvsurgery, all heads full, 4 bits",
        f"kvsurgery, budgets of 1024 by {profile.stem}, 4 bits",
        "SnapKVPress, 20%",
        f"kvsurgery, 50% of heads full by {profile.stem}",
        RETRIEVAL,
        "kvsurgery, all heads full, 2 bits",
        "kvsurgery, all heads full, 3 bits",
        "QuantizedCache, quanto, 4 bits",
        "ExpectedAttentionPress, 35%",
        "StreamingLLMPress, 20%",
        f"kvsurgery, budgets of 512 by {profile.stem}, 4 bits",
    ]
    return {name: by_name[name] for name in names}


def repositories(
    sdists: tuple[Sdist, ...], folder: Path, tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any]
) -> list[Repository]:
    """What is read and asked, of each package."""
    sizes = [settings[name] for name in ("length", "questions", "before", "new", "seed")]
    return [
        repository(sdist.name, python_files(sdist.fetch(folder), sdist.folder), tokenizer, *sizes) for sdist in sdists
    ]


@torch.inference_mode()
def answers(row: Contender, arguments: argparse.Namespace, contexts: list[Repository]) -> dict[str, list[Any]]:
    """By question, the most likely tokens of the line, and the mean negative log-likelihood of those of the line, its
    end aside; and the bytes of every cache that was read."""
    model = row.load(arguments.model, getattr(torch, arguments.dtype), arguments.device)
    reused = ReusedOutputs(arguments.reuse) if arguments.reuse and row.keeps_states else None
    results: dict[str, list[Any]] = {"tokens": [], "nats": [], "kv_bytes": []}
    for context in contexts:
        text, cache = None, None
        for line in context.lines:
            selected = row.selected(context.text, line.prefix)
            if text is None or not np.array_equal(text, selected):
                text = selected
                with reused.reading(model, text) if reused else nullcontext():
                    cache = row.read(model, torch.from_numpy(text)[None].to(model.device))
                results["kv_bytes"].append(held_bytes(cache, widest=2))
            asked = torch.from_numpy(np.concatenate([line.prefix, line.tokens])).to(model.device)
            logits = continued(model, cache_copy(cache), asked, len(text), len(line.tokens) + 1)[:-1].float()
            results["tokens"].append(logits.argmax(-1).tolist())
            results["nats"].append(F.cross_entropy(logits[:-1], asked[-len(line.tokens) : -1]).item())
    return results


def right_line(tokens: list[int], line: Line, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the most likely tokens are those from the line's name to its end; blank lines may follow."""
    start = int(line.in_name.argmax())
    if tokens[start:-1] != line.tokens[start:-1].tolist():
        return False
    last, end = (text_of(tokenizer, [token]).partition("\n") for token in (tokens[-1], line.tokens[-1]))
    return last[:2] == end[:2]


def right_name(tokens: list[int], line: Line) -> bool:
    """Whether the most likely tokens are those of the line's name."""
    return np.array_equal(np.array(tokens)[line.in_name], line.tokens[line.in_name])


@dataclass(frozen=True)
class Scores:
    """What a row comes to.

    Attributes:
        share: bytes of a cache over the original's.
        right: share of lines.
        more: the same less the original's.
        named: share of names.
        ratio: perplexity of lines over the original's.
    """

    share: float
    right: Interval
    more: Interval
    named: Interval
    ratio: Interval


def scores(report: Mapping[str, Any]) -> dict[str, Scores]:
    """Scores of every row, with intervals of a bootstrap over packages."""
    results, packages = report["results"], len(report["packages"])
    original, rows = results[ORIGINAL], {}
    for name, result in results.items():
        series = (result["right"], original["right"], result["named"], np.subtract(result["nats"], original["nats"]))
        by_package = np.array([np.reshape(values, (packages, -1)).mean(1) for values in series])
        right, original_right, named, nats = by_package.mean(1)
        drawn = resampled_means(by_package, 0)
        rows[name] = Scores(
            float(np.mean(result["kv_bytes"]) / np.mean(original["kv_bytes"])),
            interval(right, drawn[0]),
            interval(right - original_right, drawn[0] - drawn[1]),
            interval(named, drawn[2]),
            interval(np.exp(nats), np.exp(drawn[3])),
        )
    return rows


def table(report: Mapping[str, Any]) -> list[str]:
    """Lines of a Markdown table, the largest caches first."""
    heads = ["cache", "bytes", "lines completed", "difference to the original, points", "names", "perplexity"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, row in sorted(scores(report).items(), key=lambda item: -item[1].share):
        right, named = (f"{share.mean:.0%} [{share.low:.0%}, {share.high:.0%}]" for share in (row.right, row.named))
        mean, low, high = (f"{100 * value:+.0f}" for value in (row.more.mean, row.more.low, row.more.high))
        more, ratio = f"{mean} [{low}, {high}]", f"× {row.ratio.mean:.3f} [{row.ratio.low:.3f}, {row.ratio.high:.3f}]"
        if name == ORIGINAL:
            more, ratio = "", "× 1"
        lines.append(f"| {name} | {row.share:.0%} | {right} | {more} | {named} | {ratio} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock checkpoint with a tokenizer")
    parser.add_argument("--profile", type=Path, required=True, help="head scores, called by file name")
    parser.add_argument("--measured", type=Path, help="its losses, of `profile compute --method kv-bits`")
    parser.add_argument(
        "--sdists", type=Path, required=True, metavar="DIR", help="of packages; outside of a repository"
    )
    parser.add_argument("--length", type=int, default=8192, help="tokens of a package's files at most")
    parser.add_argument("--questions", type=int, default=12, help="lines of each package")
    parser.add_argument("--before", type=int, default=96, help="tokens right before a line, its file's imports aside")
    parser.add_argument("--new", type=int, default=48, help="tokens of a line at most")
    parser.add_argument("--seed", type=int, default=0, help="of the lines")
    parser.add_argument(
        "--reuse", type=Path, metavar="DIR", help="keep the MLPs' outputs for the texts there, for all caches and runs"
    )
    parser.add_argument(
        "--lines", type=Path, metavar="DIR", help="write lines and their most likely tokens there, by row"
    )
    parser.add_argument("--only", action="append", help="rows by name, in this order, after the original")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of models and caches")
    parser.add_argument("--device", default="cpu", help="where models run, such as cuda")
    parser.add_argument("--json", type=Path, required=True, help="results; those there are not measured again")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    assert tokenizer is not None  # for the checker: transformers' types say it may be
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    report = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    if report.setdefault("settings", settings) != settings:
        parser.error(f"{arguments.json} was measured with {report['settings']}; give it another name")
    rows = all_rows(arguments.measured, arguments.profile)
    names = [ORIGINAL, *arguments.only] if arguments.only else [*rows]
    if unknown := [name for name in names if name not in rows]:
        parser.error(f"there is no row {unknown[0]!r}; there are {', '.join(map(repr, rows))}")
    arguments.sdists.mkdir(parents=True, exist_ok=True)
    contexts = repositories(SDISTS, arguments.sdists, tokenizer, settings)
    report["packages"] = [
        {
            **asdict(sdist),
            "tokens": len(context.text),
            "read": context.paths,
            "asked": [{"path": line.path, "line": line.number, "name": line.name} for line in context.lines],
        }
        for sdist, context in zip(SDISTS, contexts, strict=True)
    ]
    results = report.setdefault("results", {})
    for place, name in enumerate(names, 1):
        if name in results:
            continue
        start = time.perf_counter()
        try:
            result = answers(rows[name], arguments, contexts)
        except ImportError as error:
            report.setdefault("left out", {})[name] = reason = str(error).splitlines()[0]
            console.stderr.print(f"left out: {name} ({reason})")
            continue
        # the lines are those of packages: their tokens stay out of the file
        lines = [line for context in contexts for line in context.lines]
        answered = list(zip(result.pop("tokens"), lines, strict=True))
        result["right"] = [int(right_line(tokens, line, tokenizer)) for tokens, line in answered]
        result["named"] = [int(right_name(tokens, line)) for tokens, line in answered]
        result["sha256"] = [hashlib.sha256(str(tokens).encode()).hexdigest()[:16] for tokens, _ in answered]
        results[name] = result
        record_versions(report, name, arguments.device)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        if arguments.lines:
            arguments.lines.mkdir(parents=True, exist_ok=True)
            shown = [(text_of(tokenizer, line.tokens), text_of(tokenizer, tokens)) for tokens, line in answered]
            (arguments.lines / f"{name}.json").write_text(json.dumps(shown, indent=1) + "\n")
        console.stderr.print(
            f"{place} of {len(names)}: {name}: {np.mean(result['right']):.0%} of lines, "
            f"{np.mean(result['named']):.0%} of names, {time.perf_counter() - start:.0f} s"
        )
    print("\n".join(table(report)))


if __name__ == "__main__":
    main()
