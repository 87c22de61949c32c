"""MT-Bench: open questions of two turns, whose answers are for a judge (Zheng et al. 2023, arXiv 2306.05685)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvsurgery.errors import TextError
from kvsurgery.evaluate.rows import check_source, in_folder, is_texts, numbered_rows
from kvsurgery.evaluate.sample import Conversation, Reader, Sample, fewest
from kvsurgery.setting import SOURCE, samples_setting, setting
from kvsurgery.text.chat import around_turn, between_turns, turn_tokens
from kvsurgery.text.tokens import token_ids

ANSWER_TOKENS = 1024  # at most


@dataclass(frozen=True)
class MTBenchTask:
    """The benchmark's questions as they are. The model decodes greedily, and no score of ours is made of its answers.

    The second turn is read after the model's own first answer, on the same cache.

    Attributes:
        source: a dataset's id, a folder with `question.jsonl`, or one file.
        limit: tokens of an answer at most.
        rows: the most samples, the first ones. None: all.
    """

    source: str = setting("HuggingFaceH4/mt_bench_prompts", "mt_bench", SOURCE)
    limit: int = setting(ANSWER_TOKENS, "mt_bench_tokens", "maximum number of tokens of an answer", tokens=True)
    rows: int | None = samples_setting()

    def check(self) -> None:
        """Check that the source can be read."""
        check_source(self.source)

    def samples(self, reader: Reader, limit: int | None = None) -> Iterator[Sample]:
        """One of each row, in their order.

        Raises:
            UnsupportedModel: there is no chat template for a conversation.
        """
        limit = fewest(limit, self.rows)
        tokenizer, source = reader.tokenizer, in_folder(self.source, "question")
        separator, turn_affixes = between_turns(tokenizer), around_turn(tokenizer)
        assert turn_affixes is not None  # as there is a template
        for _, place, row in numbered_rows(source, {"category": str}, limit, config="default", split="train"):
            # FastChat's file and the Hub's call them differently
            turns, name = row.get("turns", row.get("prompt")), row.get("question_id", row.get("prompt_id"))
            reference = row.get("reference") or []
            if not turns or name is None or not all(map(is_texts, (turns, reference))):
                raise TextError(f'{place}: "question_id" must be there, and "turns" and "reference" lists of texts')
            later_turns = (token_ids(tokenizer, separator + turn + turn_affixes[1]) for turn in turns[1:])
            yield Sample(
                task="mt_bench",
                name=str(name),
                tokens=turn_tokens(tokenizer, turns[0]),
                metric=None,
                limit=self.limit,
                conversation=Conversation(
                    tuple(turns), tuple(np.array(tokens, dtype=np.int64) for tokens in later_turns), tuple(reference)
                ),
                facts={"category": row["category"]},
            )


TASK = MTBenchTask
