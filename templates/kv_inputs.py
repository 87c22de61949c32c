"""Arguments of a forward pass: unsupported ones are refused, and packed texts are separated."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from .kv_cache import CACHE
from .kv_layout import has_states

# arguments by which stock attention, of some implementation, would compute or return something else
UNKNOWN = "output_attentions", "head_mask", "position_bias", "sliding_window"
# by which flash attention, and the convolutions of linear attention, tell the texts of a row apart
TEXTS = "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"


def by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """The arguments of a call by name, without the model that is called."""
    arguments = {}
    for name, value in bound.arguments.items():
        is_variadic = bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        arguments |= value if is_variadic else {name: value}
    arguments.pop("self", None)
    return arguments


def input_shape(arguments: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and tokens of a forward's input; None: it has none."""
    inputs = arguments.get("inputs_embeds")
    inputs = arguments.get("input_ids") if inputs is None else inputs
    return None if inputs is None else inputs.shape[:2]


def wants_cache(arguments: Mapping[str, Any], decoder: Any) -> bool:
    """Whether a forward is to have a cache: as in stock code, none where it checkpoints activations in training."""
    trains = decoder.training and (torch.is_grad_enabled() or CACHE != "cache")  # before 5.24 also without gradients
    if trains and any(getattr(part, "gradient_checkpointing", False) for part in decoder.modules()):
        return False
    use_cache = arguments.get("use_cache")
    return decoder.config.use_cache if use_cache is None else use_cache


def text_starts(arguments: Mapping[str, Any], decoder: torch.nn.Module, rows: int, tokens: int) -> torch.Tensor | None:
    """Check the arguments of a forward, and tell where the texts of its rows begin.

    Without an attention mask, a text begins wherever `position_ids` start again, and where no cache is wanted, wherever
    they do not go on by 1, as in stock attention. Waits for the device where several tokens have a mask or positions.

    Args:
        arguments: of the model, or of its decoder.
        decoder: the text model.
        rows, tokens: shape of the input.

    Returns:
        The first column of each column's text, int64 [1 or rows, 1, 1, tokens] on the host; None: one text a row.

    Raises:
        TypeError: a mask that is not two-dimensional.
        ValueError: an argument that this checkpoint's attention does not know, or texts that it cannot tell apart.
    """
    config: Any = decoder.config
    given = {"output_attentions": getattr(config, "output_attentions", None), **arguments}
    for name in UNKNOWN:
        if given.get(name) is not None and given[name] is not False:
            raise ValueError(
                f"{name} does not apply: this checkpoint has an attention of its own; leave it out, or load the "
                "checkpoint without trust_remote_code"
            )
    mask = arguments.get("attention_mask")
    cache = arguments.get(CACHE)
    if mask is not None and (not torch.is_tensor(mask) or mask.ndim != 2):
        raise TypeError("attention_mask must be a two-dimensional padding mask [batch, tokens]")
    if mask is not None and cache is None and mask.shape[1] != tokens:
        raise ValueError(f"the attention mask covers {mask.shape[1]} tokens, the input has {tokens}")
    _check_columns(arguments.get("cache_position"), cache, tokens)
    if tokens == 1:
        return None
    parts = (part for layer in decoder.get_submodule("layers").children() for part in layer.children())
    if arguments.get("is_causal") is False or not all(getattr(part, "is_causal", True) for part in (config, *parts)):
        raise ValueError(
            "some tokens would see later ones, which this checkpoint's cache cannot do; pass no is_causal, or load it "
            "without trust_remote_code"
        )
    asked = wants_cache(arguments, decoder)
    starts = _starts(arguments.get("position_ids"), mask, tokens, cache is not None or asked)
    _check_lengths(arguments, starts, rows)
    if not starts.any():
        return None
    if mask is not None:
        raise ValueError(
            "the texts of a row are told apart by position_ids without an attention mask; leave attention_mask out, or "
            "pass one text a row, padded"
        )
    if cache is not None or (asked and arguments.get("use_cache")):
        raise ValueError("packed texts cannot share a KV cache; pass use_cache=False, or one text a row, padded")
    if has_states(config):
        raise ValueError("layers with states cannot tell packed texts apart; pass one text a row, padded")
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk and (arguments["position_ids"].cpu().gather(1, starts) % chunk).any():
        raise ValueError("chunks of packed texts count from position 0; number each text from 0")
    return starts[:, None, None]


