"""Small tokenizers of the kinds that models have: how they spell spaces and periods is what differs."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TURN = "<|turn|>"
SPECIAL = ["<s>", "</s>", "<unk>", TURN]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}" + TURN + "{{ message['role'] }}\n{{ message['content'] | trim }}"
    "</s>\n{% endfor %}{% if add_generation_prompt %}" + TURN + "assistant\n{% endif %}"
)
KINDS = ["bytes", "metaspace", "words"]


def tokenizer(kind: str, texts: Sequence[str], size: int = 800, *, chat: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer that can spell some texts.

    Args:
        kind: "bytes" as of Llama-3 and Qwen, "metaspace" as of Llama-2, Mistral and Gemma, with what marks the first
            word, or "words", of which each is a token with its punctuation, as between spaces.
        texts: it knows their words.
        size: tokens of the first two kinds.
        chat: whether it has a chat template.
    """
    if kind == "words":
        known = dict.fromkeys(word for text in texts for word in text.split())
        made = Tokenizer(models.WordLevel({word: index for index, word in enumerate([*SPECIAL, *known])}, "<unk>"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        made = Tokenizer(models.BPE(unk_token=None if kind == "bytes" else "<unk>"))
        if kind == "bytes":
            made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
            alphabet = pre_tokenizers.ByteLevel.alphabet()
        else:
            made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
            alphabet = sorted({character for text in texts for character in text})
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
        made.train_from_iterator(texts, trainer)
    made.add_special_tokens(SPECIAL)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    names = {"bos_token": "<s>", "eos_token": "</s>", **({} if kind == "bytes" else {"unk_token": "<unk>"})}
    result = PreTrainedTokenizerFast(tokenizer_object=made, **names)
    if chat:
        result.chat_template = CHAT_TEMPLATE
    return result
