"""Which converted checkpoints and settings vLLM can serve; the others are refused before the weights load."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from kvsurgery.errors import ServingError
from kvsurgery.templates.kv_layout import KVLayout
from kvsurgery.templates.kv_rounding import with_factors
from kvsurgery.vllm.architectures import DENSE
from kvsurgery.vllm.forecast import ELSEWHERE, has_bidirectional_images, ignored, servable_layout
from kvsurgery.vllm.processes import common_part
from kvsurgery.vllm.quantized import have_kernels, in_models_dtype, in_pages

logger = init_logger("vllm.kvsurgery")

WHOLE_CACHE = ("auto", "float16", "bfloat16", "float32")
WITHOUT_CACHE = ("medusa", "ngram_gpu", "suffix")  # methods whose drafts need no KV cache
LEARNED_SINKS = "GptOssForCausalLM"
ORIGINAL = "or serve the original's cache with VLLM_PLUGINS=none"


def config_class(base: type) -> type:
    """A subclass of what vLLM does with the config of an architecture, which checks converted checkpoints.

    vLLM calls it in the process that a user starts, before any other.
    """

    class Checked(base):  # ty: ignore[unsupported-base]  # which is known at run time
        @classmethod
        def verify_and_update_config(cls, vllm_config: Any) -> None:
            super().verify_and_update_config(vllm_config)
            if is_converted(vllm_config):
                check(vllm_config)

    Checked.__name__ = Checked.__qualname__ = base.__name__
    Checked.__doc__ = base.__doc__
    return Checked


def is_converted(vllm_config: Any) -> bool:
    """Whether this is the config of a converted checkpoint."""
    return getattr(vllm_config.model_config.hf_config, "kv_surgery", None) is not None


def check(vllm_config: Any) -> None:
    """Refuse what cannot be served, and warn about what is served otherwise than a user may expect.

    Raises:
        ServingError: the checkpoint or a setting cannot be served; the message says what to do.
    """
    config = vllm_config.model_config.hf_config
    if {*(config.architectures or ())} & {*DENSE}:
        logger.warning(
            "kvsurgery: the plugin does not know %s: this checkpoint is served with the original's tokens and a KV "
            "cache of the original's size; it saves memory in transformers, with trust_remote_code=True",
            *config.architectures,
        )
        return
    layout = checked_layout(vllm_config)
    budgets = any(layer.budgets for layer in layout.layers)
    codes = in_pages(layout, vllm_config)
    if budgets:
        from kvsurgery.vllm.requests import refuse_beams_and_growing_prompts  # imports the classes of vLLM's server

        refuse_beams_and_growing_prompts()
    for line in ignored(config, codes=codes):
        logger.warning("kvsurgery: %s", line)
    if (codes or budgets) and not current_platform.is_cpu():
        logger.warning(
            "kvsurgery: the kernels that read %s in vLLM's pages have not run on a GPU, only in Triton's interpreter "
            "and an emulator: compare some answers with those of transformers, %s",
            "quantized caches" if codes else "budgeted heads",
            ORIGINAL,
        )
    if vllm_config.lora_config is not None:
        logger.warning(
            "kvsurgery: only LoRA adapters with this checkpoint's order of heads give right answers: those trained on "
            "it, and those that `kvsurgery convert --adapter ADAPTER --for CHECKPOINT` makes. vLLM does not tell them "
            "from the original's"
        )


def checked_layout(vllm_config: Any) -> KVLayout:
    """The heads of a checkpoint, of which every process of tensor parallelism gets as many of each kind.

    Raises:
        ServingError: the checkpoint or a setting cannot be served; the message says what to do.
    """
    model = vllm_config.model_config
    try:
        layout = servable_layout(model.hf_config)
        if in_pages(layout, vllm_config) and any(layer.rounded_by_queries for layer in layout.layers):
            layout = with_factors(layout, model.model, model.revision)
    except ValueError as error:
        raise ServingError(str(error)) from error
    _check_settings(vllm_config, layout)
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        logger.warning_once(
            "kvsurgery: without vLLM's hybrid KV cache manager streaming heads compute what they should, but nothing "
            "of their KV cache is freed"
        )
    _check_processes(layout, vllm_config)
    return layout


def _check_settings(vllm_config: Any, layout: KVLayout) -> None:
    """Raise ServingError for a feature of vLLM that has not been made to work with these heads."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if vllm_config.kv_transfer_config is not None or cache.kv_offloading_size is not None:
        raise ServingError(
            "KV connectors and KV offloading bring tokens from outside, and the cache manager of streaming heads would "
            f"lose the sinks among them; leave them off, {ORIGINAL}"
        )
    model = vllm_config.model_config
    if has_bidirectional_images(model.hf_config) and not model.multimodal_config.language_model_only:
        raise ServingError(
            "tokens of an image see each other in both directions in this model, which the plugin does not support; "
            f"serve text with --language-model-only, {ORIGINAL}"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method != "ngram":
        reason = "has not been tested"
        if current_platform.is_cpu() and speculative.method not in WITHOUT_CACHE:
            reason = "needs a drafter, for whose KV cache vLLM's CPU backend has no layout that converted heads have"
        raise ServingError(f"speculative decoding by {speculative.method} {reason}; use ngram, {ORIGINAL}")
    if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        raise ServingError(f"context parallelism does not know streaming heads; use tensor parallelism, {ORIGINAL}")
    if parallel.pipeline_parallel_size > 1:
        raise ServingError(
            "pipeline parallelism has not been tested, since vLLM's CPU build fails on it also with stock models; use "
            f"tensor parallelism, {ORIGINAL}"
        )
    if parallel.use_ubatching:
        raise ServingError(f"micro-batches have not been tested; leave out --enable-dbo and --ubatch-size, {ORIGINAL}")
    if cache.kv_sharing_fast_prefill:
        raise ServingError(f"--kv-sharing-fast-prefill has not been tested; leave it out, {ORIGINAL}")
    budgets = any(layer.budgets for layer in layout.layers)
    if budgets:
        _check_budget_settings(vllm_config)
    windowed = any(layer.streaming and not layer.native for layer in layout.layers)
    on_cpu = current_platform.is_cpu()
    copied = budgets or (windowed and on_cpu)  # keys and values come into the cache without a kernel of vLLM's
    shown = in_models_dtype(vllm_config) if copied else cache.cache_dtype in WHOLE_CACHE
    if not shown and (copied or windowed or on_cpu):
        raise ServingError(
            f"a {cache.cache_dtype} KV cache has not been shown right for streaming and budgeted heads; leave out "
            f"--kv-cache-dtype, {ORIGINAL}"
        )


def _check_budget_settings(vllm_config: Any) -> None:
    """Raise ServingError for a feature of vLLM that has not been made to work with budgeted heads."""
    if not (current_platform.is_cpu() or have_kernels(current_platform, vllm_config.model_config.dtype)):
        raise ServingError(
            f"on a GPU, budgeted heads have a kernel in 16 bit on NVIDIA's from Ampere on only; {ELSEWHERE}"
        )
    if vllm_config.speculative_config is not None:
        raise ServingError(f"speculative decoding has not been tested with budgeted heads; leave it out, {ORIGINAL}")
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise ServingError(
            "budgeted heads need vLLM's hybrid KV cache manager; leave out --disable-hybrid-kv-cache-manager, "
            + ORIGINAL
        )


def _check_processes(layout: KVLayout, vllm_config: Any) -> None:
    """Raise ServingError where the heads cannot be shared among the processes."""
    processes = vllm_config.parallel_config.tensor_parallel_size
    laid_out = " or ".join(map(str, layout.processes))
    undivided = [layer.heads for layer in layout.layers if layer.heads % processes]
    if undivided:
        raise ServingError(
            f"the {undivided[0]} KV heads of a layer do not divide over {processes} processes, and the plugin does not "
            f"copy heads; use --tensor-parallel-size {laid_out}, {ORIGINAL}"
        )
    if processes not in layout.processes:
        raise ServingError(
            f"the heads of this checkpoint are laid out for {laid_out} processes; "
            f"convert with --tp {processes} for --tensor-parallel-size {processes}"
        )
    part = common_part(layout, processes)
    if part is None:
        raise ServingError("vLLM needs equal numbers of full heads in all processes; convert without --tp-uneven")
    architectures = vllm_config.model_config.hf_config.architectures or ()
    if LEARNED_SINKS in architectures and any(layer.scattered for layer in part.layers):
        count = max(layout.processes)
        raise ServingError(
            f"learned sinks of heads that are laid out for {count} processes cannot be served by {processes}; use "
            f"--tensor-parallel-size {count}, or convert without --tp"
        )
