"""The methods that a stock transformers model needs to run with this checkpoint's head-level KV cache."""

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from . import kv_attention
from .kv_adapters import NO_HOTSWAP, check_adapters, check_order, mark_order
from .kv_attention import NAME, RUNNING, Running
from .kv_cache import CACHE, HandingCache, KVSurgeryCache
from .kv_inputs import by_name, input_shape, padding_of, text_starts, wants_cache
from .kv_kinds import kinds_of, quantized_code, storage_of
from .kv_layout import KVLayout, text_config

# where `from_pretrained` reads files from
DOWNLOAD = "cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder"


class KVSurgeryModel:
    """Mixin, first in the bases: every attention layer gets its layout and this checkpoint's attention function."""

    _auto_class = "AutoModel"  # save_pretrained then copies this code, in transformers 4 too
    attention_name = "self_attn"  # of the attention in a decoder layer

    def __init__(self, config: Any, *args, **kwargs):
        layout = KVLayout.from_config(config)
        layout.check_windows(text_config(config))
        for layer in layout.layers:
            kinds_of(layer)  # before weights are loaded, whether their code is here
            storage_of(layer)
        if layout.quantization:
            quantized_code().with_rounding(layout, config)
        super().__init__(config, *args, **kwargs)
        decoder = self.get_decoder()
        decoder.config._attn_implementation = NAME  # a vision tower beside it keeps another
        for decoder_layer, layer in zip(decoder.layers, layout.attended, strict=True):
            if layer.heads:
                getattr(decoder_layer, self.attention_name).kv_layout = layer
        for module in decoder.layers.modules():
            if any(isinstance(part, torch.nn.Conv1d) for part in module.children()):  # it has states
                module.register_forward_pre_hook(mask_padding, with_kwargs=True)
        for module in self.modules():
            if module is not self and any(part is decoder for part in module.modules()):
                module.register_forward_pre_hook(enter)
                module.register_forward_hook(leave, always_call=True)
        if decoder is not self:
            decoder.register_forward_pre_hook(announce, with_kwargs=True)
        order = config.kv_surgery.get("order")
        decoder.register_state_dict_post_hook(functools.partial(mark_order, order))
        decoder.register_load_state_dict_pre_hook(functools.partial(check_order, order))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args, config: Any = None, **kwargs) -> Any:
        """Load weights, but those of other heads than a given config describes."""
        path = str(pretrained_model_name_or_path)
        # None: the weights are a `state_dict`
        if pretrained_model_name_or_path is not None and hasattr(config, "kv_surgery") and config.name_or_path != path:
            options = {name: kwargs[name] for name in DOWNLOAD if name in kwargs}
            stored, _ = PretrainedConfig.get_config_dict(path, **options)
            if heads_of(stored) != heads_of(config.to_dict()):
                raise ValueError(
                    f"the heads of {path} are not in the order that this config describes, so they would be taken for "
                    "others; load it with a config of its own"
                )
        return super().from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "peft_config":  # peft has put adapters into the model
            check_adapters(self, value)
        super().__setattr__(name, value)

    def enable_peft_hotswap(self, *args, **kwargs) -> None:
        """Refuse: adapters that are swapped in place are not checked."""
        raise ValueError(NO_HOTSWAP)

    def load_adapter(self, *args, **kwargs) -> Any:
        """Load an adapter, which is not swapped in place."""
        if kwargs.get("hotswap") is True:
            raise ValueError(NO_HOTSWAP)
        return super().load_adapter(*args, **kwargs)

    def get_decoder(self) -> Any:
        """The model without its output layer."""
        decoder = super().get_decoder()
        return getattr(decoder, "model", decoder)  # transformers 5 returns Llama 4 with its output layer

    def _check_and_adjust_attn_implementation(self, *args, **kwargs) -> str:
        # whatever implementation is asked for, only this one knows the heads
        return NAME

    def set_attn_implementation(self, attn_implementation: str | dict, *args, **kwargs) -> None:
        """Set the attention of towers that read images; that of the text stays."""
        implementations = attn_implementation
        if not isinstance(implementations, dict):
            implementations = dict.fromkeys(self.config.sub_configs, implementations)
        super().set_attn_implementation({**implementations, "": NAME, "text_config": NAME}, *args, **kwargs)


