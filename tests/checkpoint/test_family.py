from __future__ import annotations

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from kvsurgery.checkpoint.family import load_family, supported
from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.errors import UnsupportedModel
from kvsurgery.heads.dimensions import ModelDimensions
from tests.helpers.families import EVERY, FAMILIES, INSIDE, WITH_IMAGES

# by the type of a model that reads images, that of its text model, which exists only there
TEXTS = {beside["model_type"]: INSIDE[text]["model_type"] for text, beside in WITH_IMAGES.values() if text in INSIDE}
TYPES = sorted({settings["model_type"] for settings in FAMILIES.values()})
# families whose config may give layers a window; three are asked for more, below
SLIDING = [name for name in TYPES if Model.of({"model_type": name}).family.window is not None]
SLIDING = [name for name in SLIDING if not Model.of({"model_type": name}).family.states]
SLIDING = [name for name in SLIDING if name not in ("smollm3", "qwen2_moe", "llama4_text")]
SMALL = {"num_hidden_layers": 7, "max_position_embeddings": 512}


def model_of(model_type: str, **settings: object) -> Model:
    return Model.of({"model_type": model_type, **settings})


def reference_windows(model_type: str, settings: dict[str, object]) -> tuple[int | None, ...]:
    """What transformers' own config class and attention layers make of it."""
    config = AutoConfig.for_model(model_type, **settings)
    window = getattr(config, "sliding_window", None)
    layers = range(config.num_hidden_layers)
    if getattr(config, "layer_types", None) and model_type != "qwen3_moe":
        chunk = getattr(config, "attention_chunk_size", None)
        sizes = {"sliding_attention": window, "chunked_attention": chunk, "linear_attention": 0, "mlp": 0, "moe": 0}
        windows = [sizes.get(config.layer_types[layer]) for layer in layers]
    else:
        windows = [window for _ in layers]
    # a window that spans all positions is full attention, unless its layer has heads of another kind
    most = 1 << 30 if model_type == "gemma4_text" else config.max_position_embeddings
    return tuple(None if size is None or size >= most else size for size in windows)


def test_one_patch_per_tested_family() -> None:
    around = ("gemma3", "gemma4", "llama4", "llava", "mistral3", "qwen3_5", "qwen3_5_moe")
    assert supported() == tuple(sorted([*TYPES, *around, *TEXTS]))


@pytest.mark.parametrize("model_type", TYPES)
def test_defaults_are_those_of_the_config_class(model_type: str) -> None:
    model = model_of(model_type)
    stock = AutoConfig.for_model(model_type)
    heads, windows = stock.num_attention_heads, model.windows
    for layer, dimensions in enumerate(model.layer_dimensions):
        own = stock.per_layer_config[layer] if hasattr(stock, "per_layer_config") else stock
        head_dim = getattr(own, "head_dim", None) or own.hidden_size // heads
        kv_heads = own.num_key_value_heads or heads
        assert dimensions == ModelDimensions(stock.num_hidden_layers, heads, kv_heads, head_dim)
        assert dimensions == (model.dimensions if windows[layer] is None else model.sliding_dimensions)
    assert model.hidden == stock.hidden_size
    assert model.windows == reference_windows(model_type, {})


@pytest.mark.parametrize("model_type", TEXTS)
@pytest.mark.parametrize("settings", [{}, {"use_sliding_window": True, "max_window_layers": 3}], ids=str)
def test_defaults_of_text_models_that_exist_inside_others(model_type: str, settings: dict[str, object]) -> None:
    model = model_of(model_type, text_config={"model_type": TEXTS[model_type], **settings})
    stock = AutoConfig.for_model(model_type, text_config={**settings}).text_config
    head_dim = getattr(stock, "head_dim", None) or stock.hidden_size // stock.num_attention_heads
    assert model.dimensions == ModelDimensions(
        stock.num_hidden_layers, stock.num_attention_heads, stock.num_key_value_heads, head_dim
    )
    assert model.hidden == stock.hidden_size
    slides = [kind == "sliding_attention" for kind in getattr(stock, "layer_types", None) or ()]
    assert model.windows == tuple(
        stock.sliding_window if any(slides[layer:][:1]) else None for layer in range(model.dimensions.layers)
    )


@pytest.mark.parametrize("model_type", TYPES)
def test_null_kv_heads_mean_one_per_query_head(model_type: str) -> None:
    model = model_of(model_type, num_attention_heads=6, num_key_value_heads=None, hidden_size=24)
    assert model.dimensions.kv_heads == 6


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "olmo2", "phi3", "mixtral", "qwen3_moe"])
def test_null_head_dim_is_left_to_the_hidden_size(model_type: str) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    assert model_of(model_type, **heads, head_dim=None).dimensions.head_dim == 8
    assert model_of(model_type, **heads, head_dim=10).dimensions.head_dim == 10


