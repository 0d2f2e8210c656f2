"""The live progress of a tune, on a terminal (a real one, a pty) and elsewhere."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from hasten.online.course import Course
from hasten.online.options import Candidate
from hasten.online.record import MeasuredBlock
from hasten.report.course import plain_step
from hasten.report.progress import TuneProgress
from hasten.tuner.proof import Block, Proof
from hasten.tuner.search_state import Claim, SearchState

EVIL = "\x1b[2J[red]x\x07"


def block(step: float, *on: str, part: str = "search", trouble: str = "", taken: float | None = None) -> Block:
    return Block(1.0, 1.0, 20, step, on, part, trouble, taken, taken is not None)


class Terminal:
    """A pty: what is written to it, and how it looks to a program."""

    def __init__(self, columns: int = 100) -> None:
        self._here, there = pty.openpty()
        self.file = os.fdopen(there, "w", encoding="utf-8")
        self.console = Console(file=self.file, width=columns, force_terminal=True, _environ={"TERM": "xterm"})

    def read(self) -> str:
        self.file.flush()
        parts = []
        while select.select([self._here], [], [], 0)[0]:
            parts.append(os.read(self._here, 1 << 16))
        return b"".join(parts).decode()

    def hang_up(self) -> None:
        if self._here >= 0:
            os.close(self._here)
            self._here = -1

    def close(self) -> None:
        self.hang_up()
        try:
            self.file.close()
        except OSError:  # what lay in its buffer has nobody to go to
            assert self._here == -1


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


def last_line(text: str) -> str:
    """What stands at the bottom after all that was written over."""
    return text.replace("\r\n", "\n").rsplit("\n", 1)[-1].rsplit("\r\x1b[2K", 1)[-1]


def test_a_terminal_shows_one_line_that_updates(terminal: Terminal):
    with TuneProgress(terminal.console, 120.0) as progress:
        progress.say("looking at the script")
        progress.block(block(0.1, part="all on"), 0.1)
        for _ in range(2):
            progress.block(block(0.05, "channels_last", "precision"), 0.1)
        progress.block(block(0.08, "precision"), 0.1)
        text = terminal.read()
        assert re.search(r"hasten +\ds  looking at the script\r\n", text)
        assert text.count("\n") == 1
        line = last_line(text)
        assert re.match(r"\d/120s  best roughly 2\.00x  now 1\.25x  search  4 blocks  on: precision$", line), line
    assert last_line(terminal.read()) == ""


def test_a_failed_block_is_not_counted(terminal: Terminal):
    with TuneProgress(terminal.console, 60.0) as progress:
        for _ in range(2):
            progress.block(block(0.05, "compile"), 0.1)
        progress.block(block(0.0001, "compile", trouble="crashed"), 0.1)
        assert "best roughly 2.00x  not counted  search  3 blocks, 1 failed" in last_line(terminal.read())


@pytest.mark.parametrize("columns", [1, 8, 20, 40, 80])
def test_the_line_fits(columns: int):
    terminal = Terminal(columns)
    with TuneProgress(terminal.console, 120.0) as progress:
        progress.block(block(0.05, *(f"technique_{n}" for n in range(9)), "数据"), 0.1)
        line = last_line(terminal.read())
        assert 1 <= len(line) < max(2, columns)
    terminal.close()


def test_elsewhere_a_line_is_said_where_the_best_pace_rises():
    file = io.StringIO()
    with TuneProgress(Console(file=file, width=80), 120.0) as progress:
        progress.say("looking at the script")
        for step in (0.1, 0.098, 0.08, 0.079, 0.05):
            for _ in range(2):
                progress.block(block(step, f"threads={step}"), 0.1)
        progress.block(block(0.01, "x"), None)
    lines = file.getvalue().splitlines()
    assert [re.sub(r"^hasten +\ds  ", "", line) for line in lines] == [
        "looking at the script",
        "best so far roughly 1.25x (not measured in turn yet), after 6 blocks: threads=0.08",
        "best so far roughly 2.00x (not measured in turn yet), after 10 blocks: threads=0.05",
    ]
    assert "\x1b" not in file.getvalue()


def test_the_best_is_the_median_of_what_was_on():
    with TuneProgress(Console(file=io.StringIO()), 120.0) as progress:
        assert progress.best is None
        for step in (0.05, 0.1, 0.1):
            progress.block(block(step, "lucky"), 0.1)
        for step in (0.08, 0.08):
            progress.block(block(step, "steady"), 0.1)
        progress.block(block(0.01, "once"), 0.1)
        assert progress.best == (pytest.approx(1.25), ("steady",))


def test_blocks_that_others_disturbed_are_the_best_only_where_there_are_no_others(terminal: Terminal):
    with TuneProgress(terminal.console, 120.0) as progress:
        for _ in range(2):
            progress.block(block(0.01, "cpu_threads", taken=0.45), 0.1)
        assert progress.best == (pytest.approx(10.0), ("cpu_threads",))
        assert "others take 45 % of the CPU  search" in last_line(terminal.read())
        for _ in range(2):
            progress.block(block(0.08, "precision"), 0.1)
        assert progress.best == (pytest.approx(1.25), ("precision",))
        assert "others" not in last_line(terminal.read())


REPORTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results" / "reports").glob("*.json"))


def replayed(proof: Proof) -> Iterator[tuple[Block, Claim | None]]:
    """The blocks of a search that was kept, each with what could be claimed by then."""
    names = list(dict.fromkeys(name for one in proof.blocks for name in one.on))
    found = SearchState(Course([Candidate("precision", True, label=name) for name in names]))
    found.chosen = frozenset(i for one in proof.blocks for i in map(names.index, one.on) if one.part == "claim")
    for one in proof.blocks:
        on = tuple(sorted(map(names.index, one.on)))
        part = one.part if one.part != "claim" else "plan" if on else "plain"
        found.blocks.append(MeasuredBlock(one.at, one.seconds, one.steps, on, part, (), one.trouble))
        yield one, found.claimed()


@pytest.mark.parametrize("path", REPORTS, ids=[path.stem for path in REPORTS])
def test_the_course_of_a_real_search_shows_no_more_than_is_claimed_of_it(path: Path, terminal: Terminal):
    """Until plan and script were measured in turn, each figure is called rough; from then on it is the claim."""
    proof = Proof.read(path)
    blocks: list[Block] = []
    claims = 0
    with TuneProgress(terminal.console, 180.0) as progress:
        for one, claimed in replayed(proof):
            blocks.append(one)
            progress.block(one, plain_step(blocks), claimed)
            line = last_line(terminal.read())
            claims += claimed is not None
            assert ("in turn" in line) == (claimed is not None)
            assert "best" not in line.replace("best roughly", "")
            if one.part != "claim":
                assert claimed is None
    assert claims >= 10
    ratio = proof.speedup
    assert f"in turn {ratio.ratio:.2f}x ({ratio.low:.2f}x to {ratio.high:.2f}x)" in line


def test_a_line_says_that_others_disturbed_what_is_best():
    file = io.StringIO()
    with TuneProgress(Console(file=file, width=80), 120.0) as progress:
        for _ in range(2):
            progress.block(block(0.01, "cpu_threads", taken=0.86), 0.1)
    said = "best so far roughly 10.0x while others took 86 % of the CPU (not measured in turn yet), after 2 blocks"
    assert said in file.getvalue()


def test_a_dumb_terminal_gets_lines(terminal: Terminal):
    console = Console(file=terminal.file, force_terminal=True, _environ={"TERM": "dumb"})
    with TuneProgress(console, 60.0) as progress:
        for _ in range(2):
            progress.block(block(0.05, "compile"), 0.1)
    text = terminal.read()
    assert "best so far roughly 2.00x" in text
    assert "\x1b" not in text


def test_colour_that_is_forced_makes_no_terminal_of_a_pipe():
    file = io.StringIO()
    with TuneProgress(Console(file=file, _environ={"FORCE_COLOR": "1"}), 60.0) as progress:
        progress.block(block(0.05, "compile"), 0.1)
    assert "\x1b" not in file.getvalue()


def test_a_terminal_that_goes_away_ends_nothing():
    terminal = Terminal()
    progress = TuneProgress(terminal.console, 60.0)
    progress.block(block(0.05, "compile"), 0.1)
    terminal.hang_up()
    progress.say("still here")
    progress.block(block(0.05, "compile"), 0.1)
    progress.close()
    progress.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "hasten progress"]
    terminal.close()


def test_closed_files_and_full_disks_end_nothing():
    file = io.StringIO()
    progress = TuneProgress(Console(file=file), 60.0)
    file.close()
    progress.say("nobody hears")
    progress.block(block(0.05, "compile"), 0.1)
    progress.close()
    with open("/dev/full", "w", encoding="utf-8") as full, TuneProgress(Console(file=full), 60.0) as progress:
        progress.say("no room")
        progress.block(block(0.05, "compile"), 0.1)


def test_what_scripts_say_cannot_steer_the_terminal(terminal: Terminal):
    with TuneProgress(terminal.console, 60.0) as progress:
        progress.say(EVIL)
        progress.block(block(0.05, EVIL, part=EVIL), 0.1)
        text = terminal.read().replace("\r\x1b[2K", "")
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "[red]x" in text


def test_an_ascii_terminal_gets_ascii():
    raw = io.BytesIO()
    with TuneProgress(Console(file=io.TextIOWrapper(raw, encoding="ascii")), 60.0) as progress:
        progress.say("données → x")
        assert raw.getvalue().decode("ascii").rstrip().endswith("donn?es -> x")
