"""Layout of the KV cache: what each head keeps, read from the `kv_surgery` section of config.json, and its bytes.

Nothing here needs torch: the tool that wrote this checkpoint and the model that runs it share this arithmetic.
"""

import re
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

# of the `kv_surgery` section that is written; what each version that can be read calls the cache's quantization
VERSION = 2
QUANTIZATION = {1: "quantisation", 2: "quantization"}
MIN_GROUP = 16  # tokens; smaller groups of keys cost more in scales than they save in codes
# what `layer_types` of a config calls layers that have a state and no KV cache, those with both, and those with neither
STATES, HYBRID, NEITHER = ("linear_attention", "mamba", "conv"), "hybrid", ("mlp", "moe")
SAVED_AS = {"layer_types": "layers_block_type"}  # by Nemotron-H, also in place of the number of layers
SLIDING, CHUNKED = "sliding_attention", "chunked_attention"  # and those with a window of their own
EVERY = 2**30  # the sink of a full head, and more tokens than a row has
ROTATIONS = "none", "values", "both"
ROUNDINGS = NEAREST, QUERIES = "nearest", "queries"
ROUNDING_FILE = "kv_cache/rounding.safetensors"  # engines load every such file that stands beside the weights
CLIPPED = 7  # ranges of a group to choose from: all of it, and 1/20 less each
TILE = 128  # tokens of a head that are quantized together
# by what budgeted heads choose, see `Selection`
SELECTS = ATTENTION, VALUE_NORM = "attention", "value-norm"
ACCUMULATED = "accumulated"  # of checkpoints of earlier versions, which can be read but not made
VALUE_SINKS = 4
SCORE_BYTES = 4  # of an accumulated score, float32
Tokens = Any  # a number of tokens, or an array of such numbers, thus products in place of `min` and `max`


class Widths(NamedTuple):
    """Bits of the codes of keys, and of values."""

    keys: int
    values: int

    @classmethod
    def of(cls, bits: Any) -> "Widths":
        """The widths that `bits` stands for, as config.json has them: a number for both, or "k3v2"."""
        pair = re.fullmatch("k([0-9])v([0-9])", bits) if isinstance(bits, str) else None
        return cls(*map(int, pair.groups())) if pair else cls(bits, bits)

    @property
    def bits(self) -> int | str:
        """The reverse of `of`."""
        return self.keys if self.keys == self.values else f"k{self.keys}v{self.values}"

    def fill_words(self, head_dim: int) -> bool:
        """Whether the codes of a head of this size fill whole words of two bytes, in which kernels load them."""
        return not any(head_dim * width % 16 for width in self)


