"""`SurgeryPlan`: where every byte of every tensor goes. From headers alone.

Whole GQA groups move together: the query heads follow their KV head, so a layer needs one order. Query rows, biases and
full-width norms move in blocks of group x head_dim rows, key and value rows in blocks of head_dim, and o_proj's input
columns in blocks of group x head_dim. Where a query head has a gate, the gate's rows follow the head's, and both move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, zip_longest
from typing import Any, NamedTuple

from kvsurgery.checkpoint.headers import Tensor
from kvsurgery.checkpoint.model import LM_HEAD, TIED, Model
from kvsurgery.checkpoint.quantization import ORIGINAL
from kvsurgery.checkpoint.role import ATTENTION_DTYPES, HIDDEN, ONE, OTHER, Role
from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.errors import CheckpointError, PolicyError, UnsupportedModel
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.policy.policy import Policy

MAX_MISSING = 1000  # tensors that are counted, where a checkpoint is not complete


class Run(NamedTuple):
    """`length` bytes from `source` to `destination`, both counted from the tensor's first byte."""

    source: int
    destination: int
    length: int


class ColumnShuffle(NamedTuple):
    """Every row is `len(order)` blocks of `block` bytes; place p of the result holds block `order[p]`."""

    block: int
    order: tuple[int, ...]

    @property
    def row(self) -> int:
        """Bytes of a row."""
        return self.block * len(self.order)


@dataclass(frozen=True, slots=True)
class Move:
    """Where one tensor's bytes go: runs in the source's order that cover it, or a shuffle of columns in every row."""

    runs: tuple[Run, ...]
    columns: ColumnShuffle | None = None

    @property
    def plain(self) -> bool:
        """Whether every byte stays in its place."""
        return self.columns is None and all(run.source == run.destination for run in self.runs)

    @property
    def first_runs(self) -> tuple[Run, ...]:
        """The runs, of shuffled columns those of the first row."""
        if self.columns is None:
            return self.runs
        block, order = self.columns
        return tuple(Run(source * block, place * block, block) for place, source in enumerate(order))


@dataclass(frozen=True)
class Plan:
    """Where the bytes of a checkpoint or of an adapter go, and why.

    Attributes:
        moves: by tensor name.
        reason: what provenance says of the order of heads: `family`, `permutation`, `profile`, `policy`, `options`.
    """

    moves: Mapping[str, Move]
    reason: Mapping[str, Any]

    @property
    def moved(self) -> tuple[str, ...]:
        """Tensors whose bytes change places."""
        return tuple(name for name, move in self.moves.items() if not move.plain)


@dataclass(frozen=True)
class SurgeryPlan(Plan):
    """The byte moves that a policy needs in one checkpoint.

    Attributes:
        family: the model family.
        dimensions: attention dimensions.
        policy: decided the order of the heads.
    """

    family: str
    dimensions: ModelDimensions
    policy: Policy


def plan_surgery(checkpoint: Checkpoint, policy: Policy, profile: str | None = None) -> SurgeryPlan:
    """Plan every byte move.

    Raises:
        UnsupportedModel: the family, a tensor or a dtype is not covered.
        CheckpointError: a tensor is missing, or a projection does not have the shape that the config implies.
        PolicyError: the policy belongs to a model of other dimensions.
    """
    model = checkpoint.model
    moves = plan_moves(checkpoint.tensors, model, policy.orders)
    if model.quantization is not None:
        model.quantization.check_complete(checkpoint.tensors)
    check_complete(checkpoint.name, model, moves)
    reason = {
        "family": model.family.name,
        "permutation": policy.orders,
        "profile": profile,
        "policy": policy.hash,
        "options": policy.options,
    }
    return SurgeryPlan(moves, reason, model.family.name, model.dimensions, policy)


