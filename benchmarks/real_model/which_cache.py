"""Which cache loses least at the bytes that it holds: ours, kvpress' and transformers', on a real language model.

    pip install kvpress optimum-quanto hqq    # what is not installed is left out
    python benchmarks/real_model/which_cache.py MODEL --measured losses.safetensors \\
        --profile er.safetensors --profile gates.safetensors \\
        --text book.txt --json which_cache.json

Every contender reads the same texts with facts in them. Then its cache is asked for each fact, which nobody knew of
when it was compressed, and reads what follows: by how much does it move the next token? With --at-end, a cache also
reads the text once for each fact, with the question at its end. Bytes are those of the storage of all tensors in the
cache; a floating-point number counts two of them, as in a model in 16 bits. In bfloat16, caches that are rotated read a
text with other roundings, which move the next token too; with --reuse they begin with the original's MLP outputs. An
interrupted run continues from its JSON file; `cache_report.py` shows it.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

try:  # it patches the attention functions that are registered when it is imported, so it comes before converted models
    import kvpress
except ImportError:
    kvpress = None
import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel, QuantizedCache
from transformers.utils import logging

from benchmarks.peers.held import held_bytes
from benchmarks.provenance import record_versions
from benchmarks.real_model.models import converted, stock
from benchmarks.real_model.reused import ReusedOutputs
from benchmarks.real_model.trials import Prompt, answered_correctly, asked_at_end, continued, prompts
from kvsurgery.display import console
from kvsurgery.measure.cache_trial import next_token_divergence
from kvsurgery.profile.full_heads import kv_scores
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.loading import load_scores
from kvsurgery.recipe import AUTO, Recipe, Streaming
from kvsurgery.text.haystack import Haystack

ORIGINAL = "original"
SHARES = (0.35, 0.6, 0.2)  # of the cache, for presses to keep
EAGER = "ObservedAttentionPress"  # H2O's score; it needs the attention matrix
ADAPTIVE = "AdaKVPress"  # over SnapKV's score; like KVzipPress it masks keys and frees nothing
PRESSES = (
    *("SnapKVPress", "KVzipPress", "ExpectedAttentionPress", "TOVAPress", "StreamingLLMPress", "PyramidKVPress"),
    *(EAGER, ADAPTIVE),
)
# what each backend scales: keys by channel where it can, values by token
AXES = {"quanto": (-1, 0), "hqq": (1, 1)}


@dataclass(frozen=True)
class Contender:
    """A cache that is compared; this one is the stock model's own.

    Attributes:
        name: unique.
        series: what it is a setting of, a line of the picture.
        keeps_states: whether a text's states are the original's while it is read.
        drops_rows: whether its cache can drop rows of a batch.
    """

    name: str = ORIGINAL
    series: str = ORIGINAL
    keeps_states: bool = True
    drops_rows: ClassVar[bool] = True

    def load(self, source: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
        """The model that it runs with."""
        return stock(source, dtype=dtype, device=device)

    def cache(self, model: PreTrainedModel) -> Any:
        """An empty cache."""
        return DynamicCache(config=model.config)

    def selected(self, text: np.ndarray, question: np.ndarray) -> np.ndarray:
        """The part of a text [tokens] that it reads before a question [tokens]: all of it, whatever the question."""
        return text

    def read(self, model: PreTrainedModel, text: torch.Tensor) -> Any:
        """A cache that holds a text [1, tokens]."""
        return model(text, past_key_values=self.cache(model), logits_to_keep=1).past_key_values

    def tokens_at_once(self, cache: Any) -> int | None:
        """How many tokens a cache may read at once so that `keep` can take any but the first back; None for any."""
        return None

    def keep(self, cache: Any, columns: int) -> None:
        """Take back what a cache has read after its first columns, for good."""
        if rejected := cache.get_seq_length() - columns:
            cache.crop(-rejected)


@dataclass(frozen=True, kw_only=True)
class Converted(Contender):
    """A checkpoint that is converted by a recipe and head scores."""

    recipe: Recipe
    profile: HeadProfile

    def load(self, source: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
        """Convert, and load with transformers alone."""
        return converted(source, self.profile, self.recipe, device, dtype)

    def cache(self, model: PreTrainedModel) -> Any:
        """An empty cache."""
        kind = type(model(torch.zeros(1, 1, dtype=torch.long, device=model.device)).past_key_values)
        return kind(model.config)

    def keep(self, cache: Any, columns: int) -> None:
        """Take back what a cache has read after its first columns, and have it keep what it reads next."""
        super().keep(cache, columns)
        cache.activate_past_recording()


@dataclass(frozen=True, kw_only=True)
class Quantized(Contender):
    """transformers' QuantizedCache."""

    backend: str
    bits: int
    drops_rows: ClassVar[bool] = False

    def cache(self, model: PreTrainedModel) -> Any:
        """An empty cache."""
        keys, values = AXES[self.backend]
        return QuantizedCache(self.backend, model.config, nbits=self.bits, axis_key=keys, axis_value=values)

    def tokens_at_once(self, cache: Any) -> int:
        """Up to the token with which the newest ones are quantized, which comes alone."""
        layer = cache.layers[0]
        unquantized = layer.keys.shape[2] if layer.keys.numel() else 0
        return max(layer.residual_length - 1 - unquantized, 1)

    def keep(self, cache: Any, columns: int) -> None:
        """Take back what a cache has read after its first columns, which is not quantized yet."""
        if rejected := cache.get_seq_length() - columns:
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, :-rejected], layer.values[:, :, :-rejected]
                layer.cumulative_length -= rejected


