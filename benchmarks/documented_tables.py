"""Write the tables of the docs anew from the committed results.

    python benchmarks/documented_tables.py

A comment in a page names the table that follows it: `<!-- table: lists -->`. Pages whose tables differ are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import (
    by_workload,
    cache_quality,
    cpu_decode,
    equal_bytes,
    generated_answers,
    gpu_tables,
    host_work,
    layer_bits,
    memory_budgets,
    quantized_cache,
    query_rounding,
    recurrent_report,
    vllm_serving,
)
from benchmarks.real_model import (
    agreement,
    beyond_context,
    beyond_cost,
    cache_report,
    gathered,
    heads_report,
    human_eval,
    long_answers,
    repository,
    running_balances,
    selection_cost,
    selections,
    short_steps,
    tasks,
)
from kvsurgery.profile.loading import load_scores

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "smollm2" / "README.md"]
PROFILES = ["gates", "minutes", "seed-1", "longer", "longer-seed-1"]  # in the order of their table
PROFILES += ["longer-400", "longer-400-seed-1", "longer-400-seed-2", "lm", "attention", "er", "r", "losses"]
BY_LENGTH = tuple(f"which-heads-{length}" for length in (2048, 4096, 8000))
HEADS = ("which-heads", "which-heads-answers", "which-heads-windows", *BY_LENGTH)
EQUAL_BYTES = "equal-bytes", "equal-bytes-gemma3", "equal-bytes-qwen"
TABLE = re.compile(r"<!-- table: (?P<name>.+) -->\n\n(?P<lines>(?:\|.*\n)+)")


def results(name: str) -> Any:
    """A committed file of results."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def profiles_agree() -> list[str]:
    """The table of agreement between SmolLM2's profiles with scores of heads."""
    folder = ROOT / "examples" / "smollm2"
    return agreement.table({name: load_scores(folder / f"{name}.safetensors") for name in PROFILES})


def heads_table(report: Mapping[str, Any]) -> list[str]:
    """The table of results that have a single window."""
    [size] = heads_report.windows(report)
    return heads_report.table(report, size)


def quality_table(report: Mapping[str, Any], scheme: str) -> list[str]:
    """The table of what each step of quantization loses, for one scheme."""
    return cache_quality.table(report["windows"], scheme)


def all_tables() -> dict[str, Callable[[], list[str]]]:
    """Functions that make each table, by the table's name in the pages."""

    def from_results(table: Callable[..., list[str]], name: str, *arguments: Any) -> Callable[[], list[str]]:
        return lambda: table(results(name), *arguments)

    names_by_function = {
        beyond_context.table: ("beyond-context", "lists"),
        beyond_cost.table: ("beyond-cost",),
        cache_report.asked_table: ("which-cache-at-end",),
        cache_report.table: (
            "which-cache",
            *(f"which-cache-qwen{texts}" for texts in ("", "-moby-dick", "-8192", "-8192-measured")),
        ),
        gathered.table: ("gathered-qwen", "gathered-smollm2"),
        generated_answers.table: ("generated-answers",),
        host_work.table: ("host-work",),
        human_eval.table: ("human-eval",),
        layer_bits.table: ("layer-bits",),
        long_answers.table: ("long-answers", "long-text", "held-answers", "held-answers-bundled"),
        memory_budgets.table: ("memory-budgets", "memory-budgets-gemma3"),
        query_rounding.table: ("query-rounding", "query-rounding-gemma3", "query-rounding-qwen"),
        quantized_cache.table: ("quantized-cache-1024", "quantized-cache-4096", "quantized-cache-bundled"),
        repository.table: ("repository",),
        running_balances.table: ("running-balances", "running-balances-100"),
        selection_cost.table: ("selection-cost",),
        selections.table: ("selections-smollm2", "selections-bundled"),
        short_steps.table: ("short-steps",),
        tasks.table: ("real-model-tasks", "real-model-tasks-4096"),
        vllm_serving.table: (
            *(
                f"vllm-serving{sizes}"
                for sizes in ("", "-codes", "-bfloat16", "-qwen", "-qwen-half", "-1024-768", "-768-896", "-512-1024")
            ),
            *(f"vllm-equal-load-{load}" for load in (100, 1000, "codes")),
        ),
    }
    gpu = gpu_tables.tables(results("gpu-nvidia-h100-80gb-hbm3"))
    tables = {
        **{name: from_results(table, name) for table, names in names_by_function.items() for name in names},
        **{
            f"{name}, written": from_results(long_answers.pace_table, name)
            for name in ("held-answers", "held-answers-bundled")
        },
        **{name: from_results(heads_table, name) for name in HEADS},
        **{f"{name}, by depth": from_results(heads_report.depth_table, name, "64+256", 50) for name in BY_LENGTH},
        **{
            f"{name}, {scheme}": from_results(quality_table, name, scheme)
            for name in ("cache-quality", "cache-quality-gemma3")
            for scheme in ("kivi", "per-token")
        },
        **{f"gpu, {section}": lambda lines=lines: lines for section, lines in gpu.items()},
        "recurrent": lambda: recurrent_report.recall_table(results("recurrent")["results"]),
        "cpu-decode": lambda: cpu_decode.table(results("cpu-decode")["rows"], 16384, 1),
        "padded-prompts": from_results(short_steps.table, "padded-prompts", "stock ratio"),
        "equal-bytes": lambda: equal_bytes.table([*map(results, EQUAL_BYTES)]),
        "profiles": profiles_agree,
    }
    return tables | {"by-workload": lambda: by_workload.table(tables)}


def filled(page: str) -> str:
    """A page with its tables made anew.

    Raises:
        KeyError: a comment names a table that is not known.
    """
    tables = all_tables()
    return TABLE.sub(
        lambda match: f"<!-- table: {match['name']} -->\n\n" + "".join(f"{line}\n" for line in tables[match["name"]]()),
        page,
    )


def main() -> None:
    for path in PAGES:
        page = path.read_text()
        if (new_page := filled(page)) != page:
            path.write_text(new_page)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
