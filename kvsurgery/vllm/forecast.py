"""Whether vLLM can serve a converted checkpoint, and how large the KV cache of a sequence is. Needs no vLLM."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvsurgery.checkpoint.quantization import KEY
from kvsurgery.heads.lengths import lengths_of
from kvsurgery.templates.kv_layout import KVLayout, has_states, setting, text_config
from kvsurgery.vllm.architectures import ARCHITECTURES
from kvsurgery.vllm.budgeted import BudgetedGroups, groups_of
from kvsurgery.vllm.groups import Groups, window_sizes
from kvsurgery.vllm.processes import common_part
from kvsurgery.vllm.quantized import holds_codes, kernels_read

BLOCK = 16  # tokens; vLLM's own choice on a GPU
# what serves a checkpoint that the plugin refuses
# settings of an engine that quantizes the KV cache itself
KV_SCHEMES = ("kv_cache_scheme", "kv_cache_quant_algo")
ELSEWHERE = "use transformers with trust_remote_code=True, or serve it with the original's cache by VLLM_PLUGINS=none"


@dataclass(frozen=True)
class Forecast:
    """The KV cache of one sequence of `tokens` tokens in one process, in bytes.

    Attributes:
        processes: of tensor parallelism.
        kv_bytes, dense_bytes: of the converted and of the original model.
        token_bytes, dense_token_bytes: what each more token of a prompt takes.
        text_only: whether images and video are refused.
    """

    tokens: int
    processes: int
    kv_bytes: int
    dense_bytes: int
    token_bytes: int
    dense_token_bytes: int
    text_only: bool = False

    @classmethod
    def of(cls, groups: Groups | BudgetedGroups, tokens: int, processes: int = 1) -> Forecast:
        """For the cache groups of one process."""
        part, block, itemsize = groups.layout, groups.tokens, groups.itemsize
        kv_itemsize = 2 * itemsize
        padded_tokens = -(-tokens // block) * block
        return cls(
            tokens,
            processes,
            groups.sequence_bytes(tokens),
            part.dense_bytes(1, padded_tokens, itemsize=itemsize),
            groups.token_bytes,
            sum(layer.heads * (layer.head_dim or part.head_dim) for layer in part.layers if not layer.native)
            * kv_itemsize,
        )

    def command(self, folder: str) -> str:
        """The command that serves a folder."""
        parallel = f" --tensor-parallel-size {self.processes}" if self.processes > 1 else ""
        text = " --language-model-only" if self.text_only else ""
        return f"vllm serve {shlex.quote(folder)}{parallel}{text}"


def forecast(config: Any) -> Forecast:
    """The forecast for a converted config at the model's own maximum.

    It is over as many processes as its heads are laid out for.

    Raises:
        ValueError: vLLM cannot serve it.
    """
    layout = servable_layout(config)
    for processes in reversed(layout.processes):
        part = common_part(layout, processes)
        if part is not None:
            groups = groups_of(part, BLOCK, quantized=holds_codes_anywhere(part, config))
            prediction = Forecast.of(groups, lengths_of(config)[-1], processes)
            return replace(prediction, text_only=has_bidirectional_images(config))
    raise AssertionError("one process holds all heads")


def forecast_or_refusal(config: Any) -> Forecast | str:
    """`forecast`, or why vLLM cannot serve a converted config."""
    try:
        return forecast(config)
    except ValueError as error:
        return str(error)


def serving_limits(config: Any) -> tuple[str, ...]:
    """What vLLM does not do with a converted config, a line each; a refusal is the only one."""
    prediction = forecast_or_refusal(config)
    if isinstance(prediction, str):
        return (prediction,)
    layout = KVLayout.from_config(config)
    limits = [*ignored(config, codes=holds_codes_anywhere(layout, config))]
    if prediction.processes < max(layout.processes):
        limits.append(
            f"vLLM serves this over {prediction.processes} of {max(layout.processes)} processes, as it needs equal "
            "numbers of full heads in all; convert without `devices.tp_uneven`"
        )
    if prediction.text_only:
        limits.append("vLLM serves text alone, as tokens of an image see each other in both directions in this model")
    return tuple(limits)


def holds_codes_anywhere(layout: KVLayout, config: Any) -> bool:
    """Whether vLLM's pages hold the tiles wherever it serves this config."""
    return holds_codes(layout) and kernels_read(layout) and not is_stateful(config)


