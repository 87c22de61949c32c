"""MM-NIAH's documents of text and images, through the processor of a tiny LLaVA."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import CLIPImageProcessor, LlavaProcessor

from kvsurgery.errors import TextError, UnsupportedModel
from kvsurgery.evaluate import decoding
from kvsurgery.evaluate.checkpoint import load, reader_of
from kvsurgery.evaluate.runner import Options, evaluate
from kvsurgery.evaluate.tasks.mm_niah import TASKS, MMNIAHTask
from kvsurgery.metrics.registry import METRICS
from kvsurgery.system.json_lines import read_lines
from tests.evaluate.limits import check_limits
from tests.helpers.families import IMAGE, make
from tests.helpers.json_lines import write_json_lines
from tests.helpers.surgery import convert_folder, random_profile
from tests.helpers.vocabularies import SPECIAL, tokenizer

WORDS = "Here is a tree. river. Which animal is in it? cat dog Answer with the letter of right option alone. A. B. word"
PATCHES = 16  # tokens of an image
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn|>{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %} {{ part['text'] }} {% else %}<image>{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>{% endif %}"
)
META = {"placed_depth": [0.5], "context_length": 1500, "choices": None, "choices_image_path": None}
ROW = {
    "id": 0,
    "images_list": ["one.png", "deep/two.jpg"],
    "context": "Here is <image> a tree. <image> Here is a river.",
    "question": "Which animal is in it?",
    "answer": "cat",
    "meta": META,
}
OPTIONS = {"answer": 1, "meta": {**META, "choices": ["cat", "dog"]}}
SHOWN = {"answer": 0, "meta": {**META, "choices_image_path": ["two.png", "one.png"]}}


def processor(*, chat=False):
    """The text knows 96 words, so that an image's token is the one that tests' models have for it."""
    known = [*dict.fromkeys(WORDS.split())]
    filled = [*known, *(f"w{number}" for number in range(IMAGE - len(SPECIAL) - len(known)))]
    spelt = tokenizer("words", [" ".join(filled)])
    spelt.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert spelt.convert_tokens_to_ids("<image>") == IMAGE
    size = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    return LlavaProcessor(
        CLIPImageProcessor(**size),
        spelt,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE if chat else None,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny LLaVA with its processor."""
    folder = make("llava", tmp_path_factory.mktemp("mm") / "llava")
    processor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def converted(model, tmp_path_factory):
    """The same with half of its heads streaming."""
    return convert_folder(model, tmp_path_factory.mktemp("mm") / "mixed", random_profile(model), sparsity=0.5).folder


