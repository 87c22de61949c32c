"""The model card of a converted checkpoint, and the table of KV bytes that it shares with the command line."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from hashlib import sha256
from string import Template
from typing import Any

from kvsurgery.display.console import size
from kvsurgery.emit.cache_description import describe_bits
from kvsurgery.emit.config import auto_class
from kvsurgery.heads.kinds import OTHERS, unquantized
from kvsurgery.heads.lengths import length_name, lengths_of
from kvsurgery.heads.section import quantization_section
from kvsurgery.policy.policy import Policy
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.system.resources import TEMPLATES
from kvsurgery.templates.kv_layout import KVLayout, setting, text_config
from kvsurgery.version import __version__
from kvsurgery.vllm.forecast import forecast

# bytes of an element of the cache, by the dtype of the model
ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "16 bit": 2}
# keys of the source's card that stay true after surgery
KEPT_KEYS = ("license", "license_name", "license_link", "language", "pipeline_tag")
# around what a report says, and what a check of the cache does, so that the next one takes its place
REPORT = "<!-- kvsurgery report -->", "<!-- end of kvsurgery report -->"
CHECK = "<!-- kvsurgery check -->", "<!-- end of kvsurgery check -->"
UNCHECKED = "Divergence of the next token from the original model: not measured."


def loaded_dtype(config: Mapping[str, Any]) -> str:
    """The dtype in which a checkpoint is loaded with `dtype="auto"`, as far as its config says: "float32", "16 bit"."""
    # transformers 5 writes `dtype`
    names = [setting(of, name) for of in (config, text_config(config)) for name in ("dtype", "torch_dtype")]
    return next((name for name in names if isinstance(name, str) and name in ITEMSIZES), "16 bit")


def kv_table(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The KV cache of one sequence in the loaded dtype, for a converted config: `tokens`, the name of a length, and
    bytes `before` and `after`. The last row is for the model's own maximum."""
    layout, itemsize = KVLayout.from_config(config), ITEMSIZES[loaded_dtype(config)]
    return [
        {
            "tokens": length_name(length),
            "before": layout.dense_bytes(1, length, itemsize=itemsize),
            "after": layout.kv_bytes(1, length, itemsize=itemsize),
        }
        for length in lengths_of(config)
    ]


def rank_table(config: Mapping[str, Any], replicated: bool) -> list[dict[str, Any]]:
    """The KV cache of one sequence in the loaded dtype at the last length of `kv_table`, for a converted config: a row
    for every number of `processes` of tensor parallelism that its heads are laid out for, with the `kv_bytes` that
    each of them holds. With `replicated` attention, each of them holds all of it."""
    layout, itemsize = KVLayout.from_config(config), ITEMSIZES[loaded_dtype(config)]
    parts = {count: [layout] * count if replicated else layout.parts(count) for count in layout.processes[1:]}
    longest = lengths_of(config)[-1]
    return [
        {"processes": count, "kv_bytes": [part.kv_bytes(1, longest, itemsize=itemsize) for part in own]}
        for count, own in parts.items()
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
) -> str:
    """README.md of a converted checkpoint.

    Args:
        base_model: what was converted: a Hub id or a folder's name.
        config: the converted config.
        profile, policy: what decided the heads; without a profile, all are full.
        code: every emitted `.py` file by its name.
        original: the source's README.md, for its licence and language.
        replicated: whether every process of tensor parallelism has all heads, as `Family` says.
    """
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", base_model)
    front = ["library_name: transformers", *([f"base_model: {base_model}"] if on_hub else [])]
    front += ["tags:", "- kvsurgery", "- long-context", "- kv-cache", *_kept(original)]
    rows = [
        f"| {row['tokens']} | {size(row['before'])} | {size(row['after'])} | {row['after'] / row['before']:.2f} |"
        for row in kv_table(config)
    ]
    auto = auto_class(config)
    reads_images = auto == "AutoModelForImageTextToText"
    return Template((TEMPLATES / "model_card.md").read_text(encoding="utf-8")).substitute(
        front_matter="\n".join(front),
        title=base_model.rsplit("/", 1)[-1],
        dtype=loaded_dtype(config),
        base_model=f"[{base_model}](https://huggingface.co/{base_model})" if on_hub else f"`{base_model}`",
        tool_version=__version__,
        auto_class=auto,
        preprocessor="processor" if reads_images else "tokenizer",
        preprocessor_class="AutoProcessor" if reads_images else "AutoTokenizer",
        others=_others(policy) + _quantized(policy),
        code_table=_code_table(code),
        searches=" and beam search" if _linear_layers(policy) else ", beam search and assisted decoding",
        sections=_states(policy)
        + _shared_cache(policy)
        + _long_prompts(policy.reform)
        + _several_devices(config, auto, replicated)
        + _serving(config),
        eligible=policy.eligible,
        full=policy.full,
        other_heads="\n".join(f"| {kind.heads} | {policy.counts[kind]} |" for kind in OTHERS),
        profile=_profile(profile),
        policy_hash=policy.hash[:16],
        # as sha256sum has them
        code_hashes="\n".join(f"{digest}  {name}" for name, digest in code_hashes(code).items()),
        check="" if policy.quantization is None else with_section("", UNCHECKED, CHECK) + "\n",
        kv_table="\n".join(["| tokens | before | after | ratio |", "|---|---|---|---|", *rows]),
    )


