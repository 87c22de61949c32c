"""`Prices`: the bytes of every candidate of `fit`, and how much it is expected to lose.

Losses that were measured (`CacheLosses`) add up: a head that streams, or is quantized, adds its own divergence of the
next token. Without a measurement the loss is a guess: one minus the share of the profile's scores that is kept, a sum
over KV heads of score x share x fidelity. A head's share is 1 if it keeps all n tokens. A streaming head keeps k of
them by their place, so what is asked for later is among them with chance k / n. A budgeted head keeps the k that get
most attention; attention falls off like Zipf's law, so that they hold about ln(1 + k) / ln(1 + n) of it. This is also
the measure that HeadKV's budgets are best by: a sum of s ln(b) with fixed sum of b is largest where budgets b are
proportional to scores s. Fidelity is what quantizing leaves of a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log1p

import numpy as np

from kvsurgery.heads.kinds import Rest
from kvsurgery.policy.budgets import allocate_budgets
from kvsurgery.policy.memory import Footprint
from kvsurgery.policy.tensor_parallel import arrange
from kvsurgery.profile.cache_losses import STREAMING_CACHE, CacheLosses
from kvsurgery.profile.methods import MAX_BUDGET
from kvsurgery.recipe import Recipe
from kvsurgery.recipe_tables import MAX_TOKENS, Cache, Demand
from kvsurgery.templates import kv_layout
from kvsurgery.templates.kv_layout import Quantization, Widths

# of logits, a guess for any model: 2 bits are left out, since they ruin some
ERRORS: dict[int | str, float] = {8: 0.0004, 4: 0.0079, 3: 0.02}
# the smallest mean budget that is considered
LEAST_BUDGET = 16
# beside budgets, full heads are counted in steps of this share of all
FULL_HEAD_STEPS = 256


@dataclass(frozen=True)
class Candidate:
    """One policy and its price.

    Attributes:
        full_heads, rest, budget, quantization: what a recipe says of them.
        kv_bytes: the KV cache of all sequences, as `KVLayout.kv_bytes` has it, in the process that holds most.
        chunk: tokens of the prompt that go through at a time.
        workspace: bytes beside weights and KV cache, at the peak of a prefill.
        total: bytes of weights, KV cache and workspace in a process.
        loss: what is expected to be lost: measured, in nats of divergence, or guessed, as a share of the scores.
    """

    full_heads: int
    rest: Rest
    budget: int | None
    quantization: Quantization | None
    kv_bytes: int
    chunk: int
    workspace: int
    total: int
    loss: float

    def recipe(self, base_recipe: Recipe) -> Recipe:
        """What makes `decide` decide it, of a recipe that leaves this to `fit`."""
        bits = self.quantization and self.quantization.bits
        return base_recipe.changed(full_heads=self.full_heads, rest=self.rest, budget=self.budget, kv_bits=bits)

    @property
    def bits(self) -> int | str:
        """Bits of what full and budgeted heads keep; 16 stands for the model's dtype."""
        return self.quantization.bits if self.quantization else 16

    @property
    def worth(self) -> tuple[float, ...]:
        """Larger is better: less loss, then more bits, more full heads, fewer bytes, and a smaller budget."""
        return -self.loss, sum(Widths.of(self.bits)), self.full_heads, -self.total, -(self.budget or 0)


