"""The options of a recipe, for `convert`, `fit` and `sweep`: from options to a `Recipe`, and back."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click

from kvsurgery.cli.help import CACHE, DEVICES, HEADS, PROMPTS, RUNNING, basic, in_group, in_options, sets
from kvsurgery.cli.options import Bits, LocalPath, Several, Tokens, flag
from kvsurgery.errors import OutputError, PolicyError, RecipeError
from kvsurgery.heads.kinds import Rest
from kvsurgery.recipe import CHOICES, FLAT, Demand, Recipe, default
from kvsurgery.system.files import check_file
from kvsurgery.templates.kv_layout import SELECTS

LARGEST_RECIPE = 1 << 20  # bytes; --save-recipe does not overwrite a larger file
# the axes of a sweep, the values and help of --kv-bits there, and the fields that a sweep does not have
AXES = ("sparsity", "full_heads", "sink", "recent", "budget", "beta", "kv_bits")
SWEPT_BITS = (
    Bits(16, 8, 4, 3, 2),
    "Bits per stored key and value of full and budgeted heads, except for the newest tokens; k3v2 has 3 for keys and 2 "
    "for values, and 16 is the model's dtype.",
)
NOT_SWEPT = ("threshold", "kv_budget")
DECIDED = (*CHOICES, "budget", "kv_bits", "kv_budget")
# the value of an option that is given without one
BARE = {"hold": 32}
# group -> field of a recipe -> its type, its help, and `basic` if --help shows it; `method` is short for others
FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    HEADS: {
        "sparsity": (float, "Share of KV heads that are not full.  [default: (0.5 with GQA, 0.75 without)]", basic),
        "threshold": (float, "Instead of --sparsity: the lowest score of a full head."),
        "full_heads": (int, "Instead of --sparsity: the number of full KV heads over the whole model."),
        "method": (
            click.Choice(["duo", "headkv", "reform"]),
            "Short for --rest streaming (duo) and --rest budgeted (headkv); reform reads long prompts and keeps every "
            "head full.  [default: (as the profile's method)]",
        ),
        "rest": (
            click.Choice(get_args(Rest)),
            "How the remaining heads behave.  [default: (as --method)]",
        ),
        "group_reduce": (
            click.Choice(["mean", "max"]),
            "How the scores of a group's query heads become the score of their KV head.",
        ),
        "head_unit": (
            int,
            "Number of neighboring KV heads that are full together and stay side by side: 2 where two heads share a "
            "block of quantized weights.",
        ),
    },
    CACHE: {
        "sink": (Tokens(), "Number of first tokens that a streaming head keeps.", basic),
        "recent": (Tokens(), "Number of latest tokens that a streaming head keeps.", basic),
        "budgets_from": (
            click.Path(),
            "The head profile whose scores decide the budgets, such as the shares of LU-KV or WG-KV: a file or an "
            "address on the Hub.  [default: (--profile)]",
        ),
        "budget": (
            Tokens(),
            "Tokens of a prompt that a budgeted head keeps on average, in addition to the observation window: a "
            'published "KV = 128" is --budget 120 --window 8.  [default: (from a profile of budgets)]',
            basic,
        ),
        "beta": (
            float,
            "Every head gets B - B/beta tokens; the other B/beta per head form a pool that is divided by score. A "
            "larger beta means a smaller pool and more even budgets.  [default: (1.2; shares and budgets keep their "
            "proportions)]",
        ),
        "window": (
            int,
            "Number of trailing prompt tokens whose attention selects what a budgeted head keeps.",
        ),
        "kernel_size": (int, "Number of neighboring tokens over which this attention is pooled."),
        "pool": (click.Choice(["max", "avg"]), "How this attention is pooled."),
        "hold": (
            Tokens(),
            "Select again after every block of this many tokens (32 if no number is given), so that a budgeted head "
            "never keeps more than budget, window and a block.  [default: (all tokens after the prompt are kept)]",
        ),
        "select": (
            click.Choice(list(SELECTS)),
            "Score by which a budgeted head selects tokens: the attention of the window, or this attention times the "
            "norm of the token's value.",
        ),
        "kv_bits": (
            Bits(8, 4, 3, 2, "auto", "source"),
            "Bits per key and value (k3v2: 3 and 2); auto by --kv-measured, source as ModelOpt chose.  "
            "[default: (the model's dtype)]",
            basic,
        ),
        "kv_budget": (float, "With --kv-bits auto: the largest average number of bits per stored value."),
        "kv_scheme": (
            click.Choice(["kivi", "per-token"]),
            "Layout of the scales: kivi has one for each channel of keys and for each token of values; per-token has "
            "one for each token of both. With --hold, budgeted heads are quantized only with per-token.",
        ),
        "kv_group_size": (
            int,
            "Number of elements that share a scale.  [default: (a tile of 128 tokens, or all channels of a head)]",
        ),
        "kv_residual": (Tokens(), "Minimum number of newest tokens that are not quantized."),
        "kv_streaming": (
            bool,
            "Also quantize the windows of streaming heads and of the model's sliding layers if they are long enough.",
        ),
        "kv_sink": (Tokens(), "Number of first tokens of a full or budgeted head that are not quantized."),
        "kv_rotate": (
            click.Choice(["none", "values", "both"]),
            "States that are rotated within a head before they are quantized: values, or both keys and values. "
            "Rotated keys help some models and harm others.  "
            "[default: (values at 4 bits and less, and with per-token keys too)]",
        ),
        "kv_clip": (
            bool,
            "Choose the ranges of codes by least squared error.  [default: (at 3 and 2 bits, and with per-token at 4)]",
        ),
        "kv_rounding": (
            click.Choice(["nearest", "queries"]),
            "How keys are rounded: nearest, or queries, which keeps errors of attention scores small by the measured "
            "queries of each head and requires --kv-measured.  [default: (nearest, or as measured)]",
        ),
        "kv_measured": (
            click.Path(),
            "File of losses measured by `profile compute --method kv-bits`. They decide rotation, clipping and "
            "rounding and, with `convert --kv-bits auto`, the width of each layer.",
        ),
    },
    DEVICES: {
        "tp": (
            click.IntRange(min=1),
            "Number of tensor-parallel processes to lay heads out for. The number of full heads in every layer is a "
            "multiple of it. The checkpoint also runs on any divisor of this number of processes.",
        ),
        "tp_uneven": (
            bool,
            "With --tp: keep exactly the requested full heads, although some processes then hold more.",
        ),
    },
    RUNNING: {
        "quantized": (
            bool,
            "Emit the code of quantized caches even without --kv-bits, for `generate(cache_implementation=...)`.",
        ),
        "kernels": (
            bool,
            "Emit the Triton kernels, and for quantized caches the loop in C that CPUs run; without them everything "
            "runs in plain torch.  [default: (emitted)]",
        ),
        "ignore_model_code": (
            bool,
            "Ignore the model's own modeling code, and convert it as the transformers model of its `model_type`.",
        ),
    },
}
# field of `ReformSizes` -> its type, and its help
REFORM: dict[str, tuple[Any, str]] = {
    "chunk": (Tokens(), "Tokens of a prompt that are read at once.  [default: (32K, or what fits the model)]"),
    "encode_budget": (Tokens(), "Tokens that a head keeps from chunk to chunk.  [default: (32K, or what fits)]"),
    "compressor": (click.Choice(["h2o", "tova", "streaming"]), "How these tokens are selected.  [default: h2o]"),
    "window": (int, "Number of last queries of a chunk whose attention selects tokens.  [default: 128]"),
    "keep": (int, "Number of first and of last tokens that are always kept.  [default: 256]"),
    "pool": (int, "Number of neighboring tokens over which similarity to the question is pooled.  [default: 129]"),
    "recompute_budget": (Tokens(), "Tokens that are gathered for the whole model.  [default: (16K, or what fits)]"),
    "query_length": (int, "Length of the question when the prompt has no user-turn marker.  [default: 64]"),
}


def recipe_options(command: Any) -> Any:
    """Add `--recipe`, and an option for every field of a recipe that has one value in a command."""
    return _fields(command)


def fit_options(command: Any) -> Any:
    """Add the options of a recipe, without the fields that `fit` decides."""
    return _fields(command, DECIDED)


def sweep_options(command: Any) -> Any:
    """Add the options of a sweep: lists of values for its axes, without the fields that a sweep does not have."""
    return _fields(command, (*NOT_SWEPT, *FIELDS[DEVICES]), AXES)


def _fields(command: Any, excluded: Container[str] = (), swept: Container[str] = ()) -> Any:
    """Add `--recipe` and an option for every field that is not excluded; swept fields take several values."""
    for group, names in FIELDS.items():
        if options := [_option(name, name in swept, *names[name]) for name in names if name not in excluded]:
            command = in_group(group, *options)(command)
    return recipe_file(command)


def reform_options(command: Any) -> Any:
    """Add the options for reading long prompts (REFORM)."""
    options = [
        sets([f"reform.{name}"], click.option(flag(f"reform_{name}"), type=kind, help=text))
        for name, (kind, text) in REFORM.items()
    ]
    return in_group(PROMPTS, *options)(command)


def recipe_file(command: Any) -> Any:
    """Add `--recipe`."""
    return basic(
        click.option(
            "--recipe",
            "recipe_path",
            type=LocalPath(),
            help="A TOML file with these options; options on the command line override it.",
        )
    )(command)


save_recipe_option = click.option("--save-recipe", type=LocalPath(), help="Write the complete recipe to a TOML file.")
profile_option = basic(
    click.option(
        "--profile",
        "profile_paths",
        multiple=True,
        metavar="PROFILE",
        help="The head profile: a file, or hf://owner/repo/path[@revision]. For long prompts add a reform profile, or "
        "give only that. Without one, here or in the recipe, `convert --kv-bits` quantizes the cache of every head.",
    )
)


def _option(
    name: str, is_list: bool, kind: Any, text: str, mark: Callable[..., Callable[[Any], Any]] | None = None
) -> Callable[[Any], Any]:
    """The option of a recipe's field; `is_list` lets it take several values, and `mark` makes it a basic one."""
    if mark is not None:
        return mark(_option(name, is_list, kind, text))
    if is_list:
        kind, text = SWEPT_BITS if name == "kv_bits" else (kind, text)
        kind = Several(click.types.convert_type(kind))
    usual = default(name) if name in FLAT else None
    names = [FLAT[name]] if name in FLAT else []
    if kind is bool and usual is not False:
        return sets(names, click.option(f"{flag(name)}/{flag(f'no_{name}')}", default=None, help=text))
    if kind is bool:
        return sets(names, click.option(flag(name), is_flag=True, flag_value=True, default=None, help=text))
    default_text = "" if usual is None or "[default" in text else f"  [default: {usual}]"
    optional_value: dict[str, Any] = {"is_flag": False, "flag_value": BARE[name]} if name in BARE else {}
    return sets(names, click.option(flag(name), type=kind, help=text + default_text, **optional_value))


