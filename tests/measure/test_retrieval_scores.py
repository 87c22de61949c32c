"""Retrieval scores: what is attended against eager attention, and the heads that recall."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.errors import KVSurgeryError, ProfileError, UnsupportedModel
from kvsurgery.measure import retrieval
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.measure.retrieval import answer, copy_score, mass_score
from kvsurgery.profile.full_heads import kv_scores
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.lengths import ROOM, default_lengths
from kvsurgery.text.needles import Needle, read_needles
from tests.helpers.families import MEASURED, stock, tokens
from tests.helpers.measured_models import measured_model
from tests.helpers.surgery import convert_folder
from tests.helpers.tiny_recall import FOLDER, task
from tests.helpers.vocabularies import tokenizer

METHODS = ["headkv-r", "headkv-er", "headkv-r2"]


def spelling():
    """A word for each token of the random models."""
    made = tokenizer("words", [f"w{number}" for number in range(4, 101)])
    made.eos_token = None
    return made


@pytest.fixture(scope="module")
def random_model():
    def make(family, **overrides):
        model = stock(family, attn_implementation="eager" if family in ("gemma2", "gpt_oss") else "sdpa", **overrides)
        model.generation_config.eos_token_id = None
        return measured_model(model, spelling())

    return make


def eager_attention(measured, sequence):
    """[layers][query_heads, tokens, tokens], of one forward over everything, and the logits."""
    measured.model.set_attn_implementation("eager")
    with torch.no_grad():
        output = measured.model(torch.tensor(sequence)[None], output_attentions=True, use_cache=False)
    return [layer[0] for layer in output.attentions], output.logits[0]


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *[(family, {}) for family in MEASURED],
        ("gemma2", {"attn_logit_softcapping": 2.0}),
        ("mistral", {"sliding_window": 9}),
        ("phi3", {"sliding_window": 9}),
        ("mixtral", {"sliding_window": 9}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "stock",
)
def test_attention_is_that_of_one_eager_forward(family, overrides, random_model, monkeypatch):
    """Sliding windows of 9 tokens in some layers, soft caps in some models; chunks longer and shorter than a window."""
    measured = random_model(family, **overrides)
    prompt = tokens(1, 40, seed=3)[0].numpy()
    needle = range(28, 34)
    answers = []
    for chunk in (7, 64):
        monkeypatch.setattr(retrieval, "PROMPT_CHUNK", chunk)
        answers.append(answer(measured, prompt, top=len(needle), limit=6))
    said = [step.token for step in answers[0]]
    assert len(said) == 6
    attention, logits = eager_attention(measured, [*prompt, *said])
    assert logits[39:45].argmax(-1).tolist() == said
    inside = copied = 0
    for steps in answers:
        for row, step in enumerate(steps, start=39):
            for (layer, (weights, positions)), maps in zip(sorted(step.layers.items()), attention, strict=True):
                exact = maps[:, row]
                assert weights.dtype == torch.float32
                torch.testing.assert_close(weights, exact.gather(1, positions), rtol=1e-3, atol=1e-5)
                torch.testing.assert_close(weights, exact.topk(len(needle)).values, rtol=1e-3, atol=1e-5)

                by_hand = np.zeros(len(exact))
                for head, seen in enumerate(exact.numpy()):
                    best = np.argsort(-seen, kind="stable")[: len(needle)]
                    by_hand[head] = sum(seen[place] for place in best if place in needle) / len(needle)
                np.testing.assert_allclose(mass_score(step.layers[layer], needle), by_hand, rtol=1e-3, atol=1e-5)
                inside += (by_hand > 0).sum()
                # as if every token of the prompt were the one that is said
                pointing = np.isin(exact.argmax(-1), needle)
                everywhere = np.full(len(prompt), step.token)
                np.testing.assert_allclose(copy_score(step.layers[layer], needle, everywhere, step.token), pointing / 6)
                copied += pointing.sum()
                if measured.windows[layer] is not None:
                    assert (positions > row - measured.windows[layer]).all()
    assert min(inside, copied) > 0, "some head must look at the needle"


def test_one_pass_over_the_prompt_and_one_query_of_attention_at_a_time(random_model, monkeypatch):
    measured = random_model("llama")
    read, queries = [], []
    measured.model.model.embed_tokens.register_forward_hook(lambda module, args, output: read.append(args[0].shape[1]))
    stock_weights = retrieval.attention_weights
    monkeypatch.setattr(
        retrieval, "attention_weights", lambda query, *rest: queries.append(query.shape) or stock_weights(query, *rest)
    )
    monkeypatch.setattr(retrieval, "PROMPT_CHUNK", 16)
    answer(measured, tokens(1, 40)[0].numpy(), top=3, limit=5)
    assert read == [16, 16, 7, *[1] * 5]
    assert queries == [(1, 8, 1, 6)] * 4 * 5


def test_weights_of_a_bfloat16_model_are_float32(random_model):
    measured = random_model("qwen3")
    measured.model.to(torch.bfloat16)
    [step] = answer(measured, tokens(1, 40)[0].numpy(), top=40, limit=1)
    for weights, _ in step.layers.values():
        assert (weights != weights.bfloat16().float()).any()
        torch.testing.assert_close(weights.sum(1), torch.ones(8))
        assert (weights[:, 1:] < weights[:, :-1]).all(), "16 bits would tie"


def test_an_answer_ends_before_an_end_token_or_after_a_line(random_model, monkeypatch):
    measured = random_model("llama")
    prompt = tokens(1, 40)[0].numpy()
    said = [step.token for step in answer(measured, prompt, top=1, limit=8)]
    fifth = next(place for place in range(2, 8) if said[place] not in said[:place])

    def again():
        return [step.token for step in answer(measured, prompt, top=1, limit=8)]

    measured.model.generation_config.eos_token_id = said[fifth]
    assert again() == said[:fifth]
    measured.model.generation_config.eos_token_id = [2, said[fifth]]
    assert again() == said[:fifth]
    measured.model.generation_config.eos_token_id = None
    measured.tokenizer.eos_token = measured.tokenizer.convert_ids_to_tokens(said[fifth])
    assert again() == said[:fifth]

    class Lines:
        """Spells one token as the end of a line; a break before the answer is none."""

        eos_token_id = None

        def decode(self, ids):
            return "\n" + "".join("a\n" if token == said[fifth] else "a" for token in ids)

    assert [step.token for step in answer(measured_model(measured.model, Lines()), prompt, top=1, limit=8)] == said[
        :fifth
    ]


def test_the_model_is_left_as_it_was(random_model):
    measured = random_model("llama")
    before = measured.model.config._attn_implementation
    answer(measured, tokens(1, 40)[0].numpy(), top=1, limit=1)
    assert measured.model.config._attn_implementation == before


@given(st.integers(200, 1_000_000))
def test_default_lengths_leave_room_for_an_answer(maximum):
    lengths = default_lengths(maximum)
    assert len(lengths) == 5
    assert list(lengths) == sorted(lengths)
    assert lengths[-1] == min(32_000, maximum - ROOM)
    assert lengths[0] == min(1_000, lengths[-1])


@pytest.fixture(scope="module")
def tiny():
    return MeasuredModel.load(str(FOLDER / "model"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Text and needles for the bundled model, as files: facts to recall, after another fact where they distract."""
    folder, rng = tmp_path_factory.mktemp("recall"), np.random.default_rng(0)
    words = np.array(task.vocabulary())
    (folder / "filler.txt").write_text(" ".join(words[task.filler(rng, 1, 3000)[0]]))
    lines = []
    for kind in ("retrieval", "reasoning"):
        for facts in task.facts(rng, 2, 2):
            other, (key, *values) = words[facts[0]], words[facts[1]]
            fact, right = f"remember {key} {' '.join(values)} .", " ".join(values)
            needle = fact if kind == "retrieval" else f"remember {' '.join(other)} . {fact}"
            line = {"needle": needle, "real_needle": right, "question": f"recall {key}", "answer": right, "kind": kind}
            lines.append(json.dumps(line))
    (folder / "needles.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def recall(tiny, files):
    """The text and the needles."""
    return Haystack.read(str(files / "filler.txt"), tiny.text, 2000), read_needles(files / "needles.jsonl")


SMALL = {"lengths": (100, 200), "depths": (0.1, 0.6)}


def retrieval_scores(measured, haystack, needles, *, lengths, depths, max_new_tokens=None, seed=0, **options):
    trials = retrieval.Trials(lengths, depths, max_new_tokens, seed)
    return retrieval.retrieval_scores(measured, haystack, needles, trials, **options)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_heads_that_ablation_finds_are_in_the_top_quarter(tiny, recall, method):
    made = retrieval_scores(tiny, *recall, method=method, lengths=(100, 500, 900), depths=(0, 0.5, 1))
    assert (made.method, made.granularity, made.scores.shape) == (method, "query", (3, 8))
    ablation = HeadProfile.load(FOLDER / "profile.safetensors")
    critical = set(np.argsort(-ablation.scores, axis=None)[:2].tolist())
    reduced = kv_scores(made)
    assert critical <= set(np.argsort(-reduced, axis=None)[: reduced.size // 4].tolist())
    assert made.provenance["successes"] >= 0.9 * made.provenance["trials"]


@pytest.mark.parametrize("method", METHODS)
def test_what_is_recorded(tiny, recall, method):
    seen = []
    made = retrieval_scores(tiny, *recall, method=method, **SMALL, seed=3, progress=lambda *state: seen.append(state))
    facts = made.provenance
    assert seen == [(done, 8, f"{done} right") for done in range(9)]
    assert (facts["trials"], facts["successes"], facts["seed"]) == (8, 8, 3)
    assert (facts["lengths"], facts["depths"]) == ([100, 200], [0.1, 0.6])
    assert (facts["text"], facts["needles"], facts["prompt"]) == ("filler.txt", 2, "plain")
    assert json.loads(json.dumps(facts)) == facts


def test_a_seed_gives_the_same_scores_again(tiny, recall):
    once, again, other = (retrieval_scores(tiny, *recall, **SMALL, seed=seed) for seed in (0, 0, 1))
    assert once == again
    assert (once.scores != other.scores).any()


def test_scores_are_the_mean_over_right_answers(tiny, recall, monkeypatch):
    haystack, needles = recall
    wanted = needles[2]
    # the same trials with a needle among them that is answered wrong, on the same pieces of text
    wrong = Needle(wanted.needle, wanted.real_needle, wanted.question, wanted.needle.split()[1], "reasoning")
    pieces = {}
    monkeypatch.setattr(
        Haystack, "piece", lambda self, rng, length: pieces.setdefault(length, self.tokens[:length].copy())
    )
    alone = retrieval_scores(tiny, haystack, [wanted], **SMALL)
    both = retrieval_scores(tiny, haystack, [wrong, wanted], **SMALL)
    assert both.provenance["trials"] == 2 * both.provenance["successes"] == 8
    np.testing.assert_array_equal(both.scores, alone.scores)


def test_the_prompt_ends_in_the_question_and_has_the_length_asked_for(tiny, recall, monkeypatch):
    prompts = []
    answer = retrieval.answer
    monkeypatch.setattr(
        retrieval, "answer", lambda measured, tokens, **rest: prompts.append(tokens) or answer(measured, tokens, **rest)
    )
    retrieval_scores(tiny, *recall, **SMALL)
    assert sorted(len(prompt) for prompt in prompts) == [100] * 4 + [200] * 4
    questions = {needle.question for needle in recall[1][2:]}
    for prompt in prompts:
        assert prompt[0] == tiny.text.bos_token_id
        assert tiny.text.decode(prompt[-2:]) in questions
        assert not np.isin(prompt[1:], tiny.text.all_special_ids).any()


def test_needles_that_do_not_say_their_kind_serve_every_method(tiny, recall):
    haystack, needles = recall
    silent = Needle(needles[0].needle, needles[0].real_needle, needles[0].question, needles[0].answer)
    for method in METHODS:
        made = retrieval_scores(tiny, haystack, [silent], method=method, **SMALL)
        assert made.provenance["trials"] == 4


def test_a_converted_checkpoint_is_scored_by_original_heads(tiny, recall, tmp_path):
    # heads 1 and 3 of layer 1 stay full, so they come first
    profile = HeadProfile.load(FOLDER / "profile.safetensors")
    converted = convert_folder(FOLDER / "model", tmp_path / "converted", profile, full_heads=2)
    measured = MeasuredModel.load(str(converted.folder))
    assert measured.permutation[1] == (1, 3, 0, 2)
    made, expected = (retrieval_scores(model, *recall, **SMALL) for model in (measured, tiny))
    np.testing.assert_allclose(made.scores, expected.scores, rtol=1e-4, atol=1e-6)


class TestErrors:
    def test_no_right_answer_is_no_profile(self, tiny, recall):
        haystack, needles = recall
        wrong = [Needle(n.needle, n.needle.split()[0], n.question, n.needle.split()[0]) for n in needles[:1]]
        with pytest.raises(ProfileError) as raised:
            retrieval_scores(tiny, haystack, wrong, **SMALL)
        assert "\n" not in str(raised.value)
        assert str(raised.value).startswith(
            "none of 4 trials had a right answer, so there are no scores: the best QA-F1 was 0 ("
        )
        assert "for 'remember'), but a right answer has over 50; try shorter `lengths`, needles that" in str(
            raised.value
        )

    def test_the_best_answer_is_told(self, tiny, recall):
        haystack, needles = recall
        first = needles[0].real_needle.split()[0]
        half = [Needle(needles[0].needle, needles[0].real_needle, needles[0].question, f"{first} remember recall")]
        with pytest.raises(ProfileError, match=rf"the best QA-F1 was 50 \('{first}' for '{first} remember recall'\)"):
            retrieval_scores(tiny, haystack, half, **SMALL, max_new_tokens=1)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"method": "duo"}, "unknown retrieval method 'duo'; known: headkv-r, headkv-er, headkv-r2"),
            ({"lengths": (100, 4091)}, "a prompt of 4091 tokens and an answer of 6 are beyond the 4096 that .*"),
            ({"lengths": (4096,), "max_new_tokens": 1}, "4096 tokens and an answer of 1 are beyond the 4096"),
            ({"lengths": (100, 3900)}, r"filler.txt has 3000 tokens, 3885 are needed; give a longer text"),
            ({"lengths": (20, 500)}, "a needle of 12 tokens is longer than the text around it, 5 tokens of a "),
            ({"lengths": (5,)}, "a needle of 12 tokens is longer than the text around it, 0 tokens of a prompt of 5"),
            ({"lengths": ()}, "`lengths` and `depths` need a value or more"),
            ({"depths": ()}, "`lengths` and `depths` need a value or more"),
            ({"max_new_tokens": 0}, "an answer needs a token or more"),
            ({"depths": (0.5, 1.5)}, r"`depths` must lie in \[0, 1\], got 0.5, 1.5"),
            ({"depths": (float("nan"),)}, r"`depths` must lie in \[0, 1\], got nan"),
        ],
    )  # fmt: skip
    def test_options_out_of_range(self, tiny, recall, options, message):
        with pytest.raises(KVSurgeryError, match=message):
            retrieval_scores(tiny, *recall, **{**SMALL, **options}, progress=lambda *state: pytest.fail("it began"))

    @pytest.mark.parametrize(("method", "kind"), [("headkv-r", "retrieval"), ("headkv-r2", "reasoning")])
    def test_no_needle_of_the_kind(self, tiny, recall, method, kind):
        haystack, needles = recall
        others = [needle for needle in needles if needle.kind != kind]
        with pytest.raises(ProfileError, match=f"{method} needs {kind} needles, and none of those given is one"):
            retrieval_scores(tiny, haystack, others, method=method, **SMALL)
        with pytest.raises(ProfileError, match=f"{method} needs {kind} needles"):
            retrieval_scores(tiny, haystack, [], method=method, **SMALL)

    def test_without_a_tokenizer(self, recall):
        with pytest.raises(UnsupportedModel, match="random has no tokenizer; heads are measured on text"):
            retrieval_scores(measured_model(stock("llama")), *recall, **SMALL)
