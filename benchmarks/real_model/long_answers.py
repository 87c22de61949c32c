"""Long answers, read through caches that stay small and through caches that grow, on a real language model.

    pip install kvpress    # what is not installed is left out
    python benchmarks/real_model/long_answers.py MODEL --profile er.safetensors --text book.txt --json answers.json

The model writes the answers itself: it goes on with pieces of a text, by sampling. Facts stand in each piece and, after
the first quarter, in each answer. Every cache then reads the same answers: how likely are they, is the next token that
of the original, and are the facts recalled, right after each quarter? Only facts that the original recalls there count.
The small caches hold as many bytes at most; quantized ones hold as many as the others would in 16 bit. The last
`--steps` tokens of each quarter take so much CPU time. With `--given` the text itself goes on, and no fact is stated in
it. With `--writer held`, budgets that hold write the answers, and the results say how long a token took then, and what
the cache held. A run continues from its JSON file.
"""

from __future__ import annotations

import argparse
import json
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

try:  # it patches the attention functions that are registered when it is imported, so it comes before converted models
    import kvpress
except ImportError:
    kvpress = None
import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.utils import logging

from benchmarks.provenance import record_versions
from benchmarks.real_model.models import converted, stock
from benchmarks.real_model.sessions import H2O, TOVA, PressSession, Session, checked_bytes
from benchmarks.real_model.trials import (
    Prompt,
    Question,
    answered_correctly,
    hide,
    needles_of,
    questions,
    stated,
    windows,
)
from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.display import console
from kvsurgery.measure.cache_trial import next_token_divergence
from kvsurgery.policy.decision import decide
from kvsurgery.policy.evidence import Evidence
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Budgeted, Recipe
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.needle_sets import read_set

ORIGINAL, SINK, QUARTERS, FACTS, TOP_P = "original", 4, 4, 6, 0.95
SPAN = 1024  # tokens of an answer whose time is taken together while it is written
SNAPKV = "SnapKVPress"  # with our observation window
PRESSES = (SNAPKV, "KeyDiffPress", "KnormPress")


@dataclass(frozen=True)
class Case:
    """A piece of text with facts in it, an answer, and questions about the facts that the answer states."""

    prompt: Prompt
    own: tuple[Question, ...]


@dataclass(frozen=True)
class Contender:
    """A cache: the model that it runs with, and how it reads."""

    name: str
    load: Callable[[], PreTrainedModel]
    session: Callable[[PreTrainedModel, torch.Tensor, int], Session] = field(default=Session)


@dataclass
class Pace:
    """Marks along an answer that is written, [tokens, seconds of CPU time so far, bytes of the cache], each `SPAN`.

    It is a hook after each forward of the model, which writes a token.
    """

    prompt: int
    marks: list[list[float]] = field(default_factory=list)

    def __call__(self, model: PreTrainedModel, _: Any, output: Any) -> None:
        cache = output.past_key_values
        written_tokens = cache.get_seq_length() - self.prompt + 1
        if written_tokens // SPAN >= len(self.marks):
            cache_bytes = checked_bytes(model, cache, self.prompt, len(output.logits))
            self.marks.append([written_tokens, time.process_time(), cache_bytes])


