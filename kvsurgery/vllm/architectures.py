"""The architectures that the plugin registers with vLLM."""

from __future__ import annotations

# the architectures that are served with the converted cache
ARCHITECTURES = (
    "ApertusForCausalLM",
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Exaone4ForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration",
    "LlamaForCausalLM",
    "LlavaForConditionalGeneration",
    "MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM",
    "Mistral3ForConditionalGeneration",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "NemotronForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoeForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
)
# the converter's other architectures, which are served with the original's cache and a warning
DENSE = (
    "Dots1ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Gemma3nForCausalLM",
    "Glm46VForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "HunYuanMoEV1ForCausalLM",
    "PhimoeForCausalLM",
    "SolarOpenForCausalLM",
    "Starcoder2ForCausalLM",
)

# architecture -> module and class that vLLM has registered for it
stock: dict[str, tuple[str, str]] = {}