class Prices:
    """What the heads of one model cost and lose for one demand.

    Args:
        scores: float32 [layers, kv_heads], of layers with full attention.
        ranking: the heads as `decide` ranks them, by their index in the flattened scores.
        run: full heads come in multiples of it in every layer.
        losses: measured losses; without them, the scores are all that is known.
    """

    def __init__(
        self,
        footprint: Footprint,
        demand: Demand,
        windows: Sequence[int | None],
        scores: np.ndarray,
        quantizations: Sequence[Quantization | None],
        ranking: np.ndarray,
        run: int,
        losses: CacheLosses | None,
    ):
        self.footprint, self.demand, self.quantizations = footprint, demand, quantizations
        self.scores, self.heads, self.run = scores, scores.size, run
        # processes that hold different heads
        self.shares = scores.shape[1] // footprint.model.kv_heads
        self.ranking = ranking
        self.score_sums = self._sums(scores)
        full_attention = [window is None for window in windows]
        # by cache, of the first heads of the ranking
        self.loss_sums: dict[str, np.ndarray] | None = None
        if losses is not None:
            self.loss_sums = {name: self._sums(losses.expected(name)[full_attention]) for name in losses.heads}
        native_windows = [window for window in windows if window is not None]
        sliding = footprint.sliding or footprint.model
        heads, head_dim = ((0, sliding.kv_heads),), sliding.head_dim
        self.native_bytes = {
            quantization: sum(
                self._layer_bytes(kv_layout.LayerLayout(heads, 0, window, quantization=quantization, head_dim=head_dim))
                for window in native_windows
            )
            for quantization in quantizations
        }
        chunks = min(demand.chunk, demand.prompt), demand.prompt
        self.workspaces = {chunk: self._workspace(chunk) for chunk in chunks}

    def candidates(self, recipe: Recipe, budget_scores: np.ndarray, beta: float | None) -> Iterator[Candidate]:
        """Candidates whose other heads become what a recipe says; budgets follow scores float32 [layers, kv_heads]."""
        if recipe.streaming:
            counts = range(0, self.heads + 1, self.run)
            yield from self.streaming(counts, recipe.streaming.sink, recipe.streaming.recent)
        elif recipe.budgeted:
            yield from self.streaming([self.heads], 0, 1)  # every head full
            yield from self.budgeted(budget_scores, beta, recipe.budgeted.selection)

    def streaming(self, counts: Sequence[int], sink: int, recent: int) -> Iterator[Candidate]:
        """Candidates with this many full heads, whose others stream."""
        context, process_heads = self.demand.context, self.heads // self.shares
        for quantization in self.quantizations:
            layer = kv_layout.LayerLayout(((0, 1),), sink, recent, quantization=quantization)
            streaming_bytes = self._layer_bytes(layer)
            full_bytes = self._heads_bytes(np.array([context]), quantization)
            for count in counts:
                if count or quantization is None or quantization.streaming:
                    # processes differ by no more than one full head, which may be smaller than one that streams
                    full_counts = count // self.shares, -(-count // self.shares)
                    kv = max(
                        full_count * full_bytes + (process_heads - full_count) * streaming_bytes
                        for full_count in full_counts
                    )
                    yield self._candidate(count, "streaming", None, quantization, kv, self._loss(count, layer))

    def _loss(self, count: int, layer: kv_layout.LayerLayout) -> float:
        """What is lost with this many full heads, whose others stream as in a layer."""
        tokens, quantization = layer.sink + layer.recent, layer.quantization
        if self.loss_sums is None:
            full_score = float(self.score_sums[count])
            total = float(self.score_sums[-1])
            fidelity = _fidelity(quantization)
            share = min(tokens, self.demand.context) / self.demand.context
            kept_score = full_score * fidelity + (total - full_score) * share * (
                fidelity if layer.quantized_window else 1
            )
            return 1 - kept_score / total
        loss = 0.0
        if tokens < self.demand.context:
            streaming_losses = self.loss_sums[STREAMING_CACHE]
            loss += streaming_losses[-1] - streaming_losses[count]
        if quantization is not None:
            quantization_losses = self.loss_sums[str(quantization.bits)]
            loss += quantization_losses[-1 if layer.quantized_window else count]
        return loss

    def _sums(self, amounts: np.ndarray) -> np.ndarray:
        """float64 [heads + 1]: sums over the first heads of the ranking, of amounts [layers, kv_heads]."""
        return np.concatenate([[0.0], amounts.flat[self.ranking].cumsum(dtype=np.float64)])

    def budgeted(
        self, budget_scores: np.ndarray, beta: float | None, selection: kv_layout.Selection
    ) -> Iterator[Candidate]:
        """Candidates whose other heads have budgets that follow these scores, float32 [layers, kv_heads].

        Where budgets hold, only with a cache that they can have: in the model's dtype, or quantized per token."""
        quantizations = [
            quantization
            for quantization in self.quantizations
            if quantization is None or selection.quantizable(quantization)
        ]
        max_held = kv_layout.EVERY if selection.hold is None else selection.window + selection.hold
        demand, budgeted_mask = self.demand, np.ones(self.scores.shape, dtype=bool)
        window = min(selection.window, demand.prompt)
        for count in range(0, self.heads, -(-self.heads // FULL_HEAD_STEPS // self.run) * self.run):
            budgeted_mask.flat[self.ranking[:count]] = False
            scores = self.scores[budgeted_mask]
            if not budget_scores[budgeted_mask].any():  # a pool cannot follow them
                return
            for budget in mean_budgets(demand.prompt):
                budgets = np.zeros(budgeted_mask.shape, dtype=np.int64)
                budgets[budgeted_mask] = allocate_budgets(budget_scores[budgeted_mask], budget, beta)
                if budgets[budgeted_mask].min() < selection.sinks:  # a head cannot have so few
                    continue
                tokens = np.minimum(budgets, demand.prompt - window) + window + demand.new_tokens
                tokens = np.minimum(tokens, budgets + max_held)
                tokens[~budgeted_mask] = demand.context
                shares = float(scores.astype(np.float64) @ np.log1p(tokens[budgeted_mask])) / log1p(demand.context)
                if self.shares > 1:
                    orders = [blocks.order for blocks in arrange(~budgeted_mask, budgets, self.shares)]
                    tokens = np.take_along_axis(tokens, np.array(orders), 1)
                processes = np.split(tokens, self.shares, axis=1)  # [layers, heads of each process]
                for quantization in quantizations:
                    kept_score = (float(self.score_sums[count]) + shares) * _fidelity(quantization)
                    kv = max(self._heads_bytes(held_tokens, quantization) for held_tokens in processes)
                    yield self._candidate(
                        count, "budgeted", budget, quantization, kv, 1 - kept_score / float(self.score_sums[-1])
                    )

    def _candidate(
        self, count: int, rest: Rest, budget: int | None, quantization: Quantization | None, kv: int, loss: float
    ) -> Candidate:
        kv = self.demand.batch * (kv + self.native_bytes[quantization])
        budgeted_count = -(-(self.heads - count) // self.shares) if rest == "budgeted" else 0
        workspace, chunk = min(
            (fixed_bytes[quantization is not None] + budgeted_count * bytes_per_head, chunk)
            for chunk, (fixed_bytes, bytes_per_head) in self.workspaces.items()
        )
        total = self.footprint.weights + kv + workspace
        # rounded, so that sums in another order tie
        return Candidate(count, rest, budget, quantization, kv, chunk, workspace, total, round(float(loss), 12))

    def _layer_bytes(self, layer: kv_layout.LayerLayout) -> int:
        """Bytes of one sequence in a layer."""
        head_dim = layer.head_dim or self.footprint.model.head_dim
        return layer.kv_bytes(self.demand.context, 0, 0, head_dim, self.footprint.itemsize)

    def _heads_bytes(self, tokens: np.ndarray, quantization: Quantization | None) -> int:
        """Bytes of one sequence's heads that keep this many tokens each."""
        head_dim, itemsize = self.footprint.model.head_dim, self.footprint.itemsize
        if quantization is None:
            return int(tokens.sum()) * 2 * head_dim * itemsize
        # no more tokens than 64 bits can add
        sink = min(quantization.sink, MAX_TOKENS)
        residual = min(quantization.residual, MAX_TOKENS)
        return int(replace(quantization, sink=sink, residual=residual).head_bytes(tokens, head_dim, itemsize).sum())

    def _workspace(self, chunk: int) -> tuple[tuple[int, int], int]:
        """Bytes that a prefill takes beside keys and values: unquantized, quantized, and for each budgeted head."""
        demand = self.demand
        in_flight_bytes = self._in_flight(chunk, 0)
        fixed_bytes = in_flight_bytes + demand.batch * self.footprint.states
        activation_bytes = partial(self.footprint.activation_bytes, demand.batch, demand.context, chunk)
        unquantized_bytes = fixed_bytes + activation_bytes(tiles=False)
        quantized_bytes = fixed_bytes + activation_bytes(tiles=chunk < demand.prompt)
        return (unquantized_bytes, quantized_bytes), self._in_flight(chunk, 1) - in_flight_bytes

    def _in_flight(self, chunk: int, budgeted_count: int) -> int:
        """Bytes of keys and values beyond the cache at the peak of a prefill, with this many budgeted heads."""
        model, demand = self.footprint.model, self.demand
        blocks = ((model.kv_heads - budgeted_count, budgeted_count),)
        layer = kv_layout.LayerLayout(blocks, 0, 1, False, (0,) * budgeted_count, kv_layout.Selection())
        sliding = self.footprint.sliding or model
        native = kv_layout.LayerLayout(((0, sliding.kv_heads),), 0, 1, native=True, head_dim=sliding.head_dim)
        layout = kv_layout.KVLayout((layer, native), model.head_dim)
        size = {"batch": demand.batch, "prompt": demand.prompt, "itemsize": self.footprint.itemsize}
        return layout.prefill_peak_bytes(**size, chunk=chunk) - layout.kv_bytes(**size)


def quantizations(cache: Cache, head_dim: int, widths: Iterable[int | str]) -> list[Quantization | None]:
    """The model's dtype, and these bits as far as heads of this size can be stored so.

    Raises:
        PolicyError: they cannot, and not for their size.
    """
    result: list[Quantization | None] = [None]
    for bits in widths:
        if Widths.of(bits).fill_words(head_dim):
            width_cache = replace(cache, bits=bits)
            width_cache.check_quantization(head_dim)
            result.append(width_cache.quantization)
    return result


def _fidelity(quantization: Quantization | None) -> float:
    return 1 - ERRORS[quantization.bits] if quantization else 1.0


def mean_budgets(prompt: int) -> list[int]:
    """Mean budgets to consider for a prompt of this many tokens."""
    largest = min(prompt, MAX_BUDGET)
    sizes = (quarter << octave for octave in range(2, MAX_BUDGET.bit_length()) for quarter in (4, 5, 6, 7))
    return [size for size in sizes if LEAST_BUDGET <= size <= largest] or [largest]
