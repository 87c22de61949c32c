"""Which measured lines stand behind the decision table of the README."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """A workload on an engine, and the line of a table that shows what the README's options do there.

    Attributes:
        workload, engine: as the README has them.
        model: that was measured.
        section: where the table stands, as docs/results.md links to it.
        table: its name in the docs.
        line: the line's first cell.
        columns: that are quoted, also from the line of the original, where the table begins with one.
    """

    workload: str
    engine: str
    model: str
    section: str
    table: str
    line: str
    columns: tuple[str, ...]


QWEN, SMOLLM2 = "Qwen2.5-Coder-1.5B", "SmolLM2"
TRANSFORMERS, VLLM = "transformers", "vLLM"
ANY, CHATS, SERVED = "any, without a profile", "chats, agents, many turns", "vllm.md#throughput"
ORIGINALS = "original", "full attention"
SERVING = "requests per CPU second", "mean concurrent requests"
CHOICES = (
    Choice(
        ANY,
        TRANSFORMERS,
        QWEN,
        "results/qwen.md#which-cache",
        "which-cache-qwen",
        "kvsurgery, all heads full, 4 bits",
        ("bytes", "facts recalled"),
    ),
    Choice(ANY, VLLM, QWEN, SERVED, "vllm-serving-qwen", "100% full, 4 bits", SERVING),
    Choice(
        CHATS,
        TRANSFORMERS,
        SMOLLM2,
        "results/caches.md#which-cache-on-a-real-language-model",
        "which-cache",
        "kvsurgery, 50% of heads full by gates",
        ("bytes", "facts recalled"),
    ),
    Choice(CHATS, VLLM, SMOLLM2, SERVED, "vllm-serving-codes", "50% full, 4 bits", SERVING),
    Choice(
        "a question about a document",
        TRANSFORMERS,
        SMOLLM2,
        "results/caches.md#asked-at-the-end",
        "which-cache-at-end",
        "kvsurgery, budgets of 512 by er, 4 bits",
        ("bytes", "asked at the end", "asked later"),
    ),
    Choice(
        "very long answers",
        TRANSFORMERS,
        SMOLLM2,
        "results/caches.md#rolling-budgets-on-a-real-language-model",
        "long-answers",
        "budgets of 451 that hold, 4 bits",
        ("KV bytes", "same next token", "facts of the prompt"),
    ),
    Choice(
        "prompts beyond the context",
        TRANSFORMERS,
        SMOLLM2,
        "results/long-prompts.md#beyond-the-context-of-a-real-language-model",
        "beyond-context",
        "REFORM",
        ("8,000 tokens", "64,000 tokens"),
    ),
    Choice(
        "a fixed amount of memory",
        TRANSFORMERS,
        SMOLLM2,
        "memory-budget.md#how-a-policy-is-priced",
        "memory-budgets",
        "640 MiB",
        ("choice of `fit`", "best of all widths", "choice above best"),
    ),
)


def table(lines_of: Mapping[str, Callable[[], list[str]]]) -> list[str]:
    """Lines of a Markdown table that quotes other tables, by their names."""
    columns = ["workload", "engine", "model", "line", "columns", "values", "the original's"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for choice in CHOICES:
        header, _, *rows = (line.strip("| ").split(" | ") for line in lines_of[choice.table]())
        places = [header.index(column) for column in choice.columns]
        [row] = (row for row in rows if row[0] == choice.line)
        original = rows[0] if rows[0][0] in ORIGINALS else [""] * len(header)
        cells = [choice.workload, choice.engine, choice.model, f"[{choice.line}]({choice.section})"]
        cells += ["<br>".join(quoted[place] for place in places) for quoted in (header, row, original)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
