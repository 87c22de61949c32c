"""Everything users do with `generate` works on an emitted model, and means what it means on a stock one.

The yardstick is the same model without a cache: it computes every step from all tokens, and test_exactness.py holds it
against an independent reference.
"""

import copy

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast, pipeline

from kvsurgery.templates.kv_layout import Quantization
from tests.helpers.emitted import emitted
from tests.helpers.families import CACHE_PATHS, WITH_STATES, largest, make, tokens
from tests.helpers.reference import reference_logits
from tests.helpers.surgery import RECENT, SINK, convert_folder

TRANSFORMERS_4 = transformers.__version__.startswith("4.")
SAMPLE = ["llama", "qwen2", "gemma2", "gemma3", "mixtral"]
NEW = 14
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "suppress_tokens": [0, 2]}


def batch(rows=3, length=30, seed=0):
    """Token ids and mask of a batch padded on the left by 0, 5, 10, ... tokens."""
    ids = tokens(rows, length, seed)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 5 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def same_without_cache(model, inputs, **options):
    torch.manual_seed(7)
    with_cache = model.generate(**inputs, **options)
    torch.manual_seed(7)
    without = model.generate(**inputs, **options, use_cache=False)
    assert with_cache.equal(without)
    return with_cache


@pytest.mark.parametrize("family", SAMPLE)
def test_greedy_equals_the_dense_reference(mixed, family):
    converted, ids = mixed(family), tokens(2, 25)
    expected = ids
    for _ in range(8):
        step = reference_logits(converted.stock, converted.full, SINK, RECENT, expected)[:, -1]
        step[:, 2] = -torch.inf  # no end before its time
        expected = torch.cat([expected, step.argmax(-1, keepdim=True)], 1)
    options = GREEDY | {"max_new_tokens": 8, "suppress_tokens": [2]}
    assert converted.model.generate(ids, **options).equal(expected)


WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "do_sample": False},
    "several beams": {"num_beams": 4, "num_return_sequences": 2, "do_sample": False, "length_penalty": 0.5},
}


# Llama in every way, and each other family in one, besides the beams that every family has
@pytest.mark.parametrize(
    ("family", "options"),
    [
        *(pytest.param("llama", options, id=f"llama-{way}") for way, options in WAYS.items()),
        *(
            pytest.param(family, WAYS[way], id=f"{family}-{way}")
            for family, way in zip(
                SAMPLE[1:], ("several beams", "sampling", "several sequences", "greedy"), strict=True
            )
        ),
    ],
)
def test_batches_with_left_padding(mixed, family, options):
    same_without_cache(mixed(family).model, batch(), **GREEDY | options)


@pytest.mark.parametrize("family", CACHE_PATHS)
def test_beams_drafts_and_turns(mixed, family):
    model, ids, options = mixed(family).model, tokens(1, 40, seed=3), GREEDY | {"max_new_tokens": 5}
    same_without_cache(model, batch(2), **options | {"num_beams": 2})
    expected, draft = model.generate(ids, **options), copy.deepcopy(model)
    if family in WITH_STATES:
        with pytest.raises(ValueError, match=r"not supported with stateful models|one state of all tokens"):
            model.generate(ids, **options, assistant_model=draft)
    else:
        assert model.generate(ids, **options, assistant_model=draft).equal(expected)
    cache = None
    for turn in range(2):
        output = model.generate(ids, **options, past_key_values=cache, return_dict_in_generate=True)
        assert output.sequences.equal(model.generate(ids, **options, use_cache=False))
        ids, cache = torch.cat([output.sequences, tokens(1, 9, seed=turn)], 1), output.past_key_values


@pytest.mark.parametrize("family", SAMPLE)
@pytest.mark.parametrize("size", [7, 29])
def test_chunked_prefill(mixed, family, size):
    model, ids = mixed(family).model, tokens(2, 30)
    assert model.generate(ids, **GREEDY, prefill_chunk_size=size).equal(model.generate(ids, **GREEDY))


@pytest.mark.skipif(TRANSFORMERS_4, reason="transformers 4 fails on a stock Llama too")
def test_chunked_prefill_with_left_padding(mixed):
    model = mixed("llama").model
    assert model.generate(**batch(), **GREEDY, prefill_chunk_size=4).equal(model.generate(**batch(), **GREEDY))