@pytest.fixture
def write(tmp_path):
    """Writes a file of questions beside four images, and gives the folder."""
    draw = np.random.default_rng(0)
    (tmp_path / "images" / "deep").mkdir(parents=True)
    for name in ("one.png", "two.png", "deep/two.jpg"):
        pixels = draw.integers(0, 256, (20, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / name)

    def to(task, *rows):
        (tmp_path / "annotations").mkdir(exist_ok=True)
        write_json_lines(tmp_path / "annotations" / f"{task}.jsonl", ({**ROW, **row} for row in rows))
        return tmp_path

    return to


def samples(folder, model, **options):
    return list(MMNIAHTask(str(folder), **options).samples(reader_of(model)))


def test_a_prompt_has_an_image_where_the_document_has_it(write, model):
    [sample] = samples(write("retrieval-text", {}), model)
    assert sample.images.text == (
        "<s>Here is <image> a tree. <image> Here is a river.\nWhich animal is in it?\n"
        "Answer with a word, a number or a short phrase alone."
    )
    assert [path.name for path in sample.images.paths] == ["one.png", "two.jpg"]
    assert (sample.tokens == IMAGE).sum() == 2 * PATCHES
    assert (sample.task, sample.limit, sample.facts) == ("mm_niah/retrieval-text", 32, {"tokens": 1000, "depth": 0.4})


@pytest.mark.parametrize(
    ("length", "depth", "expected"),
    [
        (400, 0.0, {"tokens": 1000, "depth": 0.0}),
        (1999, 0.2, {"tokens": 1000, "depth": 0.2}),
        (2000, [0.1, 0.5], {"tokens": 2000, "depth": 0.2}),
        (90_000, 1.0, {"tokens": 64_000, "depth": 0.8}),
    ],
)
def test_lengths_and_depths_are_grouped(write, model, length, depth, expected):
    meta = {**META, "context_length": length, "placed_depth": depth}
    [sample] = samples(write("retrieval-text", {"meta": meta}), model)
    assert sample.facts == expected


def test_options_are_lettered_and_may_be_images(write, model):
    write("retrieval-image", OPTIONS)
    texts, shown = samples(write("reasoning-image", SHOWN), model)
    assert texts.images.text.endswith("in it?\nA. cat\nB. dog\nAnswer with the letter of the right option alone.")
    assert texts.answers == ("1",)
    assert shown.images.text.endswith("A. <image>\nB. <image>\nAnswer with the letter of the right option alone.")
    assert [path.name for path in shown.images.paths] == ["one.png", "two.jpg", "two.png", "one.png"]
    assert (shown.tokens == IMAGE).sum() == 4 * PATCHES


def test_a_chat_template_of_parts_is_filled_in(write, model, tmp_path_factory):
    other = tmp_path_factory.mktemp("chat")
    for path in model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    processor(chat=True).save_pretrained(other)
    [sample] = samples(write("retrieval-text", {}), other)
    assert sample.images.text.startswith("<s><|turn|> Here is <image> a tree.")
    assert sample.images.text.endswith("alone. <|turn|>")
    assert (sample.tokens == IMAGE).sum() == 2 * PATCHES


def test_special_tokens_in_a_document_are_text(write, model):
    text = ROW["context"] + " </s> cat <|turn|> dog <im</s>age>"
    [sample] = samples(write("retrieval-text", {"context": text}), model)
    assert (sample.tokens == IMAGE).sum() == 2 * PATCHES
    assert "</s>" not in sample.images.text
    assert "<|turn|>" not in sample.images.text


TEXT, LIST, OPTION = "vqa_words", "counts_in_place", "option_index"


@pytest.mark.parametrize(
    ("metric", "said", "right", "expected"),
    [
        (TEXT, "It is the oak.", ["oak"], 1),
        (TEXT, "OAK", ["an oak"], 1),
        (TEXT, "oaks", ["oak"], 0),
        (TEXT, "seven, or so", ["7"], 1),
        (TEXT, "a twenty-one", ["20 1"], 1),
        (TEXT, "it costs 1,000", ["1000"], 1),
        (TEXT, "dont know", ["don't know"], 1),
        (TEXT, "", ["oak"], 0),
        (LIST, "[2, 1, 3]", ["2", "1", "3"], 1),
        (LIST, "```json\n[2, 1]\n```", ["2", "1"], 1),
        (LIST, '{"a": [2], "b": [0, 3]}', ["2", "1", "3"], 2 / 3),
        (LIST, "[2]", ["2", "1"], 1 / 2),
        (LIST, "[9, 9, 9, 9]", ["2", "1"], 0),
        (LIST, '{"a": 2}', ["2", "1"], 0),
        (LIST, "two", ["2", "1"], 0),
        (LIST, "[" * 5000, ["2", "1"], 0),
        (LIST, "", ["2", "1"], 0),
        (OPTION, "B", ["1"], 1),
        (OPTION, "**b**", ["1"], 1),
        (OPTION, "B. dog", ["1"], 1),
        (OPTION, "The answer is B.", ["1"], 1),
        (OPTION, "1", ["1"], 1),
        (OPTION, "0", ["0"], 1),
        (OPTION, "The camera is moving right.", ["1"], 1),
        (OPTION, "A", ["1"], 0),
        (OPTION, "dog", ["1"], 0),
        (OPTION, "²", ["1"], 0),
        (OPTION, "", ["1"], 0),
    ],
)
def test_what_an_answer_scores(metric, said, right, expected):
    assert METRICS[metric](said, right, ()) == pytest.approx(expected)


@pytest.mark.parametrize("metric", [TEXT, LIST, OPTION])
@given(st.text(st.sampled_from('01ab[]{}",.:*²\ud800 \n'), max_size=20))
def test_any_text_can_be_an_answer(metric, said):
    assert 0 <= METRICS[metric](said, ["1", "0"], ()) <= 1


@pytest.mark.parametrize(
    ("task", "row", "metric", "answers"),
    [
        ("counting-text", {"answer": [2, 1]}, LIST, ("2", "1")),
        ("counting-image", {"answer": "[2, 1]"}, LIST, ("2", "1")),
        ("reasoning-text", {}, TEXT, ("cat",)),
        ("retrieval-image", OPTIONS, OPTION, ("1",)),
    ],
)
def test_every_kind_of_answer_has_its_metric(write, model, task, row, metric, answers):
    [sample] = samples(write(task, row), model)
    assert (sample.metric, sample.answers) == (metric, answers)


@pytest.mark.parametrize("chunk", [None, 7], ids=["whole", "chunks"])
@pytest.mark.parametrize("row", [{}, SHOWN], ids=["before the end", "at the end"])
def test_a_model_answers_as_it_does_with_images_in_one_forward(write, model, converted, chunk, row):
    """Images that lie across chunks, and among the tokens that come one by one before a short answer."""
    [sample] = samples(write("reasoning-image", row), model)
    inputs = sample.images.inputs()
    for folder in (model, converted):
        loaded = load(folder, device="cpu")
        ids = torch.from_numpy(sample.tokens)[None]
        expected = loaded.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, **inputs)
        ends = loaded.generation_config.eos_token_id or []
        expected = [token for token in expected[0, ids.shape[1] :].tolist() if token not in ends]
        said = decoding.answers(
            loaded, sample.images.processor.tokenizer, [sample.tokens], 12, chunk=chunk, images=inputs
        )
        assert said == [expected]
        blank = {name: torch.zeros_like(value) for name, value in inputs.items()}
        other = decoding.answers(loaded, sample.images.processor.tokenizer, [sample.tokens], 12, images=blank)
        assert other != said


