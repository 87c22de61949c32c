"""Rows of a benchmark's data: of a local file or folder, or of a dataset on the Hub."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeGuard

from kvsurgery.errors import TextError, short
from kvsurgery.system.files import check_readable, parse_json, reading_text
from kvsurgery.system.repo_id import is_repo_id
from kvsurgery.text.hub_dataset import dataset_rows, require_datasets

ENDINGS = (".jsonl", ".json")
LONGEST_LINE = 1 << 26  # characters
LARGEST_FILE = 1 << 28  # bytes, of JSON that is read in one piece
TYPE_NAMES: dict[type, str] = {str: "text", int: "a whole number", list: "a list of texts"}

OPTION_METRIC = "chosen_option"  # of rows with four options
OPTION_FIELDS = tuple(f"OPTION_{letter}" for letter in "ABCD")  # fields of prompts
NUMERIC_METRIC = "first_number"  # whose answers are numbers

Columns = Mapping[str, type]  # str, int or list (of texts) by name


def table_beside(module: str) -> dict[str, Any]:
    """Read the TOML file of the same name beside a module: what a benchmark's tasks ask, and how they are measured.

    Args:
        module: its `__file__`.
    """
    return tomllib.loads(Path(module).with_suffix(".toml").read_text(encoding="utf-8"))


def read_rows(source: str, columns: Columns, *, config: str, split: str) -> Iterator[dict[str, Any]]:
    """Rows, each with the columns that are asked for; they may have more. They are read as they are taken.

    Args:
        source: a JSONL file, a JSON file with a list, or a dataset's id.
        columns: and their types.
        config, split: of a dataset.

    Raises:
        TextError: it cannot be read, a column is missing or of another type, or there are no rows. The line says where.
    """
    path, number = Path(source), 0
    if path.is_file():
        rows = _json_rows(path) if _begins_with(path, "[") else _lines(path)
    elif is_repo_id(source) and not path.exists():
        hub_rows = enumerate(dataset_rows(source, config, split), 1)
        rows = ((f"{source} {config}/{split}, row {number}", row) for number, row in hub_rows)
    else:
        raise TextError(f"cannot read rows of {source}: there is no such file, and it is not the Hub id of a dataset")
    for number, (place, row) in enumerate(rows, 1):  # noqa: B007  (counted)
        _check_row(row, columns, place)
        yield row
    if not number:
        raise TextError(f"{source} holds no rows")


def numbered_rows(
    source: str, columns: Columns, limit: int | None = None, *, config: str, split: str
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The first rows, as `read_rows` has them, each after its number from 0 on and what an error calls it.

    Args:
        limit: how many. None: all.
    """
    rows = islice(read_rows(source, columns, config=config, split=split), limit)
    return ((number, f"{source}, row {number + 1}", row) for number, row in enumerate(rows))


def check_source(source: str) -> None:
    """Check that there can be rows in a source, a file, a folder or a dataset's id, before the work that precedes them.

    Raises:
        KVSurgeryError: it cannot be read, or `datasets` is not installed.
    """
    path = Path(source)
    if path.is_dir():
        return
    if path.exists() or not is_repo_id(source):
        check_readable(path)
    else:
        require_datasets(source)


def in_folder(source: str, name: str) -> str:
    """The file of a name in a folder, with either ending; a source that is not a folder, as it is.

    Raises:
        TextError: the folder has no such file.
    """
    folder = Path(source)
    if not folder.is_dir():
        return source
    for ending in ENDINGS:
        if (path := folder / f"{name}{ending}").is_file():
            return str(path)
    raise TextError(f"{folder} has no {' or '.join(name + ending for ending in ENDINGS)}")


def named_files(source: str, names: Sequence[str], selection: Sequence[str] | None, benchmark: str) -> dict[str, str]:
    """What is read of a benchmark, by the names of its files without endings: paths, or the dataset's id.

    Args:
        names: those that the benchmark has.
        selection: some of them. None: all that a folder has, the one that a file is, or of a dataset's id all.

    Raises:
        TextError: a name is unknown, or the source does not have it.
        KVSurgeryError: a file cannot be read, or the package `datasets` is not installed.
    """
    if unknown_names := {*(selection or ())} - {*names}:
        raise TextError(f"{benchmark} has no {', '.join(sorted(unknown_names))}; it has {', '.join(names)}")
    path = Path(source)
    present_names = list(names)
    if path.is_dir():
        present_names = [name for name in names if any((path / f"{name}{ending}").is_file() for ending in ENDINGS)]
    elif path.is_file():
        present_names = [name for name in names if name == path.stem]
    missing_names = [name for name in selection or () if name not in present_names]
    if missing_names or not present_names:
        raise TextError(f"{path} has no file of {benchmark} that is called {(missing_names or names)[0]}.jsonl")
    check_source(source)
    return {name: in_folder(source, name) for name in present_names if name in (selection or names)}