def ignored(config: Any, codes: bool) -> Iterator[str]:
    """What vLLM leaves out of a converted config that it serves, a line each; with `codes`, its pages hold these."""
    section: Mapping[str, Any] = setting(config, "kv_surgery")
    if section.get("quantization") and not codes:
        exception = ", except on a CPU with a cache of the model's dtype" * holds_codes(KVLayout.from_config(config))
        yield (
            f"vLLM ignores the quantized cache (`cache.bits`) and stores 16 bit{exception}; use transformers with "
            "trust_remote_code=True to save these bytes"
        )
    if "reform" in section:
        yield (
            "vLLM reads prompts without REFORM, and refuses those beyond the model's context; use transformers with "
            "trust_remote_code=True for these"
        )
    if has_budgets(config):
        yield (
            "vLLM serves budgeted heads, but refuses beams; its prefix cache shares only what precedes the kept tokens "
            "of a prompt"
        )


def has_budgets(config: Any) -> bool:
    """Whether a config, converted or not, has budgeted heads."""
    section = setting(config, "kv_surgery") or {"layers": ()}
    return any(layer.get("budgets") for layer in section["layers"])


def is_stateful(config: Any) -> bool:
    """Whether layers have states; the config class of Falcon-H1 says so, its config.json does not."""
    return setting(config, "model_type") == "falcon_h1" or has_states(text_config(config))


def has_bidirectional_images(config: Any) -> bool:
    """Whether tokens of an image see each other in both directions, as in Gemma 3 and the larger models of Gemma 4."""
    text = setting(config, "text_config")
    return setting(config, "model_type") == "gemma3" or setting(text, "use_bidirectional_attention") == "vision"


def servable_layout(config: Any) -> KVLayout:
    """The heads of a converted config, a transformers config or a dict.

    Raises:
        ValueError: vLLM cannot serve it; the message names the way that can.
    """
    layout = KVLayout.from_config(config)
    architectures = setting(config, "architectures") or ()
    for architecture in architectures if isinstance(architectures, list | tuple) else [architectures]:
        if architecture not in ARCHITECTURES:
            raise ValueError(
                f"vLLM serves {architecture} with a KV cache of the original's size, as the plugin has not been tested "
                "with it; use transformers with trust_remote_code=True"
            )
    if len(window_sizes(layout)) > 1:
        raise ValueError(f"vLLM needs the same `sink` and `recent` in all layers of config.json; {ELSEWHERE}")
    if any(layer.budgets for layer in layout.layers):
        _check_budgets(layout)
        if is_stateful(config):
            raise ValueError(f"vLLM serves budgeted heads only in models whose layers have no states; {ELSEWHERE}")
    weights = setting(config, KEY)
    names = [name for name in KV_SCHEMES if isinstance(weights, Mapping) and weights.get(name)]
    if names:
        raise ValueError(
            "vLLM would quantize the KV cache with scales that split heads do not have; remove "
            f"{' and '.join(names)} from {KEY} of the original, or use transformers with trust_remote_code=True"
        )
    return layout


def _check_budgets(layout: KVLayout) -> None:
    """Raise ValueError where the plugin cannot serve budgeted heads."""
    selections = [layer.selection for layer in layout.layers if layer.selection]
    if any(selection.hold for selection in selections):
        raise ValueError(
            "vLLM cannot serve budgets that hold after the prompt: a later token has the slot of its position, and a "
            f"later selection would move tokens out of theirs; convert without `budgeted.hold`, {ELSEWHERE}"
        )
    sinks = max((layer.quantization.sink for layer in layout.layers if layer.quantization), default=0)
    if any(
        budget + layer.selection.window < sinks
        for layer in layout.layers
        if layer.selection
        for budget in layer.budgets
    ):
        raise ValueError(
            f"vLLM needs budgeted heads that keep their first {sinks} tokens unquantized to select as many; convert "
            f"with a larger `budgeted.window` or a smaller --kv-sink, {ELSEWHERE}"
        )
    if window_sizes(layout):
        raise ValueError(f"vLLM serves no streaming heads beside budgeted ones, not even in other layers; {ELSEWHERE}")
    if any(layer.source is not None or layer.native or not layer.heads for layer in layout.attended):
        raise ValueError(
            "vLLM serves budgeted heads only where all layers have a KV cache of their own and no sliding window of "
            f"the model's; {ELSEWHERE}"
        )
