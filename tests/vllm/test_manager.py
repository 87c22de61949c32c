"""vLLM's KV cache manager with streaming heads, without a model: block tables lead to all that a query may see."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from kvsurgery.vllm.budgeted_spec import BudgetedManager, BudgetedSpec
from kvsurgery.vllm.manager import SinkWindowManager
from kvsurgery.vllm.spec import SinkWindowSpec

LIMIT = 96  # tokens of a request
init_none_hash(sha256)


def common(block_size: int) -> dict[str, Any]:
    """What all caches have."""
    return {"block_size": block_size, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}


def spec_of(block_size: int, sink: int | None = None, recent: int = 1) -> Any:
    """The cache of full heads, or of streaming heads with this sink."""
    if sink is None:
        return FullAttentionSpec(**common(block_size))
    return SinkWindowSpec(**common(block_size), sliding_window=recent, sink=sink, bin=0)


def sampling() -> SamplingParams:
    """Parameters as an engine hands them on."""
    parameters = SamplingParams(max_tokens=LIMIT)
    if hasattr(parameters, "update_from_generation_config"):
        parameters.update_from_generation_config({}, eos_token_id=100)
    return parameters


@dataclass
class Traffic:
    """Random requests, some with common prefixes, served by a cache manager; the oracle remembers what each slot holds.

    `held` maps (block, slot) to the group that wrote it last, and to the tokens up to the one it wrote.
    """

    seed: int
    budgets: bool = False  # whether the groups after the first are of budgeted heads
    draw: random.Random = field(init=False)
    held: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    running: list[Request] = field(default_factory=list)
    started: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        draw = self.draw = random.Random(self.seed)
        hash_size = draw.choice((2, 4))
        self.sink, self.recent = draw.choice((0, 1, 3, 4, 9)), draw.choice((1, 4, 7, 12))
        sizes = [hash_size * draw.choice((1, 2)) for _ in range(draw.choice((2, 3, 4)))]
        self.specs = [
            spec_of(size, None if index == 0 or draw.random() < 0.3 else self.sink, self.recent)
            for index, size in enumerate(sizes)
        ]
        if self.budgets:
            self.specs[1:] = [
                BudgetedSpec(**common(size), kept=draw.choice((1, 5, 20)), bin=index)
                for index, size in enumerate(sizes[1:])
            ]
        self.blocks, self.chunk = draw.choice((40, 80, 200)), draw.choice((5, 16, 64))
        groups = [KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(self.specs)]
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=self.blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=LIMIT,
            max_in_flight_tokens=self.chunk,
            enable_caching=not self.budgets,
            hash_block_size=hash_size,
            scheduler_block_size=max(sizes),
        )
        self.hasher = get_request_block_hasher(hash_size, sha256)
        self.prefixes = [[draw.randrange(5) for _ in range(LIMIT)] for _ in range(3)]

    def run(self, steps: int) -> Counter[str]:
        """Serve for some steps, end all requests, and check that no block is lost."""
        for _ in range(steps):
            if len(self.running) < 4 and self.draw.random() < 0.4:
                self.arrive()
            if self.running:
                self.step(self.draw.choice(self.running))
        for request in self.running:
            self.manager.free(request)
        assert self.manager.block_pool.get_num_free_blocks() == self.blocks - 1  # one is the null block
        return self.counts

    def arrive(self) -> None:
        length = self.draw.randrange(1, LIMIT - 8)
        shared = self.draw.choice(self.prefixes)[: self.draw.randrange(length + 1)]
        tokens = shared + [self.draw.randrange(5) for _ in range(length - len(shared))]
        self.counts["requests"] += 1
        request = Request(
            request_id=str(self.counts["requests"]),
            prompt_token_ids=tokens,
            sampling_params=sampling(),
            pooling_params=None,
            mm_features=None,
            block_hasher=self.hasher,
        )
        self.running.append(request)

    def step(self, request: Request) -> None:
        """Compute some tokens of a request, a first or another time, or preempt or end it."""
        first = request.request_id not in self.started
        if not first and self.draw.random() < 0.08:
            self.manager.free(request)
            request.num_computed_tokens = 0
            self.started.remove(request.request_id)
            self.counts["preemptions"] += 1
            return
        cached, hits = None, 0
        if first:
            cached, hits, *_ = self.manager.get_computed_blocks(request)
        past = request.num_computed_tokens + hits
        new = min(self.draw.randrange(1, self.chunk + 1), request.num_tokens - past)
        if new <= 0:
            request.append_output_token_ids(self.draw.randrange(5))
            new = 1
        if past + new >= LIMIT:
            self.end(request)
        elif (
            self.manager.allocate_slots(request, new, num_new_computed_tokens=hits, new_computed_blocks=cached) is None
        ):
            self.counts["refusals"] += 1
            if (victim := self.draw.choice(self.running)).request_id in self.started:
                self.end(victim)
        else:
            self.started.add(request.request_id)
            self.counts["hits"] += hits
            self.counts["steps"] += 1
            self.check(request, past, new)
            request.num_computed_tokens = past + new

    def end(self, request: Request) -> None:
        self.manager.free(request)
        self.running.remove(request)

    def check(self, request: Request, past: int, new: int) -> None:
        """Write the new tokens, and look up all that they see."""
        tokens = [*request.all_token_ids]
        written = [hash(tuple(tokens[: place + 1])) for place in range(past + new)]
        for group, table in enumerate(self.manager.get_block_ids(request.request_id)):
            spec = self.specs[group]
            size = spec.block_size
            for place in range(past, past + new):
                assert table[place // size], "a new token has no block"
                self.held[table[place // size], place % size] = group, written[place]
            streams = isinstance(spec, SinkWindowSpec)
            for query in range(past, past + new):
                # the places that a head moves tokens to, once the prompt is complete
                prompt = request.num_prompt_tokens
                first = max(prompt - spec.kept, 0) if isinstance(spec, BudgetedSpec) and query >= prompt else 0
                for key in range(first, query + 1):
                    if not streams or key < self.sink or query - key < self.recent:
                        block = table[key // size]
                        assert block, f"token {query} sees token {key}, whose block was freed"
                        assert self.held.get((block, key % size)) == (group, written[key])
            if streams:  # what a request holds does not grow with its length
                most = spec.max_admission_blocks_per_request(self.chunk, LIMIT)
                assert sum(map(bool, table)) <= most
            if isinstance(spec, BudgetedSpec) and past >= request.num_prompt_tokens:
                first = max(request.num_prompt_tokens - spec.kept, 0) // size
                assert not any(table[:first]), "a block before what is kept was not freed"


def serve(seeds: range, budgets: bool = False) -> Counter[str]:
    """Counts over the traffic of some seeds."""
    return sum((Traffic(seed, budgets).run(120) for seed in seeds), Counter())


@pytest.mark.parametrize("first", range(0, 240, 60))
def test_every_visible_key_is_where_the_block_table_says(first: int) -> None:
    counts = serve(range(first, first + 60))
    print(dict(counts))
    assert counts["steps"] > 3_000
    assert min(counts["preemptions"], counts["refusals"], counts["hits"]) > 50


def test_budgeted_heads_find_what_they_keep_and_hold_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = serve(range(60), budgets=True)
    assert counts["steps"] > 3_000
    assert min(counts["preemptions"], counts["refusals"]) > 50
    monkeypatch.delattr(BudgetedManager, "remove_skipped_blocks")
    with pytest.raises(AssertionError, match="was not freed"):
        serve(range(60), budgets=True)


@pytest.mark.parametrize(
    "method",
    ["remove_skipped_blocks", "add_local_computed_blocks", "find_longest_cache_hit", "get_num_blocks_to_allocate"],
)
def test_the_oracle_misses_no_method(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(SinkWindowManager, method)
    with pytest.raises((AssertionError, ValueError)):
        serve(range(200))


def test_blocks_between_sinks_and_window_are_freed() -> None:
    manager = KVCacheManager(
        KVCacheConfig(100, [], [KVCacheGroupSpec(["streaming"], spec_of(4, sink=6, recent=5))]),
        max_model_len=LIMIT,
        max_in_flight_tokens=64,
        enable_caching=False,
        hash_block_size=4,
        scheduler_block_size=4,
    )
    request = Request("r", [1] * 40, sampling(), None)
    manager.allocate_slots(request, 40)
    request.num_computed_tokens = 40
    request.append_output_token_ids(1)
    manager.allocate_slots(request, 1)
    (table,) = manager.get_block_ids("r")
    # tokens 0 to 5 are sinks, and token 40 sees 36 to 40
    assert [index for index, block in enumerate(table) if block] == [0, 1, 9, 10]
