"""Which function of a repository an answer repeats, in the six languages of RepoQA."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.metrics.registry import METRICS

# a function, and what stands before it in a code block
CODE = {
    "python": (
        "def area(self, scale):\n    width, height = self.size\n    return width * height * scale",
        "import os\n",
    ),
    "java": (
        "public int area(int scale) {\n  int side = this.width;\n  return side * this.height * scale;\n}",
        "class A {\n",
    ),
    "typescript": (
        "function area(a: Box, scale: number) {\n  const side = a.width;\n  return side * scale;\n}",
        "let b = 1;\n",
    ),
    "rust": (
        "fn area(a: &Box, scale: i32) -> i32 {\n  let side = a.width;\n  side * a.height * scale\n}",
        "use a::b;\n",
    ),
    "cpp": (
        "int area(const Box& a, int scale) {\n  int side = a.width;\n  return side * a.height * scale;\n}",
        "#include <a>\n",
    ),
    "go": (
        "func area(a Box, scale int) int {\n  side := a.width\n  return side * a.height * scale\n}",
        "package a\n\n",
    ),
}
OTHER = "def put(place, row):\n    rows[place] = row\n    return rows"


def score(said, language="python", others=(OTHER,)):
    function = CODE[language][0]
    return METRICS["repeated_function"](said, (function, language), (*others, function))


@pytest.mark.parametrize("language", CODE)
def test_the_first_function_of_a_code_block_counts(language):
    function, before = CODE[language]
    after = "\n}" * (language == "java") + "\nx y z w v u t s r q p o n m l k j" * 3
    assert score(function, language) == 1
    assert score(f"Here it is:\n```\n{function}\n```\nThat is all there is to it, and nothing else.", language) == 1
    # with what stands around it, the block is not similar enough
    assert score(f"```{language}\n{before}{function}{after}\n```", language) == 1
    assert score(f"{before}{function}{after}", language) == 0


def test_blocks_without_a_function_are_passed_over():
    function = CODE["python"][0]
    assert score(f"```\nx = 1\n```\n```\n{function}\n```") == 1
    assert score("```\nx = 1\n```\n```\ny = 2\n```") == 0
    body = "return width * height"
    assert METRICS["repeated_function"](f"```\n{body}\n```\n{OTHER}", (body, "python"), (OTHER, body)) == 1


def test_methods_of_cpp_are_not_what_is_asked_for():
    """As the benchmark's query has it: a function with a qualified name is passed over."""
    function = CODE["cpp"][0]
    assert score(f"```cpp\nint Box::side() {{\n  return 1;\n}}\n{function}\n```", "cpp") == 1


def test_the_right_function_must_be_the_most_similar_one():
    function = CODE["python"][0]
    renamed = function.replace("area", "volume")
    assert score(renamed) == 1
    assert score(renamed, others=(renamed,)) == 0


@pytest.mark.parametrize(("kept", "expected"), [(12, 1), (8, 0), (0, 0)])
def test_half_a_function_is_not_it(kept, expected):
    words = CODE["python"][0].split()
    assert len(words) == 13
    assert score(" ".join(words[:kept])) == expected


@given(st.text(st.sampled_from("`\ndef():x \ud800"), max_size=30), st.sampled_from([*CODE]))
def test_any_text_can_be_an_answer(said, language):
    assert score(said, language) in (0, 1)