def with_section(card: str, section: str, marks: tuple[str, str] = REPORT) -> str:
    """A card that ends in what a report says, or has it where an earlier report's section was."""
    marked = f"{marks[0]}\n{section}\n{marks[1]}"
    before, begin, rest = card.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    return f"{before}{marked}{after}" if begin and end else f"{card.rstrip()}\n\n{marked}\n".lstrip()


def _code_table(code: Mapping[str, bytes]) -> str:
    """The code files in the order given, which is the order to read them in, each with what it says of itself."""
    rows = [
        f"| `{name}` | {(ast.get_docstring(ast.parse(content)) or '').partition(chr(10))[0]} |"
        for name, content in code.items()
    ]
    return "\n".join(["| file | content |", "|---|---|", *rows])


def _profile(profile: HeadProfile | None) -> str:
    """The rows of the table that say what decided the heads."""
    if profile is None:
        return "| head profile | none: every head stays full |"
    file = f", file `{profile.address}`" if profile.address else ""
    return (
        f"| head profile | {profile.method}, measured on {profile.base_model}{file} |\n"
        f"| profile hash | `{profile.hash[:16]}` |"
    )


def _others(policy: Policy) -> str:
    """What the heads that are not full keep, as the end of a sentence."""
    for kind in OTHERS:
        if layers := [layer for layer in policy.layers if kind.count(layer)]:
            return f", **{kind.heads}** {kind.sizes(layers)}"
    return "; in this checkpoint, all heads are retrieval heads"


def _quantized(policy: Policy) -> str:
    """How the cache is quantized, as the end of a sentence."""
    section = quantization_section(policy.layout)
    if section is None:
        return ""
    kinds = " and ".join(kind.heads for kind in unquantized(policy.layout))
    excepted = f", except in {kinds}" if kinds else ""
    return (
        f". The first {section['sink']} and at least the newest {section['residual']} tokens stay in the model's "
        f"dtype; the other tokens are stored in {describe_bits(section)}{excepted}"
    )


def _linear_layers(policy: Policy) -> int:
    """How many layers have linear attention."""
    return sum(not layer.heads for layer in policy.layout.attended)


def _states(policy: Policy) -> str:
    """What layers with linear attention have in place of a KV cache, as a section of its own."""
    count = _linear_layers(policy)
    if not count:
        return ""
    return (
        f"\n## Linear attention\n\n{count} of {len(policy.layers)} layers have linear attention. They have a state of "
        "constant size in place of keys and values, which the\nsizes below do not count. It holds all tokens, so that "
        "none can be taken back: `generate` refuses assisted decoding, as\nwith the original.\n"
    )


