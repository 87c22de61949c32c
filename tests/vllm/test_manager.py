"""vLLM's KV cache manager with streaming heads, without a model: block tables lead to all that a query may see."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from kvsurgery.vllm.budgeted_spec import (
    BudgetedManager,
    BudgetedNewestManager,
    BudgetedNewestSpec,
    BudgetedSpec,
    PromptsManager,
    PromptsSpec,
    PromptsWindowSpec,
    WholePromptManager,
)
from kvsurgery.vllm.manager import SinkWindowManager
from kvsurgery.vllm.spec import ChunkSpec, CodesSpec, SinkWindowSpec

LIMIT = 96  # tokens of a request
DRAFTS = 5  # most tokens of a step that may be rejected
SEEDS = int(os.environ.get("LOAD_SEEDS", "240"))  # of random traffic, a multiple of 60
init_none_hash(sha256)


def common(block_size: int) -> dict[str, Any]:
    """What all caches have."""
    return {"block_size": block_size, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}


@dataclass
class Full:
    """A cache group, and the tokens whose slots a kernel reads in it; all of them here."""

    spec: Any

    @property
    def lean(self) -> bool:
        """Whether attention reads new tokens from its inputs, and stores them last."""
        return getattr(self.spec, "lean", False)

    def read(self, query: int, prompt: int) -> Iterable[int]:
        """Tokens that the query at a position reads, after a prompt of so many tokens or within it."""
        return range(query + 1)

    def moved(self, prompt: int) -> Iterable[int]:
        """Places that heads write to when they have selected from a complete prompt; none here."""
        return ()

    def check(self, blocks: list[int], past: int, prompt: int, chunk: int) -> None:
        """Assert that a request with these blocks holds no more than it must, in a step of at most `chunk` tokens."""


class Streaming(Full):
    """Sinks and a window."""

    def read(self, query: int, prompt: int) -> Iterable[int]:
        window = max(query - self.spec.sliding_window + 1, 0)
        return [*range(min(self.spec.sink, window)), *range(window, query + 1)]

    def check(self, blocks: list[int], past: int, prompt: int, chunk: int) -> None:
        assert len({*blocks} - {0}) <= self.spec.max_admission_blocks_per_request(chunk, LIMIT)


class Chunked(Full):
    """Chunks of the model's own."""

    def read(self, query: int, prompt: int) -> Iterable[int]:
        return range(query - query % self.spec.attention_chunk_size, query + 1)


@dataclass
class Codes(Full):
    """Tiles, each in the slot of its last token, of tokens that are neither sinks nor among the newest."""

    sink: int
    residual: int

    def read(self, query: int, prompt: int) -> Iterable[int]:
        return tile_ends(self.spec.block_size, self.sink, query + 1 - self.residual)


