"""Progress for people: a bar in a terminal, and lines in a log."""

import io
import re
import sys
import threading

import pytest
from rich.console import Console

from kvsurgery.display import console
from kvsurgery.display.pace import duration
from kvsurgery.evaluate.standing import Steps, standing

MIB = 1 << 20


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def log(monkeypatch, capsys):
    """stderr as a file, in an environment that asks for colors all the same."""
    monkeypatch.setenv("FORCE_COLOR", "1")

    def lines():
        text = capsys.readouterr().err
        assert not text or text.endswith("\n")
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)  # no control characters but the ends of lines
        return text.splitlines()

    return lines


def steps(clock, seconds, *calls):
    """Work whose steps each take some seconds."""
    with console.step_progress("measuring duo", clock) as advance:
        for call in calls:
            clock.now += seconds
            advance(*call)


class TestLog:
    def test_a_line_every_half_minute_with_what_matters_and_the_time_left(self, log, clock):
        steps(clock, 10, *((step, 60, f"loss {1 / step:.4f}") for step in range(1, 61)))
        first, *between, last = log()
        assert first == "measuring duo 1/60, loss 1.0000, about 10 min in all"
        assert between[0] == "measuring duo 4/60, loss 0.2500, 9 min left"
        assert [re.search(r" (\d+)/60", line)[1] for line in between] == [str(step) for step in range(4, 60, 3)]
        assert last == "measuring duo 60/60, loss 0.0167"

    def test_a_short_job_has_one_line_at_its_end(self, log, clock):
        steps(clock, 1, *((step, 20, "") for step in range(1, 21)))
        assert log() == ["measuring duo 20/20"]

    def test_what_work_begins_with_is_said_at_once(self, log, clock):
        with console.step_progress("evaluating", clock) as advance:
            advance(0, None, "loading llama")
            assert log() == ["evaluating: loading llama"]
            for step in range(1, 21):
                clock.now += 1
                advance(step, 20)
        assert log() == ["evaluating 20/20"]

    def test_a_failure_at_the_beginning_repeats_nothing(self, log, clock):
        steps(clock, 1, (0, None, "loading llama"))
        assert log() == ["measuring duo: loading llama"]

    def test_a_refusal_stands_alone(self, log, clock):
        steps(clock, 100)
        assert log() == []

    def test_a_failure_says_how_far_the_work_came(self, log, clock):
        with pytest.raises(TypeError):
            steps(clock, 1, (2, 9, "loss 0.5"), "no step")
        assert log() == ["measuring duo 2/9, loss 0.5"]

    def test_what_an_earlier_run_did_counts_for_no_time(self, log, clock):
        steps(clock, 60, (500, 520), (501, 520), (502, 520))
        first, *rest, last = log()
        assert first == "measuring duo 500/520"
        assert rest == ["measuring duo 501/520, about 20 min in all", "measuring duo 502/520, 18 min left"]
        assert last == "measuring duo 502/520"

    def test_preparing_counts_for_no_time(self, log, clock):
        steps(clock, 40, (1, None, "prompts of needle"), (2, None, "prompts of needle"), (0, 9, "loading"), (1, 9, ""))
        *prompts, loading, first, _ = log()
        assert prompts == [f"measuring duo {count}, prompts of needle" for count in (1, 2)]
        assert loading == "measuring duo 0/9, loading"
        assert first == "measuring duo 1/9, about 6 min in all"

    def test_what_takes_a_moment_says_nothing(self, log, clock):
        for seconds, lines in ((0.5, []), (1.5, ["drawing 2/3, b, 2 s left", "drawing 3/3, c"])):
            with console.step_progress("drawing", clock, grace=2) as advance:
                for done, note in enumerate(("page", "a", "b", "c")):
                    advance(done, 3, note)
                    clock.now += seconds
            assert log() == lines

    def test_bytes(self, log, clock):
        with console.byte_progress("converting", 100 * MIB, clock) as advance:
            for _ in range(10):
                clock.now += 20
                advance(10 * MIB)
        *between, last = log()
        assert between[0] == "converting 20.00 MiB/100.00 MiB, 3 min left"
        assert len(between) == 4
        assert last == "converting 100.00 MiB/100.00 MiB"

    def test_bytes_of_many_threads_add_up(self, log, clock):
        with console.byte_progress("verifying", 8000, clock) as advance:
            threads = [threading.Thread(target=lambda: [advance(1) for _ in range(1000)]) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert log() == ["verifying 7.81 KiB/7.81 KiB"]


class TestTable:
    def text(self, *columns):
        with console.stdout.capture() as capture:
            console.stdout.print(console.table("Scores", columns, [["a" * 9] * len(columns)]))
        return [line.strip() for line in capture.get().splitlines() if line.strip()]

    def test_headings_of_a_wide_table_take_several_lines(self):
        _, words, more_words, _, cells = self.text("name", *["first token"] * 6)
        assert (words.split(), more_words.split()) == (["first"] * 6, ["name", *["token"] * 6])
        assert cells == "  ".join(["a" * 9] * 7)

    @pytest.mark.parametrize(("terminal", "columns"), [(None, 21), (80, 21), (150, 42)])
    def test_what_fits(self, terminal, columns, monkeypatch):
        """A table of three blocks is printed whole, in a file as in a terminal of 80 columns; in a wide one of more."""
        file = io.StringIO()
        file.isatty = lambda: terminal is not None
        monkeypatch.delenv("COLUMNS", raising=False)
        monkeypatch.setattr(console, "stdout", Console(file=file, force_terminal=True, width=terminal or 50))
        tables = (
            console.table("", ["key", *["value"] * count], [["k", *["a" * 8] * count]]) for count in (columns, 43)
        )
        assert [console.fits(table) for table in tables] == [True, False]

    def test_a_narrow_table_stays_as_it_is(self):
        _, headings, _, cells = self.text("first token", "a")
        assert (headings.split(), cells) == (["first", "token", "a"], "aaaaaaaaa     aaaaaaaaa")


class TestTerminal:
    def test_a_bar_and_an_estimate_of_the_whole(self, monkeypatch, clock):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", Terminal())
        steps(clock, 60, (1, 20, "loss 1.0000"), (2, 20, "loss 0.5000"))
        text = sys.stderr.getvalue()
        assert text.count("measuring duo: about 20 min in all") == 1
        assert "━" in text
        assert "loss 0.5000" in text

    @pytest.mark.parametrize("width", [60, 80, 160])
    def test_counts_and_times_are_whole(self, width, monkeypatch, clock):
        monkeypatch.setattr(console, "stderr", Console(file=Terminal(), width=width, force_terminal=True))
        note = "converted: longbench/multifieldqa_en, 100% right"
        with console.step_progress("evaluating", clock) as advance:
            advance(12_345, 56_789, note)
        line = re.sub(r"\x1b\[[\d;?]*\w", "", console.stderr.file.getvalue()).split("\r")[-1].strip()
        assert len(line) <= width
        assert re.fullmatch(r"evaluating [━╺╸ ]+ 12345/56789 converted: .* ETA -:--:--", line), line

    def test_no_estimate_of_what_is_short(self, monkeypatch, clock):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", Terminal())
        steps(clock, 1, (1, 20), (2, 20))
        assert "in all" not in sys.stderr.getvalue()

    def test_a_terminal_that_cannot_go_back_gets_lines(self, monkeypatch, clock):
        monkeypatch.setenv("TERM", "dumb")
        monkeypatch.setattr(sys, "stderr", Terminal())
        steps(clock, 60, (1, 20, "loss 1.0000"))
        assert sys.stderr.getvalue().startswith("measuring duo 1/20, loss 1.0000, about 20 min in all\n")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (45, "45 s"), (89.9, "90 s"), (90, "2 min"), (3600, "60 min"), (5400, "1 h 30 min")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_two_models_are_one_count():
    seen = []
    steps = Steps(lambda *state: seen.append(state), samples=4, models=2)
    steps.of(0, "original")(3, 4, "original: needle")
    steps.of(1, "converted")(1, 4, "policy-1: needle, 100% right")
    assert seen == [(3, 8, "original: needle"), (5, 8, "converted: needle, 100% right")]


def test_how_right_the_answers_of_a_task_are():
    records = [{"task": "needle", "scores": {"rouge": 1.0}}, {"task": "needle", "scores": {"rouge": 0.0}}]
    records += [{"task": "needle", "skipped": "too long"}, {"task": "perplexity", "nll": 0.0}]
    assert standing("needle", records) == "needle, 50% right"
    assert standing("perplexity", records) == "perplexity 1"
    assert standing("ruler", records) == "ruler"
