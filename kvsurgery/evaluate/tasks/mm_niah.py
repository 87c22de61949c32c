"""MM-NIAH: needles in documents of text and images, for models that read both (Wang et al. 2024, arXiv 2406.07230)."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsurgery.errors import TextError, short
from kvsurgery.evaluate.images import image_processor, image_prompt
from kvsurgery.evaluate.rows import is_texts, named_files, numbered_rows
from kvsurgery.evaluate.sample import Reader, Sample, fewest
from kvsurgery.setting import THERE, samples_setting, setting

ANSWER_TOKENS = 32  # at most
TASKS = [f"{kind}-{needle}" for kind in ("retrieval", "counting", "reasoning") for needle in ("text", "image")]
ANNOTATIONS, IMAGES = "annotations", "images"  # folders
IMAGE_MARK = "<image>"
COLUMNS = {"images_list": list, "context": str, "question": str}
# how the benchmark groups lengths, from this number of tokens on, and depths
LENGTH_GROUPS = (1000, 2000, 4000, 8000, 12000, 16000, 24000, 32000, 40000, 48000, 64000)
DEPTH_GROUPS = 5
BY_LETTER = "Answer with the letter of the right option alone."
BY_WORDS = "Answer with a word, a number or a short phrase alone."


@dataclass(frozen=True)
class MMNIAHTask:
    """The benchmark's documents and questions, answer length and metrics; our wording of what an answer looks like.

    A document with its images is read whole: what does not fit in a model's context is left out.

    Attributes:
        source: a folder such as `mm_niah_val`, with `annotations` and `images.tar.gz` unpacked as `images`.
        tasks: such as "retrieval-text". None: all that the folder has.
        rows: the most samples of each task, the first ones. None: all.
    """

    source: str | None = setting(
        None, "mm_niah", "MM-NIAH's mm_niah_val or mm_niah_test from the Hub, with its images unpacked", default="none"
    )
    tasks: tuple[str, ...] | None = setting(None, "mm_niah_tasks", "tasks such as counting-image", default=THERE)
    rows: int | None = samples_setting()

    def check(self) -> None:
        """Check that there are files."""
        self._files()

    def samples(self, reader: Reader, limit: int | None = None) -> Iterator[Sample]:
        """Task by task, in the order of the rows.

        Raises:
            TextError: an image is missing or lies outside of the folder.
            UnsupportedModel: the model does not read images, or has no processor.
        """
        limit = fewest(limit, self.rows)
        assert reader.checkpoint is not None
        processor = image_processor(reader.checkpoint, reader.trust_remote_code)
        images, files = self._files()
        for task, path in files.items():
            for number, place, row in numbered_rows(path, COLUMNS, limit, config=task, split="test"):
                question = _Question.of(task, row, place)
                image_paths = [_image_path(images, name, place) for name in (*row["images_list"], *question.images)]
                parts = f"{row['context']}\n{question.text}".split(IMAGE_MARK)
                if len(parts) - 1 != len(image_paths):
                    raise TextError(f"{place}: {len(image_paths)} images are listed for {len(parts) - 1} {IMAGE_MARK}")
                prompt = image_prompt(processor, parts, image_paths)
                yield Sample(
                    task=f"mm_niah/{task}",
                    name=str(number),
                    tokens=prompt.tokens(),
                    metric=question.metric,
                    answers=question.answers,
                    limit=ANSWER_TOKENS,
                    facts=_facts(row, place),
                    images=prompt,
                )

    def _files(self) -> tuple[Path, dict[str, str]]:
        """The folder of images, and the paths of questions by task."""
        if self.source is None:
            raise TextError("`mm_niah` must name a folder, such as mm_niah_val of OpenGVLab/MM-NIAH on the Hub")
        folder = Path(self.source)
        for name in (ANNOTATIONS, IMAGES):
            if not (folder / name).is_dir():
                raise TextError(f"{folder} has no folder {name}; give MM-NIAH's, with images.tar.gz unpacked in it")
        return folder / IMAGES, named_files(str(folder / ANNOTATIONS), TASKS, self.tasks, "MM-NIAH")


@dataclass(frozen=True)
class _Question:
    """What is asked of a row: images among its options are in `images`, and in the text their placeholders."""

    text: str
    metric: str
    answers: tuple[str, ...]
    images: tuple[str, ...] = ()

    @classmethod
    def of(cls, task: str, row: Mapping[str, Any], place: str) -> _Question:
        """Of a row.

        Raises:
            TextError: options or answer are of another layout.
        """
        meta = row.get("meta")
        answer = row.get("answer")
        if not isinstance(meta, dict):
            raise TextError(f'{place}: "meta" must be an object')
        texts = _texts(meta, "choices", place)
        images = _texts(meta, "choices_image_path", place)
        if texts and images:
            raise TextError(f"{place}: options are texts or images, not both")
        if options := texts or [IMAGE_MARK] * len(images):
            if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < min(len(options), 26):
                raise TextError(f'{place}: "answer" must be the index of an option, got {short(answer)}')
            option_lines = (f"{chr(ord('A') + index)}. {option}" for index, option in enumerate(options))
            text = "\n".join([row["question"], *option_lines, BY_LETTER])
            return cls(text, "option_index", (str(answer),), tuple(images))
        if task.startswith("counting"):
            metric, answers = "counts_in_place", _numbers(answer, place)
        elif isinstance(answer, str) and answer.strip():
            metric, answers = "vqa_words", (answer,)
        else:
            raise TextError(f'{place}: "answer" must be text, got {short(answer)}')
        return cls(f"{row['question']}\n{BY_WORDS}", metric, answers)


def _texts(meta: Mapping[str, Any], name: str, place: str) -> list[str]:
    value = meta.get(name) or []
    if not is_texts(value):
        raise TextError(f'{place}: "{name}" must be a list of texts, or null')
    return value


def _numbers(answer: Any, place: str) -> tuple[str, ...]:
    """The numbers of a list, which some files have as text."""
    numbers = answer
    if isinstance(answer, str):
        try:
            numbers = json.loads(answer)
        except (ValueError, RecursionError):
            numbers = None
    if not isinstance(numbers, list) or not numbers or not all(type(number) is int for number in numbers):
        raise TextError(f'{place}: "answer" must be a list of whole numbers, got {short(answer)}')
    return tuple(map(str, numbers))


def _image_path(folder: Path, name: str, place: str) -> Path:
    """The path of an image.

    Raises:
        TextError: there is none in the folder.
    """
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise TextError(f"{place}: the image {short(name)} is outside of {folder}")
    if not path.is_file():
        raise TextError(f"{place}: there is no image {short(name)} in {folder}")
    return path


def _facts(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Length and depth as the benchmark groups them; shorter documents are with those of 1,000 tokens."""
    length = row["meta"].get("context_length")
    depth = row["meta"].get("placed_depth")
    depths = depth if isinstance(depth, list) else [depth]
    if not _is_number(length) or not depths or not all(_is_number(value) and 0 <= value <= 1 for value in depths):
        raise TextError(f'{place}: "context_length" must be a number, and "placed_depth" one or several from 0 to 1')
    group = min(int(DEPTH_GROUPS * sum(depths) / len(depths)), DEPTH_GROUPS - 1)
    return {"tokens": LENGTH_GROUPS[max(0, bisect_right(LENGTH_GROUPS, length) - 1)], "depth": group / DEPTH_GROUPS}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


TASK = MMNIAHTask