@dataclass(frozen=True)
class Quantization:
    """How heads store all but their newest tokens: in tiles of `TILE`, as codes of some `bits`; see `Widths`.

    A code c stands for minimum + scale * c. Scale and minimum belong to a group of states: with the scheme `kivi` (Liu
    et al. 2024), of one channel over `group_size` tokens for keys, and of one token over `group_size` channels for
    values; with `per-token`, the latter for both. Without a group size, a tile and a whole head.

    The first `sink` tokens of a head, its newest `residual` tokens, and those that no whole tile is made of yet stay in
    the model's dtype. So do streaming heads, unless `streaming` is set and their window is at least twice the residual
    and a tile; then they keep the sinks that they have.

    `rotate` says what is rotated within a head before it is stored (see kv_codes.py): `none`, `values`, or `both`
    keys and values. By default, values are where they have 4 bits or less, and with `per-token` keys too, as a few of
    their channels are far larger than the others that they would share a scale with. With `kivi`, rotated keys lose
    less in some models, and far more in others, such as those that normalize queries and keys.

    With `clip`, the range of a group is that of `CLIPPED` with the least squared error. By default it is chosen so
    where keys or values have 2 or 3 bits, and with `per-token` 4: elsewhere it does not help every model.

    `rounding` says how keys are rounded: each element by itself (`nearest`, the default), or channel by channel so that
    errors of q . k become small (`queries`, see kv_rounding.py), with factors that a file of the checkpoint has.
    """

    bits: int | str
    scheme: str = "kivi"
    group_size: int | None = None
    residual: int = TILE
    streaming: bool = False
    sink: int = 4
    rotate: str | None = None
    clip: bool | None = None
    rounding: str | None = None

    def __post_init__(self) -> None:
        widths = self.widths
        object.__setattr__(self, "bits", widths.bits)
        if self.rotate is None:
            rotates_keys = self.scheme == "per-token" and widths.keys != 8
            object.__setattr__(self, "rotate", ROTATIONS[2 if rotates_keys else widths.values != 8])
        if self.clip is None:
            clipped = (4, 3, 2) if self.scheme == "per-token" else (3, 2)
            object.__setattr__(self, "clip", any(width in clipped for width in widths))
        object.__setattr__(self, "rounding", self.rounding or NEAREST)

    @property
    def widths(self) -> Widths:
        """Bits of keys and of values."""
        return Widths.of(self.bits)

    def tiles(self, tokens: Tokens) -> Tokens:
        """Tiles that are packed of this many tokens after the sinks: `residual` and more stay, and the very newest."""
        packable = tokens - 1 - self.residual
        return packable * (packable > 0) // TILE

    def window_tiles(self, recent: int) -> int:
        """Tiles that a window of this many tokens can reach into, however its newest tokens are taken back."""
        return -(-(recent - 1) // TILE)

    def slots(self, capacity: Tokens, sink: int, margin: int = 0) -> Tokens:
        """Slots for tokens in the model's dtype of a head of `capacity` tokens, of which `margin` may be taken back."""
        excess = capacity - sink - self.residual - TILE - margin
        return capacity - excess * (excess > 0)

    def head_bytes(self, tokens: Tokens, head_dim: int, itemsize: int, margin: int = 0) -> Tokens:
        """Bytes of a head that sees all of its `tokens`, of which `margin` may be taken back."""
        slots = self.slots(tokens, self.sink, margin)
        return self.tiles(tokens - self.sink) * self.tile_bytes(head_dim, itemsize) + slots * 2 * head_dim * itemsize

    def code_bytes(self, head_dim: int) -> list[int]:
        """Bytes of a token's codes, of keys and of values."""
        return [head_dim * width // 8 for width in self.widths]

    def key_groups(self, head_dim: int) -> tuple[int, int]:
        """Shape of the scales of a tile's keys, and of their minima."""
        if self.scheme == "kivi":
            return TILE // (self.group_size or TILE), head_dim
        return self.value_groups(head_dim)

    def value_groups(self, head_dim: int) -> tuple[int, int]:
        """Shape of the scales of a tile's values, and of their minima."""
        return TILE, head_dim // (self.group_size or head_dim)

    def tile_bytes(self, head_dim: int, itemsize: int = 2) -> int:
        """Bytes of a tile: codes, scales and minima of keys and values."""
        scales = sum(rows * columns for rows, columns in (self.key_groups(head_dim), self.value_groups(head_dim)))
        return TILE * sum(self.code_bytes(head_dim)) + 2 * scales * itemsize

    def check(self, head_dim: int) -> None:
        """Raise ValueError, in words, where heads of this size cannot be stored so."""
        if any(type(width) is not int or width not in (8, 4, 3, 2) for width in self.widths):
            raise ValueError(f"a quantized cache has 8, 4, 3 or 2 bits, or two such as k3v2; got {self.bits!r}")
        if self.scheme not in ("kivi", "per-token"):
            raise ValueError(f"the scheme of a quantized cache is kivi or per-token, got {self.scheme!r}")
        if type(self.residual) is not int or self.residual < 0:
            raise ValueError(f"the residual of a quantized cache is a number of tokens, got {self.residual!r}")
        if type(self.sink) is not int or self.sink < 0:
            raise ValueError(f"the sink of a quantized cache is a number of tokens, got {self.sink!r}")
        if type(self.clip) is not bool:
            raise ValueError(f"whether a quantized cache clips ranges is true or false, got {self.clip!r}")
        if self.rotate not in ROTATIONS:
            raise ValueError(f"a quantized cache rotates {', '.join(ROTATIONS)}, got {self.rotate!r}")
        if self.rounding not in (ROUNDINGS if self.scheme == "kivi" else (NEAREST,)):
            raise ValueError(f"keys are rounded nearest or, with the scheme kivi, by queries, got {self.rounding!r}")
        if not self.widths.fill_words(head_dim):
            raise ValueError(f"heads of {head_dim} do not fill whole 16-bit words at {self.bits} bits")
        if type(self.streaming) is not bool:
            raise ValueError(f"whether streaming heads are quantized is true or false, got {self.streaming!r}")
        size = self.group_size
        if size is None:
            return
        if type(size) is not int or size < 1 or head_dim % size:
            raise ValueError(f"the group size {size!r} does not divide head_dim {head_dim}; leave it out")
        if self.scheme == "kivi" and (TILE % size or size < MIN_GROUP):
            raise ValueError(f"the group size {size} of kivi must divide {TILE} and be {MIN_GROUP} or more")


@dataclass(frozen=True)
class Selection:
    """How budgeted heads choose what they keep of a prompt (SnapKV, Li et al. 2024).

    By the attention of its last `window` tokens, pooled over `kernel_size` neighbors by their maximum (`max`) or mean
    (`avg`). The window is kept on top of the budget.

    With `hold`, budgets hold after the prompt too: whenever `hold` tokens have come since the last selection, heads
    select again in the same way, among the tokens that they still have. Without it they keep all that follows.

    `select` says what is pooled: `attention` as it is, or `value-norm`, attention times the Euclidean norm of the
    token's value (VATP, Guo et al. 2024, has the L1 norm)."""

    window: int = 8
    kernel_size: int = 7
    pool: str = "max"
    hold: int | None = None
    select: str = ATTENTION

    def quantizable(self, quantization: Quantization) -> bool:
        """Whether heads that select like this can be quantized.

        Where budgets hold, every token needs scales of its own: a later selection moves its codes, and where tokens
        share scales, it would quantize them again."""
        return self.hold is None or quantization.scheme == "per-token"

    def score_count(self, budget: int, columns: int) -> int:
        """Scores that a head with this budget accumulates, of the tokens that it has selected of so many columns."""
        return min(budget, columns) if self.select == ACCUMULATED else 0

    @property
    def sinks(self) -> int:
        """First tokens that always stay.

        Where values count there are some: they get much attention, and their values are small."""
        return VALUE_SINKS if self.select == VALUE_NORM else 0


@dataclass(frozen=True)
class LayerLayout:
    """One layer's KV heads in order.

    In each of `blocks` come full heads that keep every token, then streaming or budgeted ones. A process of tensor
    parallelism has whole blocks; one block is the ordinary case.

    A streaming head at position i sees position j <= i when j < sink or i - j < recent. A layer with a sliding window
    of the model's own is `native`: all its heads stream, with sink 0 and recent = window. Where it is `chunked`,
    rows are cut into chunks of `recent` tokens, and a position sees its own chunk. A budgeted head keeps so many tokens
    of the prompt as its entry in `budgets` says, the prompt's last `selection.window`, and all that follow; with
    `selection.hold`, never more than these and a block of so many.

    A layer without blocks has no KV cache of its own: its attention is linear, or its queries attend to the keys and
    values of an earlier layer, `source`, whose heads its query heads belong to.

    `order` has the original model's KV head at each place; a converted checkpoint does not say, and there it is empty.
    `head_dim` is set where a layer's heads have another size than `KVLayout.head_dim`.
    """

    blocks: tuple[tuple[int, int], ...]
    sink: int
    recent: int
    native: bool = False
    budgets: tuple[int, ...] = ()
    selection: Selection | None = None
    quantization: Quantization | None = None
    order: tuple[int, ...] = ()
    head_dim: int | None = None
    chunked: bool = False
    source: int | None = None
    round_keys: Any = field(default=None, compare=False, repr=False)  # factors of rounding, in a model that runs

    def in_window(self, i: Any, j: Any) -> Any:
        """Whether the window of streaming heads at position i has position j <= i: integers, or tensors of them."""
        return in_window(i, j, self.recent, self.chunked)

    @cached_property
    def heads(self) -> int:
        """KV heads of the layer."""
        return sum(map(sum, self.blocks))

    @cached_property
    def full(self) -> int:
        """KV heads that keep every token."""
        return sum(full for full, _ in self.blocks)

    @cached_property
    def streaming(self) -> int:
        """KV heads that stream."""
        return self.heads - self.full - len(self.budgets)

    @cached_property
    def scattered(self) -> bool:
        """Whether the full heads lie in several places."""
        return len(self.blocks) > 1 and 0 < self.full < self.heads

    def part(self, rank: int | None, processes: int) -> "LayerLayout":
        """What one of `processes` processes holds: whole blocks, in order. Without a rank, what each of them holds.

        Raises:
            ValueError: blocks do not divide, or processes differ and the rank is not known.
        """
        size, remainder = divmod(len(self.blocks), processes)
        if remainder:
            raise ValueError(f"{len(self.blocks)} blocks of heads do not divide over {processes} processes")
        if rank is None:
            first, *others = (self.part(process, processes) for process in range(processes))
            if any(other != first for other in others):
                raise ValueError("processes hold different heads; give the index of this process")
            return first
        start = rank * size
        own_blocks = self.blocks[start : start + size]
        first_budget = sum(others for _, others in self.blocks[:start])
        budget_count = sum(others for _, others in own_blocks)
        first = sum(map(sum, self.blocks[:start]))
        heads = sum(map(sum, own_blocks))
        budgets, order = self.budgets[first_budget : first_budget + budget_count], self.order[first : first + heads]
        return replace(self, blocks=own_blocks, budgets=budgets, order=order)

    @cached_property
    def quantized_window(self) -> bool:
        """Whether streaming heads are quantized."""
        quantization = self.quantization
        return bool(
            quantization
            and quantization.streaming
            and self.streaming
            and self.recent >= 2 * (quantization.residual + TILE)
        )

    @cached_property
    def quantized_heads(self) -> int:
        """How many heads are quantized: the first ones in the order of storage."""
        if self.quantization is None:
            return 0
        return self.heads if self.quantized_window or self.quantized_budgets else self.full

    @cached_property
    def rounded_by_queries(self) -> bool:
        """Whether keys are rounded by the queries."""
        return bool(self.quantized_heads and self.quantization and self.quantization.rounding == QUERIES)

    @cached_property
    def rotated_values(self) -> int:
        """How many heads store rotated values: the first ones."""
        return self.quantized_heads if self.quantization and self.quantization.rotate != "none" else 0

    @cached_property
    def rotated_keys(self) -> int:
        """How many heads store rotated keys, and get rotated queries."""
        return self.quantized_heads if self.quantization and self.quantization.rotate == "both" else 0

    @cached_property
    def holds(self) -> bool:
        """Whether budgets hold after the prompt."""
        return self.selection is not None and self.selection.hold is not None

    @cached_property
    def quantized_budgets(self) -> bool:
        """Whether budgeted heads are quantized."""
        quantization, selection = self.quantization, self.selection
        return bool(quantization and self.budgets and selection and selection.quantizable(quantization))

    def held(self, budget: int, prompt: int, new: int) -> int:
        """Tokens that a head with this budget stores at most."""
        assert self.selection is not None  # as there are budgets
        window = min(self.selection.window, prompt)
        tokens = min(budget, prompt - window) + window + new
        if self.selection.hold is None:
            return tokens
        return min(tokens, budget + self.selection.window + self.selection.hold)

    def streaming_slots(self, capacity: int, margin: int = 0) -> int:
        """Tokens a streaming head stores when the cache holds `capacity` tokens and can take back `margin`."""
        return min(capacity, self.sink + self.recent + margin)

    def kv_bytes(self, prompt: int, new: int, margin: int, head_dim: int, itemsize: int) -> int:
        """Bytes of one sequence's keys and values in this layer, once the prompt is in."""
        token, total = 2 * head_dim * itemsize, prompt + new
        budgeted = [self.held(budget, prompt, new) for budget in self.budgets]
        beside = self._streaming_bytes(total, margin, head_dim, itemsize)
        if self.selection:
            beside += SCORE_BYTES * sum(self.selection.score_count(budget, total) for budget in self.budgets)
        quantization = self.quantization
        if quantization is None:
            return beside + (total * self.full + sum(budgeted)) * token
        tokens = [(total, margin)] * self.full
        if self.quantized_budgets:
            tokens += [(count, 0 if self.holds else margin) for count in budgeted]
        else:
            beside += sum(budgeted) * token
        sizes = (quantization.head_bytes(count, head_dim, itemsize, most) for count, most in tokens)
        return beside + sum(sizes)

    def _streaming_bytes(self, total: int, margin: int, head_dim: int, itemsize: int) -> int:
        """The same of its streaming heads alone."""
        token, quantization = 2 * head_dim * itemsize, self.quantization
        if quantization is None or not self.quantized_window:
            return self.streaming * self.streaming_slots(total, margin) * token
        tiles = min(quantization.tiles(total - self.sink), quantization.window_tiles(self.recent))
        slots = quantization.slots(total, self.sink, margin)
        return self.streaming * (tiles * quantization.tile_bytes(head_dim, itemsize) + slots * token)


def in_window(i: Any, j: Any, recent: int, chunked: bool) -> Any:
    """Whether a window, or a chunk, of `recent` tokens at position i has position j <= i."""
    return i // recent == j // recent if chunked else i - j < recent


def setting(config: Any, name: str) -> Any:
    """What a transformers config, or the dict of a config.json, has under a name; None where that is nothing."""
    return config.get(name, config.get(SAVED_AS.get(name))) if isinstance(config, dict) else getattr(config, name, None)


def text_config(config: Any) -> Any:
    """The part of such a config that is of the model with the KV cache: `text_config` where others lie beside it."""
    part = setting(config, "text_config")
    return config if part is None or (isinstance(config, dict) and not isinstance(part, dict)) else part


def has_states(config: Any) -> bool:
    """Whether layers of a text model have states of all earlier tokens, by its config."""
    return not {*STATES, HYBRID}.isdisjoint(setting(config, "layer_types") or ())


def layer_setting(config: Any, layer: int, name: str) -> Any:
    """What such a config has under a name for one layer; `per_layer_config` says where layers differ.

    Raises:
        ValueError: `per_layer_config` is malformed.
    """
    layers = setting(config, "per_layer_config")
    try:
        if isinstance(layers, dict):
            layer_settings = {int(index): settings for index, settings in layers.items()}.get(layer, {})
            return layer_settings[name] if name in layer_settings else setting(config, name)
        return setting(config if layers is None else layers[layer], name)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"per_layer_config of config.json is malformed: {error!r}") from error


@dataclass(frozen=True)
class KVLayout:
    """The layout of a whole model; `head_dim` is the size of the heads, but for layers that have one of their own."""

    layers: tuple[LayerLayout, ...]
    head_dim: int

    @classmethod
    def from_config(cls, config: Any) -> "KVLayout":
        """Read and check the layout of a config: a transformers config or the dict of a config.json.

        Raises:
            ValueError: no `kv_surgery` section, an unknown version, or one that contradicts the rest of the config.
        """
        section = setting(config, "kv_surgery")
        text = text_config(config)
        if not isinstance(section, dict):
            raise ValueError("config.json has no kv_surgery section: this code runs converted checkpoints only")
        version = section.get("version")
        if type(version) is not int or version not in QUANTIZATION:
            raise ValueError(f"kv_surgery version {version!r} is unknown here; this code reads {VERSION} and older")
        try:
            head_dim = _count(section["head_dim"], least=1)
            selection = _selection(section["selection"]) if "selection" in section else None
            quantization_section = section.get(QUANTIZATION[version])
            entries = section["layers"]
            sizes = [_count(entry.get("head_dim", head_dim), least=1) for entry in entries]
            parts = zip(entries, _by_layer(quantization_section, len(entries)), sizes, strict=True)
            layers = tuple(_layer(entry, selection, _quantization(part, version, size)) for entry, part, size in parts)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"kv_surgery section of config.json is malformed: {error!r}") from error
        layer_types = setting(text, "layer_types") or []
        if not isinstance(layer_types, list | tuple):
            raise ValueError(f"layer_types of config.json is not a list: {layer_types!r}")
        if len(layers) != (depth := setting(text, "num_hidden_layers") or len(layer_types)):
            raise ValueError(f"kv_surgery describes {len(layers)} layers, the model has {depth}")
        for index, layer in enumerate(layers):
            heads = layer_setting(text, index, "num_key_value_heads") or setting(text, "num_attention_heads")
            no_cache = index < len(layer_types) and layer_types[index] in (*STATES, *NEITHER)
            expected = 0 if no_cache or layer.source is not None else heads
            if layer.heads != expected:
                raise ValueError(f"kv_surgery gives layer {index} {layer.heads} KV heads, the model has {expected}")
            if layer.source is not None and not (layer.source < index and layers[layer.source].heads == heads):
                raise ValueError(f"kv_surgery lets layer {index} share the KV cache of layer {layer.source}")
        sizes = [{*map(sum, layer.blocks)} for layer in layers if layer.blocks]
        if any(len(size) > 1 for size in sizes) or len({len(layer.blocks) for layer in layers if layer.blocks}) > 1:
            raise ValueError("kv_surgery has blocks of heads of different sizes")
        if any(layer.rounded_by_queries and len(layer.blocks) > 1 for layer in layers):
            raise ValueError("kv_surgery rounds keys by the queries, which is not for several blocks of heads")
        return cls(layers, head_dim)

    def check_windows(self, text: Any) -> None:
        """Raise ValueError where layers have other windows of their own than they were converted with.

        Args:
            text: the text model's config, with the defaults of its class.
        """
        layer_types = setting(text, "layer_types") or [None] * len(self.layers)
        positions = setting(text, "max_position_embeddings") or EVERY
        for index, (layer, kind) in enumerate(zip(self.layers, layer_types, strict=True)):
            chunked = layer.chunked or kind == CHUNKED
            name = "attention_chunk_size" if chunked else "sliding_window"
            size = setting(text, name)
            if layer.native:
                agrees = size == layer.recent and kind in (None, CHUNKED if chunked else SLIDING)
            else:  # a window over all positions was taken for none
                agrees = kind not in (CHUNKED, SLIDING) or size is None or size >= positions
            if layer.heads and not agrees:
                window = f"a window of {layer.recent}" if layer.native else "no window"
                raise ValueError(
                    f"layer {index} was converted with {window}, but config.json has layer_types {kind!r} and {name} "
                    f"{size!r}; convert the original with this config"
                )

    @property
    def attended(self) -> tuple[LayerLayout, ...]:
        """Of each layer, the heads that its queries attend to: its own, or those of the layer whose cache it shares."""
        return tuple(layer if layer.source is None else self.layers[layer.source] for layer in self.layers)

    @property
    def processes(self) -> tuple[int, ...]:
        """Over how many processes the heads can be split."""
        blocks = max(len(layer.blocks) for layer in self.layers)
        return tuple(count for count in range(1, blocks + 1) if blocks % count == 0)

    def parts(self, processes: int) -> "list[KVLayout]":
        """What each of `processes` processes holds under tensor parallelism, by rank.

        Raises:
            ValueError: the heads do not divide so; `self.processes` has the numbers that do.
        """
        layers = (tuple(layer.part(rank, processes) for layer in self.layers) for rank in range(processes))
        return [KVLayout(part, self.head_dim) for part in layers]

    @property
    def selection(self) -> Selection | None:
        """How budgeted heads select; None: the others stream."""
        return next((layer.selection for layer in self.layers if layer.selection), None)

    @property
    def quantization(self) -> Quantization | None:
        """How the cache is quantized, that of the first layer that is; None: it is not."""
        return next((layer.quantization for layer in self.layers if layer.quantization), None)

    def quantized(self, quantization: Quantization) -> "KVLayout":
        """These heads with a cache that is quantized.

        Raises:
            ValueError: heads of this size cannot be stored so.
        """
        for head_dim in {layer.head_dim or self.head_dim for layer in self.layers}:
            quantization.check(head_dim)
        layers = tuple(replace(layer, quantization=quantization) for layer in self.layers)
        if any(layer.holds for layer in layers) and not any(layer.quantized_heads for layer in layers):
            raise ValueError(
                "heads with rolling budgets are quantized with the scheme per-token only, and no other head is "
                "quantized; choose that scheme, or leave quantization out"
            )
        return KVLayout(layers, self.head_dim)

    def kv_bytes(self, batch: int, prompt: int, new: int = 0, margin: int = 0, itemsize: int = 2) -> int:
        """Bytes of keys and values that a cache for `prompt + new` tokens allocates.

        Args:
            batch: sequences; beams and returned sequences count.
            prompt: columns of the prompt, padding included.
            new: tokens to generate.
            margin: tokens kept beyond a streaming head's window, and beyond the residual of a quantized one, so that
                as many can be taken back (assisted decoding); 0 otherwise. Heads whose budget holds keep whole blocks.
            itemsize: bytes of an element; 2 for bfloat16 and float16.
        """
        return batch * sum(
            layer.kv_bytes(prompt, new, margin, layer.head_dim or self.head_dim, itemsize) for layer in self.layers
        )

    def dense_bytes(self, batch: int, prompt: int, new: int = 0, itemsize: int = 2) -> int:
        """Bytes of the unconverted model's cache: every head keeps all tokens, but for the model's own windows."""
        states = sum(
            layer.heads
            * (layer.streaming_slots(prompt + new) if layer.native else prompt + new)
            * (layer.head_dim or self.head_dim)
            for layer in self.layers
        )
        return 2 * batch * states * itemsize

    def prefill_peak_bytes(
        self, batch: int, prompt: int, new: int = 0, chunk: int | None = None, itemsize: int = 2
    ) -> int:
        """Bytes of keys and values at the peak of a prefill: the cache, and one layer's chunk on its way in.

        A prompt that comes in chunks waits whole in budgeted heads until its last token can select.
        """
        chunk = min(chunk or prompt, prompt)
        states = max(layer.heads * (layer.head_dim or self.head_dim) for layer in self.layers) * chunk
        if chunk < prompt:
            states += sum(len(layer.budgets) * prompt * (layer.head_dim or self.head_dim) for layer in self.layers)
        return self.kv_bytes(batch, prompt, new, itemsize=itemsize) + 2 * batch * states * itemsize