@pytest.mark.parametrize(
    ("family", "draft"),
    [("llama", "itself"), ("llama", "another"), ("llama", "stock"), ("gemma2", "itself"), ("gemma2", "another")],
)
def test_assisted_decoding(mixed, checkpoint, family, draft, tmp_path):
    converted, ids = mixed(family), tokens(1, 40, seed=3)
    assistant = {
        "itself": converted.load,
        "another": lambda: convert_folder(make(family, tmp_path / "a", seed=5), tmp_path / "b", sparsity=0.75).load(),
        "stock": lambda: copy.deepcopy(converted.stock),
    }[draft]()
    assistant.generation_config.num_assistant_tokens = 6
    expected = converted.model.generate(ids, **GREEDY | {"max_new_tokens": 40})
    found = converted.model.generate(
        ids, **GREEDY | {"max_new_tokens": 40}, assistant_model=assistant, return_dict_in_generate=True
    )
    assert found.sequences.equal(expected)
    assert found.past_key_values.columns.margin < 40  # the margin follows the candidates, not the length


def test_draft_for_a_stock_target(mixed):
    converted, ids = mixed("llama"), tokens(1, 40, seed=4)
    draft = converted.load()
    expected = converted.stock.generate(ids, **GREEDY | {"max_new_tokens": 40})
    assert converted.stock.generate(ids, **GREEDY | {"max_new_tokens": 40}, assistant_model=draft).equal(expected)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prompt_lookup(mixed, family):
    model = mixed(family).model
    ids = tokens(1, 12).repeat(1, 4)
    options = GREEDY | {"max_new_tokens": 30}
    found = model.generate(ids, **options, prompt_lookup_num_tokens=5, return_dict_in_generate=True)
    expected = model.generate(ids, **options)
    # transformers 4 may keep drafted tokens beyond `max_new_tokens`, also of a stock model
    assert found.sequences[:, : expected.shape[1]].equal(expected)
    assert found.past_key_values.columns.margin <= 12
    # nothing grew, although drafts may go beyond the last token
    assert found.past_key_values.layers[0].capacity == 48 + 30 + 5


def test_drafts_by_some_of_the_layers_are_refused(mixed):
    model = mixed("llama").model
    expected = model.generate(tokens(1, 12), **GREEDY)
    with pytest.raises(ValueError, match=r"assistant_early_exit.*pass an assistant_model"):
        model.generate(tokens(1, 12), **GREEDY, assistant_early_exit=1)
    assert model.generate(tokens(1, 12), **GREEDY).equal(expected)  # it was left as it was


@pytest.mark.parametrize("quantization", [None, Quantization(8, "per-token", 2, 5)], ids=["16 bit", "8 bits"])
def test_autocast(checkpoint, tmp_path, quantization):
    """Keys are wider than values then, once they are rotated."""
    model = convert_folder(checkpoint("llama"), tmp_path / "out", quantization=quantization).load()
    inputs = batch(3, 150)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model.generate(**inputs, **GREEDY, return_dict_in_generate=True, output_logits=True)
    expected = model.generate(**inputs, **GREEDY, return_dict_in_generate=True, output_logits=True)
    assert largest(found.logits[0] - expected.logits[0], expected.logits[0]) <= 0.1
    assert found.past_key_values.layers[0].heads[0].groups[0].keys.dtype == torch.float32


@pytest.mark.parametrize("family", SAMPLE)
def test_continuing_a_returned_cache(mixed, family):
    model = mixed(family).model
    history, cache = tokens(1, 20), None
    for turn in range(3):
        history = torch.cat([history, tokens(1, 9, seed=10 + turn)], 1)
        output = model.generate(history, **GREEDY, past_key_values=cache, return_dict_in_generate=True)
        assert output.sequences.equal(model.generate(history, **GREEDY))
        history, cache = output.sequences, output.past_key_values
    layout = model.model.layers[0].self_attn.kv_layout
    assert cache.layers[0].heads[-1].groups[0].slots == layout.sink + layout.recent


@pytest.mark.parametrize("second", ["plain", "lookup", "draft"])
@pytest.mark.parametrize("first", ["plain", "lookup", "draft"])
def test_turns_of_different_kinds(mixed, first, second):
    converted = mixed("llama")
    model, ids = converted.model, tokens(1, 20)
    options = {"plain": {}, "lookup": {"prompt_lookup_num_tokens": 3}, "draft": {"assistant_model": converted.load()}}
    output = model.generate(ids, **GREEDY, **options[first], return_dict_in_generate=True)
    ids = torch.cat([output.sequences, tokens(1, 9, seed=20)], 1)
    again = {"past_key_values": output.past_key_values, "return_dict_in_generate": True}
    output = model.generate(ids, **GREEDY, **options[second], **again)
    assert output.sequences.equal(model.generate(ids, **GREEDY))
    assert output.past_key_values.columns.margin < 9  # the margin follows the candidates, not the next turn