def padding_of(mask: Any, tokens: int) -> Any:
    """The mask [rows, tokens] of what `padding_mask` (kv_attention.py) returned for each kind of layers.

    Some models that read images hand that to their decoder. Any other mask stays as it is."""
    if not isinstance(mask, dict):
        return mask
    pads = [part for part in mask.values() if part is not None]
    if any(getattr(part, "dtype", None) not in (torch.int32, torch.int64) or part.shape[-1] > 2 for part in pads):
        return mask
    return (torch.arange(tokens, device=pads[0].device) >= pads[0][:, 0, 0, :1]).long() if pads else None


def _check_columns(cache_position: torch.Tensor | None, cache: Any, tokens: int) -> None:
    """Raise ValueError where an input is to be stored elsewhere than after what the cache holds."""
    if cache_position is None or (tokens == 1 and cache_position.device.type != "cpu"):  # decode steps do not wait
        return
    first = 0 if cache is None else cache.get_seq_length()
    if cache_position.tolist() != [*range(first, first + tokens)]:
        raise ValueError(
            f"cache_position must count the {tokens} tokens of the input from {first} on, after those of the cache; "
            "leave it out, and crop() or reset() the cache to read tokens anew"
        )


def _starts(position_ids: torch.Tensor | None, mask: torch.Tensor | None, tokens: int, use_cache: bool) -> torch.Tensor:
    """The first column of each column's text, int64 [1 or rows, tokens] on the host.

    With a mask or a cache, positions may leave gaps. With a mask, they mean nothing beside padding.
    """
    borders = torch.zeros(1, max(tokens - 1, 0), dtype=torch.bool)
    if position_ids is not None:
        positions = position_ids[0] if position_ids.ndim == 3 and len(position_ids) == 4 else position_ids
        steps = positions.diff(dim=-1)
        repeats = steps == 0
        if steps.ndim == 3:  # time, height and width, of which the tokens of an image share some
            repeats, positions = repeats.all(0), positions[0]
            borders = repeats | (steps[0] < 0)
        else:
            borders = steps <= 0 if use_cache or mask is not None else steps != 1
        if use_cache and mask is None and (repeats & (positions[..., 1:] > 0)).any():
            raise ValueError("position_ids repeat: pass use_cache=False and no cache, with which each begins a text")
    if mask is not None:
        numbers = mask[:, -tokens:]
        borders = borders.to(mask.device) & numbers[:, 1:].bool() & numbers[:, :-1].bool()
        borders = borders | (numbers.diff(dim=-1) != 0) & (numbers[:, 1:] > 1)
    columns = torch.arange(1, tokens, device=borders.device)
    starts = torch.where(borders, columns, 0).cummax(-1).values
    return torch.cat([torch.zeros_like(starts[:, :1]), starts], 1).cpu()


def _check_lengths(arguments: Mapping[str, Any], starts: torch.Tensor, rows: int) -> None:
    """Raise ValueError where flash attention's own terms, or a convolution's, tell other texts apart than `starts`."""
    given = [name for name in TEXTS if arguments.get(name) is not None]
    if not given:
        return
    tokens, starts = starts.shape[1], starts.expand(rows, -1)
    begins = (starts + torch.arange(rows, device="cpu")[:, None] * tokens).unique()
    bounds = torch.cat([begins, torch.tensor([rows * tokens], device="cpu")])
    for name in given:
        value = torch.as_tensor(arguments[name]).cpu()
        if name == "seq_idx":
            agrees = value.diff(dim=-1).bool().equal(starts.diff(dim=-1).bool())
        elif name in ("max_length_q", "max_length_k"):
            agrees = value >= bounds.diff().max()
        else:
            agrees = value.tolist() == bounds.tolist()
        if not agrees:
            raise ValueError(
                f"{name} tells other texts apart than position_ids; pass only position_ids that restart at each text"
            )
