"""A model's answers to a batch of samples, with their scores, or the reason why there is none."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvsurgery.errors import KVSurgeryError
from kvsurgery.evaluate import decoding
from kvsurgery.evaluate.sample import Sample
from kvsurgery.metrics.registry import METRICS
from kvsurgery.text.tokens import text_of

TOKEN_ACCURACY = "token_accuracy"
GATHERED_ALONE = "processes that share a model do not read beyond its recompute budget"
GATHERED_FIRST = "a prompt beyond the recompute budget cannot be read before its question is known"


@dataclass(frozen=True, eq=False)
class Respondent:
    """A model that answers.

    Attributes:
        tokenizer: decodes its answers.
        chunk: tokens of a prompt that it reads at once. None: all.
        shared: whether other processes share the model, and wait for this one.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    chunk: int | None = None
    shared: bool = False

    def records(self, batch: Sequence[Sample], report: Callable[[str], None]) -> list[dict[str, Any]]:
        """A record of each sample, as a file of answers has it.

        Samples beyond the model's context, and those with a prompt of fewer than two tokens, are skipped. A batch that
        runs out of memory is read sample by sample, and a sample that does so alone is skipped.

        Args:
            batch: samples of one `Sample.kind`.
            report: called now and then with a note on the progress.
        """
        records = [_skip_record(sample, reason) for sample in batch if (reason := self.unusable_reason(sample))]
        fitting_samples = [sample for sample in batch if not self.unusable_reason(sample)]
        if not fitting_samples:
            return records
        try:
            return records + self._responses(fitting_samples, report)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            if self.shared:
                longest_tokens = max(len(sample.tokens) for sample in fitting_samples)
                raise KVSurgeryError(f"out of memory at {longest_tokens:,} tokens; leave longer prompts out") from error
        # only here, where nothing holds the frames of the failure any longer
        free()
        if len(fitting_samples) == 1:
            return [*records, _skip_record(fitting_samples[0], "out of memory")]
        return records + [record for sample in fitting_samples for record in self.records([sample], report)]

    def unusable_reason(self, sample: Sample) -> str | None:
        """Why a sample is too short or too long, if it is. What REFORM reads may be longer than the context."""
        if len(sample.tokens) < 2:  # one for the cache, and one that the answer begins after
            return "the prompt has fewer than 2 tokens"
        positions = self.model.config.get_text_config().max_position_embeddings
        prompt = len(sample.tokens)
        budget = decoding.recompute_budget(self.model)
        if self.shared and budget is not None and prompt > budget:
            return GATHERED_ALONE
        if sample.context and budget is not None and sample.positions > budget:
            return GATHERED_FIRST
        if budget is not None and not sample.continuation:
            prompt = min(prompt, budget)
        if prompt + sample.positions - len(sample.tokens) <= positions:
            return None
        return f"prompt and answer are beyond {positions} positions"

    def _responses(self, batch: Sequence[Sample], report: Callable[[str], None]) -> list[dict[str, Any]]:
        first, rows = batch[0], [sample.tokens for sample in batch]
        report(first.task)
        if first.continuation:

            def step(done: int) -> None:
                report(f"{first.task}, token {done} of {first.continuation}")

            losses = decoding.mean_nll(self.model, rows, first.continuation, chunk=self.chunk, progress=step)
            return [{**_record(sample), "nll": nll} for sample, nll in zip(batch, losses, strict=True)]
        if first.context:
            limits = [sample.limit for sample in batch]
            answers = decoding.later_answers(
                self.model, self.tokenizer, rows, limits, first.context, stops=first.stops, chunk=self.chunk
            )
            return [self._answer_record(sample, tokens) for sample, tokens in zip(batch, answers, strict=True)]
        limit = max(sample.limit for sample in batch)
        images = first.images.inputs() if first.images else None
        answers = decoding.answers(
            self.model, self.tokenizer, rows, limit, stops=first.stops, chunk=self.chunk, images=images
        )
        return [self._answer_record(sample, tokens) for sample, tokens in zip(batch, answers, strict=True)]

    def _answer_record(self, sample: Sample, tokens: list[int]) -> dict[str, Any]:
        """An answer, cut at the sample's own limit and before a text that stops it, with its scores."""
        tokens = tokens[: sample.limit]
        text = text_of(self.tokenizer, tokens, skip_special_tokens=True).lstrip("\n")
        stop_places = (place for stop in sample.stops if (place := text.find(stop)) >= 0)
        text = text[: min(stop_places, default=len(text))].rstrip()
        if sample.grade:
            scores = dict(sample.grade(text))
        else:
            scores = {metric: score(metric, sample, text, tokens) for metric in sample.metrics}
        return {**_record(sample), "answer": text, "tokens": tokens, "scores": scores}


def score(metric: str, sample: Sample, text: str, tokens: Sequence[int]) -> float:
    """The score of an answer, 0 to 1."""
    if metric == TOKEN_ACCURACY:
        assert sample.answer_tokens is not None  # samples of this metric have them
        targets = sample.answer_tokens.tolist()
        return sum(token == target for token, target in zip(tokens, targets, strict=False)) / len(targets)
    return float(METRICS[metric](text, sample.answers, sample.choices))


def ran_out(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on a device or on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def free() -> None:
    """Free the memory that nothing refers to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _record(sample: Sample) -> dict[str, Any]:
    return {"task": sample.task, "sample": sample.name}


def _skip_record(sample: Sample, reason: str) -> dict[str, Any]:
    return {**_record(sample), "skipped": reason}