def plan_moves(
    tensors: Iterable[Tensor],
    model: Model,
    orders: Sequence[Sequence[int]],
    role_of: Callable[[Model, Tensor], Role] = Model.role,
) -> dict[str, Move]:
    """The move of every tensor if the KV heads of layer l are put into the order `orders[l]`.

    Args:
        tensors: which move.
        model: that they are of.
        orders: by layer, the source's KV head at each place.
        role_of: the role of a tensor of the model, or of an adapter of it.

    Raises:
        UnsupportedModel, CheckpointError, PolicyError: as `plan_surgery`.
    """
    heads = model.layer_heads
    if [sorted(order) for order in orders] != [[*places] for places in heads]:
        raise PolicyError(f"the policy does not order the heads of this model, which has {model.dimensions}")
    moves: dict[str, Move] = {}
    parts: set[tuple[int | None, str]] = set()
    for tensor in tensors:
        role = role_of(model, tensor)
        beyond_last = model.is_beyond(role.layer)
        if (role.layer, role.part) in parts:
            raise CheckpointError(f"{tensor.name!r} is in the checkpoint twice, under two names")
        parts.add((role.layer, role.part))
        if role.layer is None or role.axis is None or beyond_last:
            moves[tensor.name] = unmoved(tensor)
        elif not heads[role.layer]:
            raise CheckpointError(f"{tensor.name!r} is in layer {role.layer}, which has no KV cache")
        else:
            dimensions = model.layer_dimensions[role.layer]
            _check_shape(tensor, role, dimensions, model.hidden)
            moves[tensor.name] = _permute(tensor, role, dimensions, model.hidden, tuple(orders[role.layer]))
    return moves


def check_complete(name: str, model: Model, tensors: Collection[str]) -> None:
    """Check that every tensor is there that the stock class would otherwise initialize at random.

    Args:
        name: what the checkpoint is called.
        model: of the checkpoint, before its conversion.
        tensors: names of the tensors that are there.

    Raises:
        CheckpointError: with the name of the first that is not.
    """
    missing = [*islice(model.missing(tensors), MAX_MISSING)]
    if not missing:
        return
    subject = f"{missing[0]} and {len(missing) - 1} more tensors are" if len(missing) > 1 else f"{missing[0]} is"
    reason = f" ({TIED} is false)" if missing[0].endswith(LM_HEAD) else ""
    raise CheckpointError(
        f"{subject} missing from {name}{reason}; transformers would load random numbers instead; "
        "is the checkpoint complete?"
    )


def _check_shape(tensor: Tensor, role: Role, model: ModelDimensions, hidden: int) -> None:
    if not (role.per or role.flat) and tensor.dtype not in ATTENTION_DTYPES:
        raise UnsupportedModel(
            f"{tensor.name!r} is {tensor.dtype}; conversion supports {', '.join(ATTENTION_DTYPES)} weights, and those "
            "whose quantization config.json describes"
        )
    expected_shape = tuple(_lengths(tensor, role, model, hidden))
    if role.flat:
        expected_shape = (math.ceil(math.prod(expected_shape) / role.flat), *tensor.shape[1:])
    if tensor.shape != expected_shape or (role.flat and math.prod(tensor.shape[1:]) != 1):
        raise CheckpointError(
            f"{tensor.name!r} has shape {list(tensor.shape)}, config.json implies {list(expected_shape)}"
        )


def _lengths(tensor: Tensor, role: Role, model: ModelDimensions, hidden: int) -> Iterator[int]:
    """The lengths of a tensor's axes, as the config implies them; of axes that it says nothing of, those that are."""
    for symbol, per, length in zip_longest(role.shape, role.per, tensor.shape):
        if symbol == OTHER:
            yield length
        elif symbol is not None:
            yield math.ceil(_length(symbol, model, hidden) / (per or 1))


def _length(symbol: str, model: ModelDimensions, hidden: int) -> int:
    """The length of an axis that a symbol implies."""
    lengths = {HIDDEN: hidden, ONE: 1}
    return lengths[symbol] if symbol in lengths else sum(_head_lengths(symbol, model)) * model.kv_heads