@pytest.mark.parametrize("rest", ["streaming", "budgeted"])
@pytest.mark.parametrize("given", ["all tokens", "new tokens"])
def test_drafts_in_a_later_turn(mixed, checkpoint, tmp_path, rest, given):
    """The text is that without drafts, also where budgets hold and a prompt read anew would give another one."""
    if given == "new tokens" and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("this version takes all tokens where it drafts")
    held = {"rest": rest, "budget": 6, "window": 4, "hold": 8} if rest == "budgeted" else {}
    model = convert_folder(checkpoint("llama"), tmp_path, full_heads=1, **held).load()
    first = model.generate(tokens(1, 40), **GREEDY, return_dict_in_generate=True)
    ids, texts = torch.cat([first.sequences, tokens(1, 9, seed=20).repeat(1, 2)], 1), []
    for options in ({}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": model}):
        cache = copy.deepcopy(first.past_key_values)
        new = ids if given == "all tokens" else ids[:, cache.get_seq_length() :]
        output = model.generate(
            new,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            **GREEDY | {"max_new_tokens": 30},
            **options,
        )
        texts.append(output[0, new.shape[1] :][:30].tolist())
    assert texts[1:] == texts[:1] * 2


def test_continuing_a_padded_batch(mixed):
    model = mixed("llama").model
    first = model.generate(**batch(), **GREEDY, return_dict_in_generate=True)
    more = tokens(3, 6, seed=9)
    ids = torch.cat([first.sequences, more], 1)
    mask = torch.cat([batch()["attention_mask"], torch.ones(3, ids.shape[1] - 30, dtype=torch.long)], 1)
    second = {"input_ids": ids, "attention_mask": mask}
    assert model.generate(**second, **GREEDY, past_key_values=first.past_key_values).equal(
        model.generate(**second, **GREEDY)
    )


def test_input_embeddings(mixed):
    model, ids = mixed("llama").model, tokens(2, 20)
    embeddings = model.get_input_embeddings()(ids)
    assert model.generate(inputs_embeds=embeddings, **GREEDY).equal(model.generate(ids, **GREEDY)[:, 20:])


def test_classifier_free_guidance(mixed):
    model, ids = mixed("llama").model, tokens(1, 20)
    same_without_cache(model, {"input_ids": ids}, **GREEDY, guidance_scale=1.5)


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: index for index, word in enumerate(["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, 101))])}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def test_pipeline(mixed, tokenizer):
    texts = ["w5 w6 w7 w8 w9 w10 w11 w12 w13", "w40 w41", " ".join(f"w{i}" for i in range(20, 50))]
    generator = pipeline("text-generation", model=mixed("llama").load(), tokenizer=tokenizer)
    options = {"max_new_tokens": 6, "do_sample": False}
    together = generator(texts, batch_size=3, **options)
    assert together == [generator(text, **options) for text in texts]


@pytest.mark.parametrize("family", SAMPLE)
def test_saved_again_and_reloaded(mixed, family, tmp_path):
    converted, ids = mixed(family), tokens(2, 30)
    converted.load().save_pretrained(tmp_path / "again")
    again = type(converted)(converted.source, tmp_path / "again", converted.policy)
    assert again.load().generate(ids, **GREEDY).equal(converted.model.generate(ids, **GREEDY))
    assert again.model.config.architectures == converted.stock.config.architectures


@pytest.mark.parametrize("family", SAMPLE)
def test_base_model(mixed, family):
    converted, ids = mixed(family), tokens(2, 30)
    base = converted.load(AutoModel)
    with torch.no_grad():
        expected = converted.model(ids, output_hidden_states=True)
        found = base(ids, output_hidden_states=True)
    assert len(found.hidden_states) == converted.stock.config.num_hidden_layers + 1
    assert largest(found.last_hidden_state - expected.hidden_states[-1], expected.hidden_states[-1]) <= 1e-6
    assert found.past_key_values.get_seq_length() == 30


def test_two_checkpoints_in_one_process(mixed, checkpoint, tmp_path):
    ids = tokens(1, 40)
    one = mixed("llama")
    before = one.model(ids).logits
    other = convert_folder(checkpoint("llama"), tmp_path / "other", sparsity=0.75, sink=1, recent=2)
    expected = reference_logits(other.stock, other.full, 1, 2, ids)
    assert largest(other.model(ids).logits - expected, expected) <= 1e-4
    assert one.model(ids).logits.equal(before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(mixed, dtype):
    converted, ids = mixed("llama"), tokens(2, 40)
    model = converted.load(dtype=dtype)
    with torch.no_grad():
        expected, found = converted.model(ids).logits, model(ids).logits
    assert found.dtype == dtype
    assert largest(found.float() - expected, expected) < (0.02 if dtype == torch.float16 else 0.15)
    cache = model.generate(ids, **GREEDY, return_dict_in_generate=True).past_key_values
    assert cache.layers[0].heads[0].groups[0].keys.dtype == dtype


def test_device_map(mixed):
    pytest.importorskip("accelerate")
    converted, ids = mixed("llama"), tokens(2, 30)
    placed = converted.load(device_map={"": "cpu"})
    assert placed.generate(ids, **GREEDY).equal(converted.model.generate(ids, **GREEDY))


def test_layers_offloaded_to_disk(mixed, tmp_path):
    pytest.importorskip("accelerate")
    converted, ids = mixed("llama"), tokens(2, 30)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{index}": "disk" if index == 2 else "cpu" for index in range(4)}
    placed = converted.load(device_map=places, offload_folder=tmp_path)
    assert placed.generate(ids, **GREEDY).equal(converted.model.generate(ids, **GREEDY))


def test_logits_to_keep_is_honored(mixed):
    model, ids = mixed("llama").model, tokens(2, 30)
    with torch.no_grad():
        assert model(ids, logits_to_keep=1).logits.shape == (2, 1, 101)
    assert model._supports_logits_to_keep()


@pytest.mark.parametrize("family", SAMPLE)
def test_training_forward(mixed, family):
    converted, ids = mixed(family), tokens(2, 40)
    model = converted.load().train()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    plain = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert plain["model.layers.0.self_attn.k_proj.weight"].abs().max() > 0
    model.zero_grad()
    model(ids, labels=ids).loss.backward()  # with a cache, as Trainer runs it
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert largest(parameter.grad - plain[name], plain[name]) <= 1e-5


def test_gradient_checkpointing(mixed):
    model, ids = mixed("llama").load().train(), tokens(2, 40)
    expected = model(ids, labels=ids, use_cache=False).loss
    model.gradient_checkpointing_enable()
    found = model(ids, labels=ids).loss
    found.backward()
    assert found.item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("steps", [[8], [1], [5, 3]], ids=str)
def test_gradients_of_what_follows_a_past(all_full, mixed, steps):
    """What is cached without gradients stays; what comes after it learns, as in the stock model."""

    def learn(model, **options):
        with torch.no_grad():
            cache = model(tokens(2, 20), **options).past_key_values
        loss = 0
        for size in steps:
            output = model(tokens(2, size, seed=size), past_key_values=cache)
            cache, loss = output.past_key_values, loss + output.logits.square().mean()
        loss.backward()
        return [layer.self_attn.k_proj.weight.grad for layer in model.model.layers]

    stock = AutoModelForCausalLM.from_pretrained(all_full("llama").source, attn_implementation="eager")
    if len(steps) == 1:  # stock's gradients flow through what an earlier call has cached too
        for found, expected in zip(learn(all_full("llama").load()), learn(stock), strict=True):
            assert largest(found - expected, expected) <= 1e-5
    for found in learn(mixed("llama").load()):
        assert found.isfinite().all()
        assert found.any()


def test_a_compiled_forward_is_exact_and_not_compiled_again_for_other_lengths():
    model = emitted("llama", 1, layers=[{"blocks": [[1, 3]], "sink": 3, "recent": 5}])
    prompts, options = [tokens(1, length) for length in (40, 24, 33)], GREEDY | {"max_new_tokens": 3}
    expected = [model.generate(ids, **options) for ids in prompts]
    model.forward = torch.compile(model.forward, backend="eager")
    try:
        results = [model.generate(ids, **options) for ids in prompts[:2]]
        with torch.compiler.set_stance("fail_on_recompile"):
            results.append(model.generate(prompts[2], **options))
    finally:
        del model.forward
        torch._dynamo.reset()
    assert all(map(torch.equal, results, expected))
