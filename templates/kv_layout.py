"""Which KV heads keep what, read from the `kv_surgery` section of config.json, and the bytes that this takes.

Nothing here needs torch: the tool that wrote this checkpoint and the model that runs it share this arithmetic.
"""

from dataclasses import dataclass

VERSION = 1


@dataclass(frozen=True)
class Selection:
    """How budgeted heads choose what they keep of a prompt (SnapKV, Li et al. 2024): by the attention of its last
    `window` tokens, pooled over `kernel_size` neighbours by their maximum (`max`) or mean (`avg`)."""

    window: int
    kernel_size: int
    pool: str


@dataclass(frozen=True)
class LayerLayout:
    """One layer's KV heads in order: `full` heads that keep every token, then `streaming` or budgeted ones.

    A streaming head at position i sees position j <= i when j < sink or i - j < recent. A layer with a sliding window
    of the model's own is `native`: all its heads stream, with sink 0 and recent = window. A budgeted head keeps so many
    tokens of the prompt as its entry in `budgets` says, the prompt's last `selection.window`, and all that follow.
    """

    full: int
    streaming: int
    sink: int
    recent: int
    native: bool = False
    budgets: tuple[int, ...] = ()
    selection: Selection | None = None

    @property
    def heads(self) -> int:
        """KV heads of the layer."""
        return self.full + self.streaming + len(self.budgets)

    def streaming_slots(self, capacity: int, margin: int = 0) -> int:
        """Tokens a streaming head stores when the cache holds `capacity` tokens and can take back `margin`."""
        return min(capacity, self.sink + self.recent + margin)

    def rows(self, prompt: int, new: int, margin: int = 0) -> int:
        """Tokens stored per sequence, summed over the layer's KV heads, once the prompt is in."""
        capacity = prompt + new
        rows = self.full * capacity + self.streaming * self.streaming_slots(capacity, margin)
        if self.budgets:
            window = min(self.selection.window, prompt)
            rows += sum(min(budget, prompt - window) + window + new for budget in self.budgets)
        return rows


@dataclass(frozen=True)
class KVLayout:
    """The layout of a whole model."""

    layers: tuple[LayerLayout, ...]
    head_dim: int

    @classmethod
    def from_config(cls, config) -> "KVLayout":
        """Read and check the layout of a config: a transformers config or the dict of a config.json.

        Raises:
            ValueError: no `kv_surgery` section, an unknown version, or one that contradicts the rest of the config.
        """
        get = config.get if isinstance(config, dict) else lambda name, default=None: getattr(config, name, default)
        section = get("kv_surgery")
        if not isinstance(section, dict):
            raise ValueError("config.json has no kv_surgery section: this code runs converted checkpoints only")
        if section.get("version") != VERSION:
            raise ValueError(
                f"kv_surgery version {section.get('version')!r} is unknown here; this code reads {VERSION}"
            )
        try:
            selection = _selection(section["selection"]) if "selection" in section else None
            layers = tuple(_layer(entry, selection) for entry in section["layers"])
            head_dim = _count(section["head_dim"], least=1)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"kv_surgery section of config.json is malformed: {error!r}") from error
        if len(layers) != get("num_hidden_layers"):
            raise ValueError(f"kv_surgery describes {len(layers)} layers, the model has {get('num_hidden_layers')}")
        heads = get("num_key_value_heads") or get("num_attention_heads")
        for index, layer in enumerate(layers):
            if layer.heads != heads:
                raise ValueError(f"kv_surgery gives layer {index} {layer.heads} KV heads, the model has {heads}")
        return cls(layers, head_dim)

    def kv_bytes(self, batch: int, prompt: int, new: int = 0, margin: int = 0, itemsize: int = 2) -> int:
        """Bytes of keys and values that a cache for `prompt + new` tokens allocates.

        Args:
            batch: sequences; beams and returned sequences count.
            prompt: columns of the prompt, padding included.
            new: tokens to generate.
            margin: tokens that streaming heads keep beyond their window so that as many can be taken back
                (assisted decoding); 0 otherwise.
            itemsize: bytes of an element; 2 for bfloat16 and float16.
        """
        rows = sum(layer.rows(prompt, new, margin) for layer in self.layers)
        return 2 * batch * rows * self.head_dim * itemsize

    def dense_bytes(self, batch: int, prompt: int, new: int = 0, itemsize: int = 2) -> int:
        """Bytes of the unconverted model's cache: every head keeps all tokens, but for the model's own windows."""
        rows = sum(layer.rows(prompt, new) if layer.native else layer.heads * (prompt + new) for layer in self.layers)
        return 2 * batch * rows * self.head_dim * itemsize

    def prefill_peak_bytes(
        self, batch: int, prompt: int, new: int = 0, chunk: int | None = None, itemsize: int = 2
    ) -> int:
        """Bytes of keys and values at the peak of a prefill: the cache, and one layer's chunk on its way in.

        A prompt that comes in chunks waits whole in budgeted heads until its last token can select.
        """
        chunk = min(chunk or prompt, prompt)
        rows = max(layer.heads for layer in self.layers) * chunk
        if chunk < prompt:
            rows += sum(len(layer.budgets) * prompt for layer in self.layers)
        return self.kv_bytes(batch, prompt, new, itemsize=itemsize) + 2 * batch * rows * self.head_dim * itemsize


def _layer(entry: dict, selection: Selection | None) -> LayerLayout:
    """One layer's entry. Blocks are the head groups of tensor-parallel ranks; this code knows one block."""
    [[full, other]] = entry["blocks"]
    if "budgets" in entry:
        budgets = tuple(_count(budget) for budget in entry["budgets"])
        if len(budgets) != other or selection is None:
            raise ValueError(f"{other} budgeted heads with {len(budgets)} budgets and selection {selection}")
        return LayerLayout(_count(full), 0, 0, 1, budgets=budgets, selection=selection)
    sink, recent = _count(entry["sink"]), _count(entry["recent"], least=1)
    return LayerLayout(_count(full), _count(other), sink, recent, entry.get("native", False) is True)


def _selection(entry: dict) -> Selection:
    kernel_size, pool = _count(entry["kernel_size"], least=1), entry["pool"]
    if kernel_size % 2 == 0 or pool not in ("max", "avg"):
        raise ValueError(f"pooling must be max or avg over an odd kernel_size, got {pool!r} over {kernel_size}")
    return Selection(_count(entry["window"], least=1), kernel_size, pool)


def _count(value, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"expected an integer of at least {least}, got {value!r}")
    return value