def recipe_of(options: Mapping[str, Any], **values: Any) -> Recipe:
    """Build the recipe of a command: the file of --recipe, with the options on the command line over it.

    Args:
        options: the command's parameters by name; None means not given.
        values: further fields to set.

    Raises:
        UsageError: options contradict each other, or the file.
        RecipeError: the file cannot be read.
    """
    path = options.get("recipe_path")
    recipe = Recipe() if path is None else Recipe.load(path)
    values |= {name: options[name] for names in FIELDS.values() for name in names if options.get(name) is not None}
    method = values.pop("method", None)
    implied_rest = {"duo": "streaming", "headkv": "budgeted"}.get(method)
    if implied_rest and values.setdefault("rest", implied_rest) != implied_rest:
        raise click.UsageError(f"--method {method} means --rest {implied_rest}; leave one of them out")
    if "tp_uneven" in values and "tp" not in values and recipe.devices.tp == 1:
        raise click.UsageError("--tp-uneven requires --tp")
    sizes = {name: value for name in REFORM if (value := options.get(f"reform_{name}")) is not None}
    if sizes:
        values["reform"] = replace(recipe.reform, **sizes)
    values |= _demand(options, recipe.fit)
    if paths := options.get("profile_paths"):
        values["profiles"] = tuple(paths)
    try:
        recipe = recipe.changed(**values)
    except PolicyError as error:
        raise click.UsageError(in_options(str(error))) from error
    if not recipe.profiles and recipe.budgets_from is None and recipe.cache is None:
        alternative = "" if recipe.fit else "; without one, --kv-bits 8, 4, 3 or 2 quantizes the cache of every head"
        raise click.UsageError(
            f"--profile is missing: the file with the scores that decide which heads stay full{alternative}"
        )
    return recipe


