"""What vLLM's engine does with requests works with streaming heads too: the tokens stay those of the emitted model."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm import ModelRegistry, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.registry import _LazyRegisteredModel
from vllm.plugins import load_general_plugins
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, StructuredOutputsParams

from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.vllm.groups import Groups
from kvsurgery.vllm.split import SplitAttention
from tests.helpers.families import make
from tests.helpers.surgery import Converted, convert_folder, reform_profile
from tests.helpers.tiny_recall import FOLDER
from tests.vllm.models import GEMMA_2
from tests.vllm.serving import (
    BLOCK,
    LARGE_HEADS,
    RECENT,
    SINK,
    Generated,
    assert_equal,
    converted,
    engine,
    fill_caches,
    generate,
    preemptions,
    prompts,
    reference,
    rejected_drafts,
)

ROWS = prompts()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return converted("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def wanted(llama: Converted) -> Generated:
    return reference(llama.model, ROWS)


def modules(llm) -> list:
    """The modules of the model that an engine in this process runs."""
    return [*llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.modules()]


def free_blocks(llm) -> int:
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


@pytest.mark.parametrize("cached", [True, False])
def test_one_engine_serves_every_kind_of_request(cached: bool, llama: Converted, wanted: Generated) -> None:
    # vLLM's CPU build fails where a step reads a part of a prompt with a seed
    with engine(llama.folder, max_logprobs=20, max_num_batched_tokens=1024, enable_prefix_caching=cached) as llm:
        free = free_blocks(llm)
        assert_equal(generate(llm, ROWS), wanted)
        # several samples of one prompt share its blocks
        parameters = SamplingParams(n=3, temperature=1, top_k=1, max_tokens=24, ignore_eos=True)
        (result,) = llm.generate([{"prompt_token_ids": ROWS[2]}], parameters, use_tqdm=False)
        assert {tuple(output.token_ids) for output in result.outputs} == {tuple(wanted[2][0])}
        # seeds decide, however requests are batched
        seeded = {"temperature": 1, "seed": 5}
        together = generate(llm, ROWS, **seeded)
        assert_equal(together, [generate(llm, [row], **seeded)[0] for row in ROWS])
        # log probabilities of the prompt's own tokens
        parameters = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, ignore_eos=True)
        (result,) = llm.generate([{"prompt_token_ids": ROWS[2]}], parameters, use_tqdm=False)
        logits = llama.model(_tensor(ROWS[2])).logits[0].log_softmax(-1)
        for place in range(1, len(ROWS[2])):
            token = ROWS[2][place]
            assert result.prompt_logprobs[place][token].logprob == pytest.approx(
                logits[place - 1, token].item(), abs=1e-3
            )
        _abort_half(llm)
        assert_equal(generate(llm, ROWS), wanted)
        assert free_blocks(llm) == free


def _tensor(row: list[int]):
    import torch

    return torch.tensor([row])


def _abort_half(llm) -> None:
    """Requests of which every other is cancelled after some steps."""
    for index, row in enumerate(ROWS * 2):
        parameters = SamplingParams(
            temperature=0, max_tokens=30, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        llm.llm_engine.add_request(f"aborted-{index}", {"prompt_token_ids": row}, parameters)
    for step in range(200):
        if step % 3 == 1 and step < 12:
            llm.llm_engine.abort_request([f"aborted-{step}"])
        llm.llm_engine.step()
        if not llm.llm_engine.has_unfinished_requests():
            return


@pytest.mark.parametrize("cached", [True, False])
def test_preempted_requests_go_on_with_the_same_tokens(cached: bool, llama: Converted) -> None:
    rows = prompts(lengths=(60, 61, 62))
    with engine(llama.folder, enable_prefix_caching=False) as llm:
        alone = [generate(llm, [row], 120)[0] for row in rows]
    with engine(llama.folder, num_gpu_blocks_override=30, max_model_len=256, enable_prefix_caching=cached) as llm:
        assert_equal(generate(llm, rows, 120), alone)
        assert preemptions(llm) > 0


@pytest.mark.parametrize("chunk", [512, 48])
def test_without_the_prefix_cache_a_request_holds_no_more_than_its_windows(
    chunk: int, llama: Converted, wanted: Generated
) -> None:
    groups = Groups(llama.policy.layout, BLOCK, 4)
    with engine(llama.folder, enable_prefix_caching=False, max_num_batched_tokens=chunk) as llm:
        fill_caches(llm, float("nan"))  # what a block held before is not read
        assert_equal(generate(llm, ROWS), wanted)
        free, held = free_blocks(llm), []
        parameters = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        llm.llm_engine.add_request("measured", {"prompt_token_ids": ROWS[3]}, parameters)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            held.append(free - free_blocks(llm))
    assert max(held) <= groups.blocks(len(ROWS[3]) + 9)


@pytest.mark.parametrize("cached", [True, False])
def test_prompts_that_come_in_parts(cached: bool, llama: Converted) -> None:
    """A second part is read after the first one and its answer without the last token, wherever in a block that is."""
    with engine(llama.folder, enable_prefix_caching=cached) as llm:
        for length in range(90, 90 + BLOCK, 3):
            first, second = ROWS[3][:length], ROWS[3][length : length + 40]
            [[*kept, _], answer] = _answers_to_parts(llm, [first, second])
            [(wanted, _)] = generate(llm, [[*first, *kept, *second]], 4)
            assert answer == wanted


def _answers_to_parts(llm, parts: list[list[int]]) -> list[list[int]]:
    """Four tokens after each part of a prompt, of which the next one comes after that."""
    served, answers = llm.llm_engine, []
    for part in parts:
        request = served.input_processor.process_inputs(
            "parts",
            {"prompt_token_ids": [*part]},  # which vLLM extends
            SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
            served.get_supported_tasks(),
            resumable=True,
        )
        served.engine_core.add_request(request)
        tokens: list[int] = []
        while len(tokens) < 4:
            tokens += [token for output in served.engine_core.get_output().outputs for token in output.new_token_ids]
        answers.append(tokens)
    served.engine_core.abort_requests(["parts"])
    return answers


@pytest.mark.parametrize("cached", [True, False])
def test_speculation_by_ngrams(cached: bool, llama: Converted) -> None:
    rows = [*ROWS, ROWS[1] * 4]
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with engine(llama.folder, speculative_config=speculative, enable_prefix_caching=cached) as llm:
        assert_equal(generate(llm, rows), reference(llama.model, rows))
        assert rejected_drafts(llm) > 0


def test_without_the_hybrid_manager_nothing_is_freed_and_nothing_wrong(llama: Converted, wanted: Generated) -> None:
    with engine(llama.folder, disable_hybrid_kv_cache_manager=True) as llm:
        assert_equal(generate(llm, ROWS), wanted)


def test_blocks_for_several_processes_in_one(tmp_path: Path) -> None:
    checkpoint = converted("llama", tmp_path, sparsity=10 / 16, tp=2)
    with engine(checkpoint.folder) as llm:
        assert any(module.scattered for module in modules(llm) if isinstance(module, SplitAttention))
        assert_equal(generate(llm, ROWS), reference(checkpoint.model, ROWS))


@pytest.mark.parametrize("sparsity", [0, 1])
def test_all_heads_alike(sparsity: float, tmp_path: Path) -> None:
    checkpoint = converted("llama", tmp_path, sparsity=sparsity)
    with engine(checkpoint.folder) as llm:
        assert_equal(generate(llm, ROWS), reference(checkpoint.model, ROWS))


def test_without_the_plugin_the_folder_is_the_original(
    llama: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "elsewhere"  # vLLM remembers the class of a path
    folder.symlink_to(llama.folder)
    load_general_plugins()  # once in a process
    monkeypatch.setitem(
        ModelRegistry.models,
        "LlamaForCausalLM",
        _LazyRegisteredModel("vllm.model_executor.models.llama", "LlamaForCausalLM"),
    )
    with engine(folder) as llm:
        assert not any(isinstance(module, SplitAttention) for module in modules(llm))
        assert_equal(generate(llm, ROWS), reference(llama.stock, ROWS))


def test_an_unconverted_checkpoint_keeps_the_stock_attention(llama: Converted) -> None:
    with engine(llama.source) as llm:
        attentions = [module for module in modules(llm) if isinstance(module, Attention | SplitAttention)]
        assert {type(module) for module in attentions} == {Attention}
        assert_equal(generate(llm, ROWS), reference(llama.stock, ROWS))


def test_windows_as_long_as_the_models_own(tmp_path: Path) -> None:
    checkpoint = converted("gemma2", tmp_path, model={**GEMMA_2, "sliding_window": 40}, recent=40)
    with engine(checkpoint.folder) as llm:
        assert_equal(generate(llm, ROWS), reference(checkpoint.model, ROWS))


def test_the_bundled_model_with_its_tokenizer(tmp_path: Path) -> None:
    profile = HeadProfile.load(FOLDER / "profile.safetensors")
    checkpoint = convert_folder(FOLDER / "model", tmp_path / "out", profile, full_heads=4, sink=4, recent=32)
    rows = prompts(295, (5, 100, 400))
    with engine(checkpoint.folder, skip_tokenizer_init=False) as llm:
        assert_equal(generate(llm, rows), reference(checkpoint.model, rows))
        beams = llm.beam_search(
            [{"prompt_token_ids": rows[1]}], BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
        )
        best = checkpoint.model.generate(
            _tensor(rows[1]), num_beams=3, max_new_tokens=8, do_sample=False, eos_token_id=None
        )
        assert beams[0].sequences[0].tokens == best[0].tolist()
        guide = StructuredOutputsParams(choice=["nedi", "fibu"])
        parameters = SamplingParams(temperature=0, max_tokens=4, structured_outputs=guide)
        (answer,) = llm.generate(["remember dofi doge nedi fibu . recall dofi"], parameters, use_tqdm=False)
        assert answer.outputs[0].text.strip() in ("nedi", "fibu")


def test_reform_reads_prompts_within_the_context_as_usual(tmp_path: Path) -> None:
    source = make("llama", tmp_path / "stock", **LARGE_HEADS)
    sizes = {"sink": SINK, "recent": RECENT, "sparsity": 0.5}
    checkpoint = convert_folder(source, tmp_path / "converted", reform=reform_profile(source), **sizes)
    with engine(checkpoint.folder, max_model_len=None) as llm:
        assert_equal(generate(llm, ROWS), reference(checkpoint.model, ROWS))
        with pytest.raises(VLLMValidationError, match="maximum context length is 1024"):
            generate(llm, prompts(lengths=(1025, 5))[:1])