def _head_lengths(symbol: str, model: ModelDimensions) -> list[int]:
    """How many rows or columns move with a KV head, where heads lie along an axis: for each letter of the symbol."""
    group = model.query_heads // model.kv_heads
    if symbol == "query_heads":
        return [group]
    if symbol == "kv_heads":
        return [1]
    if symbol == "gated_queries":
        return [2 * group * model.head_dim]
    return [model.head_dim * (group if letter == "q" else 1) for letter in symbol]


def _permute(tensor: Tensor, role: Role, model: ModelDimensions, hidden: int, order: tuple[int, ...]) -> Move:
    axis = role.axis
    assert axis is not None  # as heads lie along one
    if order == tuple(range(model.kv_heads)):
        return unmoved(tensor)
    inner = 1  # numbers of each row or column, where rows follow one another in one axis
    if role.flat is None:
        per = role.per[axis] if role.per else Fraction(1)
        element = tensor.size // math.prod(tensor.shape[: axis + 1])  # bytes of all that lies at one place of the axis
    else:
        per = role.flat
        element = tensor.size // math.prod(tensor.shape)
        columns = _length(role.shape[1], model, hidden)
        if axis > 0 and per % columns == 0:  # whole rows share an element, whatever the order of their columns
            return unmoved(tensor)
        if axis == 0:
            inner = columns
    elements = [Fraction(length * inner) / per for length in _head_lengths(role.shape[axis], model)]
    unit = math.lcm(*(share.denominator for share in elements))
    if not _moves_units(order, unit):
        share = max(elements, key=lambda share: share.denominator)
        unit = model.kv_heads if model.kv_heads % unit else unit
        raise UnsupportedModel(
            f"{tensor.name!r}: {share * per} numbers belong to a KV head, and {per} share an element, "
            f"so single heads cannot be moved without quantizing the weights again; set `heads.head_unit` to {unit}, "
            f"which keeps {unit} together, or {ORIGINAL}"
        )
    blocks = [element * int(unit * share) for share in elements]
    order = tuple(source // unit for source in order[::unit])
    if axis > 0:
        return Move((Run(0, 0, tensor.size),), _column_shuffle(blocks, order))
    runs: list[Run] = []
    base = 0
    for block in blocks:
        places = [0] * len(order)
        for place, source in enumerate(order):
            places[source] = place
        runs += (Run(base + source * block, base + place * block, block) for source, place in enumerate(places))
        base += block * len(order)
    return Move(_coalesce(runs))


def _moves_units(order: Sequence[int], unit: int) -> bool:
    """Whether `unit` neighbors, counted from the first head, are neighbors in an order as well."""
    runs = [order[start : start + unit] for start in range(0, len(order), unit)]
    return all(run == tuple(range(run[0], run[0] + unit)) and run[0] % unit == 0 for run in runs)


def _column_shuffle(blocks: Sequence[int], order: Sequence[int]) -> ColumnShuffle:
    """The shuffle of rows in which each KV head has a block of each kind, of so many bytes; kinds stay in order."""
    unit = math.gcd(*blocks)
    places: list[int] = []
    base = 0
    for block in blocks:
        count = block // unit
        places += (base + source * count + index for source in order for index in range(count))
        base += count * len(order)
    return ColumnShuffle(unit, tuple(places))


def unmoved(tensor: Tensor) -> Move:
    """The move of a tensor that is copied."""
    return Move((Run(0, 0, tensor.size),))


def _coalesce(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Join runs that are neighbors in both source and destination."""
    merged = [runs[0]]
    for run in runs[1:]:
        previous = merged[-1]
        if (previous.source + previous.length, previous.destination + previous.length) == (run.source, run.destination):
            merged[-1] = Run(previous.source, previous.destination, previous.length + run.length)
        else:
            merged.append(run)
    return tuple(merged)