def contenders(source: Path, profile: HeadProfile, budget: int, hold: int) -> list[Contender]:
    """All that are compared; but for the original and what grows, each holds as many tokens or bytes at most."""
    window = Budgeted().window
    max_tokens, eager = budget + window + hold, partial(stock, source, "eager")

    def ours(name: str, recipe: Recipe) -> Contender:
        return Contender(name, partial(converted, source, profile, recipe))

    def pressed(press: str) -> Contender:
        def session(model: PreTrainedModel, prompt: torch.Tensor, new: int) -> Session:
            if kvpress is None:
                raise ImportError("kvpress is not installed")
            kept_tokens, options = max_tokens - hold, {"window_size": window} if press == SNAPKV else {}
            prefill_press, base_press = (getattr(kvpress, press)(**options) for _ in range(2))
            prefill_press.compression_ratio = 1 - kept_tokens / prompt.shape[1]
            decoding_press = kvpress.DecodingPress(base_press, compression_interval=hold, target_size=kept_tokens)
            return PressSession(model, prompt, new, kvpress.PrefillDecodingPress(prefill_press, decoding_press))

        return Contender(f"kvpress, {press}, blocks of {hold}", partial(stock, source), session)

    def quantized(bits: int, block: int) -> Contender:
        most_bytes = _bytes(source, profile, Recipe.of(rest="budgeted", budget=max_tokens - window - block, hold=block))
        base_recipe = Recipe.of(rest="budgeted", hold=block, kv_bits=bits, kv_scheme="per-token", kv_residual=block)
        budget_range = range(max_tokens - window - block, 16 // bits * max_tokens)
        fits = bisect_right(
            budget_range,
            most_bytes,
            key=lambda candidate: _bytes(source, profile, base_recipe.changed(budget=candidate)),
        )
        return ours(
            f"budgets of {budget_range[fits - 1]} that hold, {bits} bits",
            base_recipe.changed(budget=budget_range[fits - 1]),
        )

    streaming = Recipe.of(sparsity=1.0, rest="streaming", sink=SINK, recent=max_tokens - SINK)
    return [
        Contender(ORIGINAL, partial(stock, source)),
        *(
            ours(
                f"budgets of {budget} that hold, blocks of {hold}", Recipe.of(rest="budgeted", budget=budget, hold=hold)
            )
            for budget, hold in ((budget, hold), (max_tokens - window - hold // 4, hold // 4))
        ),
        *(quantized(bits, hold // 4) for bits in (4, 2)),
        ours(f"all heads streaming, {SINK} + {max_tokens - SINK}", streaming),
        *(
            Contender(f"{kind.__name__}, {max_tokens}", eager, partial(kind, max_tokens=max_tokens))
            for kind in (H2O, TOVA)
        ),
        *map(pressed, PRESSES),
        ours(f"budgets of {budget}, all that follows is kept", Recipe.of(rest="budgeted", budget=budget)),
    ]


def _bytes(source: Path, profile: HeadProfile, recipe: Recipe) -> int:
    """The most bytes that a cache without full heads holds of one sequence, in 16 bit."""
    return decide(recipe, Evidence(profile), Checkpoint.open(source)).policy.layout.kv_bytes(1, 2**15, 2**15)


@torch.inference_mode()
def cases(
    model: Path,
    text: Path,
    size: tuple[int, int],
    count: int,
    writer: Callable[[], PreTrainedModel] | None,
    answers: list[list[int]],
    marks: list[list[float]],
) -> Iterator[Case]:
    """Pieces of a text at even distances, with facts between their sentences, and answers.

    Args:
        size: tokens of a prompt, and of an answer.
        writer: loads what writes the answers; without one, the text itself goes on.
        answers: tokens that it has written, by case; those that are missing are added.
        marks: the pace at which they are written is added.
    """
    tokenizer, prompt, new = AutoTokenizer.from_pretrained(model), *size
    assert tokenizer is not None  # for the checker: transformers' types say it may be
    haystack = Haystack.read(str(text), tokenizer, prompt + new + 1)
    rng, needles = np.random.default_rng(0), read_set("word")
    pieces = windows(haystack, prompt, new, count)
    facts = [needles_of(rng, needles, 2 * FACTS if writer else FACTS) for _ in pieces]
    fact_prompts = []
    for piece, piece_facts in zip(pieces, facts, strict=True):
        fact_tokens = sum(map(len, stated(tokenizer, piece_facts[:FACTS])))
        fact_prompts.append(
            hide(tokenizer, piece.tokens[fact_tokens:prompt], piece.tokens[prompt:-1], piece_facts[:FACTS], rng)
        )
    if writer and not answers:
        sentences = [[*chain(*stated(tokenizer, piece_facts[FACTS:]))] for piece_facts in facts]
        pace = Pace(prompt, marks)
        answers += written_answers(writer(), np.stack([prompt.text for prompt in fact_prompts]), sentences, new, pace)
    for number, prompt in enumerate(fact_prompts):
        if writer:
            following = np.array(answers[number])
            yield Case(Prompt(prompt.text, prompt.questions, following), questions(tokenizer, facts[number][FACTS:]))
        else:
            yield Case(prompt, ())


def written_answers(
    model: PreTrainedModel, prompts: np.ndarray, sentences: list[list[int]], new: int, pace: Pace
) -> list[list[int]]:
    """Answers of `new` tokens to prompts, int64 [cases, tokens], with sentences after the first quarter."""
    torch.manual_seed(0)
    longest = max(map(len, sentences))  # in one batch, so that the shorter ones begin again
    middle = torch.tensor([[*words, *words[: longest - len(words)]] for words in sentences])
    hook = model.register_forward_hook(pace)
    begun_sequences, cache = sampled(model, torch.from_numpy(prompts), new // QUARTERS)
    sequences, _ = sampled(model, torch.cat([begun_sequences, middle], 1), new - new // QUARTERS - longest, cache)
    hook.remove()
    return sequences[:, prompts.shape[1] :].tolist()


def sampled(model: PreTrainedModel, tokens: torch.Tensor, new: int, cache: Any = None) -> tuple[torch.Tensor, Any]:
    """Texts, int64 [cases, tokens], with so many tokens more, and the cache, which may be that of their beginnings."""
    assert isinstance(model, GenerationMixin)  # for the checker
    ends = model.generation_config.eos_token_id  # which never come
    generation_config = GenerationConfig(
        do_sample=True, top_p=TOP_P, top_k=0, max_new_tokens=new, min_new_tokens=new, pad_token_id=0, eos_token_id=ends
    )
    output = model.generate(
        tokens, generation_config=generation_config, past_key_values=cache, return_dict_in_generate=True
    )
    assert not isinstance(output, torch.Tensor)
    return output.sequences, output.past_key_values


@torch.inference_mode()
def measure(
    contender: Contender, model: PreTrainedModel, case: Case, steps: int, original_logs: list[torch.Tensor]
) -> dict[str, Any]:
    """By quarter: the mean negative log-likelihood, the share of next tokens that are the original's, the divergence,
    the facts of the prompt and of the answer that are recalled, and milliseconds of CPU time for each of the last
    tokens.

    Args:
        original_logs: log-probabilities of each quarter; filled by the first contender, the original.
    """
    following = torch.from_numpy(case.prompt.following)[None]
    session = contender.session(model, torch.from_numpy(case.prompt.text)[None], following.shape[1])
    result = {name: [] for name in ("nats", "same", "kl", "right", "own", "step_ms")}
    for number, quarter in enumerate(following.chunk(QUARTERS, 1)):
        body, *timed_tokens = quarter.split([quarter.shape[1] - steps, *[1] * steps], 1)
        logits = [session.last, session.read(body)]
        begin = time.process_time()
        logits += [session.forward(token).logits for token in timed_tokens]
        result["step_ms"].append(1e3 * (time.process_time() - begin) / max(steps, 1))
        session.last = logits[-1][:, -1:]
        logs = torch.cat(logits, 1)[0, :-1].log_softmax(-1)
        if number == len(original_logs):
            original_logs.append(logs)
        result["nats"].append(F.nll_loss(logs, quarter[0]).item())
        result["same"].append((logs.argmax(-1) == original_logs[number].argmax(-1)).float().mean().item())
        result["kl"].append(next_token_divergence(logs, original_logs[number]).item())
        tokens_after = session.seen - len(case.prompt.text)
        result["right"].append([*map(int, answered_correctly(model, session.cache, case.prompt, tokens_after))])
        if number and case.own:
            own_prompt = Prompt(case.prompt.text, case.own, case.prompt.following)
            result["own"].append([*map(int, answered_correctly(model, session.cache, own_prompt, tokens_after))])
    return {**result, "kv_bytes": max(session.kv_bytes, session.stored_bytes())}


def table(report: dict[str, Any]) -> list[str]:
    """Lines of a Markdown table, of the cases that were measured with all contenders.

    Facts are counted over all cases and quarters: those recalled, of those that the original recalls there.
    """
    quarter, steps = report["settings"]["new"] // QUARTERS, report["settings"]["steps"]
    ends = [f"{(number + 1) * quarter:,}" for number in range(QUARTERS)]
    has_own_facts = bool(report["results"][ORIGINAL][0]["own"])
    heads = ["cache", "KV bytes", f"perplexity up to {ends[0]}", *ends[1:], "same next token", "KL"]
    heads += ["facts of the prompt", *(["of the answer"] if has_own_facts else [])]
    heads += [f"ms a token at {ends[0]}", f"at {ends[-1]}"] if steps else []
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    count = min(map(len, report["results"].values()))
    base = report["results"][ORIGINAL][:count]
    for name, all_cases in report["results"].items():
        of_cases = all_cases[:count]
        mean = {part: np.mean([case[part] for case in of_cases], 0) for part in ("nats", "same", "kl", "step_ms")}
        cells = [name, console.size(max(case["kv_bytes"] for case in of_cases))]
        cells += [f"{value:.1f}" for value in np.exp(mean["nats"])]
        cells += [f"{mean['same'].mean():.1%}", f"{mean['kl'].mean():.4f}"]
        for part in ("right", "own") if has_own_facts else ("right",):
            recalled, original_recalled = (np.array([case[part] for case in results]) for results in (of_cases, base))
            cells.append(
                f"{(recalled * original_recalled).sum()} of {original_recalled.sum()}"
                if original_recalled.any()
                else "-"
            )
        cells += [f"{mean['step_ms'][index]:.0f}" for index in (0, -1) if steps]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def pace_table(report: dict[str, Any]) -> list[str]:
    """Lines of a Markdown table of how an answer was written: over the first `SPAN` tokens, and the last of each
    quarter."""
    quarter, mark_pairs = report["settings"]["new"] // QUARTERS, [*pairwise(report["marks"])]
    ends = (SPAN, *(quarter * number for number in range(1, QUARTERS + 1) if quarter * number > SPAN))
    spans = [max(span for span in mark_pairs if span[1][0] <= end) for end in ends]
    steps = [1e3 * (after[1] - before[1]) / (after[0] - before[0]) for before, after in spans]
    return [
        f"| tokens written | {' | '.join(f'{after[0]:,}' for _, after in spans)} |",
        "|---" * (len(spans) + 1) + "|",
        f"| ms a token | {' | '.join(f'{step:.{0 if step > 10 else 2}f}' for step in steps)} |",
        f"| KV bytes | {' | '.join(console.size(after[2]) for _, after in spans)} |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock checkpoint with a tokenizer")
    parser.add_argument("--profile", type=Path, required=True, help="head scores that budgets follow")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=4096, help="tokens of an answer")
    parser.add_argument("--cases", type=int, default=2)
    parser.add_argument("--budget", type=int, default=120)
    parser.add_argument("--hold", type=int, default=128)
    parser.add_argument("--steps", type=int, default=32, help="tokens at the end of each quarter that are timed")
    parser.add_argument("--given", action="store_true", help="the text itself goes on")
    parser.add_argument(
        "--writer",
        choices=(ORIGINAL, "held"),
        default=ORIGINAL,
        help="who writes answers: held, budgets in small blocks",
    )
    parser.add_argument("--first", type=int, help="measure only so many of the contenders")
    parser.add_argument("--json", type=Path, required=True, help="results; those there are not computed again")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    names = ("prompt", "new", "cases", "budget", "hold", "steps", "given", "writer")
    settings = {name: getattr(arguments, name) for name in names} | {"text": arguments.text.name}
    report = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    if report.setdefault("settings", settings) != settings:
        parser.error(f"{arguments.json} was measured with {report['settings']}; give it another name")
    results, answers, marks = (report.setdefault(*part) for part in (("results", {}), ("answers", []), ("marks", [])))
    all_contenders = contenders(arguments.model, HeadProfile.load(arguments.profile), arguments.budget, arguments.hold)
    size, models = (arguments.prompt, arguments.new), {}
    writer = None if arguments.given else all_contenders[0 if arguments.writer == ORIGINAL else 2].load
    answer_cases = cases(arguments.model, arguments.text, size, arguments.cases, writer, answers, marks)
    for number, case in enumerate(answer_cases):
        arguments.json.write_text(json.dumps(report) + "\n")
        original_logs: list[torch.Tensor] = []
        for contender in islice(all_contenders, arguments.first):
            contender_results = results.setdefault(contender.name, [])
            if len(contender_results) > number and contender.name != ORIGINAL:
                continue
            if contender.name not in models:
                models[contender.name] = contender.load()
            try:
                result = measure(contender, models[contender.name], case, arguments.steps, original_logs)
            except ImportError as error:
                console.stderr.print(f"left out: {contender.name} ({error})")
                del results[contender.name]
                continue
            contender_results[number:] = [result, *contender_results[number + 1 :]]
            record_versions(report, contender.name)
            report["results"] = {
                measured_contender.name: results[measured_contender.name]
                for measured_contender in all_contenders
                if measured_contender.name in results
            }
            arguments.json.write_text(json.dumps(report) + "\n")
            console.stderr.print(f"{number + 1} of {arguments.cases}, {contender.name}: {result}")
    print("\n".join([*table(report), "", *(pace_table(report) if arguments.writer == "held" else [])]))


if __name__ == "__main__":
    main()