def is_texts(value: object) -> TypeGuard[list[str]]:
    """Whether a value of a row is a list of texts."""
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def four_options(row: Mapping[str, Any], place: str) -> list[str]:
    """The options of a row, or of one of its questions.

    Args:
        place: what an error calls the row.

    Raises:
        TextError: they are not four texts.
    """
    options = row.get("options")
    if not is_texts(options) or len(options) != 4:
        raise TextError(f'{place}: "options" must be four texts')
    return options


def option_fields(row: Mapping[str, Any], metric: str, place: str) -> dict[str, str]:
    """The fields of a prompt that are called `OPTION_FIELDS`; empty where the metric is for rows without options.

    Raises:
        TextError: as `four_options`.
    """
    options = four_options(row, place) if metric == OPTION_METRIC else [""] * len(OPTION_FIELDS)
    return dict(zip(OPTION_FIELDS, options, strict=True))


def right_answers(row: Mapping[str, Any], metric: str, place: str) -> tuple[str, ...]:
    """What is right, as texts: a row's `answer` is a text, a number or a list of them. Of options, text and letter.

    Args:
        metric: which the answers are for.
        place: what an error calls the row.

    Raises:
        TextError: there is none, or none that the metric can be counted with.
    """
    answer = row.get("answer")
    while isinstance(answer, list) and len(answer) == 1:
        [answer] = answer
    answers = tuple(map(str, answer)) if isinstance(answer, list) else () if answer is None else (str(answer),)
    if metric == OPTION_METRIC:
        options = four_options(row, place)
        if not answers or answers[0] not in options:
            raise TextError(f'{place}: "answer" must be one of "options"')
        return (answers[0], "ABCD"[options.index(answers[0])])
    if not answers or (metric == NUMERIC_METRIC and not all(re.fullmatch(r"-?\d+(\.\d+)?", text) for text in answers)):
        raise TextError(f'{place}: "answer" must be {"numbers" if metric == NUMERIC_METRIC else "texts"}')
    return answers


def read_json(path: str | Path) -> Any:
    """Content of a JSON file of at most 256 MiB.

    Raises:
        TextError: it cannot be read, is larger, or is not JSON of whole characters.
    """
    path = Path(path)
    with reading_text(path):
        if path.stat().st_size > LARGEST_FILE:
            raise TextError(f"{path} is over {LARGEST_FILE >> 20} MiB; give JSON lines, or fewer of them")
        text = path.read_text(encoding="utf-8-sig")
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise TextError(f"{path} is not JSON: {error}") from error


def _begins_with(path: Path, character: str) -> bool:
    with reading_text(path), open(path, encoding="utf-8-sig", errors="replace") as file:
        return file.read(1 << 10).lstrip()[:1] == character


def _json_rows(path: Path) -> Iterable[tuple[str, Any]]:
    return ((f"{path}, row {number}", row) for number, row in enumerate(read_json(path), 1))


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with reading_text(path), open(path, encoding="utf-8-sig", newline="\n") as file:
        for number in count(1):
            line, place = file.readline(LONGEST_LINE), f"{path}, line {number}"
            if not line:
                return
            if len(line) == LONGEST_LINE:
                raise TextError(f"{place}: over {LONGEST_LINE >> 20} million characters; this is not a row")
            if line.strip():
                yield place, _parse_json(line, place)


def _parse_json(line: str, place: str) -> Any:
    try:
        return parse_json(line)
    except (ValueError, RecursionError) as error:
        raise TextError(f"{place}: not JSON: {error}") from error


def _check_row(row: Any, columns: Columns, place: str) -> None:
    if not isinstance(row, dict):
        fields_text = f" with the fields {', '.join(columns)}" if columns else ""
        raise TextError(f"{place}: not a JSON object{fields_text}")
    for name, kind in columns.items():
        if name not in row:
            raise TextError(f'{place}: "{name}" is missing; the fields are {", ".join(columns)}')
        value = row[name]
        is_valid = is_texts(value) if kind is list else isinstance(value, kind) and not isinstance(value, bool)
        if not is_valid:
            raise TextError(f'{place}: "{name}" must be {TYPE_NAMES[kind]}, got {short(value)}')
