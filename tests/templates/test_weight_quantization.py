"""A converted checkpoint loads with quantized weights, as any checkpoint does.

Surgery moves whole rows of q, k and v, with whose scales they stay, and columns of o, whose rows keep their scales. So
it computes what the stock model does whose weights are quantized the same way.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, QuantoConfig, TorchAoConfig

from kvsurgery.system.processes import tensor_parallel
from kvsurgery.templates.kv_layout import TILE, KVLayout, Quantization
from tests.distributed.start import start
from tests.helpers.families import largest, tokens
from tests.helpers.reference import reference_logits
from tests.helpers.surgery import RECENT, SINK, convert_folder

PROMPT, STEPS = 33, 7
KV_BITS = Quantization(4, residual=16)


def quanto():
    """8-bit weights by optimum-quanto, and the class of a quantized one."""
    package = pytest.importorskip("optimum.quanto", reason="pip install optimum-quanto")
    return QuantoConfig(weights="int8"), package.QTensor


def torchao():
    """8-bit weights by torchao, and the class of a quantized one."""
    package = pytest.importorskip("torchao.quantization", reason="pip install torchao")
    kind = pytest.importorskip("torchao.utils").TorchAOBaseTensor
    return TorchAoConfig(package.Int8WeightOnlyConfig()), kind


BACKENDS = [quanto, torchao]


@pytest.fixture(params=BACKENDS)
def backend(request):
    """What `from_pretrained` takes as `quantization_config`, and the class of a quantized weight."""
    return request.param()


@torch.no_grad()
def stepwise(model, ids, prompt=PROMPT):
    """Logits of a prompt in one piece and of single steps after it."""
    kv_cache, parts = None, []
    for part in ids.split([prompt] + [1] * (ids.shape[1] - prompt), 1):
        output = model(part, past_key_values=kv_cache)
        kv_cache = output.past_key_values
        parts.append(output.logits)
    return torch.cat(parts, 1)


def test_logits_equal_those_of_the_quantized_stock_model(mixed, backend):
    converted, (config, kind) = mixed("llama"), backend
    stock = AutoModelForCausalLM.from_pretrained(
        converted.source, dtype=torch.float32, quantization_config=config
    ).eval()
    model = converted.load(quantization_config=config)
    for layer in (*stock.model.layers, *model.model.layers):
        linear = [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]
        assert len(linear) == 7
        assert all(isinstance(module.weight, kind) for module in linear)
    ids = tokens(2, PROMPT + STEPS)
    expected = reference_logits(stock, converted.full, SINK, RECENT, ids)
    assert largest(stepwise(model, ids) - expected, expected) < 1e-5
    assert largest(stepwise(converted.model, ids) - expected, expected) > 1e-3  # what quantizing itself changes


def test_generation(mixed, backend):
    model, ids = mixed("llama").load(quantization_config=backend[0]), tokens(2, PROMPT)
    options = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": [0, 2]}
    generated = model.generate(ids, **options)
    assert generated.shape == (2, PROMPT + 12)
    assert generated.equal(model.generate(ids, **options, use_cache=False))


def test_weights_and_cache_quantized_together(checkpoint, mixed, backend, tmp_path):
    both = convert_folder(checkpoint("qwen3"), tmp_path / "both", sparsity=0.5, quantization=KV_BITS)
    prompt, ids = 2 * TILE, tokens(2, 2 * TILE + STEPS)
    plain = stepwise(mixed("qwen3").load(quantization_config=backend[0]), ids, prompt)
    model = both.load(quantization_config=backend[0])
    found = stepwise(model, ids, prompt)
    assert largest(found[:, :prompt] - plain[:, :prompt], plain) < 1e-5  # a prompt sees itself unquantized
    assert 1e-3 < ((found - plain)[:, prompt:].norm() / plain[:, prompt:].norm()).item() < 0.1
    options = {"max_new_tokens": 9, "do_sample": False, "suppress_tokens": [2], "return_dict_in_generate": True}
    kv_cache = model.generate(ids, **options).past_key_values
    # the type of keys and values is that of activations, whatever weights have
    layout = KVLayout.from_config(model.config)
    assert kv_cache.allocated_bytes() == layout.kv_bytes(2, ids.shape[1], 9, itemsize=4)


def compute(processes, folder, make):
    """Logits of one process of several that share a quantized model, and the numbers that it holds of a projection."""
    config, kind = make()
    options = {"quantization_config": config, **tensor_parallel("cpu", processes.world)}
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32, **options).eval()
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert isinstance(weight, kind)
    return stepwise(model, tokens(2, PROMPT + STEPS)), weight.numel()


@pytest.mark.slow
@pytest.mark.parametrize("make", BACKENDS)
def test_two_processes_share_quantized_weights(make, checkpoint, tmp_path):
    """Scales of rows that are cut in two are of each half, so that the error is no larger than that of one process."""
    config, _ = make()
    converted = convert_folder(checkpoint("qwen3"), tmp_path / "tp2", sparsity=0.5, tp=2)
    ids = tokens(2, PROMPT + STEPS)
    exact, alone = stepwise(converted.model, ids), stepwise(converted.load(quantization_config=config), ids)
    ranks = start(2, compute, tmp_path, converted.folder, make)
    for shared, held in ranks:
        assert 0.2 < ((shared - exact).norm() / (alone - exact).norm()).item() < 1.2
        assert 2 * held == converted.model.model.layers[0].self_attn.q_proj.weight.numel()
        assert shared.equal(ranks[0][0])
