"""Options that `convert` and `fit` share: how heads are decided, and numbers as people write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import click


class Size(click.ParamType):
    """Bytes: 24GB is 24 x 10^9, 24GiB is 24 x 2^30."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?(?:([kmgt])(i?))?b", str(value), re.IGNORECASE)
        if not match:
            self.fail(f"{value!r} is no size; write 24GB, which is 24 x 10^9 bytes, or 24GiB, 24 x 2^30", param, ctx)
        power = " kmgt".index((match[2] or " ").lower())
        return int(Fraction(match[1]) * (1024 if match[3] else 1000) ** power)


class Tokens(click.ParamType):
    """Tokens: 128K is 128 x 1024 and 1M is 1024 x 1024, as models' names have it; 128000 is as written."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d{1,12})([km]?)", str(value), re.IGNORECASE)
        if not match:
            self.fail(f"{value!r} is no number of tokens; write 131072, or 128K, which is the same", param, ctx)
        return int(match[1]) * 1024 ** " km".index(match[2].lower() or " ")


class Several(click.ParamType):
    """Numbers with commas between them."""

    name = "list"

    def __init__(self, item: click.ParamType):
        self.item = item

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(self.item.convert(part.strip(), param, ctx) for part in str(value).split(","))


def policy_options(command: Any) -> Any:
    """Add the options that say what heads become, but for how much of them is kept."""
    return _added(kind_options(command), _SIZES)


def kind_options(command: Any) -> Any:
    """The same without sizes, for a command that takes several of each."""
    return _added(command, _KINDS)


def _added(command: Any, options: Sequence[Any]) -> Any:
    for option in reversed(options):
        command = option(command)
    return command


def reform_options(command: Any) -> Any:
    """Add the options that say how long prompts are read, as `Reform` has them."""
    for name, (kind, text) in reversed(REFORM_SIZES.items()):
        command = click.option(f"--reform-{name.replace('_', '-')}", type=kind, help=f"Long prompts: {text}")(command)
    return command


REFORM_SIZES = {
    "chunk": (Tokens(), "tokens read at once.  [default: 32K, or what fits the model]"),
    "encode_budget": (Tokens(), "tokens that a head keeps from chunk to chunk.  [default: 32K, or what fits]"),
    "compressor": (click.Choice(["h2o", "tova", "streaming"]), "how it chooses them.  [default: h2o]"),
    "window": (int, "last queries of a chunk, which choose.  [default: 128]"),
    "keep": (int, "first and last tokens that always stay.  [default: 256]"),
    "pool": (int, "neighbours that a token's similarity to the question is pooled over.  [default: 129]"),
    "recompute_budget": (Tokens(), "tokens that are gathered for the whole model.  [default: 16K, or what fits]"),
    "query_length": (int, "tokens of the question, where nothing marks it.  [default: 64]"),
}

_KINDS = (
    click.option(
        "--method",
        type=click.Choice(["duo", "headkv", "reform"]),
        help="Short for --rest streaming, and --rest budgeted; reform is for long prompts, and keeps every head full.  "
        "[default: what the profile was measured for]",
    ),
    click.option(
        "--rest",
        type=click.Choice(["streaming", "budgeted"]),
        help="What heads are that are not full.  [default: as --method]",
    ),
    click.option("--window", type=int, default=8, show_default=True, help="Last tokens of a prompt, which choose."),
    click.option(
        "--kernel-size", type=int, default=7, show_default=True, help="Neighbours that attention is pooled over."
    ),
    click.option(
        "--pool", type=click.Choice(["max", "avg"]), default="max", show_default=True, help="How it is pooled."
    ),
    click.option(
        "--kv-scheme",
        type=click.Choice(["kivi", "per-token"]),
        help="What a scale is for: kivi, a channel of keys and a token of values; per-token, a token.  [default: kivi]",
    ),
    click.option(
        "--kv-group-size",
        type=int,
        help="States that share a scale.  [default: a tile of 128 tokens, or all channels of a head]",
    ),
    click.option("--kv-residual", type=int, help="Newest tokens that stay as they are, at least.  [default: 128]"),
    click.option(
        "--kv-streaming",
        is_flag=True,
        flag_value=True,
        default=None,
        help="Streaming heads too, and the model's own windows, where they are at least twice what stays as it is.",
    ),
    click.option(
        "--group-reduce",
        type=click.Choice(["mean", "max"]),
        default="mean",
        show_default=True,
        help="How scores of the query heads of a group become their KV head's.",
    ),
)
_SIZES = (
    click.option("--sink", type=int, default=64, show_default=True, help="First tokens that a streaming head keeps."),
    click.option(
        "--recent", type=int, default=256, show_default=True, help="Latest tokens that a streaming head keeps."
    ),
    click.option(
        "--beta",
        type=float,
        default=1.2,
        show_default=True,
        help="Budgets are B - B/beta each, and a pool of B/beta per head that follows the scores: a larger beta means "
        "a smaller pool and more even budgets.",
    ),
    click.option(
        "--tp",
        type=click.IntRange(min=1),
        help="Lay heads out for so many processes of tensor parallelism, or a divisor of that: every layer gets a "
        "multiple of it of full heads.  [default: 1]",
    ),
    click.option(
        "--tp-uneven",
        is_flag=True,
        help="With --tp: keep exactly the full heads asked for, though some processes hold more.",
    ),
)


def decided(
    method: str | None,
    rest: str | None,
    window: int,
    kernel_size: int,
    pool: str,
    bits: int | None,
    tp: int | None = None,
    tp_uneven: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """The options as `decide` takes them, with a cache of so many bits."""
    from kvsurgery.decide.policy import Quantisation, Selection

    implied = {"duo": "streaming", "headkv": "budgeted"}.get(method)
    if rest and implied and rest != implied:
        raise click.UsageError(f"--method {method} means --rest {implied}; leave one of them out")
    names = ("scheme", "group_size", "residual", "streaming")
    given = {name: value for name in names if (value := options.pop(f"kv_{name}")) is not None}
    if given and bits is None:
        flags = " and ".join(f"--kv-{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"{flags} goes with --kv-bits; add that, or leave it out")
    if tp is None and tp_uneven:
        raise click.UsageError("--tp-uneven goes with --tp; add that, or leave it out")
    parallel = {} if tp is None else {"tp": tp, "tp_uneven": tp_uneven}
    quantisation = {} if bits is None else {"quantisation": Quantisation(bits, **given)}
    selection = Selection(window, kernel_size, pool)
    return {**options, **parallel, **quantisation, "rest": rest or implied, "selection": selection}
