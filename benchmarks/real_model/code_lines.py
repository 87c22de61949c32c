"""Files of one package to read, and lines of its other files that use what those define.

A question is the beginning of a file: its path, its imports, and the last tokens before a line that is to be completed.
The line uses a name that a read file defines, no other file of the package defines, and the question does not mention.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from kvsurgery.text.tokens import text_of, token_ids

LEAST = 10  # characters of a line that are not spaces
PER_FILE = 3  # questions at most
LONGEST = 256  # tokens before a line, with its file's imports
COMMON = {*dir(builtins), *(name for kind in (str, bytes, list, dict, set, tuple) for name in dir(kind))}


@dataclass(frozen=True)
class Line:
    """A line to complete.

    Attributes:
        path: of its file.
        number: from 1.
        name: defined in a file that was read.
        prefix: tokens before it, the line's indentation included, int64 [tokens].
        tokens: of the line, the end of the line included, int64 [tokens].
        in_name: which of them have a character of the name, bool [tokens].
    """

    path: str
    number: int
    name: str
    prefix: np.ndarray
    tokens: np.ndarray
    in_name: np.ndarray


@dataclass(frozen=True)
class Repository:
    """Files of a package that are read, and lines of other files.

    Attributes:
        paths: of the files that are read.
        text: their tokens, int64 [tokens].
    """

    package: str
    paths: tuple[str, ...]
    text: np.ndarray
    lines: tuple[Line, ...]


def repository(
    package: str,
    files: Mapping[str, str],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    questions: int,
    before: int,
    new: int,
    seed: int,
) -> Repository:
    """Choose files of a package that fit in `length` tokens together, and draw lines of others that use them.

    Args:
        files: sources by path; those that do not parse are left out.
        before: tokens right before a line.
        new: tokens of a line at most.

    Raises:
        ValueError: there are too few lines.
    """
    trees = {path: tree for path, source in files.items() if (tree := _parsed(source)) is not None}
    paths, text = _read(files, trees, tokenizer, length)
    candidates = list(_candidates(files, trees, paths))
    lines: list[Line] = []
    for place in np.random.default_rng([seed, length]).permutation(len(candidates)):
        path, number, name = candidates[place]
        per_file = Counter(line.path for line in lines)
        if name in (line.name for line in lines) or per_file[path] == PER_FILE:
            continue
        source = files[path].splitlines(keepends=True)
        prefix = _prefix(path, source[: number - 1], trees[path], name, tokenizer, before)
        indent, tokens, in_name = _line(source[number - 1], name, tokenizer)
        fits = len(prefix) <= LONGEST and len(tokens) <= new
        if fits and not mentions(text_of(tokenizer, prefix), name):
            lines.append(Line(path, number, name, np.concatenate([prefix, indent]), tokens, in_name))
        if len(lines) == questions:
            return Repository(package, paths, text, tuple(lines))
    raise ValueError(f"{package} has {len(lines)} lines to ask for, not {questions}")


def mentions(text: str, name: str) -> bool:
    """Whether a text has a name as a word."""
    return re.search(rf"\b{name}\b", text) is not None


def _line(line: str, name: str, tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of a line's indentation, its other tokens, and which of these have a character of a name."""
    encoded = tokenizer(line, add_special_tokens=False, return_offsets_mapping=True)
    tokens = np.array(encoded["input_ids"], np.int64)
    spans = np.array(encoded["offset_mapping"])
    indent = sum(not line[:stop].strip() for stop in spans[:, 1])
    start, stop = next(match.span() for match in re.finditer(rf"\b{name}\b", line))
    in_name = (spans[:, 0] < stop) & (spans[:, 1] > start)
    return tokens[:indent], tokens[indent:], in_name[indent:]


def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def _read(
    files: Mapping[str, str], trees: Mapping[str, ast.Module], tokenizer: PreTrainedTokenizerBase, length: int
) -> tuple[tuple[str, ...], np.ndarray]:
    """Paths and tokens of files that fit, beginning with those that most other files import."""
    users = Counter(module for tree in trees.values() for module in _imports(tree))
    paths: list[str] = []
    text: list[int] = []
    for path in sorted(trees, key=lambda path: (-users[_module(path)], path)):
        tokens = token_ids(tokenizer, f"# {path}\n{files[path].strip()}\n\n")
        if _definitions(trees[path]) and len(text) + len(tokens) <= length:
            paths.append(path)
            text += tokens
    return tuple(paths), np.array(text, np.int64)


def _module(path: str) -> str:
    """The last part of a module's name, as imports have it."""
    return path.removesuffix(".py").removesuffix("/__init__").rpartition("/")[2]


def _imports(tree: ast.Module) -> set[str]:
    """Last parts of the names of modules that a file imports from."""
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {module.rpartition(".")[2] for module in modules}


def _definitions(tree: ast.Module) -> set[str]:
    """Names that a file defines at its top level and in its classes, private ones aside."""
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    names = {name for body in bodies for node in body for name in _defined(node)}
    return {name for name in names if not name.startswith("_")}


def _defined(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def _candidates(
    files: Mapping[str, str], trees: Mapping[str, ast.Module], paths: tuple[str, ...]
) -> Iterator[tuple[str, int, str]]:
    """Path, line and name of every use of a name that only files that are read define."""
    names = set().union(*(_definitions(trees[path]) for path in paths)) - COMMON
    others = sorted(trees.keys() - set(paths))
    names = names.difference(*(_definitions(trees[path]) for path in others))
    for path in others:
        tree, source = trees[path], files[path].splitlines()
        own_names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_stored(node)}
        own_names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and _is_stored(node)}
        own_names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        uses = {use for node in ast.walk(tree) for use in _used(node)}
        for number, name in sorted(uses):
            if name in names - own_names and len("".join(source[number - 1].split())) >= LEAST:
                yield path, number, name


def _is_stored(node: ast.Attribute | ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _used(node: ast.AST) -> list[tuple[int, str]]:
    """Line and name of a use: a variable, an attribute or a keyword."""
    match node:
        case ast.Name(id=name, lineno=number) | ast.Attribute(attr=name, end_lineno=int(number)):
            return [(number, name)]
        case ast.keyword(arg=str(name), lineno=number):
            return [(number, name)]
    return []


def _prefix(
    path: str, source: list[str], tree: ast.Module, name: str, tokenizer: PreTrainedTokenizerBase, before: int
) -> np.ndarray:
    """A file's path, its imports but that of a name, and the last tokens up to a line, int64 [tokens]."""
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    end = max((node.end_lineno or 0 for node in imports), default=0)
    statements = ["".join(source[node.lineno - 1 : node.end_lineno]) for node in imports]
    shown = "".join(statement for statement in statements if not mentions(statement, name))
    head = token_ids(tokenizer, f"# {path}\n{shown}\n")
    return np.array(head + token_ids(tokenizer, "".join(source[end:]))[-before:], np.int64)
