"""Ways to answer a question about a text that is longer than what a model may look at, all in the same few lines.

A method reads a text and returns a `Reading`. Asked a question, that returns a `Session`, and the tokens that it has
yet to see. Methods that choose tokens of the prompt go on with the model's own cache; recurrent ones with what their
layers keep from chunk to chunk. All run the same emitted model and its attention. `Reform` holds everybody's settings:

- whoever answers from a cache, or from chosen tokens, has `recompute_budget` of them;
- recurrent methods read `chunk` tokens at once. What follows a chunk sees what is kept of it; the answer is all kept;
- `keep` first and last tokens always stay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from kvsurgery.templates.kv_cache import KVSurgeryCache
from kvsurgery.templates.kv_encode import ChunkEncoder, Encoder, EncodingLayer, best_places
from kvsurgery.templates.kv_gather import gather, similarity
from kvsurgery.templates.kv_layout import KVLayout
from kvsurgery.templates.kv_received import attention_received
from kvsurgery.templates.kv_reform import Reform
from kvsurgery.templates.kv_softmax import Scoring, Span

EVERYTHING = 2**62  # tokens


class Session(Protocol):
    """An answer being generated."""

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        """The most likely token [1, 1] after these [1, tokens], which follow what was read."""


class Reading(Protocol):
    """A text that has been read."""

    def ask(self, question: torch.Tensor) -> tuple[Session, torch.Tensor]:
        """Let a question [1, tokens] follow the text; returns the session and what to give it first.

        Only one question can be asked, as what was kept of the text may go: ask further ones of a `duplicate`.
        """


class Method(Protocol):
    """A way to read long texts."""

    @property
    def name(self) -> str: ...

    def read(self, model: PreTrainedModel, text: torch.Tensor, new: int) -> Reading:
        """Read a text [1, tokens], before a question and so many new tokens, together no more than `new`."""


Read = TypeVar("Read")


def duplicate(reading: Read, model: PreTrainedModel) -> Read:
    """A copy of what reads or was read, which goes on by itself with the same model."""
    return copy.deepcopy(reading, {id(module): module for module in model.modules()})


class Plain:
    """The model with its own cache."""

    def __init__(self, model: PreTrainedModel, capacity: int):
        self.model, self.cache = model, KVSurgeryCache(model.config, capacity)

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, past_key_values=self.cache, logits_to_keep=1).logits.argmax(-1)

    def ask(self, question: torch.Tensor) -> tuple[Session, torch.Tensor]:
        return self, question


@dataclass(frozen=True)
class Full:
    """All of the prompt."""

    name: str = "full attention"

    def read(self, model: PreTrainedModel, text: torch.Tensor, new: int) -> Reading:
        reading = Plain(model, text.shape[1] + new)
        reading.next(text)
        return reading


@dataclass(frozen=True)
class Choosing:
    """A text of which each question gets tokens of its own, places [kept] of the whole prompt [1, tokens]."""

    model: PreTrainedModel
    text: torch.Tensor
    new: int
    choose: Callable[[torch.Tensor, int], torch.Tensor]  # by the prompt, and where its question begins

    def ask(self, question: torch.Tensor) -> tuple[Session, torch.Tensor]:
        prompt = torch.cat([self.text, question], 1)
        places = self.choose(prompt, self.text.shape[1])
        return Plain(self.model, len(places) + self.new), prompt[:, places]


@dataclass(frozen=True)
class Truncation:
    """The first few tokens of the prompt and its last ones."""

    settings: Reform
    name: str = "truncation"

    def read(self, model: PreTrainedModel, text: torch.Tensor, new: int) -> Reading:
        return Choosing(model, text, new, self.choose)

    def choose(self, prompt: torch.Tensor, question: int) -> torch.Tensor:
        keep, budget = self.settings.keep, self.settings.recompute_budget
        places = torch.arange(prompt.shape[1], device=prompt.device)
        return torch.cat([places[:keep], places[keep:][keep - budget :]])


def part_scores(prompt: list[int], question: int, part: int) -> torch.Tensor:
    """How well each whole part of a prompt before its question matches the question, float32 [parts] (BM25, Robertson
    et al. 1994); a word is a token.

    Args:
        question: where it begins.
        part: tokens of a part.
    """
    import bm25s  # nothing else needs it

    words = list(map(str, prompt))
    retriever = bm25s.BM25()
    retriever.index([words[start : start + part] for start in range(0, len(words), part)], show_progress=False)
    return torch.from_numpy(retriever.get_scores(words[question:]))[: question // part]


@dataclass(frozen=True)
class BM25:
    """The parts of the prompt that a retriever finds by the question's words, and its end.

    A part has 128 tokens; as many parts as fit beside the first and last tokens.
    """

    settings: Reform
    part: int = 128
    name: str = "BM25 retrieval"

    def read(self, model: PreTrainedModel, text: torch.Tensor, new: int) -> Reading:
        return Choosing(model, text, new, self.choose)

    def choose(self, prompt: torch.Tensor, question: int) -> torch.Tensor:
        keep, length = self.settings.keep, prompt.shape[1]
        budget = min(self.settings.recompute_budget, length)
        scores = part_scores(prompt[0].tolist(), question, self.part)
        is_chosen = torch.zeros(length, dtype=torch.bool)
        is_chosen[:keep] = is_chosen[length - keep :] = True
        for index in scores.topk(min((budget - 2 * keep) // self.part, len(scores))).indices.tolist():
            is_chosen[index * self.part :][: self.part] = True
        unchosen = (~is_chosen).nonzero()[:, 0]
        is_chosen[unchosen[len(unchosen) - (budget - int(is_chosen.sum())) :]] = True  # the end takes what is left
        return is_chosen.nonzero()[:, 0].to(prompt.device)


@dataclass(frozen=True)
class Embedded:
    """A text whose tokens have embeddings, those of its last and unfinished chunk aside."""

    model: PreTrainedModel
    encoder: Encoder
    text: torch.Tensor
    new: int
    embeddings: torch.Tensor  # [tokens of whole chunks, heads * head_dim]

    def ask(self, question: torch.Tensor) -> tuple[Session, torch.Tensor]:
        prompt, start = torch.cat([self.text, question], 1), self.text.shape[1]
        last_embeddings = self.encoder.read(input_ids=prompt[:, len(self.embeddings) :])
        embeddings = torch.cat([self.embeddings, last_embeddings])
        scores = similarity(embeddings, embeddings[start:].to(question.device))
        places = gather(scores, start, self.encoder.reform)
        return Plain(self.model, len(places) + self.new), prompt[:, places]


@dataclass(frozen=True)
class Gathered:
    """REFORM (Song et al. 2025), as `generate` of a converted checkpoint does it."""

    settings: Reform
    name: str = "REFORM"

    def read(self, model: PreTrainedModel, text: torch.Tensor, new: int) -> Reading:
        encoder = Encoder(model.model, KVLayout.from_config(model.config), self.settings)
        whole_length = text.shape[1] // self.settings.chunk * self.settings.chunk
        return Embedded(model, encoder, text, new, encoder.read(input_ids=text[:, :whole_length]))


class Reader(ChunkEncoder):
    """Reads with all layers, and answers from what they keep."""

    def __init__(self, model: PreTrainedModel, settings: Reform, capacity: int):
        super().__init__(model.model, KVLayout.from_config(model.config), settings)
        self.head, self.budget, self.capacity = model.lm_head, settings.recompute_budget, capacity
        self.rest, self.question = torch.empty(1, 0, dtype=torch.long, device=model.device), 0

    def ask(self, question: torch.Tensor) -> tuple[Session, torch.Tensor]:
        self.question = question.shape[1]
        return self, torch.cat([self.rest, question], 1)

    def forward(self, tokens: torch.Tensor, budget: int = EVERYTHING) -> torch.Tensor:
        """Hidden states [1, tokens, hidden]; then this many tokens are kept."""
        self.reform = replace(self.reform, encode_budget=budget)
        return self.read_chunk(input_ids=tokens).last_hidden_state

    def compress(self, tokens: torch.Tensor) -> torch.Tensor:
        """The same of a part of the prompt, of which the budget is kept."""
        return self.forward(tokens, self.budget)

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.forward(tokens) if tokens.shape[1] == 1 else self.compress(tokens)
        return self.head(hidden[:, -1:]).argmax(-1)


@dataclass(frozen=True)
class Recurrent:
    """StreamingLLM (Xiao et al. 2023), H2O (Zhang et al. 2023) and TOVA (Oren et al. 2024), by `settings.compressor`.

    H2O's scores are those of the last `window` queries of a chunk, as when REFORM reads.
    """

    settings: Reform
    name: str
    reader: Callable[[PreTrainedModel, Reform, int], Reader] = Reader

    def read(self, model: PreTrainedModel, text: torch.Tensor, new: int) -> Reading:
        reader = self.reader(model, self.settings, text.shape[1] + new)
        for part in text.split(self.settings.chunk, 1):
            if part.shape[1] == self.settings.chunk:
                reader.compress(part)
            else:
                reader.rest = part
        return reader


class DistillingLayer(EncodingLayer):
    """A layer that keeps what surprised the model, and what a catalyst prompt attends to."""

    encoder: InfiniPot

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        super().lazy_initialization(key_states, value_states)
        self.novelty = key_states.new_zeros(key_states.shape[1], 0)  # [kv_heads, kept]

    def choose(self, query: torch.Tensor, keys: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        reform = self.encoder.reform
        novelty = torch.cat([self.novelty, self.encoder.surprise.expand(keys.shape[1], -1)], 1)
        received = attention_received(query, keys, keys.new_zeros(1, 1, 1), scoring)[0]
        received = received[:, : novelty.shape[1]].clone()  # the catalyst itself goes
        received.scatter_(1, novelty.topk(reform.encode_budget // 2, -1).indices, float("inf"))
        chosen_places = best_places(received, reform.encode_budget, reform.keep)
        self.novelty = novelty.gather(1, chosen_places)
        return chosen_places


class InfiniPot(Reader):
    """After every chunk a catalyst prompt asks what may be needed (Kim et al. 2024); here the words that questions open
    with. Half of the budget goes to tokens by their negative log-likelihood, the rest by the catalyst's attention."""

    layer = DistillingLayer

    def __init__(self, model: PreTrainedModel, settings: Reform, capacity: int, catalyst: Sequence[int]):
        super().__init__(model, settings, capacity)
        self.catalyst = torch.tensor([catalyst], device=model.device)
        # of what no layer has chosen from, and of the next token
        self.surprise, self.expected = torch.zeros(0, device=model.device), None

    def compress(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.forward(tokens)
        logits = self.head(hidden)
        previous_logits = logits[:, :1] if self.expected is None else self.expected
        loss = F.cross_entropy(torch.cat([previous_logits, logits[:, :-1]], 1)[0], tokens[0], reduction="none")
        self.surprise, self.expected = torch.cat([self.surprise, loss]), logits[:, -1:]
        if self.past > self.budget:
            self.forward(self.catalyst, self.budget)
            self.surprise = self.surprise[:0]
        return hidden


class BlockLayer(EncodingLayer):
    """A layer that keeps all states, and lets a chunk see the first, the latest and a few blocks of them.

    A block is known by the keys of its tokens that the queries after them, in their chunk, ask for most.
    """

    encoder: InfLLM

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        shape = (*key_states.shape[:2], self.encoder.capacity, key_states.shape[3])
        self.keys, self.values = key_states.new_empty(shape), key_states.new_empty(shape)
        self.asked = key_states.new_empty(shape[2])  # by later queries
        self.leading = key_states.new_empty(shape[1], 0, shape[3])  # [kv_heads, blocks, head_dim], sums of keys
        self.is_initialized = True

    def attend(self, query, keys, values, path, scoring) -> torch.Tensor:
        assert self.keys is not None  # as `update` was called
        assert self.values is not None
        past, tokens, seen = self.encoder.past, query.shape[2], self.encoder.seen
        rotation = self.encoder.rotation.at(past, tokens)
        stop = seen + tokens
        plain_keys = rotation.turn_back(keys)
        # [1, kv_heads, tokens, head_dim]
        plain_query = rotation.turn_back(query).unflatten(1, (keys.shape[1], -1)).mean(2)
        self.keys[:, :, seen:stop], self.values[:, :, seen:stop] = plain_keys, values
        following = plain_query.flip(2).cumsum(2).flip(2) - plain_query
        later_queries = torch.arange(tokens, 0, -1, device=query.device)
        self.asked[seen:stop] = (following * plain_keys).sum((0, 1, 3)) / later_queries
        places = self.places(plain_query.mean(2)[0], self.keys)
        past_keys = self.encoder.rotation.at(0, past).turn(self.keys[:, :, places])
        past_values = self.values[:, :, places]
        span = Span(past_keys.shape[2])
        return path.attend(query, torch.cat([past_keys, keys], 2), torch.cat([past_values, values], 2), span, scoring)

    def places(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Earlier tokens that are seen, by what a chunk asks on average [kv_heads, head_dim], and by all keys."""
        encoder, keep = self.encoder, self.encoder.reform.keep
        size, blocks = encoder.size, encoder.blocks
        for block in range(self.leading.shape[1], blocks):
            start = keep + block * size
            leader_places = start + self.asked[start : start + size].topk(encoder.leaders).indices
            self.leading = torch.cat([self.leading, keys[0, :, leader_places].sum(1, keepdim=True)], 1)
        is_chosen = torch.zeros(encoder.seen, dtype=torch.bool, device=keys.device)
        is_chosen[:keep] = is_chosen[keep + blocks * size :] = True
        score = (self.leading * query[:, None]).sum((0, 2))
        for block in score.topk(min(blocks, encoder.chosen)).indices.tolist():
            is_chosen[keep + block * size :][:size] = True
        return is_chosen.nonzero()[:, 0]


class InfLLM(Reader):
    """Retrieves blocks of a full cache for every chunk (Xiao et al. 2024), but with contiguous positions.

    First tokens, chosen blocks and the latest tokens take the budget together; the question is a chunk of its own.
    """

    layer = BlockLayer
    size, leaders, latest = 32, 4, 48  # tokens of a block, those it is known by, and the least of the latest

    def __init__(self, model: PreTrainedModel, settings: Reform, capacity: int):
        super().__init__(model, settings, capacity)
        self.seen = 0
        self.chosen = (self.budget - settings.keep - self.latest - self.size + 1) // self.size

    def forward(self, tokens: torch.Tensor, budget: int = EVERYTHING) -> torch.Tensor:
        self.blocks = max(self.seen - self.reform.keep - self.latest, 0) // self.size
        self.past = self.seen - max(self.blocks - self.chosen, 0) * self.size
        hidden = super().forward(tokens)
        self.seen += tokens.shape[1]
        return hidden

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.shape[1] > self.question:
            self.forward(tokens[:, : -self.question])
        return super().next(tokens[:, -self.question :])