@given(
    model_type=st.sampled_from(SLIDING),
    settings=st.fixed_dictionaries(
        {"sliding_window": st.sampled_from([16, 511, 512, 4096])},
        optional={
            "use_sliding_window": st.booleans(),
            "max_window_layers": st.integers(0, 8),
            "sliding_window_pattern": st.integers(1, 8),
        },
    ),
)
def test_windows_are_those_of_transformers(model_type: str, settings: dict[str, object]) -> None:
    settings = {**SMALL, **settings}
    model = model_of(model_type, **settings)
    assert model.windows == reference_windows(model_type, settings)


@pytest.mark.parametrize(
    "model_type", ["qwen2", "qwen3", "gemma2", "gemma3_text", "smollm3", "olmo3", "exaone4", "cohere2"]
)
def test_layer_types_come_before_the_rule(model_type: str) -> None:
    types = ["full_attention", "sliding_attention", "full_attention"]
    settings = {
        "num_hidden_layers": 3,
        "max_position_embeddings": 512,
        "layer_types": types,
        "sliding_window": 8,
        "use_sliding_window": True,
    }
    model = model_of(model_type, **settings)
    assert model.windows == (None, 8, None)


def test_smollm3_has_to_say_which_layers_slide() -> None:
    settings = {"sliding_window": 8, "num_hidden_layers": 2}
    with pytest.raises(UnsupportedModel, match="add layer_types"):
        _ = model_of("smollm3", use_sliding_window=True, **settings).windows
    types = ["sliding_attention", "full_attention"]
    assert model_of("smollm3", use_sliding_window=True, layer_types=types, **settings).windows == (8, None)
    assert model_of("smollm3", use_sliding_window=False, **settings).windows == (None, None)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"no_rope_layers": []},
        {"no_rope_layers": None, "no_rope_layer_interval": 3},
        {"no_rope_layers": [0, 1, 1, 0, 0, 1, 1]},
        {"no_rope_layers": [1] * 7, "layer_types": ["chunked_attention"] * 3 + ["full_attention"] * 4},
        {"attention_chunk_size": 512},
    ],
    ids=str,
)
def test_chunked_layers_are_those_of_transformers(settings: dict[str, object]) -> None:
    settings = {**SMALL, "attention_chunk_size": 16, **settings}
    model = model_of("llama4_text", **settings)
    assert model.family.has_chunked_layers
    assert model.windows == reference_windows("llama4_text", settings)


def test_the_largest_published_number_of_positions() -> None:
    model = model_of("llama4_text", max_position_embeddings=10_485_760, num_hidden_layers=4)
    assert model.windows == (8192, 8192, 8192, None)


def test_chunked_layers_need_a_number_for_each_layer() -> None:
    model = model_of("llama4_text", num_hidden_layers=4, no_rope_layers=[1, 0])
    with pytest.raises(UnsupportedModel, match="no_rope_layers must have a number for each of 4 layers"):
        _ = model.windows


@pytest.mark.parametrize(
    "settings",
    [
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention", "chunked_attention"]},
        {"layer_types": "sliding_attention"},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": None},
        {"sliding_window": 0},
        {"sliding_window": -1},
        {"sliding_window": 2.5},
        {"sliding_window": "8"},
    ],
    ids=str,
)
def test_windows_that_make_no_sense(settings: dict[str, object]) -> None:
    model = model_of("gemma2", num_hidden_layers=2, **settings)
    with pytest.raises(UnsupportedModel):
        _ = model.windows


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "evenly"),
        ({"num_attention_heads": 4, "num_key_value_heads": 8}, "evenly"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"hidden_size": 16}, "width"),
        ({"head_dim": 1 << 19}, "width"),
    ],
    ids=str,
)
def test_dimensions_that_make_no_sense(settings: dict[str, object], word: str) -> None:
    model = model_of("llama", **settings)
    with pytest.raises(UnsupportedModel, match=word):
        _ = model.dimensions


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"model_type": "gpt2"}, "supported: .*llama"),
        ({}, "None"),
        ({"model_type": ["llama"]}, "not supported"),
        ({"model_type": "../llama"}, "not supported"),
        ({"model_type": "llama", "kv_surgery": {"version": 2}}, "revert"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "hqq"}}, "quantized by .hqq"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "causal"),
        ({"model_type": "qwen2", "use_bidirectional_attention": True}, "causal"),
        ({"model_type": "qwen2", "output_attentions": True}, "remove the key"),
        ({"model_type": "qwen2", "is_causal": False}, "is_causal False"),
        ({"model_type": "llava", "text_config": {"model_type": "llama", "is_causal": None}}, "is_causal None"),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, "causal"),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, "Ministral"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM"),
        ({"model_type": "qwen2_moe", "use_sliding_window": True}, "version of transformers"),
        ({"model_type": "cohere2_moe", "first_k_dense_replace": 1}, "replace it by layer_types and mlp_layer_types"),
        ({"model_type": "hy_v3", "mlp_bias": True}, "mlp_bias"),
        ({"model_type": "llava"}, "one of llama, mistral"),
        ({"model_type": "llava", "text_config": "llama"}, "one of llama, mistral"),
        ({"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3"}}, "one of qwen3_vl_text; text_config is of"),
        ({"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text", "is_causal": False}}, "is_causal"),
        ({"model_type": "llava", "text_config": {"model_type": "gemma2"}}, "text_config is of 'gemma2'"),
        ({"model_type": "llava", "text_config": {"model_type": "mistral", "layer_types": ["x"]}}, "Ministral"),
    ],
    ids=str,
)
def test_what_is_not_supported(config: dict[str, object], word: str) -> None:
    with pytest.raises(UnsupportedModel, match=word):
        Model.of(config)


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("deepseek_v3", {}, "one latent for all heads"),
        ("qwen4_exp", {}, "by an indexer"),
        ("minimax_m3_vl", {}, "by an indexer"),
        ("mimo_v2_flash", {}, "has values of another size than keys"),
        ("laguna", {"num_hidden_layers": 2, "num_attention_heads_per_layer": [48, 64]}, "query heads in some layers"),
        ("step3p7", {"text_config": {"num_sliding_attention_heads": 96}}, "query heads in some layers"),
    ],
)
def test_heads_that_no_patch_can_describe(model_type: str, settings: dict[str, object], reason: str) -> None:
    if model_type not in CONFIG_MAPPING_NAMES:
        pytest.skip("this version of transformers does not have the family")
    config = AutoConfig.for_model(model_type, **settings).to_dict()
    with pytest.raises(UnsupportedModel, match=reason) as raised:
        Model.of(config)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("types", [["sparse"], ["sparse", "moe"], 2], ids=str)
