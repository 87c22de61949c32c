"""The marker that opens a user's turn in a chat template, as token ids."""

from __future__ import annotations

import itertools
from pathlib import Path

FIRST, REPLY, SECOND = "Astrolabe?", "Bergamot.", "Cormorant?"  # texts that no template has


def user_marker(folder: Path) -> tuple[int, ...]:
    """Token ids of the marker that a chat template puts before every text of the user; empty without a template.

    The marker is the longest common suffix of the text before a first turn and the text between a reply and a second
    turn, without trailing blanks, which tokenizers join to the next word.
    """
    if not (folder / "tokenizer_config.json").exists():
        return ()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        assert tokenizer is not None  # its type in transformers allows None
        if not tokenizer.chat_template:
            return ()
        texts = (("user", FIRST), ("assistant", REPLY), ("user", SECOND))
        turns = [{"role": role, "content": content} for role, content in texts]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        assert isinstance(text, str)
    except Exception:  # a tokenizer or a template may raise anything; without it, questions are counted from the end
        return ()
    before = text.partition(FIRST)[0]
    between = text.partition(REPLY)[2].partition(SECOND)[0]
    common_pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before[::-1], between[::-1], strict=False))
    marker = "".join(letter for letter, _ in common_pairs)[::-1].rstrip()
    return tuple(tokenizer(marker, add_special_tokens=False)["input_ids"]) if marker else ()