@dataclass
class Newest(Streaming):
    """Sinks, and the tokens after the tiles that are read."""

    residual: int

    def window(self, query: int) -> int:
        """The first token that the query at a position reads beside tiles and sinks."""
        tile, sink = self.spec.stride, self.spec.sink
        return sink + len(tile_ends(tile, sink, query + 1 - self.residual)) * tile

    def read(self, query: int, prompt: int) -> Iterable[int]:
        return [*range(min(self.spec.sink, query + 1)), *range(self.window(query), query + 1)]

    def check(self, blocks: list[int], past: int, prompt: int, chunk: int) -> None:
        super().check(blocks, past, prompt, chunk)
        sinks, size = cdiv(self.spec.sink, self.spec.block_size), self.spec.block_size
        assert not any(blocks[sinks : self.window(past) // size]), "a block of tokens that are in tiles was not freed"


@dataclass
class BudgetedCodes(Codes):
    """Tiles that end after the places before what heads keep."""

    def moved(self, prompt: int) -> Iterable[int]:
        return range(max(prompt - self.spec.kept, 0), prompt)

    def read(self, query: int, prompt: int) -> Iterable[int]:
        first = max(prompt - self.spec.kept, 0)
        return [end for end in super().read(query, prompt) if query >= prompt and end >= first]


class Budgeted(Full):
    """The places that a head moves tokens to once the prompt is complete, and later tokens."""

    def moved(self, prompt: int) -> Iterable[int]:
        return range(max(prompt - self.spec.kept, 0), prompt)

    def read(self, query: int, prompt: int) -> Iterable[int]:
        return range(max(prompt - self.spec.kept, 0) if query >= prompt else 0, query + 1)

    def check(self, blocks: list[int], past: int, prompt: int, chunk: int) -> None:
        dropped = max(prompt - self.spec.kept, 0) // self.spec.block_size if past >= prompt else 0
        assert not any(blocks[:dropped]), "a block before what is kept was not freed"


class BudgetedNewest(Budgeted):
    """All tokens until the prompt is complete, then sinks and a window."""

    def moved(self, prompt: int) -> Iterable[int]:
        first = self.first(prompt)
        return [*range(first, min(first + self.spec.sink, prompt)), *super().moved(prompt)]

    def first(self, prompt: int) -> int:
        """The place of the first sink, where a block begins that no other request has."""
        return max(prompt - self.spec.kept, 0) // self.spec.block_size * self.spec.block_size

    def read(self, query: int, prompt: int) -> Iterable[int]:
        if query < prompt:
            return range(query + 1)
        first, window = self.first(prompt), max(query - self.spec.window + 1, prompt - self.spec.kept, 0)
        return [*range(first, min(first + self.spec.sink, window)), *range(window, query + 1)]

    def check(self, blocks: list[int], past: int, prompt: int, chunk: int) -> None:
        if past >= prompt:
            first = self.first(prompt) // self.spec.block_size
            assert not any(blocks[:first]), "a block before the sinks was not freed"
            sinks = first + cdiv(self.spec.sink, self.spec.block_size)
            left = max(past - self.spec.window + 1, 0) // self.spec.block_size
            assert not any(blocks[sinks:left]), "a block between sinks and window was not freed"


def tile_ends(tile: int, sink: int, tokens: int) -> range:
    """Positions of the last tokens of the complete tiles of the first `tokens` tokens."""
    return range(sink + tile - 1, tokens - 1, tile)


def streaming(block_size: int, sink: int, recent: int, drafts: int | None = None) -> Streaming:
    """Streaming heads."""
    spec = SinkWindowSpec(**common(block_size), sliding_window=recent, sink=sink, bin=0, drafts=drafts)
    return Streaming(spec)


def tiled(size: int) -> dict[str, Any]:
    """What caches of tiles have; a tile has `size` tokens here."""
    return {**common(size), "dtype": torch.uint8, "tokens_per_state": size, "state_content_bytes": 64}


def sampling() -> SamplingParams:
    """Parameters as an engine hands them on."""
    parameters = SamplingParams(max_tokens=LIMIT)
    if hasattr(parameters, "update_from_generation_config"):
        parameters.update_from_generation_config({}, eos_token_id=100)
    return parameters


@dataclass(eq=False)
class Scheduled:
    """New tokens of a request in a step, the last of which are drafts that are all rejected; and its blocks."""

    request: Request
    past: int
    new: int
    drafts: list[int]
    tables: list[list[int]]

    @property
    def tokens(self) -> list[int]:
        """The request's tokens, drafts included."""
        return [*self.request.all_token_ids, *self.drafts][: self.past + self.new + len(self.drafts)]


@dataclass
class Traffic:
    """Random requests, some with common prefixes, served by a cache manager; the oracle remembers what each slot holds.

    `held` maps (block, slot) to the group that wrote it last, and to the tokens up to the one it wrote.
    """

    seed: int
    budgets: bool = False  # whether the groups after the first are of budgeted heads
    cached: bool = True  # whether requests may share blocks, unless a group is lean
    drafts: int | None = None  # of lean groups
    draw: random.Random = field(init=False)
    held: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    running: list[Request] = field(default_factory=list)
    tables: dict[str, list[list[int]]] = field(default_factory=dict)  # of requests that have started, in the worker
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        draw = self.draw = random.Random(self.seed)
        hash_size = draw.choice((2, 4))
        sizes = [hash_size * draw.choice((1, 2)) for _ in range(draw.choice((2, 3, 4)))]
        self.groups = self.budgeted(sizes) if self.budgets else self.reusable(sizes)
        self.blocks, self.chunk = draw.choice((40, 80, 200)), draw.choice((5, 16, 64))
        groups = [KVCacheGroupSpec([f"layer{index}"], group.spec) for index, group in enumerate(self.groups)]
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=self.blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=LIMIT,
            max_in_flight_tokens=2 * self.chunk,
            enable_caching=self.cached and self.drafts is None,
            hash_block_size=hash_size,
            scheduler_block_size=max(group.spec.block_size for group in self.groups),
        )
        self.hasher = get_request_block_hasher(hash_size, sha256)
        self.prefixes = [[draw.randrange(5) for _ in range(LIMIT)] for _ in range(3)]

    def reusable(self, sizes: list[int]) -> list[Full]:
        """Groups whose blocks may be shared: full heads or their tiles first, and last the newest tokens of tiles."""
        draw = self.draw
        sink, recent = draw.choice((0, 1, 3, 4, 9)), draw.choice((1, 4, 7, 12))
        chunks = draw.random() < 0.3
        if chunks:  # which vLLM has beside blocks of one size only
            sizes = sizes[:1] * len(sizes)
        groups: list[Full] = [Full(FullAttentionSpec(**common(sizes[0])))]
        for size in sizes[1:]:
            groups.append(streaming(size, sink, recent, self.drafts) if draw.random() < 0.7 else groups[0])
        if chunks:
            groups[-1] = Chunked(ChunkSpec(**common(sizes[0]), attention_chunk_size=4 * sizes[0], bin=0))
        if draw.random() < 0.5:
            residual = draw.choice((0, 3, 8))
            codes = Codes(CodesSpec(**tiled(sizes[0])), sink, residual)
            newest = {"sliding_window": residual + sizes[0], "stride": sizes[0], "sink": sink, "bin": 1}
            newest["drafts"] = self.drafts
            groups = [codes, *groups[1:], Newest(SinkWindowSpec(**common(sizes[-1]), **newest), residual)]
        return groups

    def budgeted(self, sizes: list[int]) -> list[Full]:
        """Groups of budgeted heads after one of full heads."""
        draw = self.draw
        sink, residual = draw.choice((0, 1, 9)), draw.choice((0, 3, 8))
        groups: list[Full] = [Full(PromptsSpec(**common(sizes[0])))]
        if draw.random() < 0.5:
            window = {"sliding_window": residual + sizes[0], "stride": sizes[0], "sink": sink, "bin": 0}
            newest = Newest(PromptsWindowSpec(**common(sizes[-1]), **window), residual)
            groups = [Codes(PromptsSpec(**tiled(sizes[0])), sink, residual), newest]
        for index, size in enumerate(sizes[1:]):
            kept = draw.choice((1, 5, 20))
            if draw.random() < 0.5:
                groups.append(Budgeted(BudgetedSpec(**common(size), kept=kept, bin=index)))
            else:
                common_parts = {"kept": max(kept, sink), "bin": index}
                tokens = BudgetedNewestSpec(**common(size), sink=sink, window=residual + size, **common_parts)
                groups.append(BudgetedCodes(BudgetedSpec(**tiled(size), **common_parts), sink, residual))
                groups.append(BudgetedNewest(tokens))
        return groups

    def run(self, steps: int) -> Counter[str]:
        """Serve for some steps, end all requests, and check that no block is lost."""
        for _ in range(steps):
            if len(self.running) < 4 and self.draw.random() < 0.4:
                self.arrive()
            if self.running:
                self.step()
        for request in self.running:
            self.manager.free(request)
        assert self.manager.block_pool.get_num_free_blocks() == self.blocks - 1  # one is the null block
        return self.counts

    def arrive(self) -> None:
        length = self.draw.randrange(1, LIMIT - 8)
        texts = [*self.prefixes, *([*request.all_token_ids] for request in self.running)]
        shared = self.draw.choice(texts)[: self.draw.randrange(length + 1)]
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

    def step(self) -> None:
        """Compute some tokens of some requests."""
        scheduled: list[Scheduled] = []
        for request in self.draw.sample(self.running, self.draw.randrange(1, len(self.running) + 1)):
            if request in self.running and (found := self.schedule(request, [each.request for each in scheduled])):
                scheduled.append(found)
        self.check(scheduled)

    def schedule(self, request: Request, others: list[Request]) -> Scheduled | None:
        """Find blocks for some tokens of a request, a first or another time, or preempt or end it.

        If there are none, end a request that is not among the `others` of the step.
        """
        first = request.request_id not in self.tables
        anew = first or self.draw.random() < 0.1  # the worker gets the whole table, as where a prompt grows
        if not first and self.draw.random() < 0.08:
            self.manager.free(request)
            request.num_computed_tokens = request.num_in_flight_tokens = 0
            del self.tables[request.request_id]
            self.counts["preemptions"] += 1
            return None
        cached, hits = None, 0
        if first:
            cached, hits, *_ = self.manager.get_computed_blocks(request)
        past = request.num_computed_tokens + hits
        new = min(self.draw.randrange(1, self.chunk + 1), request.num_tokens - past)
        drafts = 0
        if new <= 0:
            request.append_output_token_ids(self.draw.randrange(5))
            new = 1
        if past + new == request.num_tokens and not self.budgets:  # which vLLM may let follow
            drafts = min(self.draw.choice((0, 0, 1, DRAFTS)), self.chunk - new)
        if past + new + drafts >= LIMIT:
            self.end(request)
            return None
        known = {"num_new_computed_tokens": hits, "new_computed_blocks": cached}
        blocks = self.manager.allocate_slots(request, new + drafts, **known)
        if blocks is None:
            self.counts["refusals"] += 1
            if (victim := self.draw.choice(self.running)).request_id in self.tables and victim not in others:
                self.end(victim)
            return None
        self.counts["hits"] += hits
        self.counts["steps"] += 1
        owned = [[*table] for table in self.manager.get_block_ids(request.request_id)]
        if anew:
            self.tables[request.request_id] = [[*table] for table in owned]
        else:
            for table, further in zip(self.tables[request.request_id], blocks.get_block_ids(), strict=True):
                table.extend(further)
        tables = []
        for group, table, in_worker in zip(self.groups, owned, self.tables[request.request_id], strict=True):
            group.check(table, past - request.num_in_flight_tokens, request.num_prompt_tokens, 2 * self.chunk)
            tables.append([*in_worker] if group.lean else table)  # a step may read what the manager has given on
        request.num_computed_tokens = past + new
        # the next step may be scheduled while this one is computed
        request.num_in_flight_tokens = 0 if drafts else self.draw.choice((0, new))
        return Scheduled(request, past, new, [self.draw.randrange(5) for _ in range(drafts)], tables)

    def end(self, request: Request) -> None:
        self.manager.free(request)
        self.running.remove(request)
        self.tables.pop(request.request_id, None)

    def check(self, scheduled: list[Scheduled]) -> None:
        """Write the new tokens of a step, and look up all that they see.

        Layers of different groups take turns. So what a lean group reads, before it writes, must outlast what the other
        groups write. Budgeted heads select after all tokens of a prompt have seen it.
        """
        hashes = [self.contents(each) for each in scheduled]
        written: list[dict[tuple[int, int], tuple[int, int]]] = [{} for _ in self.groups]
        for each, known in zip(scheduled, hashes, strict=True):
            for index, (group, table) in enumerate(zip(self.groups, each.tables, strict=True)):
                size = group.spec.block_size
                for place in range(each.past, len(known)):
                    block = table[place // size]
                    assert block or group.lean, "a new token has no block"
                    if block:
                        written[index][block, place % size] = index, known[place]
        pairs = [*zip(scheduled, hashes, strict=True)]
        for index, group in enumerate(self.groups):
            if group.lean:
                foreign = set().union(*written[:index], *written[index + 1 :])
                for each, known in pairs:
                    self.look_up(index, each, known, range(each.past, len(known)), range(each.past), foreign)
        for tokens in written:
            self.held.update(tokens)
        if self.budgets:
            for each, known in pairs:
                prompt = each.request.num_prompt_tokens
                if each.past < prompt <= len(known):
                    for index in range(len(self.groups)):
                        self.look_up(index, each, known, range(each.past, prompt), range(prompt))
                        self.select(index, each, known)
        for each, known in pairs:
            selected = self.budgets and each.past < each.request.num_prompt_tokens <= len(known)
            first = each.request.num_prompt_tokens if selected else each.past
            for index, group in enumerate(self.groups):
                if not group.lean:
                    self.look_up(index, each, known, range(first, len(known)), range(len(known)))
        self.check_owners()

    def contents(self, each: Scheduled) -> list[int]:
        """What keys and values of each token depend on: the tokens up to it, and after a prompt what heads dropped."""
        prompt = each.request.num_prompt_tokens if self.budgets else len(each.tokens)
        return [
            hash((*each.tokens[: place + 1], "after", prompt) if place >= prompt else (*each.tokens[: place + 1],))
            for place in range(len(each.tokens))
        ]

    def select(self, index: int, each: Scheduled, known: list[int]) -> None:
        """Write where heads of a group move what they have selected, which other requests must not read."""
        group, table, prompt = self.groups[index], each.tables[index], each.request.num_prompt_tokens
        size, blocks = group.spec.block_size, self.manager.block_pool.blocks
        for place in group.moved(prompt):
            block = table[place // size]
            assert block, "a place that heads write to has no block"
            assert blocks[block].ref_cnt == 1, "heads write to a block of several requests"
            assert blocks[block].block_hash is None, "heads write to a block that a later request may find"
            self.held[block, place % size] = index, hash((known[prompt - 1], place))

    def look_up(
        self,
        index: int,
        each: Scheduled,
        known: list[int],
        queries: range,
        stored: range,
        foreign: Collection[tuple[int, int]] = (),
    ) -> None:
        """Assert that a group holds what new tokens of a request see among positions that are `stored`."""
        group, table, prompt = self.groups[index], each.tables[index], each.request.num_prompt_tokens
        size, moved = group.spec.block_size, {*group.moved(prompt)}
        for query in queries:
            for key in group.read(query, prompt):
                if key in stored:
                    place = table[key // size], key % size
                    wanted = hash((known[prompt - 1], key)) if query >= prompt and key in moved else known[key]
                    assert table[key // size], f"token {query} sees token {key}, whose block was freed"
                    assert place not in foreign, "another group gets the block too early"
                    assert self.held.get(place) == (index, wanted), f"the block of token {key} has other tokens"

    def check_owners(self) -> None:
        """Every block has as many owners as the pool counts, and those without one are free."""
        owners = Counter(
            block
            for request in self.running
            for table in self.manager.get_block_ids(request.request_id)
            for block in {*table} - {0}
        )
        pool = self.manager.block_pool
        assert all(pool.blocks[block].ref_cnt == count for block, count in owners.items())
        assert pool.get_num_free_blocks() == self.blocks - 1 - len(owners)


def serve(seeds: range, **options: Any) -> Counter[str]:
    """Counts over the traffic of some seeds."""
    return sum((Traffic(seed, **options).run(40) for seed in seeds), Counter())


@pytest.mark.parametrize("first", range(0, SEEDS, 60))
def test_every_visible_key_is_where_the_block_table_says(first: int) -> None:
    counts = serve(range(first, first + 60))
    assert counts["steps"] > 3_000
    assert min(counts["preemptions"], counts["refusals"], counts["hits"]) > 50


@pytest.mark.parametrize("first", range(0, SEEDS, 60))
def test_lean_groups_hold_what_later_steps_see_however_long_the_chunks(first: int) -> None:
    counts = serve(range(first, first + 60), drafts=DRAFTS)
    assert counts["steps"] > 3_000
    assert min(counts["preemptions"], counts["refusals"]) > 50


def test_the_oracle_misses_rejected_drafts() -> None:
    with pytest.raises(AssertionError, match=r"whose block was freed|has other tokens"):
        serve(range(60), drafts=0)


def test_the_oracle_misses_blocks_that_another_group_gets_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(manager: SinkWindowManager, request_id: str, num_tokens: int, *args: Any) -> list[Any]:
        manager.remove_skipped_blocks(request_id, num_tokens - DRAFTS)
        return earlier(manager, request_id, num_tokens, *args)

    earlier = SinkWindowManager.allocate_new_blocks
    monkeypatch.setattr(SinkWindowManager, "allocate_new_blocks", allocate)
    with pytest.raises(AssertionError):
        serve(range(60), drafts=DRAFTS)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("first", range(0, SEEDS, 60))
def test_budgeted_heads_find_what_they_keep_and_hold_no_more(first: int, cached: bool) -> None:
    counts = serve(range(first, first + 60), budgets=True, cached=cached)
    assert counts["steps"] > 3_000
    assert min(counts["preemptions"], counts["refusals"]) > 50
    assert (counts["hits"] > 50) == cached


def _all_tokens(manager: Any, request: Request) -> int:
    """Blocks of generated tokens are shared too."""
    return request.num_tokens


def _to_the_end(cls: Any, *args: Any, kv_cache_spec: Any, **options: Any) -> Any:
    """Blocks are found that heads would write to."""
    return FOUND(cls, *args, kv_cache_spec=replace(kv_cache_spec, kept=0), **options)


FOUND = WholePromptManager.find_longest_cache_hit.__func__
SHARING: dict[str, tuple[type, str, Any]] = {
    "generated tokens": (PromptsManager, "shared_tokens", _all_tokens),
    "what heads write to": (WholePromptManager, "shared_tokens", PromptsManager.shared_tokens),
    "blocks of a longer prompt": (WholePromptManager, "find_longest_cache_hit", classmethod(_to_the_end)),
    "after a preemption": (WholePromptManager, "pop_blocks_for_free", FullAttentionManager.pop_blocks_for_free),
}


@pytest.mark.parametrize("kind", SHARING)
def test_the_oracle_misses_no_limit_of_what_budgeted_heads_share(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*SHARING[kind])
    with pytest.raises(AssertionError, match=r"has other tokens|heads write to a block|was not freed"):
        serve(range(SEEDS), budgets=True)


@pytest.mark.parametrize("manager", [BudgetedManager, BudgetedNewestManager])
def test_the_oracle_misses_blocks_of_budgeted_heads(manager: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(manager, "remove_skipped_blocks")
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


@pytest.mark.parametrize("drafts", [None, 0])
def test_blocks_between_sinks_and_window_are_freed(drafts: int | None) -> None:
    manager = KVCacheManager(
        KVCacheConfig(100, [], [KVCacheGroupSpec(["streaming"], streaming(4, sink=6, recent=5, drafts=drafts).spec)]),
        max_model_len=LIMIT,
        max_in_flight_tokens=64,
        enable_caching=False,
        hash_block_size=4,
        scheduler_block_size=4,
    )

    def held() -> list[int]:
        (table,) = manager.get_block_ids("r")
        return [index for index, block in enumerate(table) if block]

    request = Request("r", [1] * 40, sampling(), None)
    manager.allocate_slots(request, 40)
    assert held() == ([0, 1, 9] if drafts == 0 else [*range(10)])
    request.num_computed_tokens = 40
    request.append_output_token_ids(1)
    manager.allocate_slots(request, 1)
    # tokens 0 to 5 are sinks, and token 40 sees 36 to 40
    assert held() == [0, 1, 9, 10]
