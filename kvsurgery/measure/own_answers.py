"""A model's own long answers, to train its gates on: what heads do while it generates.

RLKV (Du et al. 2025) rewards gates for right answers of a reasoning model, by reinforcement learning. Here the model
answers once, and the gates are trained as DuoAttention's are, over the tokens of these answers instead of passkeys.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from blake3 import blake3

from kvsurgery.display.progress import Progress, silent
from kvsurgery.errors import ProfileError
from kvsurgery.measure.mesh import Mesh
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.measure.prompts import Contexts
from kvsurgery.system.files import write_bytes_whole
from kvsurgery.text.chat import turn_tokens
from kvsurgery.text.long_tasks import long_task
from kvsurgery.text.tokens import end_tokens

TOGETHER = 8  # answers generated at a time
# greedy answers of small models repeat themselves
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "top_k": 0}


class Answer(NamedTuple):
    """Token ids of a prompt, and of what the model answered."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class OwnAnswers:
    """Answers drawn for each step and place, prompt included no longer than the context of the step."""

    contexts: Contexts
    answers: list[Answer]

    @classmethod
    def of(
        cls,
        measured: MeasuredModel,
        contexts: Contexts,
        count: int,
        path: Path | None = None,
        progress: Progress = silent,
        mesh: Mesh = Mesh(),
    ) -> OwnAnswers:
        """Read the answers, or let the model answer sums and lists to recall.

        Args:
            contexts: an answer goes on until prompt and answer have the shortest context, and stops at the longest.
            count: answers that are generated.
            path: a file of answers, JSON lines of `{"prompt": [ids], "answer": [ids]}`: read where it exists, written
                where it does not.
            progress: of the answers that are generated.
            mesh: all processes generate the same.

        Raises:
            ProfileError: the shortest context has no room for an answer, or the file holds none of that length, or
                tokens that the model does not have.
            OutputError: the file cannot be written.
        """
        if path is not None and mesh.processes.agree(path.exists()):
            answers = read_answers(path)
            vocabulary_size = measured.model.config.get_text_config().vocab_size
            if any(max(entry.prompt + entry.answer, default=0) >= vocabulary_size for entry in answers):
                raise ProfileError(f"{path} has tokens that {measured.name} does not have; give answers of this model")
        else:
            answers = []
            for answer in generated(measured, contexts, count):
                answers.append(answer)
                progress(len(answers), None, f"of {count} answers generated")
            answers = mesh.processes.agree(answers)
            if path is not None and mesh.processes.rank == 0:
                lines = "".join(json.dumps(entry._asdict()) + "\n" for entry in answers)
                write_bytes_whole(path, lines.encode(), "answers")
        long_answers = [
            entry for entry in answers if len(entry.prompt) < contexts.shortest <= len(entry.prompt + entry.answer)
        ]
        if not long_answers:
            raise ProfileError(f"no answer has {contexts.shortest} tokens with its prompt; give a smaller minimum")
        return cls(contexts, long_answers)

    @property
    def facts(self) -> dict[str, Any]:
        """For a profile's provenance."""
        digest = blake3(json.dumps(self.answers).encode()).hexdigest()[:32]
        return {"prompts": "own answers", "answers": len(self.answers), "hash": digest, **asdict(self.contexts)}

    def __call__(self, step: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens int64 [1, tokens] and targets bool [1, tokens], True in the answer."""
        prompt, answer = self.answers[self.contexts.rng(step, place).integers(len(self.answers))]
        tokens = torch.tensor([prompt + answer])[:, : self.contexts.length(step)]
        targets = torch.zeros_like(tokens, dtype=torch.bool)
        targets[:, len(prompt) :] = True
        return tokens, targets


@torch.no_grad()
def generated(measured: MeasuredModel, contexts: Contexts, count: int) -> Iterator[Answer]:
    """The model's answers, sampled with the seed of the contexts.

    Raises:
        ProfileError: a prompt is as long as the shortest context, or the tokenizer does not know its words.
    """
    prompts = task_prompts(measured, count, contexts.seed)
    longest = max(map(len, prompts))
    if longest >= contexts.shortest:
        raise ProfileError(f"prompts have up to {longest} tokens, without an answer; give a larger `min_context`")
    ends = {*end_tokens(measured.model.generation_config)}
    for start in range(0, count, TOGETHER):
        batch = prompts[start : start + TOGETHER]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(each)) + each for each in batch])
        mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in batch])
        shortest_length = min(map(len, batch))
        with torch.random.fork_rng():
            torch.manual_seed(contexts.seed + start)
            sequences = measured.model.generate(  # ty: ignore[not-callable]  # it is GenerationMixin's
                ids.to(measured.model.device),
                attention_mask=mask.to(measured.model.device),
                min_new_tokens=contexts.shortest - shortest_length,
                max_new_tokens=contexts.longest - shortest_length,
                pad_token_id=0,
                **SAMPLING,
            )
        for prompt, answer in zip(batch, sequences[:, width:].tolist(), strict=True):
            end = next((place for place, token in enumerate(answer) if token in ends), len(answer))
            yield Answer(prompt, answer[: min(end, contexts.longest - len(prompt))])


def task_prompts(measured: MeasuredModel, count: int, seed: int) -> list[list[int]]:
    """The tokens of tasks with long answers.

    Raises:
        ProfileError: the tokenizer does not know their words.
    """
    prompts = [turn_tokens(measured.text, long_task(each, seed)).tolist() for each in range(count)]
    if any(measured.text.unk_token_id in each for each in prompts):
        raise ProfileError(
            f"the tokenizer of {measured.name} does not know all words of the tasks; give answers of its own"
        )
    return prompts


@torch.no_grad()
def token_seconds(measured: MeasuredModel, tokens: int) -> float:
    """How long a token of each answer of a batch takes here."""
    prompt = torch.ones(TOGETHER, 64, dtype=torch.int64, device=measured.model.device)
    start_time = time.perf_counter()
    measured.model.generate(  # ty: ignore[not-callable]  # it is GenerationMixin's
        prompt,
        attention_mask=torch.ones_like(prompt),
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=0,
        do_sample=False,
    )
    return (time.perf_counter() - start_time) / tokens


def read_answers(path: Path) -> list[Answer]:
    """Answers of a file of JSON lines.

    Raises:
        ProfileError: the file cannot be read, or a line is not an answer.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"cannot read answers {path}: {error}") from error
    answers = []
    for number, line in enumerate(lines, 1):
        try:
            answer = Answer(**json.loads(line))
            is_valid = all(type(token) is int and token >= 0 for token in answer.prompt + answer.answer)
        except (ValueError, TypeError, RecursionError):
            is_valid = False
        if not is_valid:
            raise ProfileError(f'{path}, line {number}: expected {{"prompt": [ids], "answer": [ids]}}')
        answers.append(answer)
    return answers
