"""The model card of a converted checkpoint, and the table of KV bytes that it shares with the command line."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any

from kvsurgery.checkpoint.dtype import ITEMSIZES, config_dtype
from kvsurgery.checkpoint.patch import States
from kvsurgery.checkpoint.quantization import Quantization
from kvsurgery.checkpoint.side_code import SideCode
from kvsurgery.emit.config import auto_class
from kvsurgery.heads.kinds import OTHERS, unquantized
from kvsurgery.heads.lengths import length_name, lengths_of
from kvsurgery.heads.section import quantization_section
from kvsurgery.policy.policy import Policy
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.templates.kv_layout import STATES, KVLayout, text_config
from kvsurgery.version import HOME, __version__

UNKNOWN_DTYPE = "16 bit"
# keys of the source's card that stay true after surgery
KEPT_KEYS = ("license", "license_name", "license_link", "language", "pipeline_tag")
# around what a report says, and what a check of the cache does, so that the next one takes its place
REPORT = "<!-- kvsurgery report -->", "<!-- end of kvsurgery report -->"
CHECK = "<!-- kvsurgery check -->", "<!-- end of kvsurgery check -->"
UNCHECKED = "Divergence of the next token from the original model: not measured."


def loaded_dtype(config: Mapping[str, Any]) -> str:
    """The dtype in which a checkpoint is loaded with `dtype="auto"`, as far as its config says: "float32", "16 bit"."""
    dtype = config_dtype(config)
    return dtype if dtype in ITEMSIZES else UNKNOWN_DTYPE


def _itemsize(config: Mapping[str, Any]) -> int:
    return ITEMSIZES.get(loaded_dtype(config), 2)


def kv_table(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The KV cache of one sequence in the loaded dtype, for a converted config.

    Rows have `tokens`, and the bytes `before` and `after`; the last one is for the model's own maximum.
    """
    layout = KVLayout.from_config(config)
    itemsize = _itemsize(config)
    return [
        {
            "tokens": length,
            "before": layout.dense_bytes(1, length, itemsize=itemsize),
            "after": layout.kv_bytes(1, length, itemsize=itemsize),
        }
        for length in lengths_of(config)
    ]


def rank_table(config: Mapping[str, Any], replicated: bool) -> list[dict[str, Any]]:
    """The KV cache that each process of tensor parallelism holds, for a converted config.

    It is of one sequence of the last length of `kv_table`, in the loaded dtype. There is a row for every number of
    `processes` that the heads are laid out for, with the `kv_bytes` of each process. With `replicated` attention, each
    of them holds the whole cache.
    """
    layout = KVLayout.from_config(config)
    itemsize = _itemsize(config)
    parts = {count: [layout] * count if replicated else layout.parts(count) for count in layout.processes[1:]}
    longest = lengths_of(config)[-1]
    return [
        {"processes": count, "kv_bytes": [part.kv_bytes(1, longest, itemsize=itemsize) for part in layouts]}
        for count, layouts in parts.items()
    ]


def code_hashes(files: Mapping[str, bytes]) -> dict[str, str]:
    """SHA-256 of each Python file, by name."""
    return {name: sha256(files[name]).hexdigest() for name in sorted(files) if name.endswith(".py")}


def model_card(
    base_model: str,
    config: Mapping[str, Any],
    profile: HeadProfile | None,
    policy: Policy,
    code: Mapping[str, bytes],
    original: str = "",
    replicated: bool = False,
    side_code: SideCode | None = None,
    states: States | None = None,
) -> str:
    """README.md of a converted checkpoint.

    Args:
        base_model: what was converted: a Hub id or a folder's name.
        config: the converted config.
        profile, policy: what decided the heads; without a profile, all are full.
        code: every emitted `.py` file by its name, in the order to read them.
        original: the source's README.md, for its license and language.
        replicated: whether every process of tensor parallelism has all heads, as `Family` says.
        side_code: code of the source's tokenizer or processor.
        states: those of the model's layers, as `Family` says.
    """
    from kvsurgery.emit.rendering import template_environment

    repo_id = re.match(r"[\w.-]+/[\w.-]+(?=/|$)", base_model)
    auto = auto_class(config)
    side_code = side_code or SideCode({}, ())
    layers = policy.layout.layers
    weights = Quantization.of(config)
    template = template_environment().get_template("model_card.md.jinja")
    return template.render(
        auto_class=auto,
        base_model=base_model,
        check="" if policy.quantization is None else with_section("", UNCHECKED, CHECK),
        code={name: _summary(text) for name, text in code.items()},
        dtype=loaded_dtype(config),
        home=HOME,
        front_matter=_front_matter(repo_id[0] if repo_id else None, original),
        hashes=code_hashes({**code, **side_code.files}),
        kv_rows=[{**row, "tokens": length_name(row["tokens"])} for row in kv_table(config)],
        state_layers=sum(kind in STATES for kind in text_config(config).get("layer_types") or ()),
        states_beside=states is not None and states.beside,
        longest=length_name(lengths_of(config)[-1]),
        model_type=config["model_type"],
        repo_id=repo_id[0] if repo_id else None,
        other_kinds={kind: [layer for layer in layers if kind.count(layer)] for kind in OTHERS},
        policy=policy,
        preprocessor="processor" if auto == "AutoModelForImageTextToText" else "tokenizer",
        profile=profile,
        quantization=quantization_section(policy.layout),
        ranks=rank_table(config, replicated),
        replicated=replicated,
        side_code=side_code,
        sharing_layers=sum(layer.source is not None for layer in policy.layers),
        unquantized=[kind.heads for kind in unquantized(policy.layout)],
        version=__version__,
        weights=weights and weights.layout,
    )


def with_section(card: str, section: str, marks: tuple[str, str] = REPORT) -> str:
    """A card that ends in what a report says, or has it where an earlier report's section was."""
    marked_section = f"{marks[0]}\n{section}\n{marks[1]}"
    before, begin, tail = card.partition(marks[0])
    _, end, after = tail.partition(marks[1])
    return f"{before}{marked_section}{after}" if begin and end else f"{card.rstrip()}\n\n{marked_section}\n".lstrip()


@lru_cache
def _summary(code: bytes) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(code)) or "").partition("\n")[0]


def _front_matter(base_model: str | None, original: str) -> str:
    """The card's metadata as YAML, with those keys of the original card that stay true."""
    import yaml

    match = re.match(r"---\r?\n(.*?)\r?\n---", original, re.DOTALL)
    try:
        # this loader leaves scalars as strings: the language `no` is not false
        original_metadata = yaml.load(match[1], yaml.BaseLoader) if match else None
    except (yaml.YAMLError, ValueError, RecursionError):
        original_metadata = None
    kept_metadata = (
        {key: value for key, value in original_metadata.items() if key in KEPT_KEYS}
        if isinstance(original_metadata, dict)
        else {}
    )
    metadata = {
        "library_name": "transformers",
        "base_model": base_model,
        "tags": ["kvsurgery", "long-context", "kv-cache"],
        **kept_metadata,
    }
    return yaml.safe_dump({key: value for key, value in metadata.items() if value}, sort_keys=False, allow_unicode=True)
