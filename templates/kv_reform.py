"""How a checkpoint reads prompts beyond its context: compress, gather, recompute (REFORM, Song et al. 2025).

The prompt goes through the lower layers chunk by chunk, beside a compressed cache. A few heads' states, an embedding of
every token, say which tokens the question needs; those alone go through the whole model. Nothing here needs torch.
"""

from dataclasses import dataclass, replace
from typing import Any

from .kv_layout import setting, text_config

COMPRESSORS = ("h2o", "tova", "streaming")


@dataclass(frozen=True)
class Reform:
    """REFORM's settings, the section `kv_surgery.reform` of config.json; numbers are tokens.

    Attributes:
        heads: (layer, state, head) of each embedding head: states before RoPE, after norm and bias. Of q query heads
            are counted, of k and v KV heads, in this checkpoint's order.
        chunk: of the prompt, that is read at once.
        encode_budget: what a KV head keeps from chunk to chunk.
        compressor: what it keeps: `h2o`, what the last `window` queries of the chunk attend to most, by KV head, mean
            over its query heads; `tova`, what the last query attends to most, mean over all heads of the layer;
            `streaming`, the first `keep` and the latest.
        window: last queries of a chunk, which choose.
        keep: first and last tokens that are always kept, of the cache and of the prompt.
        pool: neighbors over which a token's similarity to the question is max-pooled.
        recompute_budget: tokens that go through the whole model, those always kept and the question included.
        query_marker: token ids that open a user's turn; the question is what follows the last one, if that is short.
        query_length: length of the question where it is not.
    """

    heads: tuple[tuple[int, str, int], ...]
    chunk: int = 32768
    encode_budget: int = 32768
    compressor: str = "h2o"
    window: int = 128
    keep: int = 256
    pool: int = 129
    recompute_budget: int = 16384
    query_marker: tuple[int, ...] = ()
    query_length: int = 64

    @classmethod
    def from_config(cls, config: Any) -> "Reform | None":
        """Read and check the section of a config, a transformers config or the dict of a config.json, if there is one.

        Raises:
            ValueError: it is malformed, or contradicts the rest of the config.
        """
        section = (setting(config, "kv_surgery") or {}).get("reform")
        if section is None:
            return None
        try:
            heads = tuple((layer, state, head) for layer, state, head in section["heads"])
            parsed: dict[str, Any] = {"heads": heads, "query_marker": tuple(section.get("query_marker", ()))}
            reform = cls(**{**section, **parsed})
            size_names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
            reform.check(*(setting(text_config(config), name) for name in size_names))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"kv_surgery.reform of config.json is malformed: {error}") from error
        return reform

    def check(self, layers: int, query_heads: int, kv_heads: int | None) -> None:
        """Raise ValueError, in words, for settings that contradict each other or heads that such a model has not."""
        for name in ("chunk", "encode_budget", "window", "keep", "pool", "recompute_budget", "query_length"):
            value = getattr(self, name)
            if type(value) is not int or value < (0 if name == "keep" else 1):
                raise ValueError(f"{name} is a number of tokens, got {value!r}")
        if self.pool % 2 == 0:
            raise ValueError(f"pool is an odd number of tokens, got {self.pool}")
        if self.compressor not in COMPRESSORS:
            raise ValueError(f"compressor is one of {', '.join(COMPRESSORS)}, got {self.compressor!r}")
        if not self.heads:
            raise ValueError("no embedding heads")
        counts = {"q": query_heads, "k": kv_heads or query_heads, "v": kv_heads or query_heads}
        for layer, state, head in self.heads:
            valid = type(layer) is int and type(head) is int and state in counts
            if not valid or not (0 <= layer < layers and 0 <= head < counts[state]):
                raise ValueError(f"the model has no {state}-head {head} in layer {layer}")
        for name in ("encode_budget", "recompute_budget"):
            if getattr(self, name) < 2 * self.keep:
                raise ValueError(
                    f"{name} {getattr(self, name)} is less than the first and last {self.keep} tokens: they always stay"
                )
        if any(type(token) is not int or token < 0 for token in self.query_marker):
            raise ValueError(f"query_marker is a list of token ids, got {list(self.query_marker)}")

    def with_budget(self, recompute_budget: int | None) -> "Reform":
        """Settings with another recompute budget, if one is given.

        Raises:
            ValueError: it is no number, or less than the first and last tokens that are always kept.
        """
        if recompute_budget is None:
            return self
        if type(recompute_budget) is not int or recompute_budget < max(2 * self.keep, 1):
            raise ValueError(
                f"recompute_budget is {recompute_budget!r}; it holds the first and last {self.keep} tokens and more"
            )
        return replace(self, recompute_budget=recompute_budget)

    @property
    def exit_layer(self) -> int:
        """The highest layer that is looked at; those above it do not run while the prompt is read."""
        return max(layer for layer, _, _ in self.heads)