def _layer(entry: dict, selection: Selection | None, quantization: Quantization | None) -> LayerLayout:
    """One layer's entry."""
    blocks = tuple((_count(full), _count(others)) for full, others in entry["blocks"])
    if not blocks:
        source = None if entry.get("source") is None else _count(entry["source"])
        return LayerLayout((), 0, 1, quantization=quantization, source=source)
    head_dim = entry.get("head_dim")
    if "budgets" in entry:
        budgets = tuple(_count(budget) for budget in entry["budgets"])
        others = sum(others for _, others in blocks)
        if len(budgets) != others or selection is None:
            raise ValueError(f"{others} budgeted heads with {len(budgets)} budgets and selection {selection}")
        return LayerLayout(blocks, 0, 1, False, budgets, selection, quantization, head_dim=head_dim)
    sink = _count(entry["sink"])
    recent = _count(entry["recent"], least=1)
    native = entry.get("native", False) is True
    chunked = entry.get("chunked", False) is True
    if chunked and (sink or not native):
        raise ValueError("a chunked layer is native, with sink 0")
    return LayerLayout(blocks, sink, recent, native, quantization=quantization, head_dim=head_dim, chunked=chunked)


def _selection(entry: dict) -> Selection:
    kernel_size, pool = _count(entry["kernel_size"], least=1), entry["pool"]
    if kernel_size % 2 == 0 or pool not in ("max", "avg"):
        raise ValueError(f"pooling must be max or avg over an odd kernel_size, got {pool!r} over {kernel_size}")
    select = entry.get("select", ATTENTION)
    selection = Selection(_count(entry["window"], least=1), kernel_size, pool, entry.get("hold"), select)
    if "hold" in entry:
        _count(selection.hold, least=selection.window)
    if select not in SELECTS and (select != ACCUMULATED or selection.hold is None):
        raise ValueError(f"heads select by {' or '.join(SELECTS)}, got {select!r}")
    return selection