def test_an_evaluation_names_the_images(write, model, converted, tmp_path):
    folder, out = write("retrieval-text", {}, {"answer": "dog"}), tmp_path / "report"
    models = {"original": model, "converted": converted}
    results = evaluate(models, {"mm_niah": MMNIAHTask(str(folder))}, out, Options(batch=4), device="cpu")
    assert [(task.task, task.metric, task.count) for task in results.tasks] == [("mm_niah/retrieval-text", TEXT, 2)]
    record = read_lines(out / "samples.jsonl")[0]
    assert record["prompt"].count("<image>") == 2
    assert [path.endswith(name) for path, name in zip(record["images"], ("one.png", "two.jpg"), strict=True)]
    assert record["tokens"] > 2 * PATCHES


def test_a_limit_is_of_each_file(write, model):
    write("counting-text", *[{"answer": [1]}] * 4)
    check_limits(MMNIAHTask(str(write("retrieval-text", *[{}] * 4))), reader_of(model))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"images_list": ["one.png"]}, "row 2: 1 images are listed for 2 <image>"),
        ({"images_list": ["one.png", "none.png"]}, r"row 2: there is no image 'none.png' in .*images"),
        ({"images_list": ["one.png", "../out.png"]}, r"row 2: the image '../out.png' is outside of .*images"),
        ({"images_list": ["one.png", "/etc/hostname"]}, "row 2: the image '/etc/hostname' is outside of"),
        ({"images_list": ["one.png", "away.png"]}, "row 2: the image 'away.png' is outside of"),
        ({"images_list": ["one.png", "text.png"]}, "cannot read the image .*text.png: cannot identify image file"),
        ({"answer": 3}, 'row 2: "answer" must be text, got 3'),
        ({"answer": " "}, "row 2: \"answer\" must be text, got ' '"),
        ({"meta": None}, 'row 2: "meta" must be an object'),
        ({"meta": {**META, "placed_depth": 2}}, 'row 2: "context_length" must be a number, and "placed_depth" one or'),
        ({"meta": {**META, "context_length": "1"}}, 'row 2: "context_length" must be a number'),
        ({**OPTIONS, "answer": 2}, 'row 2: "answer" must be the index of an option, got 2'),
        ({**OPTIONS, "answer": "B"}, "row 2: \"answer\" must be the index of an option, got 'B'"),
        ({"meta": {**META, "choices": "AB"}}, 'row 2: "choices" must be a list of texts, or null'),
        ({"meta": {**META, "choices": ["a"], "choices_image_path": ["one.png"]}}, "options are texts or images, not"),
    ],
)
def test_malformed_rows_are_named(write, model, row, message):
    folder = write("retrieval-text", {}, row)
    Image.new("RGB", (8, 8)).save(folder / "out.png")
    (folder / "images" / "away.png").symlink_to(folder / "out.png")
    (folder / "images" / "text.png").write_text("not an image")
    with pytest.raises(TextError, match=message):
        samples(folder, model)


@pytest.mark.parametrize("answer", ["two", [], [1.5], [True], None, "[" * 5000])
def test_counts_are_whole_numbers(write, model, answer):
    with pytest.raises(TextError, match='row 1: "answer" must be a list of whole numbers, got'):
        samples(write("counting-text", {"answer": answer}), model)


def test_models_that_read_no_images_are_refused(write, checkpoint, model, tmp_path_factory):
    folder = write("retrieval-text", {})
    reader = reader_of(model)
    text = type(reader)(reader.tokenizer, 512, 101, checkpoint=checkpoint("llama"))
    with pytest.raises(UnsupportedModel, match="is a llama model; questions about images are for LLaVA, Pixtral and"):
        list(MMNIAHTask(str(folder)).samples(text))
    bare = tmp_path_factory.mktemp("bare")
    for path in model.iterdir():
        if "processor" not in path.name:
            (bare / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UnsupportedModel, match=f"^{bare} cannot read images: .+") as refused:
        samples(folder, bare)
    assert "\n" not in str(refused.value)


def test_the_folder_is_asked_for(tmp_path):
    with pytest.raises(TextError, match="`mm_niah` must name a folder, such as mm_niah_val of OpenGVLab/MM-NIAH on"):
        MMNIAHTask().check()
    (tmp_path / "annotations").mkdir()
    with pytest.raises(TextError, match="has no folder images; give MM-NIAH's, with images"):
        MMNIAHTask(str(tmp_path)).check()
    (tmp_path / "images").mkdir()
    with pytest.raises(TextError, match=f"annotations has no file of MM-NIAH that is called {TASKS[0]}.jsonl"):
        MMNIAHTask(str(tmp_path)).check()
    with pytest.raises(TextError, match="MM-NIAH has no retrieval; it has retrieval-text, retrieval-image"):
        MMNIAHTask(str(tmp_path), ("retrieval",)).check()
