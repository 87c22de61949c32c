"""The metric of RepoQA (Liu et al. 2024), as in SCBench: whether an answer repeats the right function."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from kvsurgery.errors import KVSurgeryError
from kvsurgery.version import how_to_install

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

SIMILAR = 0.8  # BLEU from which on an answer is the function
# language -> package, the name of its grammar there, and the type of a function node in its syntax trees
LANGUAGES = {
    "python": ("tree_sitter_python", "language", "function_definition"),
    "java": ("tree_sitter_java", "language", "method_declaration"),
    "typescript": ("tree_sitter_typescript", "language_typescript", "function_declaration"),
    "rust": ("tree_sitter_rust", "language", "function_item"),
    "cpp": ("tree_sitter_cpp", "language", "function_definition"),
    "go": ("tree_sitter_go", "language", "function_declaration"),
}
CODE_BLOCK = re.compile(r"^```\w*\s*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def repeated_function(answer: str, references: Sequence[str], choices: Sequence[str]) -> float:
    """1 if the right function is the most similar one to an answer, with a BLEU of at least 0.8.

    In an answer with code blocks, the first function in a block counts, or else the first block.

    Args:
        references: the function and its programming language.
        choices: the functions of the same repository.

    Raises:
        KVSurgeryError: the packages that parse and compare are not installed.
    """
    reference, language = references
    parser = _parser(language)
    answer = answer.strip()
    blocks = CODE_BLOCK.findall(answer)
    functions = (function for block in blocks if (function := _first_function(parser, block, language)) is not None)
    code = next(functions, blocks[0] if blocks else answer)
    similarities = {choice: _bleu(code, choice) for choice in choices}
    best_choice = max(similarities, key=similarities.__getitem__)
    return float(best_choice == reference and similarities[best_choice] >= SIMILAR)


def require_parsers() -> None:
    """Check that the packages of the metric are installed, before the work whose result it measures.

    Raises:
        KVSurgeryError: a package is missing.
    """
    for language in LANGUAGES:
        _parser(language)


def _parser(language: str) -> Parser:
    package, grammar, _ = LANGUAGES[language]
    try:
        import nltk.translate.bleu_score  # noqa: F401
        import tree_sitter

        capsule = getattr(import_module(package), grammar)()
        return tree_sitter.Parser(tree_sitter.Language(capsule))  # ty: ignore[deprecated]  # an integer would be
    except ImportError as error:
        raise KVSurgeryError(f"RepoQA's metric needs {error.name}: {how_to_install('eval')}") from error


def _first_function(parser: Parser, code: str, language: str) -> str | None:
    source, kind = code.encode(errors="replace"), LANGUAGES[language][2]
    for node in _nodes(parser.parse(source).root_node):
        if node.type == kind and (language != "cpp" or _is_free(node)):
            return source[node.start_byte : node.end_byte].decode()
    return None


def _nodes(root: Node) -> Iterator[Node]:
    """All nodes of a syntax tree in the order of the text, outer ones first."""
    stack = [root]  # a tree may be deeper than Python's stack
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(node.children))


def _is_free(function: Node) -> bool:
    """Whether a function of C++ has a plain name: neither a class before it, nor a pointer as its result."""
    declarator = function.child_by_field_name("declarator")
    name = declarator and declarator.child_by_field_name("declarator")
    return bool(declarator and name) and (declarator.type, name.type) == ("function_declarator", "identifier")


def _bleu(answer: str, reference: str) -> float:
    """BLEU of up to four words in a row, smoothed for short texts (Chen and Cherry 2014, method 4), 0 to 1."""
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    words = re.split(r"\s+", answer.strip())
    reference_words = re.split(r"\s+", reference.strip())
    return float(sentence_bleu([reference_words], words, smoothing_function=SmoothingFunction().method4))