def _by_layer(entry: dict | None, count: int) -> list[dict | None]:
    """Of each of `count` layers, the entry of its quantized cache; None where it is not quantized."""
    if entry is None:
        return [None] * count
    lists = {name: value for name, value in dict(entry).items() if isinstance(value, list)}
    if any(len(values) != count for values in lists.values()):
        raise ValueError(f"lists of a quantized cache have a value for each of {count} layers")
    entries = [entry | {name: values[layer] for name, values in lists.items()} for layer in range(count)]
    return [None if "bits" in lists and layer_entry["bits"] is None else layer_entry for layer_entry in entries]


def _quantization(entry: dict | None, version: int, head_dim: int) -> Quantization | None:
    if entry is None:
        return None
    if version == 1:  # all tokens were packed, and as they are
        entry = {**entry, "sink": 0, "rotate": "none", "clip": False}
    if entry["rotate"] is None or entry["clip"] is None:
        raise ValueError("`rotate` and `clip` of a quantized cache are baked, and never null")
    entry = {"streaming": False, "rounding": NEAREST, **entry}
    quantization = Quantization(**{field.name: entry[field.name] for field in fields(Quantization)})
    quantization.check(head_dim)
    return quantization


def _count(value: Any, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"expected an integer of at least {least}, got {value!r}")
    return value
