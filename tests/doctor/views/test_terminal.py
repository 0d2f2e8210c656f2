"""The screen that `hasten doctor` ends with."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hasten.doctor.diagnose import diagnose
from hasten.doctor.verdict.diagnosis import Diagnosis, Pauses, Verdict
from hasten.doctor.views import wording
from hasten.doctor.views.terminal import show
from hasten.evidence import PHASES, Evidence, HowKnown, Severity
from hasten.evidence.figures import percent
from hasten.evidence.finding import worst_first
from hasten.report.screen import stacked
from tests.doctor.made import run, use
from tests.doctor.views import diagnoses


def screen(
    found: Diagnosis, seen: Evidence | None = None, width: int = 80, html: Path | None = None, **options: object
) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, **options)  # type: ignore[arg-type]
    show(found, seen, console, html)
    return file.getvalue()


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_most_important_comes_first():
    text = flat(screen(diagnoses.diagnosis(), diagnoses.evidence(), html=Path("page.html")))
    order = [
        "data-bound: the step waits 61 % of its time for batches",
        "The loader makes a batch in 31 ms",
        "train.py --epochs 1 (200 training steps seen)",
        "Where a steady step's time goes",
        "data wait 31.2 ms 61 %",
        "a whole step 51.2 ms 100 %",
        "median 50.8 ms",
        "first step 1.24 s (24 times the median)",
        "800 ms of waiting as 2 epochs began",
        "2 steps over three times the median, 620 ms in all; step 31: 400 ms",
        "steps became 12 % slower",
        "decode 63 %",
        "1.4 of 2 cores",
        "HIGH workers_zero train.py:41 up to 41 % of the step, measured",
        "the step waits 61 % of its time for data and the loader has no workers",
        "fix: give the loader num_workers=2",
        "MEDIUM precision train.py:57 up to 12 % of the step, estimated",
        "LOW bias_before_norm layer1.0.conv1 read from code, not measured",
        "and 2 notes: constant_rate, unsafe_load (train.py:12); see page.html",
        "machine 2 cores are 52 % busy",
        "unseen The GPU: this machine has none.",
        "notes Stopped after 200 steps.",
        "page page.html",
        "Next: tune measures and installs loader_workers and precision for you:",
        "hasten tune train.py --epochs 1",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_it_is_one_screen():
    assert len(screen(diagnoses.diagnosis(), diagnoses.evidence()).splitlines()) <= 45
    many = diagnoses.diagnosis(findings=diagnoses.FINDINGS * 12, unseen=("x",) * 20, notes=("y",) * 20)
    text = screen(many, diagnoses.evidence())
    assert len(text.splitlines()) <= 58
    assert "more finding" in text
    assert "and 17 more; --html FILE shows them" in flat(text)


def test_a_taller_terminal_shows_more_findings():
    found = diagnoses.diagnosis(findings=diagnoses.FINDINGS[:3] * 6)
    small, tall = (
        screen(found, None, force_terminal=True, height=height, color_system=None).count("fix:") for height in (24, 90)
    )
    assert small < tall


@pytest.mark.parametrize("width", [36, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_console_and_none_ends_in_blanks(width):
    found = dataclasses.replace(diagnoses.diagnosis(), command=("t.py",))
    lines = screen(found, diagnoses.on_gpu(), width).splitlines()
    assert not [line for line in lines if len(line) > width and len(line.split()) > 1], "only a long word stays whole"
    assert not [line for line in lines if line != line.rstrip()]


def test_a_setting_that_somebody_may_copy_stays_whole():
    setting = "GLIBC_TUNABLES=" + ":".join(f"glibc.malloc.threshold_{number}=1073741824" for number in range(4))
    (first, *_) = diagnoses.diagnosis().findings
    found = diagnoses.diagnosis(findings=(dataclasses.replace(first, fix=f"start it with {setting} set"),))
    assert any(line.strip() == setting for line in screen(found).splitlines())


def test_a_healthy_run_is_told_so_calmly():
    found = diagnoses.diagnosis(
        verdict=Verdict("none", "Nothing is saturated"), findings=(), machine=(), unseen=(), notes=()
    )
    text = screen(found)
    assert wording.NO_FINDINGS in text
    assert "Findings" not in text
    assert "Next:" not in text
    assert "unseen" not in text


def test_notes_alone_are_no_findings():
    text = flat(screen(diagnoses.diagnosis(findings=diagnoses.FINDINGS[3:])))
    assert wording.NO_FINDINGS in text
    assert "and 2 notes: constant_rate, unsafe_load (train.py:12)" in text


def test_a_run_that_never_trained_has_a_screen_too():
    found = Diagnosis(
        ("train.py",),
        Verdict("untrained", "No training step was seen", ("It ended after 2 s.",)),
        error="ValueError: x",
    )
    text = flat(screen(found))
    assert "No training step was seen It ended after 2 s. train.py (0 training steps seen) failed ValueError: x" in text
    assert "nan" not in text
    assert wording.NO_FINDINGS not in text


def test_what_scripts_say_cannot_steer_the_terminal():
    text = screen(*diagnoses.hostile())
    assert not set("\x1b\x07\x00\r\u202e\u2028") & set(text)
    assert "[bold red]x[/bold red]" in text
    assert not re.search(r"\b(nan|inf|None)\b", text)
    text.encode()


def test_without_a_terminal_there_are_no_escapes():
    assert "\x1b" not in screen(diagnoses.diagnosis(), diagnoses.evidence())
    assert "\x1b[" in screen(diagnoses.diagnosis(), force_terminal=True, color_system="standard")


def test_a_dumb_terminal_gets_no_escapes():
    assert "\x1b" not in screen(diagnoses.diagnosis(), force_terminal=True, _environ={"TERM": "dumb"})


def test_an_ascii_terminal_gets_ascii():
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    found = diagnoses.diagnosis(notes=("données",), median=3e-5, step=3e-5, phases={"data": 3e-5})
    show(found, diagnoses.evidence(), Console(file=file, width=80))
    file.flush()
    text = raw.getvalue().decode("ascii")
    assert "####" in text
    assert "donn?es" in text
    assert "30.0 us" in text


def test_places_are_relative_where_that_is_shorter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    near = dataclasses.replace(diagnoses.FINDINGS[0], file=str(tmp_path / "src" / "train.py"))
    assert wording.place(near) == "src/train.py:41"
    far = dataclasses.replace(near, file="/t.py")
    assert wording.place(far) == "/t.py:41"
    assert wording.place(dataclasses.replace(near, file="", line=0, where="layer1")) == "layer1"
    assert wording.place(dataclasses.replace(near, file="a\0b")) == "a\ufffdb:41"


def test_a_worth_says_how_it_is_known():
    one = diagnoses.FINDINGS[0]
    assert wording.worth(one) == "up to 41 % of the step, measured"
    assert wording.worth(dataclasses.replace(one, how_known=HowKnown.READ)) == "read from code, not measured"
    assert wording.worth(dataclasses.replace(one, worth=None)) == ""
    assert wording.worth(dataclasses.replace(one, worth=math.nan)) == ""
    assert wording.worth(dataclasses.replace(one, worth=0.004)) == "less than 1 % of the step, measured"


def test_the_worst_finding_comes_first_whatever_the_order():
    text = screen(diagnoses.diagnosis(findings=diagnoses.FINDINGS[::-1]))
    assert text.index("HIGH") < text.index("MEDIUM") < text.index("LOW")


@pytest.mark.parametrize("share", [0.466, 0.5649, 0.346, 0.617])
def test_a_figure_is_the_same_in_every_part_of_the_page(share):
    seen = run(shares={"data": share, "other": 0.0149}, use=use(1.0, cores=(0.2,) * 8))
    text = flat(screen(diagnose(seen), seen))
    said = f"{share * 100:.0f} %"
    for place in (
        f"waits {said} of its time for batches",
        f"ms {said} ",
        f"{said} of the step",
        f"waits {said} of its",
    ):
        assert place in text, (place, text)
    assert text.count(f"waits {said} of its time") == 2  # the verdict, and data_bound
    assert "1.5 %" in text
    shown = [figure for figure in re.findall(r"[0-9.]+ ?%", text) if figure not in ("100 %", "1 %")]
    assert all(" %" in figure for figure in shown)


@pytest.mark.parametrize(
    ("steps", "disturbed", "said"),
    [
        (200, (), "of 190 of the 200 steps"),
        (10, (), "of 5 of the 10 steps"),
        (10, (4, 5, 6, 8), "of 2 of the 10 steps"),
        (3, (2,), "of 1 of the 3 steps"),
        (2, (), "of 1 of the 2 steps"),
        (1, (), "of the only step, the first, with all that start-up costs"),
    ],
)
def test_the_page_says_of_which_steps_its_figures_are(steps, disturbed, said):
    seen = run(steps)
    long = (tuple(100 * part for part in seen.step_phases[0]), *seen.step_phases[1:])  # the first takes 10 s
    found = diagnose(dataclasses.replace(seen, step_phases=long, disturbed=disturbed))
    told = dict(wording.asides(found, None))
    assert told["steady"].endswith(f"; {said}")
    assert found.step == pytest.approx(10.0 if steps == 1 else 0.1)
    assert f"first step 10 s{' (100 times the median)' if steps > 1 else ''}" in told["pauses"]


def test_pauses_that_were_not_seen_are_not_told():
    told = dict(wording.asides(diagnoses.diagnosis(pauses=Pauses(), spread=0.0), None))
    assert set(told) == {"steady"}


SECONDS = st.dictionaries(st.sampled_from([*PHASES, "logging"]), st.floats(1e-7, 1e3), min_size=1)


@given(SECONDS, st.integers(4, 100))
def test_phase_bars_add_up_and_shares_are_those_of_the_verdict(phases, room):
    rows = wording.phase_rows(diagnoses.diagnosis(phases=phases))
    whole = sum(phases.values())
    assert [row.share for row in rows if row.share != "<0.1 %"] == [
        percent(row.seconds / whole) for row in rows if row.seconds / whole >= 0.001
    ]
    assert sum(row.seconds for row in rows) == pytest.approx(sum(phases.values()))
    lengths = stacked([row.seconds for row in rows], room)
    assert sum(lengths) == room
    for row, length in zip(rows, lengths, strict=True):
        assert abs(length - row.seconds / sum(phases.values()) * room) < 1.01


@given(SECONDS)
def test_the_screen_draws_the_phases_to_one_whole(phases):
    text = screen(diagnoses.diagnosis(phases=phases, findings=()))
    drawn = [line.count("█") for line in text.splitlines() if "█" in line]
    assert sum(drawn) == 40


@given(st.lists(st.floats(0, 1), max_size=6))
def test_severities_with_the_same_word_are_ordered_by_worth(worths):
    found = [dataclasses.replace(diagnoses.FINDINGS[0], worth=worth, severity=Severity.LOW) for worth in worths]
    assert [one.worth for one in worst_first(found)] == sorted(worths, reverse=True)