class KVSurgeryGeneration(KVSurgeryModel):
    """A model whose `generate` makes, sizes and continues a `KVSurgeryCache`."""

    _auto_class = "AutoModelForCausalLM"

    def _prepare_generated_length(self, generation_config: Any, *args, inputs_tensor: torch.Tensor, **kwargs) -> Any:
        config = super()._prepare_generated_length(generation_config, *args, inputs_tensor=inputs_tensor, **kwargs)
        config.kv_prompt = inputs_tensor.shape[1]
        return config

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, mode: Any, batch_size: int, max_cache_length: int, *args
    ) -> None:
        if generation_config.use_cache is False:
            if (cache := model_kwargs.get(CACHE)) is not None:
                check_cache(cache)
            return
        if generation_config.assistant_early_exit is not None:
            raise ValueError(
                "assistant_early_exit drafts with some of the layers, and this checkpoint's cache is of all of them; "
                "leave it out, or pass an assistant_model"
            )
        if getattr(generation_config, "use_mtp", False):  # transformers 5.24
            raise ValueError("use_mtp drafts with layers that have no place in this checkpoint's cache; leave it out")
        cache = model_kwargs.get(CACHE)
        if cache is not None and generation_config.cache_implementation is not None:
            raise ValueError("cache_implementation does not apply to a cache that exists; leave one of them out")
        if cache is None:
            quantization = None
            if generation_config.cache_implementation == "quantized":
                quantization = quantized_code().requested_quantization(generation_config.cache_config, self.config)
            elif generation_config.cache_implementation not in (None, "dynamic", "dynamic_full"):
                raise ValueError(
                    f"cache_implementation={generation_config.cache_implementation!r} does not apply: "
                    "this checkpoint brings its own KV cache; leave the option out"
                )
            cache = model_kwargs[CACHE] = KVSurgeryCache(self.config, quantization=quantization)
            if getattr(generation_config, "is_assistant", False):
                cache.activate_past_recording()
        check_cache(cache)
        cache.graph = None  # adapters and hooks may have changed since the last turn
        cache.expect_prompt(generation_config.kv_prompt)
        cache.confirm(cache.get_seq_length())
        # a draft is asked for a few tokens again and again
        if generation_config.max_new_tokens is not None and not getattr(generation_config, "is_assistant", False):
            # drafts from the prompt may be longer than what is left to generate
            cache.reserve(max_cache_length + 1 + (generation_config.prompt_lookup_num_tokens or 0))

    def init_continuous_batching(self, *args, **kwargs) -> Any:
        raise ValueError(
            "continuous batching has a paged cache of its own, in which every head keeps every token; call generate() "
            "with a batch padded on the left, serve this checkpoint with vLLM, or load it without trust_remote_code"
        )

    generate_batch = init_continuous_batching  # before it prepares anything

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        *args,
        attention_mask: torch.Tensor | None = None,  # by its name, stock code knows that a model takes one
        inputs_embeds: torch.Tensor | None = None,
        **kwargs,
    ) -> dict:
        kwargs |= {"attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        cache = kwargs.get(CACHE)
        if isinstance(cache, KVSurgeryCache) and inputs.get(CACHE) is None:
            # where RoPE changes with the length (longrope), stock code drops it, to compute all tokens anew; version
            # 5.17 passes the newest alone
            kwargs |= {CACHE: None} | ({"next_sequence_length": None} if "next_sequence_length" in kwargs else {})
            inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
            cache.restart()
            inputs[CACHE] = cache
            inputs.pop("cache_position", None)  # of the newest token, in version 4
        return inputs

    def _sample(self, *args, **kwargs) -> Any:
        with past_recording_restored(kwargs.get(CACHE)):  # stock code leaves it on where it checks for the end late
            return super()._sample(*args, **kwargs)

    def _assisted_decoding(self, input_ids: torch.Tensor, *args, **kwargs) -> Any:
        cache = kwargs.get(CACHE)
        if cache is None:  # stock code says what is missing
            return super()._assisted_decoding(input_ids, *args, **kwargs)
        mask, columns = kwargs.get("attention_mask"), None
        if mask is None:  # transformers drops one that hides nothing, and remembers its length
            columns = getattr(kwargs.get("generation_config"), "_mask_length", None)
        columns = columns or (input_ids if mask is None else mask).shape[1]
        repeated_tokens = cache.get_seq_length() - (columns - input_ids.shape[1])
        if repeated_tokens >= input_ids.shape[1]:
            raise ValueError("the cache holds all tokens of the input already; pass at least one that is new")
        with past_recording_restored(cache):
            if not hasattr(self, "_get_initial_cache_position"):  # by which transformers 4 leaves these out itself
                cache.repeated = repeated_tokens
            cache.activate_past_recording()
            cache.confirm(columns)  # the first forward holds what is new of these, and candidates
            return super()._assisted_decoding(input_ids, *args, **kwargs)


@contextmanager
def past_recording_restored(cache: KVSurgeryCache | None) -> Generator[None]:
    """Let a cache record its past after a generation, however it ends, only if it did so before."""
    recorded = cache is not None and cache.columns.record_past
    try:
        yield
    finally:
        if cache is not None:
            cache.repeated = 0
            cache.columns.record_past = recorded


def with_kv_cache(forward: Callable) -> Callable:
    """Wrap a stock model's `forward`: it makes a `KVSurgeryCache` where a cache is wanted, and checks the mask."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        for name in ("past_key_values", "cache"):  # which all versions take here
            if name in kwargs:
                kwargs[CACHE] = kwargs.pop(name)
        arguments = by_name(signature.bind_partial(self, *args, **kwargs))
        if isinstance(cache := arguments.get(CACHE), KVSurgeryCache) and cache.repeated:
            for name in ("input_ids", "position_ids", "token_type_ids", "mm_token_type_ids"):
                if arguments.get(name) is not None:
                    arguments[name] = arguments[name][..., cache.repeated :]
            cache.repeated = 0
        decoder = self.get_decoder()
        shape = input_shape(arguments)
        config = decoder.config
        for module in (self, decoder):  # peft tells a model of its first adapter only
            if adapters := getattr(module, "peft_config", None):
                check_adapters(self, adapters)
        if shape is None:
            raise ValueError("pass input_ids or inputs_embeds")
        if arguments.get("return_shared_kv_states"):
            raise ValueError(
                "this checkpoint's cache keeps fewer keys and values than another model would read of it; leave "
                "return_shared_kv_states out, and assistant models that read the target's cache"
            )
        asked = {"output_attentions": True} if getattr(self.config, "output_attentions", None) else {}
        starts = text_starts(asked | arguments, decoder, *shape)
        if starts is not None and decoder is self:
            arguments.update(attention_mask=starts, use_cache=False)
        if cache is None and starts is None and wants_cache(arguments, decoder):
            cache = arguments[CACHE] = KVSurgeryCache(self.config)
        if config._attn_implementation != NAME:
            raise ValueError(f"this checkpoint runs with its own attention, not with {config._attn_implementation!r}")
        if cache is not None:
            check_cache(cache)
            cache.begin(arguments.get("attention_mask"), *shape)
        depth = enter_checked(config, starts)
        try:
            is_step = cache is not None and cache.columns.expected > shape[1] == 1
            if is_step and kv_attention.kv_graph is not None and isinstance(self, KVSurgeryGeneration):
                cache.graph = cache.graph or kv_attention.kv_graph.DecodeGraph()
                output = cache.graph.step(forward, self, arguments, cache)
                if output is not None:
                    return output
            return forward(self, **arguments)
        finally:  # an interrupt calls no hook
            return_to(depth)

    return wrapper


def announce(decoder: torch.nn.Module, args: tuple, options: dict) -> tuple[tuple, dict] | None:
    """Check a forward of the inner model and tell its cache, unless the model around it has.

    Trainers call it alone, and so do the first stages of a pipeline. Texts that are packed into rows are attended to
    one by one."""
    cache = options.get(CACHE, options.get("past_key_values"))
    if isinstance(cache, HandingCache) and not isinstance(cache, KVSurgeryCache):  # it reads a long prompt
        return None
    if cache is not None:
        check_cache(cache)
    arguments = by_name(inspect.signature(decoder.forward).bind_partial(*args, **options))
    cache = arguments.setdefault(CACHE, cache)
    shape = input_shape(arguments)
    if shape is None:  # stock code says what is missing
        return None
    under_way = RUNNING.get()[-1]
    starts = under_way.starts
    if not under_way.checked:
        mask = padding_of(arguments.get("attention_mask"), shape[1])
        starts = text_starts({**arguments, "attention_mask": mask}, decoder, *shape)
        if isinstance(cache, KVSurgeryCache):
            cache.begin(mask, *shape)
    return None if starts is None else ((), {**arguments, "attention_mask": starts, "use_cache": False})


@torch.compiler.disable
def enter_checked(config: Any, starts: torch.Tensor | None) -> int:
    """State that a forward is under way whose arguments have been checked; returns how many others it lies in."""
    forwards = RUNNING.get()
    RUNNING.set((*forwards, Running(config, checked=True, starts=starts)))
    return len(forwards)


@torch.compiler.disable
def return_to(depth: int) -> None:
    """State that no forward is under way but the outermost ones."""
    RUNNING.set(RUNNING.get()[:depth])


@torch.compiler.disable
def enter(module: torch.nn.Module, *args) -> None:
    """State whose forward is under way: of the decoder, or of what lies between it and the model."""
    forwards = RUNNING.get()
    config = text_config(module.config)
    RUNNING.set((*forwards, forwards[-1] if forwards[-1].config is config else Running(config)))


@torch.compiler.disable
def leave(*args) -> None:
    """State that the forward has ended."""
    RUNNING.set(RUNNING.get()[:-1])


def mask_padding(module: torch.nn.Module, args: tuple, options: dict) -> tuple[tuple, dict] | None:
    """Mask a single token that is padding in a module with states: stock code takes it for a generated one."""
    cache = options[CACHE if CACHE in options else "cache_params"]
    states = args[0] if args else options["hidden_states"]
    if not isinstance(cache, KVSurgeryCache) or states.shape[1] > 1 or not cache.columns.padding_open:
        return None
    is_token = [[pad < cache.columns.expected] for pad in cache.columns.pads]
    return args, {**options, "attention_mask": torch.tensor(is_token, device=states.device)}


def heads_of(config: dict) -> list | None:
    """The blocks of heads of each layer, by a config.json; None: the original's order."""
    section = config.get("kv_surgery")
    return None if section is None else [layer["blocks"] for layer in section["layers"]]


def convert_weights(class_name: str, stock: str) -> None:
    """Load weights into a class of this checkpoint as into the stock one, a class or a `model_type`.

    transformers 5 renames tensors and joins experts at load, but not for custom code unless it is registered.
    """
    try:
        from transformers import conversion_mapping
    except ImportError:  # transformers 4 renames for every class, and keeps experts apart
        return
    mapping = conversion_mapping.get_checkpoint_conversion_mapping(stock)
    conversion_mapping.register_checkpoint_conversion_mapping(class_name, mapping, overwrite=True)


def require_transformers(major: int) -> None:
    """Raise ImportError where transformers is of an earlier major version."""
    if int(transformers.__version__.split(".")[0]) < major:
        raise ImportError(
            f"the code of this checkpoint needs transformers {major}, not {transformers.__version__}; without "
            "trust_remote_code it loads as the original model"
        )


def check_cache(cache: Any) -> None:
    """Raise TypeError for a cache of another class."""
    if isinstance(cache, KVSurgeryCache):
        return
    name, advice = type(cache).__name__, "leave past_key_values out, and prefix tuning, which passes one"
    if name == KVSurgeryCache.__name__:
        name, advice = f"that of {type(cache).__module__}", "give it to a model of the folder that filled it"
    raise TypeError(f"this checkpoint runs with a KVSurgeryCache, got {name}; {advice}")
