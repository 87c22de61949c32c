"""Every table with large figures and long names, in 80 and in 60 columns: no line is longer, and no number is cut."""

import io
import re
from dataclasses import replace

import click
import pytest
from rich.console import Console

from kvsurgery.cli import bench, evaluate, fit, plan, sweep
from kvsurgery.display import console
from kvsurgery.policy.fit import Fit
from kvsurgery.policy.prices import Candidate
from kvsurgery.recipe import Demand
from kvsurgery.templates.kv_layout import Quantization
from tests.report import builders

GIB = 1 << 30


@pytest.fixture(params=[80, 60])
def lines(request, monkeypatch):
    """What is printed to a terminal of that width; lines of tables have no space but those between their columns."""
    file = io.StringIO()
    file.isatty = lambda: True
    monkeypatch.setattr(console, "stdout", Console(file=file, width=request.param, soft_wrap=True, color_system=None))

    def check(*numbers):
        text = file.getvalue()
        table_lines = [line for line in text.splitlines() if line.startswith(" ")]
        assert max(map(len, table_lines)) <= request.param
        words = text.split()
        assert not {word for number in numbers for word in number.split()} - {*words}
        return text

    return check


def test_scores(lines):
    long = builders.task("infinitebench/longbook_sum_eng", 1, 0.9, "rouge_l_sum", difference=builders.interval(-0.1))
    found = builders.results(
        tasks=(*builders.results().tasks, replace(long, count=12_345)),
        tokens=131_072,
        kv_bytes=GIB,
        dense_bytes=16 * GIB,
    )
    with click.Context(evaluate.evaluate):  # the command whose options are named
        evaluate._show(found)
    text = lines("12,345", "131,072", "100.0%", "90.0%", "1.00 GiB", "16.00 GiB", "[-2.5,", "+1.5]", "8.310", "8.360")
    assert re.search(r"KV\s+cache", text)
    assert "6.2%" in text
    assert text.splitlines()[-1].startswith("Not as good: ")


def test_times_and_memory(lines):
    rows = [replace(row, batch=128, tokens=1 << 20) for row in builders.bench().rows[:3]]
    slow = builders.phase(1234.5678, 999 * GIB)
    rows = [replace(row, prefill=slow, chunked=slow, first_token=slow, decode=slow, kv_bytes=999 * GIB) for row in rows]
    settings = {"lengths": [1 << 20], "batches": [1, 128], "dtype": "float32", "processes": 1, "rounds": 3, "chunk": 9}
    bench._show(builders.bench(rows=tuple(rows), settings=settings))
    lines("128", "1,048,576", "1,234,567.8", "1197530.8–1296296.2", "999.00 GiB")


@pytest.mark.parametrize("axes", [{}, {"recent": (8192, 16384), "sink": (64, 128), "beta": (1.05, 1.2)}])
def test_settings(axes, lines):
    found = builders.sweep()
    options = {name: values[-1] for name, values in axes.items()}
    points = tuple(replace(point, options={**point.options, **options}) for point in found.points)
    sweep._show(replace(found, axes={**found.axes, **axes}, points=points))
    lines("64", "256", "1024", "97.0%", "71.0%", "15.00 GiB", *(map(str, options.values())))


def test_policies(lines):
    def candidate(heads, bits, size):
        quantization = Quantization(bits) if bits < 16 else None
        return Candidate(heads, "budgeted", 16_384, quantization, size, 2048, GIB, size + GIB, 1 / (1 + heads))

    candidates = tuple(candidate(100 * place, bits, place * 999 * GIB) for place in range(1, 20) for bits in (16, 4))
    fit._print_table(Fit(Demand(1 << 60, 1 << 20, 1, 0, 2048), None, candidates, candidates[-2]))
    lines("full", "chosen", "1900", "16384", "unquantized", "18.54 TiB", "18.54 TiB", "99.95%")


def test_bytes_of_each_length_and_process(lines):
    facts = {
        **{"kv_dtype": "bfloat16", "replicated": False, "family": "llama"},
        "kv_bytes": [{"tokens": 1 << 20, "before": 1023 * GIB, "after": 999 * GIB}],
        "ranks": [{"processes": 128, "kv_bytes": [999 * GIB, 1000 * GIB]}],
    }
    plan.print_kv_bytes(facts)
    lines("1M", "1023.00 GiB", "999.00 GiB", "0.98", "128", "1000.00 GiB")