@dataclass(frozen=True, kw_only=True)
class Pressed(Contender):
    """A press of kvpress, which keeps a share of the prompt."""

    share: float

    def load(self, source: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
        """The stock model, with the attention that the press needs."""
        return stock(source, "eager" if self.series == EAGER else "sdpa", dtype, device)

    def press(self, library: Any) -> Any:
        """The press, out of kvpress."""
        if self.series == ADAPTIVE:
            return library.AdaKVPress(library.SnapKVPress(compression_ratio=1 - self.share))
        return getattr(library, self.series)(compression_ratio=1 - self.share)

    def read(self, model: PreTrainedModel, text: torch.Tensor) -> Any:
        """A cache that holds a text [1, tokens].

        Raises:
            ImportError: kvpress is not installed.
        """
        if kvpress is None:
            raise ImportError("kvpress is not installed")
        with self.press(kvpress)(model):
            cache = super().read(model, text)
        for layer in cache.layers:  # KVzip leaves views of what it has read after the text
            layer.keys = layer.keys.contiguous()
            layer.values = layer.values.contiguous()
        return cache


@dataclass(frozen=True, kw_only=True)
class DuoAttention(Pressed):
    """kvpress' DuoAttention with given head scores and our default sizes; it masks keys and frees nothing."""

    profile: HeadProfile

    def press(self, library: Any) -> Any:
        """The press, which would otherwise download its scores."""
        press, sizes = library.DuoAttentionPress(head_compression_ratio=1 - self.share), Streaming()
        press.load_attention_pattern = lambda model: (sizes.sink, sizes.recent, kv_scores(self.profile))
        return press


def contenders(losses_path: Path | None, profiles: list[Path]) -> list[Contender]:
    """All that are compared, those first whose comparison says most.

    Args:
        losses_path: losses of the model, which choose full heads and say what to rotate and clip. Without them, the
            first of `profiles` chooses, and the defaults hold.
        profiles: head scores, such as those of needles; the first goes to kvpress' DuoAttention too.
    """
    other_profiles = [load_scores(profile) for profile in profiles]
    other_labels = [f"by {profile.stem}" for profile in profiles]
    losses, by_loss, measured = other_profiles[0], other_labels[0], None
    if losses_path:
        losses, by_loss, measured = load_scores(losses_path), "by measured loss", str(losses_path)

    def ours(
        sparsity: float,
        bits: int | None,
        scores: HeadProfile,
        chosen_by: str,
        residual: int | None = None,
        window: tuple[int, int] | None = None,
        *,
        both_rotated: bool = False,
    ) -> Converted:
        recipe = Recipe.of(sparsity=sparsity, rest="streaming")
        name, series = "kvsurgery, all heads full", "kvsurgery"
        if sparsity:
            name, series = f"kvsurgery, {1 - sparsity:.0%} of heads full {chosen_by}", "kvsurgery, streaming heads"
        if bits:
            recipe = recipe.changed(kv_bits=bits, kv_measured=measured)
            name = f"{name}, {bits} bits"
            series += ", bits" if not sparsity else ", 4 bits" if bits == 4 else ", 2 or 8 bits"
        if residual is not None:
            recipe = recipe.changed(kv_residual=residual)
            name, series = (f"{words}, residual {residual}" for words in (name, series))
        if both_rotated:
            recipe = recipe.changed(kv_rotate="both")
            name, series = (f"{words}, keys and values rotated" for words in (name, series))
        if window is not None:
            recipe = recipe.changed(sink=window[0], recent=window[1])
            name, series = (f"{words}, window {window[0]} + {window[1]}" for words in (name, series))
        return Converted(name, series, keeps_states=not sparsity, recipe=recipe, profile=scores)

    def budgeted(budget: int, bits: int | None = None) -> Converted:
        recipe, series = Recipe.of(rest="budgeted", budget=budget), "kvsurgery, budgets"
        name = f"kvsurgery, budgets of {budget} {other_labels[0]}"
        if bits:
            recipe = recipe.changed(kv_bits=bits, kv_measured=measured)
            name, series = f"{name}, {bits} bits", f"{series}, {bits} bits"
        return Converted(name, series, recipe=recipe, profile=other_profiles[0])

    def by_layer(kv_budget: float) -> Converted:
        recipe = Recipe.of(sparsity=0, rest="streaming", kv_bits=AUTO, kv_budget=kv_budget, kv_measured=measured)
        name = f"kvsurgery, all heads full, {kv_budget:g} bits by layer, residual 0"
        recipe = recipe.changed(kv_residual=0)
        return Converted(name, "kvsurgery, bits, residual 0", recipe=recipe, profile=losses)

    def quantized(backend: str, bits: int) -> Quantized:
        return Quantized(
            f"QuantizedCache, {backend}, {bits} bits", f"QuantizedCache, {backend}", backend=backend, bits=bits
        )

    pressed = [[Pressed(f"{press}, {share:.0%}", press, share=share) for press in PRESSES] for share in SHARES]
    return [
        Contender(),
        ours(0.5, None, losses, by_loss),
        ours(0, 4, losses, by_loss),
        quantized("quanto", 4),
        ours(0.5, 4, losses, by_loss),
        *pressed[0],
        ours(0.75, None, losses, by_loss),
        ours(0, 2, losses, by_loss),
        quantized("quanto", 2),
        quantized("hqq", 4),
        ours(0.75, 4, losses, by_loss),
        *pressed[1],
        *(ours(0.5, None, *labelled_profile) for labelled_profile in zip(other_profiles, other_labels, strict=True)),
        ours(0, 3, losses, by_loss),
        ours(0.25, None, losses, by_loss),
        *pressed[2],
        ours(0.25, 4, losses, by_loss),
        quantized("hqq", 2),
        DuoAttention(
            f"DuoAttentionPress, 50% of heads full {other_labels[0]}",
            "DuoAttentionPress",
            share=0.5,
            profile=other_profiles[0],
        ),
        ours(0.5, 2, losses, by_loss),
        *(ours(0, bits, losses, by_loss, residual=0) for bits in (4, 3, 2)),
        *(budgeted(budget) for budget in (512, 256, 1024, 128, 64)),
        *(budgeted(budget, 4) for budget in (512, 1024, 256)),
        *([by_layer(3.3)] if measured else [ours(0, 2, losses, by_loss, both_rotated=True)]),
        *(ours(sparsity, 4, losses, by_loss, window=(16, 64)) for sparsity in (0.75, 0.5)),
        ours(0.875, 4, losses, by_loss),
        *(ours(sparsity, 8, losses, by_loss) for sparsity in (0, 0.5)),
    ]


@torch.inference_mode()
def read(contender: Contender, model: PreTrainedModel, prompt: Prompt) -> Any:
    """A cache that holds a prompt's text."""
    return contender.read(model, torch.from_numpy(prompt.text)[None].to(model.device))


def answers(
    contender: Contender, arguments: argparse.Namespace, texts: list[Prompt], original_logs: list[torch.Tensor]
) -> dict[str, Any]:
    """Right answers by question, and by text the divergence, the mean negative log-likelihood and the bytes held.

    Args:
        original_logs: log-probabilities of what follows each text; filled by the first contender, the original.
    """
    model = contender.load(arguments.model, getattr(torch, arguments.dtype), arguments.device)
    results: dict[str, Any] = {"right": [], "kl": [], "nats": []}
    results |= {"kv_bytes": []} | ({"right_at_end": []} if arguments.at_end else {})
    reused = ReusedOutputs(arguments.reuse) if arguments.reuse and contender.keeps_states else None
    for number, prompt in enumerate(texts):
        with reused.reading(model, prompt.text) if reused else nullcontext():
            cache = read(contender, model, prompt)
        results["kv_bytes"].append(held_bytes(cache, widest=2))
        results["right"] += map(int, answered_correctly(model, cache, prompt))
        if arguments.at_end:
            for asked in asked_at_end(prompt):
                results["right_at_end"] += map(int, answered_correctly(model, read(contender, model, asked), asked))
        following = torch.from_numpy(prompt.following).to(model.device)
        logs = continued(model, cache, following[:-1], len(prompt.text)).float().log_softmax(-1)
        if number == len(original_logs):
            original_logs.append(logs)
        results["kl"].append(next_token_divergence(logs, original_logs[number]).item())
        results["nats"].append(F.nll_loss(logs, following[1:]).item())
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock checkpoint with a tokenizer")
    parser.add_argument("--measured", type=Path, help="its losses, of `profile compute --method kv-bits`")
    parser.add_argument(
        "--profile",
        type=Path,
        action="append",
        required=True,
        help="other head scores, called by file name; may be repeated",
    )
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text that facts are hidden in")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a text with facts")
    parser.add_argument("--facts", type=int, default=8, help="in each")
    parser.add_argument("--prompts", type=int, default=13, help="texts with facts")
    parser.add_argument("--new", type=int, default=96, help="tokens after each that are predicted")
    parser.add_argument("--seed", type=int, default=0, help="of the places in the text, and of the facts")
    parser.add_argument("--at-end", action="store_true", help="also ask each question at the end of the text")
    parser.add_argument(
        "--reuse", type=Path, metavar="DIR", help="keep the MLPs' outputs for the texts there, for all caches and runs"
    )
    parser.add_argument("--only", action="append", help="caches by name, in this order, after the original")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the models and of their caches"
    )
    parser.add_argument("--device", default="cpu", help="where models run, such as cuda")
    parser.add_argument("--json", type=Path, required=True, help="results; those there are not computed again")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    assert tokenizer is not None  # for the checker: transformers' types say it may be
    settings = {name: getattr(arguments, name) for name in ("length", "facts", "prompts", "new")}
    haystack = Haystack.read(str(arguments.text), tokenizer, arguments.length + arguments.new + 1)
    amounts = arguments.length, arguments.facts, arguments.prompts, arguments.seed, arguments.new
    texts = prompts(tokenizer, haystack, *amounts)
    settings |= {"text": arguments.text.name} | ({"at_end": True} if arguments.at_end else {})
    settings |= {"dtype": arguments.dtype} if arguments.dtype != "float32" else {}
    settings |= {"seed": arguments.seed} if arguments.seed else {}
    settings |= {"measured": arguments.measured.name} if arguments.measured else {}
    report = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    if report.setdefault("settings", settings) != settings:
        parser.error(f"{arguments.json} was measured with {report['settings']}; give it another name")
    report["places"] = [place for prompt in texts for place in prompt.places]
    results, original_logs = report.setdefault("results", {}), []
    by_name = {contender.name: contender for contender in contenders(arguments.measured, arguments.profile)}
    names = [ORIGINAL, *arguments.only] if arguments.only else [*by_name]
    if unknown := [name for name in names if name not in by_name]:
        parser.error(f"there is no cache {unknown[0]!r}; there are {', '.join(map(repr, by_name))}")
    selected = [by_name[name] for name in names]
    for place, contender in enumerate(selected, 1):
        if contender.name in results and contender.name != ORIGINAL:
            continue
        start = time.perf_counter()
        try:
            result = answers(contender, arguments, texts, original_logs)
        except (ImportError, RuntimeError) as error:
            # transformers has one mask for all layers, which a press may leave at different lengths
            if isinstance(error, RuntimeError) and not isinstance(contender, Pressed):
                raise
            report.setdefault("left out", {})[contender.name] = reason = str(error).splitlines()[0]
            console.stderr.print(f"left out: {contender.name} ({reason})")
            continue
        results[contender.name] = {"series": contender.series, **result}
        record_versions(report, contender.name, arguments.device)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        console.stderr.print(
            f"{place} of {len(selected)}: {contender.name}: {np.mean(result['right']):.0%} of facts, "
            f"KL {np.mean(result['kl']):.4f}, {console.size(result['kv_bytes'][0])}, "
            f"{time.perf_counter() - start:.0f} s",
        )


if __name__ == "__main__":
    main()
