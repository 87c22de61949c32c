"""Which converted checkpoints and settings vLLM can serve; the others are refused before anything is loaded."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from kvsurgery.templates.kv_layout import KVLayout
from kvsurgery.vllm.forecast import NO_REFORM, has_bidirectional_images, servable_layout
from kvsurgery.vllm.quantized import in_pages

logger = init_logger("vllm.kvsurgery")

WHOLE_CACHE = ("auto", "float16", "bfloat16", "float32")


class Refused(Exception):
    """A checkpoint or a setting that cannot be served; the message says what to do.

    No ValueError: where vLLM checks its config, these end in several lines of their own.
    """


def check(vllm_config: Any) -> KVLayout:
    """The heads of one process of tensor parallelism, which are the same in every process.

    Raises:
        Refused: the checkpoint or a setting cannot be served.
    """
    try:
        layout = servable_layout(vllm_config.model_config.hf_config)
    except ValueError as error:
        raise Refused(
            f"kvsurgery: {error}; or serve it with VLLM_PLUGINS=none, and a KV cache of the original's size"
        ) from error
    _check_settings(vllm_config, layout)
    return _one_process(layout, vllm_config.parallel_config.tensor_parallel_size)


def checked_layout(vllm_config: Any) -> KVLayout:
    """The same, after warnings of what vLLM does otherwise than transformers.

    Raises:
        Refused: the checkpoint or a setting cannot be served.
    """
    layout = check(vllm_config)
    if layout.quantization and not in_pages(layout, vllm_config):
        logger.warning_once(
            "kvsurgery: the quantized KV cache of this checkpoint is for transformers; vLLM stores keys and values in "
            "the dtype of --kv-cache-dtype, here %s",
            vllm_config.cache_config.cache_dtype,
        )
    if "reform" in vllm_config.model_config.hf_config.kv_surgery:
        logger.warning_once("kvsurgery: %s", NO_REFORM)
    if vllm_config.lora_config is not None:
        logger.warning_once(
            "kvsurgery: only LoRA adapters with this checkpoint's order of heads give right answers: those trained on "
            "it, and those that `kvsurgery convert --adapter ADAPTER --for CHECKPOINT` makes. vLLM does not tell them "
            "from the original's"
        )
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        logger.warning_once(
            "kvsurgery: without vLLM's hybrid KV cache manager streaming heads compute what they should, but nothing "
            "of their KV cache is freed"
        )
    return layout


def _check_settings(vllm_config: Any, layout: KVLayout) -> None:
    """Raise Refused for a feature of vLLM that has not been made to work with streaming heads."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if vllm_config.kv_transfer_config is not None or getattr(cache, "kv_offloading_size", None):
        raise Refused("kvsurgery: KV connectors and KV offloading do not know sink tokens; leave them off")
    model = vllm_config.model_config
    if has_bidirectional_images(model.hf_config) and not model.multimodal_config.language_model_only:
        raise Refused(
            "kvsurgery: tokens of an image see each other in both directions in this model, and the KV cache of a "
            "converted checkpoint cannot do that; serve text with --language-model-only"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method != "ngram":
        raise Refused(f"kvsurgery: speculative decoding by {speculative.method} is refused; use ngram")
    if max(parallel.decode_context_parallel_size or 1, parallel.prefill_context_parallel_size or 1) > 1:
        raise Refused("kvsurgery: context parallelism does not know streaming heads; use tensor parallelism")
    if parallel.pipeline_parallel_size > 1:
        raise Refused("kvsurgery: pipeline parallelism has not been tested; use tensor parallelism")
    if cache.kv_sharing_fast_prefill:
        raise Refused("kvsurgery: --kv-sharing-fast-prefill has not been tested; leave it out")
    streams = any(layer.streaming and not layer.native for layer in layout.layers)
    if cache.cache_dtype not in WHOLE_CACHE and (streams or current_platform.is_cpu()):
        raise Refused(
            f"kvsurgery: a {cache.cache_dtype} KV cache has not been shown to keep the windows of streaming heads; "
            "leave out --kv-cache-dtype"
        )


def _one_process(layout: KVLayout, processes: int) -> KVLayout:
    if processes not in layout.processes:
        raise Refused(
            f"kvsurgery: the heads of this checkpoint are laid out for {' or '.join(map(str, layout.processes))} "
            f"processes; convert with --tp {processes} for --tensor-parallel-size {processes}"
        )
    first, *others = layout.parts(processes)
    if any(other != first for other in others):
        raise Refused("kvsurgery: vLLM needs equal numbers of full heads in all processes; convert without --tp-uneven")
    return first
