"""Ranking of embedding heads: the formulas by hand and by their laws, on random models, and on one that recalls."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvsurgery.checkpoint.family import load_family
from kvsurgery.errors import ProfileError, UnsupportedModel
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.measure.recurrence import RecurrentPass, chunks
from kvsurgery.measure.reform import (
    NEIGHBORS,
    PAPER,
    RankedPrompt,
    embedding_ranking,
    mean_rank,
    neighbor_means,
    normalized_ranks,
    sample_ranks,
    similarity,
)
from kvsurgery.profile.embedding_heads import RANKED_KINDS
from kvsurgery.profile.head_profile import HeadProfile
from tests.helpers.families import stock, tokens
from tests.helpers.measured_models import measured_model, recurrence
from tests.helpers.tiny_recall import FOLDER, ablation, task

SMALL = recurrence(chunk=16, budget=12, keep=2, window=4)
SCORES = hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(2, 30)), elements=st.integers(-3, 3))


def sample(length=50, seed=0):
    """Random tokens: one of its own, the context, three that ask, and two after them."""
    ids = tokens(1, length, seed)[0].numpy()
    gold = (range(9, 12), range(30, 32))
    return RankedPrompt(ids, range(1, length - 5), range(length - 5, length - 2), gold)


def measured(family="llama", **overrides):
    return measured_model(stock(family, **overrides), name="org/random")


class TestSimilarity:
    def test_by_hand(self):
        context = torch.tensor([[[3.0, 4.0], [0.0, -2.0], [5.0, 0.0]]])
        question = torch.tensor([[[2.0, 0.0], [0.0, 10.0]]])
        torch.testing.assert_close(similarity(context, question), torch.tensor([[0.8, 0.0, 1.0]]))

    def test_length_of_a_state_does_not_matter(self):
        context, question = torch.randn(2, 5, 8), torch.randn(2, 3, 8)
        scaled = context * torch.rand(2, 5, 1).add(0.1)
        torch.testing.assert_close(similarity(scaled, 7 * question), similarity(context, question))


class TestNeighborMeans:
    def test_twenty_are_ten_before_and_nine_after(self):
        scores = torch.zeros(1, 60)
        scores[0, 30] = 20
        assert neighbor_means(scores, 20)[0].nonzero().flatten().tolist() == list(range(21, 41))

    @given(SCORES, st.integers(1, 40))
    def test_the_mean_of_those_there(self, scores, neighbors):
        means = neighbor_means(torch.from_numpy(scores), neighbors).numpy()
        for token in range(scores.shape[1]):
            first = token - neighbors // 2
            there = scores[:, max(first, 0) : first + neighbors]
            np.testing.assert_allclose(means[:, token], there.mean(axis=1), atol=1e-6)


class TestRanks:
    def test_by_hand(self):
        scores = torch.tensor([[0.1, 0.9, 0.5, 0.5, -1.0]])
        ranks = normalized_ranks(scores, torch.arange(5))
        # above: 3, 0, 1 and half of the other, the same, 4; of four others
        assert ranks.tolist() == [[3 / 4, 0, 1.5 / 4, 1.5 / 4, 1]]
        assert mean_rank(scores, np.array([1, 3]), neighbors=1).tolist() == [1.5 / 8]

    @given(SCORES, st.data())
    def test_in_the_unit_interval_and_one_half_on_average(self, scores, data):
        gold = data.draw(st.lists(st.integers(0, scores.shape[1] - 1), min_size=1, unique=True))
        ranks = normalized_ranks(torch.from_numpy(scores), torch.tensor(gold))
        assert ((ranks >= 0) & (ranks <= 1)).all()
        everything = mean_rank(torch.from_numpy(scores), np.arange(scores.shape[1]), neighbors=1)
        np.testing.assert_allclose(everything, 0.5)

    @given(SCORES, st.randoms(use_true_random=False))
    def test_order_of_tokens_and_heads_does_not_matter(self, scores, random):
        heads, order = list(range(len(scores))), list(range(scores.shape[1]))
        random.shuffle(heads)
        random.shuffle(order)
        ranks = normalized_ranks(torch.from_numpy(scores), torch.arange(scores.shape[1])).numpy()
        shuffled = normalized_ranks(
            torch.from_numpy(np.ascontiguousarray(scores[heads][:, order])), torch.arange(scores.shape[1])
        )
        np.testing.assert_array_equal(shuffled.numpy(), ranks[heads][:, order])

    @given(st.integers(2, 40), st.data())
    def test_a_perfect_head_has_the_least_and_its_opposite_the_most(self, count, data):
        gold = data.draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True))
        scores = torch.zeros(2, count)
        scores[0, gold], scores[1, gold] = 1, -1
        # the gold tokens are first, in a tie: each has half of the others before it
        least = (len(gold) - 1) / 2 / (count - 1)
        np.testing.assert_allclose(mean_rank(scores, np.array(gold), neighbors=1), [least, 1 - least])


class TestSample:
    def test_overlapping_gold_counts_once(self):
        gold = (range(4, 6), range(5, 7), range(2, 3))
        assert RankedPrompt(np.arange(10), range(1, 8), range(8, 10), gold).gold_places.tolist() == [1, 3, 4, 5]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"gold": ()}, "a sample without gold tokens"),
            ({"gold": (range(3, 3),)}, "a sample without gold tokens"),
            ({"gold": (range(0, 2),)}, r"gold tokens, range\(0, 2\), lie outside the context, range\(1, 8\)"),
            ({"gold": (range(2, 3), range(6, 9))}, r"gold tokens, range\(6, 9\), lie outside"),
            ({"question": range(7, 10)}, "question, .* must follow its context"),
            ({"question": range(8, 8)}, "question, .* must follow its context"),
            ({"question": range(8, 11)}, "is beyond its 10 tokens"),
            ({"context": range(1, 1)}, "question, .* must follow its context"),
        ],
        ids=range(8),
    )
    def test_what_does_not_lie_right(self, change, message):
        good = {"tokens": np.arange(10), "context": range(1, 8), "question": range(8, 10), "gold": (range(2, 4),)}
        with pytest.raises(ProfileError, match=message):
            RankedPrompt(**{**good, **change})


@torch.no_grad()
def by_definition(measured, sample):
    """Ranks of one sample from one plain reading, token by token."""
    seen = []
    reading = RecurrentPass(measured, torch.from_numpy(sample.tokens), recurrence(999, 999, 0, 1))
    reading.read(range(len(sample.tokens)), seen.append)
    ranks = {kind: [] for kind in RANKED_KINDS}
    for states in seen:
        tables = {"q": states.query, "k": states.key, "v": states.value, "hidden": states.hidden}
        rows = {
            kind: [
                [max(torch.cosine_similarity(head[i], head[j], dim=0) for j in sample.question) for i in sample.context]
                for head in table
            ]
            for kind, table in tables.items()
        }
        paid = states.attention(sample.question)
        rows["attention"] = [[head[:, i].max() for i in sample.context] for head in paid]
        for kind, heads in rows.items():
            ranks[kind].append([])
            for scores in np.array(heads, dtype=np.float64):
                means = np.array(
                    [
                        scores[max(0, i - NEIGHBORS // 2) : i - NEIGHBORS // 2 + NEIGHBORS].mean()
                        for i in range(len(scores))
                    ]
                )
                gold = [i - sample.context.start for part in sample.gold for i in part]
                ranks[kind][-1].append(np.mean([(means > means[i] + 1e-12).sum() for i in gold]) / (len(scores) - 1))
    return ranks


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_ranks_of_a_sample_by_definition(family):
    of, asked = measured(family), sample()
    made = sample_ranks(of, asked, PAPER)
    for kind, ranks in by_definition(of, asked).items():
        np.testing.assert_allclose(made[kind], ranks, atol=1e-6, err_msg=kind)


def test_in_chunks_the_question_is_compared_with_all_of_them():
    """Where the cache holds everything, chunks change nothing; the question may begin in any place of a chunk."""
    of, asked = measured("gemma3"), sample()
    whole = sample_ranks(of, asked, PAPER)
    for chunk in (9, 15, 44):
        chunked = sample_ranks(of, asked, recurrence(chunk, 99, 0, 4))
        for kind, ranks in whole.items():
            np.testing.assert_allclose(chunked[kind], ranks, atol=0.05, err_msg=kind)
            assert np.abs(chunked[kind] - ranks).mean() < 1e-3


class TestRanking:
    def test_means_over_samples(self):
        of, asked = measured(), [sample(seed=seed) for seed in range(3)]
        made = embedding_ranking(of, {"multihop": asked[:1], "pattern": asked[1:]}, recurrence=SMALL)
        one, two, three = (sample_ranks(of, each, SMALL) for each in asked)
        for kind in RANKED_KINDS:
            np.testing.assert_allclose(made.ranking.mnr["multihop"][kind], one[kind], rtol=1e-6)
            np.testing.assert_allclose(made.ranking.mnr["pattern"][kind], (two[kind] + three[kind]) / 2, rtol=1e-6)

    def test_what_it_records(self):
        of, asked = measured(), {"pattern": [sample(), sample(60)]}
        steps = []
        made = embedding_ranking(
            of,
            asked,
            recurrence=SMALL,
            data={"text": "random", "seed": 3},
            progress=lambda done, total: steps.append((done, total)),
        )
        assert steps == [(1, 2), (2, 2)]
        assert (made.method, made.scores, made.granularity, made.base_model) == ("reform", None, None, "org/random")
        assert made.embedding_heads == made.ranking.pick()
        assert (
            made.provenance.items()
            >= {
                "text": "random",
                "seed": 3,
                "chunk": 16,
                "budget": 12,
                "neighbors": 20,
                "samples": {"pattern": 2},
                "tokens": [50, 60],
            }.items()
        )

    def test_the_same_again(self, tmp_path):
        one, two = (embedding_ranking(measured(), {"pattern": [sample()]}, recurrence=SMALL) for _ in range(2))
        assert one == two
        one.save(tmp_path / "p.safetensors")
        assert HeadProfile.load(tmp_path / "p.safetensors") == one

    @pytest.mark.parametrize("family", ["qwen2", "phi3", "olmo2"])
    def test_a_converted_checkpoint_gives_the_original_s_heads(self, mixed, family):
        converted = mixed(family)
        asked = {"pattern": [sample(seed=seed) for seed in range(3)], "multihop": [sample(seed=4)]}
        original, other = (
            embedding_ranking(MeasuredModel.load(str(folder)), asked, recurrence=SMALL)
            for folder in (converted.source, converted.folder)
        )
        assert any(layer.order != tuple(sorted(layer.order)) for layer in converted.policy.layers)
        assert other.embedding_heads == original.embedding_heads
        assert (other.base_model, other.model) == (converted.source.name, original.model)
        for name, kinds in original.ranking.mnr.items():
            for kind, ranks in kinds.items():
                np.testing.assert_allclose(other.ranking.mnr[name][kind], ranks, atol=0.03, err_msg=f"{name} {kind}")

    @pytest.mark.parametrize(
        ("samples", "options", "message"),
        [
            ({}, {}, "samples are by task, pattern or multihop; got none"),
            ({"recall": [sample()]}, {}, "samples are by task, pattern or multihop; got recall"),
            ({"pattern": [sample()], "multihop": []}, {}, "there are no multihop samples to rank heads by"),
            (
                {"pattern": [sample(600)]},
                {},
                "600 tokens read in one chunk takes 600 positions, org/random has 512; give a smaller chunk or budget",
            ),
            (
                {"pattern": [sample(600)]},
                {"recurrence": recurrence(100, 412, 9, 9)},
                "read in chunks of 100 beside 412 takes 512 positions, org/random has 511",
            ),
        ],
        ids=["nothing", "unknown task", "no samples", "context", "chunk"],
    )
    def test_bad_input(self, samples, options, message):
        small = {"max_position_embeddings": 511} if "recurrence" in options else {}
        with pytest.raises(ProfileError, match=message):
            embedding_ranking(measured(**small), samples, **options)

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"chunk": 0}, "chunk is a number of tokens, got 0"),
            ({"window": 0}, "window is a number of tokens"),
            ({"keep": -1}, "keep is a number of tokens"),
            ({"encode_budget": 511}, "encode_budget 511 does not hold the first and last 256 tokens"),
        ],
        ids=str,
    )
    def test_bad_sizes(self, sizes, message):
        with pytest.raises(ProfileError, match=message):
            embedding_ranking(measured(), {"pattern": [sample()]}, recurrence=replace(PAPER, **sizes))

    def test_a_family_that_reform_does_not_cover(self):
        refused = measured_model(stock("gpt_oss"), no_reform=load_family("gpt_oss").no_reform)
        with pytest.raises(UnsupportedModel, match="REFORM does not cover gpt-oss: its learned sinks were not tried"):
            embedding_ranking(refused, {"pattern": [sample()]})

    def test_beyond_the_model_s_length_in_chunks(self):
        made = embedding_ranking(measured(), {"pattern": [sample(600)]}, recurrence=recurrence(100, 400, 9, 9))
        assert made.embedding_heads

    def test_states_that_overflow(self):
        of = measured()
        of.model.model.layers[2].self_attn.v_proj.weight.data[5] = float("inf")
        with pytest.raises(ProfileError, match="states of org/random are not finite"):
            embedding_ranking(of, {"pattern": [sample()]})


# the bundled model, on its own task


def recall_samples(seed, count, length):
    """The queries of `task.prompts`: "recall KEY" asks, "remember KEY ... ." is gold."""
    made = []
    for row in task.prompts(seed, count, length).tokens.numpy():
        [fact] = np.flatnonzero((row[:-2] == task.REMEMBER) & (row[1:-1] == row[-1]))
        gold = range(fact, fact + task.FACT)
        made.append(RankedPrompt(row, range(length - 2), range(length - 2, length), (gold,)))
    return made


@pytest.fixture(scope="module")
def recaller():
    return MeasuredModel.load(str(FOLDER / "model"), device="cpu")


@pytest.mark.slow
def test_attention_finds_the_heads_that_ablation_found(recaller):
    """By the attention it pays, the KV heads that recall needs are in the top quarter."""
    dims = recaller.dimensions
    rise = ablation.ablation_scores(recaller.model, [task.answered(task.prompts(3, 4, 512))], sink=4, recent=32)
    mnr = embedding_ranking(recaller, {"pattern": recall_samples(0, 8, 1024)}).ranking.mnr["pattern"]
    by_head = mnr["attention"].reshape(dims.layers, dims.kv_heads, dims.group).min(axis=-1)
    critical = set(np.argsort(-rise, axis=None)[:2])
    assert rise.flat[list(critical)].sum() > 0.9 * rise.sum()
    assert critical <= set(np.argsort(by_head, axis=None)[: by_head.size // 4])


SHORT = recurrence(chunk=256, budget=128, keep=16, window=32)


def gathered(measured, sample, heads, budget=384, keep=32, pool=33):
    """Tokens that the heads find, as REFORM gathers them: int64 [budget], ascending."""
    parts = {head: [] for head in heads}

    def visit(states):
        for head in heads:
            if head.layer == states.layer:
                own = {"q": states.query, "k": states.key, "v": states.value}[head.state][head.head]
                parts[head].append(torch.nn.functional.normalize(own, dim=-1))

    reading = RecurrentPass(measured, torch.from_numpy(sample.tokens), SHORT)
    for chunk in chunks(SHORT, len(sample.tokens), sample.question.start):
        reading.read(chunk, visit)
    embeddings = torch.cat([torch.cat(part) for part in parts.values()], dim=-1)
    question = embeddings[sample.question.start : sample.question.stop]
    scores = torch.nn.functional.max_pool1d((embeddings @ question.T).amax(1)[None], pool, 1, pool // 2)[0]
    scores[:keep] = scores[-keep:] = float("inf")
    return scores.sort(descending=True, stable=True).indices[:budget].sort().values


@pytest.mark.slow
def test_the_picked_heads_find_what_recall_needs(recaller):
    """Of 2,048 tokens, read in chunks, the picked heads gather 384 that answer the question; the last four do not."""
    ranking = embedding_ranking(recaller, {"pattern": recall_samples(1, 8, 1024)}, recurrence=SHORT).ranking
    asked = recall_samples(2, 8, 2048)
    answers = task.prompts(2, 8, 2048).answers

    def recall(heads):
        kept = torch.stack([torch.from_numpy(each.tokens)[gathered(recaller, each, heads)] for each in asked])
        return task.exact_match(recaller.model, task.Prompts(kept, answers))

    assert recall(ranking.pick()) == 1
    assert recall(ranking.best("pattern")[-4:]) < 0.5
