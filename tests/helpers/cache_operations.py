"""`CacheOperations`: what machines that drive a cache share, and the pair of models that they compare."""

import copy
import pickle
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvsurgery.templates.kv_cache import KVSurgeryCache
from tests.helpers.emitted import CLASSES
from tests.helpers.families import stock


def stock_and_emitted(family: str, window: int, **section: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A stock model of two layers, and the same weights under the emitted code; `window` is Gemma 2's own."""
    changes = {"sliding_window": window, "attn_logit_softcapping": 4.0} if family == "gemma2" else {}
    original = stock(family, num_hidden_layers=2, **changes)
    config = copy.deepcopy(original.config)
    head_dim = original.model.layers[0].self_attn.head_dim
    config.kv_surgery = {"version": 2, "head_dim": head_dim, **section}
    model = CLASSES[family](config).eval()
    model.load_state_dict(original.state_dict())
    return original, model


class CacheOperations(RuleBasedStateMachine):
    """Rows that are reordered, selected and copied. `seen` columns are in the cache; `safe` of them are never taken
    back while recording."""

    cache: KVSurgeryCache
    rows: list[Any]
    seen: int
    safe: int
    recording: bool

    def keep(self, rows: list[int]):
        """Let the references follow the cache, which now has these rows."""
        raise NotImplementedError

    @rule(data=st.data())
    def reorder(self, data):
        rows = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=len(self.rows), max_size=len(self.rows)))
        self.cache.reorder_cache(torch.tensor(rows))
        self.keep(rows)

    @rule(data=st.data())
    def select(self, data):
        rows = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=3))
        self.cache.batch_select_indices(torch.tensor(rows))
        self.keep(rows)

    @rule()
    def record(self):
        self.cache.activate_past_recording()
        self.safe = max(self.safe, self.seen) if self.recording else self.seen
        self.recording = True

    @rule(pickled=st.booleans())
    def copy(self, pickled):
        copied = pickle.loads(pickle.dumps(self.cache)) if pickled else copy.deepcopy(self.cache)
        self.cache.reset()
        self.cache = copied