def _demand(options: Mapping[str, Any], file_demand: Demand | None) -> dict[str, Demand]:
    """The memory demand of --fit, --context and --batch of `convert`, over that of the file."""
    names = ("memory", "context", "batch")
    typed_values = {name: value for name in names if (value := options.get(f"fit_{name}")) is not None}
    if not typed_values:
        return {}
    demand_fields = {**(vars(file_demand) if file_demand else {}), **typed_values}
    if "memory" not in demand_fields:
        option = "--context" if "context" in typed_values else "--batch"
        raise click.UsageError(f"{option} requires --fit")
    if "context" not in demand_fields:
        raise click.UsageError("--fit requires --context, the number of tokens to make room for")
    return {"fit": Demand(**demand_fields)}


def check_recipe_file(path: Path) -> None:
    """Check that the file of --save-recipe can be written, and would not replace a file that is not a recipe.

    Raises:
        OutputError: it cannot be written, or is another kind of file.
    """
    check_file(path)
    if path.exists():
        try:
            if not path.is_file() or path.stat().st_size > LARGEST_RECIPE:
                raise RecipeError(f"{path} is not a file of this kind")
            Recipe.load(path)
        except RecipeError as error:
            raise OutputError(
                f"{path} exists and is not a recipe; give another file to --save-recipe ({error})"
            ) from error


def write_recipe(recipe: Recipe, path: Path | None) -> None:
    """Write a recipe to the file of --save-recipe, if one is given."""
    from kvsurgery.display import console

    if path is not None:
        recipe.save(path)
        console.stderr.print(f"wrote {path}")


def flags_of(recipe: Recipe) -> list[str]:
    """The options that reproduce a complete recipe, apart from its profiles and long prompts."""
    return [
        word
        for name, value in recipe.options.items()
        if name == "rest" or value != default(name)
        for word in ([flag(f"no_{name}")] if value is False else [flag(name), *([] if value is True else [str(value)])])
    ]