def _shared_cache(policy: Policy) -> str:
    """Which layers have no KV cache of their own, as a section of its own."""
    count = sum(layer.source is not None for layer in policy.layers)
    if not count:
        return ""
    return (
        f"\n## Shared KV cache\n\n{count} of {len(policy.layers)} layers have no KV cache of their own: they attend to "
        "the keys and values of an earlier layer. A head of\nthat layer keeps what any of its layers needs, by the "
        "largest of their scores. Budgeted heads choose tokens by the attention\nof the earlier layer.\n"
    )


def _long_prompts(reform: Any | None) -> str:
    """How prompts beyond the context are read, as a section of its own."""
    if reform is None:
        return ""
    heads = ", ".join(f"{state}{layer}.{head}" for layer, state, head in reform.heads)
    return (
        f"\n## Long prompts\n\nFrom a prompt of more than {reform.recompute_budget:,} tokens, `generate` gathers the "
        f"{reform.recompute_budget:,} that its question\nneeds most, and computes only these (REFORM). The layers up "
        f"to {reform.exit_layer} read the whole prompt in chunks of {reform.chunk:,} tokens, with a\ncache of "
        f"{reform.encode_budget:,} tokens. Tokens are compared by their states in {heads} (layer, head).\n"
        "`query_length=` sets the number of tokens at the end of the prompt that are the question.\n"
        "`return_gathered=True` returns the gathered tokens.\n"
    )


def _several_devices(config: Mapping[str, Any], auto: str, replicated: bool) -> str:
    """How tensor parallelism splits the heads, as a section of its own."""
    table = rank_table(config, replicated)
    if not table:
        return ""
    most = table[-1]["processes"]
    lines = [
        "## Several devices",
        "",
        f"The heads of each layer are stored in {most} blocks, for tensor parallelism over {_either(table)} processes.",
        f"Start this script with `torchrun --nproc-per-node {most}`, and give all processes the same seed:",
        "",
        "```python",
        "from transformers.distributed import DistributedConfig",
        "",
        f"model = {auto}.from_pretrained(",
        f'    here, trust_remote_code=True, dtype="auto", distributed_config=DistributedConfig(tp_size={most})',
        ")",
        "```",
        "",
        'In transformers 4, pass `tp_plan="auto"` instead. Load the model in a single process first, so that its code',
        "is copied once.",
        "",
        f"KV cache of {length_name(lengths_of(config)[-1])} tokens in each process:",
        "",
        "| processes | at least | at most |",
        "|---|---|---|",
        *(f"| {row['processes']} | {size(min(row['kv_bytes']))} | {size(max(row['kv_bytes']))} |" for row in table),
    ]
    if replicated:
        lines += [
            "",
            f"This is the whole cache: transformers replicates the attention of {config['model_type']} everywhere.",
        ]
    return "\n" + "\n".join(lines) + "\n"


def _serving(config: Mapping[str, Any]) -> str:
    """How vLLM serves the checkpoint, as a section of its own."""
    try:
        expected = forecast(config)
    except ValueError as error:
        return f"\n## vLLM\n\n{error}.\n"
    held, dense = size(expected.kv_bytes), size(expected.dense_bytes)
    each = " in each process" if expected.processes > 1 else ""
    lines = [
        "## vLLM",
        "",
        "    pip install kvsurgery vllm",
        f"    {expected.command('DIR')}",
        "",
        "A plugin of kvsurgery serves full and streaming heads from separate caches. For "
        f"{length_name(expected.tokens)} tokens in 16 bit they hold {held}{each};",
        f"the original's caches hold {dense}. Without the plugin, vLLM serves the original model.",
    ]
    return "\n" + "\n".join(lines) + "\n"


def _either(table: list[dict[str, Any]]) -> str:
    *others, last = (str(row["processes"]) for row in table)
    return f"{', '.join(others)} or {last}" if others else last


def _kept(card: str) -> list[str]:
    """Lines of a card's front matter whose keys stay true, with the list items that belong to them."""
    match = re.match(r"---\r?\n(.*?)\r?\n---", card, re.DOTALL)
    lines, keep = [], False
    for line in match[1].splitlines() if match else []:
        if not line.startswith((" ", "-")):
            keep = line.split(":")[0].strip() in KEPT_KEYS
        if keep:
            lines.append(line)
    return lines