def test_types_of_layers_with_experts_must_be_known(types: object) -> None:
    model = model_of("hy_v3", num_hidden_layers=2, num_experts=2, mlp_layer_types=types)
    with pytest.raises(UnsupportedModel, match="mlp_layer_types"):
        [*model.missing(["model.norm.weight"])]


@pytest.mark.parametrize("name", EVERY)
def test_every_tensor_that_transformers_saves_has_a_role(checkpoint, name: str) -> None:
    source = Checkpoint.open(checkpoint(name))
    roles = [source.model.family.role(tensor.name) for tensor in source.tensors]
    permuted = {role.part for role in roles if role.axis is not None}
    assert permuted >= set(source.model.family.permute)
    assert {role.layer for role in roles} == {None, *range(source.model.dimensions.layers)}


@pytest.mark.parametrize(
    "tensor",
    [
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.weight_scale_inv",
        "model.layers.00.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.weight\n",
        "model.layers.0.mlp.gate_projXweight",
        "model.layers.-1.self_attn.q_proj.weight",
        "model.layers.٣.self_attn.q_proj.weight",
        "model.layers.self_attn.q_proj.weight",
        "self_attn.q_proj.weight",
        "score.weight",
        "",
    ],
)
def test_unknown_tensors_are_refused(tensor: str) -> None:
    with pytest.raises(UnsupportedModel, match="not known"):
        model_of("llama").family.role(tensor)


def test_base_models_save_without_prefix() -> None:
    family = model_of("llama").family
    name = "layers.1.self_attn.q_proj.weight"
    assert family.role(name) == family.role(f"model.{name}")
    assert family.role("norm.weight") == family.role("model.norm.weight")


@pytest.mark.parametrize(
    ("name", "layer", "part"),
    [
        ("language_model.model.layers.1.self_attn.q_proj.weight", 1, "self_attn.q_proj.weight"),
        ("model.language_model.layers.1.self_attn.q_proj.weight", 1, "self_attn.q_proj.weight"),
        ("language_model.model.norm.weight", None, "norm.weight"),
        ("language_model.lm_head.weight", None, "lm_head.weight"),
        ("lm_head.weight", None, "lm_head.weight"),
        (
            "model.vision_tower.encoder.layers.0.self_attn.q_proj.weight",
            None,
            "vision_tower.encoder.layers.0.self_attn.q_proj.weight",
        ),
        ("multi_modal_projector.linear_1.bias", None, "multi_modal_projector.linear_1.bias"),
    ],
)
def test_a_text_model_inside_another(name: str, layer: int | None, part: str) -> None:
    role = model_of("llava", text_config={"model_type": "mistral"}).family.role(name)
    assert (role.layer, role.part, role.axis is None) == (layer, part, layer is None)


@pytest.mark.parametrize("model_type", [*TYPES, *TEXTS])
def test_what_tensor_parallelism_replicates_is_what_transformers_says(model_type: str) -> None:
    plan = AutoConfig.for_model(model_type).get_text_config().base_model_tp_plan
    projections = ("k_proj", "qkv_proj")
    projection = next((style for name, style in (plan or {}).items() if name.endswith(projections)), None)
    if model_type == "gpt_oss" and transformers.__version__.startswith("4."):
        assert projection == "colwise"  # only there
        projection = None
    assert load_family(model_type).replicated == (projection != "colwise")
