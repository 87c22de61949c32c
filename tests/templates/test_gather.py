"""`generate` over prompts beyond the recompute budget: which tokens are kept, and that everything else is as ever."""

import copy
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, GenerationConfig
from transformers.utils import logging

from kvsurgery.templates.kv_encode import Encoder
from kvsurgery.templates.kv_gather import gather, question_start, similarity
from kvsurgery.templates.kv_reform import Reform
from tests.helpers.emitted import emitted
from tests.helpers.families import tokens

REFORM = {
    "heads": [[1, "k", 2], [2, "v", 0], [0, "q", 5], [1, "q", 1]],
    "chunk": 8,
    "encode_budget": 12,
    "window": 3,
    "keep": 3,
    "pool": 3,
    "recompute_budget": 20,
    "query_length": 4,
}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def model():
    return emitted("llama", reform=REFORM)


@pytest.fixture(scope="module")
def without():
    return emitted("llama")


@given(
    scores=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=13, max_size=60),
    budget=st.integers(12, 40),
    question=st.integers(1, 5),
    keep=st.integers(0, 3),
    pool=st.sampled_from([1, 3, 7]),
)
def test_kept_tokens_are_the_first_the_last_the_question_and_the_best(scores, budget, question, keep, pool):
    budget = min(budget, len(scores) - 1)
    reform = Reform(((0, "k", 0),), keep=keep, pool=pool, recompute_budget=budget)
    places = gather(torch.tensor(scores), len(scores) - question, reform).tolist()
    assert len(places) == budget
    assert places == sorted(set(places))
    always = {*range(keep), *range(len(scores) - max(keep, question), len(scores))}
    assert always <= set(places)
    pooled = [max(scores[max(0, place - pool // 2) : place + pool // 2 + 1]) for place in range(len(scores))]
    rest = sorted(set(range(len(scores))) - always, key=lambda place: (-pooled[place], place))
    assert set(places) == always | set(rest[: budget - len(always)])


def test_similarity_is_the_best_of_the_question():
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(9, 6, generator=generator)
    expected = [max(float(token @ asked) for asked in embeddings[7:]) for token in embeddings]
    assert torch.allclose(similarity(embeddings, embeddings[7:]), torch.tensor(expected))


@pytest.mark.parametrize(
    ("ids", "marker", "options", "expected"),
    [
        ([5, 6, 7, 8, 9, 5, 6, 1, 2], (5, 6), {}, 7),  # after the last marker
        ([5, 6, 7, 8, 9, 1, 2, 5, 6], (5, 6), {}, 5),  # nothing after the marker: the last tokens
        ([5, 6, *range(10, 22)], (5, 6), {}, 10),  # a turn that takes more than half of the budget holds a document
        ([7, 8, 9, 1, 2, 3], (5, 6), {}, 2),  # no marker: the last tokens
        ([7, 8], (5, 6), {}, 0),
        ([5, 6, 7, 8, 9], (5, 6), {"query_length": 1}, 4),
        ([5, 6, 7, 8, 9], (5, 6), {"query_start": 1}, 1),
    ],
)
def test_where_the_question_begins(ids, marker, options, expected):
    reform = Reform(((0, "k", 0),), query_marker=marker, query_length=4, recompute_budget=20)
    assert question_start(torch.tensor(ids), reform, **options) == expected


def test_prompts_within_the_budget_are_generated_as_without(model, without):
    ids = tokens(2, 20)
    assert model.generate(ids, **GREEDY).equal(without.generate(ids, **GREEDY))


def test_a_budget_that_holds_the_prompt_is_plain_generation(model, without):
    ids = tokens(1, 70)
    output, [places] = model.generate(ids, recompute_budget=70, return_gathered=True, **GREEDY)
    assert output.equal(without.generate(ids, **GREEDY))
    assert places.tolist() == list(range(70))


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_the_answer_is_that_to_the_gathered_prompt(model, without, options):
    ids = tokens(1, 70)
    output, [places] = model.generate(ids, return_gathered=True, **GREEDY, **options)
    assert len(places) == 20
    assert places.tolist() == sorted({*places.tolist(), 0, 1, 2, 66, 67, 68, 69})
    expected = without.generate(ids[:, places], **GREEDY, **options)
    assert output[:, :70].equal(ids.expand(len(output), -1))
    assert output[:, 70:].equal(expected[:, 20:])


def test_every_row_is_gathered_as_if_alone(model):
    ids = tokens(3, 70)
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    mask[2, :55] = 0  # what is left of it fits
    output, places = model.generate(ids * mask, attention_mask=mask, return_gathered=True, **GREEDY)
    assert list(map(len, places)) == [20, 20, 15]
    assert output[:, :70].equal(ids * mask)
    for row, pad in enumerate([0, 11, 55]):
        alone, [own] = model.generate(ids[row : row + 1, pad:], return_gathered=True, **GREEDY)
        assert own.equal(places[row])
        assert alone[0, 70 - pad :].equal(output[row, 70:])
    inferred, _ = model.generate(ids * mask, return_gathered=True, **GREEDY)
    assert inferred.equal(output)


def test_padding_is_inferred_from_the_pad_token_that_a_call_has(model, monkeypatch):
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(5))
    ids[0, :7] = 0
    _, expected = model.generate(ids, attention_mask=ids != 0, return_gathered=True, **GREEDY)
    monkeypatch.setattr(model.generation_config, "pad_token_id", 1)
    for options in (GREEDY, {"generation_config": GenerationConfig(**GREEDY)}):
        _, places = model.generate(ids, return_gathered=True, **options)
        assert [row.tolist() for row in places] == [row.tolist() for row in expected]
    no_pad = model.generate(ids, return_gathered=True, **{**GREEDY, "eos_token_id": 0})[1]
    assert no_pad[0].tolist() != expected[0].tolist()  # a pad token that also ends answers says nothing


def test_embeddings_are_gathered_like_ids(model):
    ids = tokens(1, 70)
    expected = model.generate(ids, **GREEDY)
    assert model.generate(inputs_embeds=model.get_input_embeddings()(ids), **GREEDY).equal(expected[:, 70:])


def test_options_of_generate_mean_what_they_do(model):
    ids = tokens(1, 70)
    expected = model.generate(ids, **GREEDY)
    options = {name: value for name, value in GREEDY.items() if name != "max_new_tokens"}
    assert model.generate(ids, max_length=76, **options).equal(expected)
    output = model.generate(input_ids=ids, return_dict_in_generate=True, output_scores=True, **GREEDY)
    assert output.sequences.equal(expected)
    assert len(output.scores) == 6
    torch.manual_seed(3)
    first = model.generate(ids, do_sample=True, num_return_sequences=3, max_new_tokens=6, pad_token_id=0)
    torch.manual_seed(3)
    assert model.generate(ids, do_sample=True, num_return_sequences=3, max_new_tokens=6, pad_token_id=0).equal(first)
    assert first[:, :70].equal(ids.expand(3, -1))


@pytest.fixture
def configured(model, monkeypatch):
    """The model with settings as its generation_config.json may have them."""

    def configure(**settings):
        config = copy.deepcopy(model.generation_config)
        config.update(**settings)
        monkeypatch.setattr(model, "generation_config", config)
        return model

    return configure


def test_lengths_count_the_whole_prompt_wherever_they_are_set(model, configured):
    ids, options = tokens(1, 70), {name: value for name, value in GREEDY.items() if name != "max_new_tokens"}
    whole = model.generate(ids, **GREEDY | {"max_new_tokens": 20})
    assert configured(max_length=78).generate(ids, **options).equal(whole[:, :78])
    assert model.generate(ids, GenerationConfig(**options)).equal(whole[:, :78])
    assert model.generate(ids, **options, max_length=81).equal(whole[:, :81])
    assert model.generate(ids, GenerationConfig(max_length=80, **options)).equal(whole[:, :80])
    assert model.generate(ids, **GREEDY).equal(whole[:, :76])  # max_new_tokens takes precedence
    ends = GREEDY | {"max_new_tokens": 20, "eos_token_id": int(whole[0, 70])}
    assert model.generate(ids, **ends).shape[1] == 71
    assert model.generate(ids, **ends, min_length=78).shape[1] >= 78
    assert configured(min_length=78).generate(ids, **ends).shape[1] >= 78
    assert configured().generate(ids, **ends, min_new_tokens=4).shape[1] >= 74


def test_time_counts_from_the_beginning_of_the_prompt(configured, monkeypatch):
    model, read = configured(max_time=60.0), Encoder.read
    monkeypatch.setattr(time, "time", lambda: clock[0])
    clock = [0.0]
    assert model.generate(tokens(1, 70), **GREEDY).shape[1] == 76
    monkeypatch.setattr(
        Encoder, "read", lambda *args, **inputs: clock.append(clock.pop() + 61) or read(*args, **inputs)
    )
    assert model.generate(tokens(1, 70), **GREEDY).shape[1] == 71


def test_a_streamer_sees_the_whole_prompt(model):
    class Seen(list):
        def put(self, value):
            self.extend(value.flatten().tolist())

        def end(self):
            self.append("end")

    ids, seen = tokens(1, 70), Seen()
    output = model.generate(ids, streamer=seen, **GREEDY)
    assert seen == [*output[0].tolist(), "end"]


def test_scores_of_a_retriever_are_mixed_in(model):
    ids = tokens(1, 70)
    scores = torch.zeros(1, 70)
    scores[0, 40:45] = 1e6
    _, [places] = model.generate(ids, return_gathered=True, token_scores=scores, **GREEDY)
    assert {*range(40, 45)} <= set(places.tolist())
    _, [same] = model.generate(ids, return_gathered=True, token_scores=torch.ones(1, 70), **GREEDY)
    _, [plain] = model.generate(ids, return_gathered=True, **GREEDY)
    assert same.equal(plain)


def test_a_bar_is_shown(model, capsys):
    logging.enable_progress_bar()
    try:
        model.generate(tokens(1, 30), progress=True, **GREEDY)
    finally:
        logging.disable_progress_bar()
    assert "reading: 100%" in capsys.readouterr().err


def test_progress_is_told(model):
    told = []
    model.generate(tokens(2, 30), progress=lambda done, total: told.append((done, total)), **GREEDY)
    assert [done for done, _ in told] == [8, 16, 24, 30, 38, 46, 54, 60]
    assert {total for _, total in told} == {60}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"query_length": 71}, "the question would begin at token -1 of a prompt of 70"),
        ({"query_start": 70}, "the question would begin at token 70 of a prompt of 70"),
        ({"query_length": 3, "query_start": 9}, "exclude each other"),
        ({"recompute_budget": 5}, "it holds the first and last 3 tokens and more"),
        ({"query_length": 30}, "recompute_budget 20 is less than the 33 tokens that are always kept"),
        ({"token_scores": torch.zeros(1, 9)}, r"token_scores are \[1, 9\], the prompt is \[1, 70\]"),
        ({"max_new_tokens": None, "max_length": 70}, "prompt has 70 tokens and max_length=70 counts them"),
        ({"position_ids": torch.arange(70)[None] % 40}, "leave position_ids out"),
        ({"token_healing": True}, "token_healing"),
        ({"past_key_values": DynamicCache()}, "leave past_key_values out"),
        ({"attention_mask": torch.ones(1, 70).index_fill(1, torch.tensor([9]), 0)}, "holes"),
        ({"attention_mask": torch.ones(1, 70).index_fill(1, torch.tensor([69]), 0)}, "padded on the right"),
    ],
)
def test_what_contradicts_the_prompt_is_refused(model, options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        model.generate(tokens(1, 70), **GREEDY | options)


def test_another_turn_is_gathered_anew(model):
    ids = tokens(1, 70)
    output = model.generate(ids, return_dict_in_generate=True, **GREEDY)
    with pytest.raises(ValueError, match="leave past_key_values out"):
        model.generate(output.sequences, past_key_values=output.past_key_values, **GREEDY)


def test_a_checkpoint_without_reform_knows_none_of_its_options(without):
    with pytest.raises(ValueError, match=r"not used by the model: .*query_length.*return_gathered"):
        without.generate(tokens(1, 9), query_length=3, return_gathered=True, **GREEDY)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": []}, "no embedding heads"),
        ({"heads": [[4, "k", 0]]}, "no k-head 0 in layer 4"),
        ({"heads": [[0, "k", 4]]}, "no k-head 4 in layer 0"),
        ({"heads": [[0, "o", 0]]}, "no o-head"),
        ({"heads": [[0, "k"]]}, "malformed"),
        ({"chunk": 0}, "chunk is a number of tokens"),
        ({"pool": 4}, "odd"),
        ({"compressor": "snap"}, "compressor"),
        ({"encode_budget": 5}, "encode_budget 5"),
        ({"query_marker": [-1]}, "query_marker"),
        ({"surprise": 1}, "malformed"),
    ],
)
def test_malformed_settings_are_refused(without, change, words):
    config = without.config.to_dict()
    config["kv_surgery"] = {**config["kv_surgery"], "reform": {**REFORM, **change}}
    with pytest.raises(ValueError, match=words):
        Reform.from_config(config)
