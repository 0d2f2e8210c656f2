"""The HTML page of a diagnosis."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.doctor.verdict.diagnosis import Diagnosis, Verdict
from hasten.doctor.views import charts, timeline, wording
from hasten.doctor.views.page import excerpt, render, write
from hasten.errors import HastenError
from hasten.evidence import PHASES, Evidence, MachineUse
from hasten.report.drawing import Scale
from tests.doctor.views import diagnoses
from tests.report.test_html import Page


def drawings(source: str) -> list[ElementTree.Element]:
    """Every chart of the page, read as XML; a chart may hold a stretched drawing."""
    found = re.findall(r'<svg class="chart".*?(?:</svg>\s*)+(?=</figure>|</div>|$)', source, re.DOTALL)
    return [ElementTree.fromstring(drawing) for drawing in found]


def calm(page: Page, source: str) -> None:
    """Nothing is loaded, run or shown that is no number."""
    assert not {"script", "link", "img", "iframe", "object", "base", "foreignobject"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href", "srcset") or name.startswith("on")]
    assert "@import" not in source
    assert "url(" not in source
    assert "default-src 'none'" in source
    assert not re.search(r"\b(nan|inf|None|Undefined)\b", page.text)
    assert not [value for _, value in page.attributes if re.search(r"\b(nan|inf)\b", value)]


def test_the_figures_are_on_the_page():
    source = render(diagnoses.diagnosis(), diagnoses.on_gpu())
    text = Page(source).text
    for figure in (
        "data-bound: the step waits 61 % of its time for batches",
        "The loader makes a batch in 31 ms",
        "51.2 ms",
        "data wait, 31.2 ms a step",
        "of 2 cores, on average",
        "on the GPU's clock",
        "up to 41 % of the step, measured",
        "fix: give the loader num_workers=2",
        "one batch takes 31.2 ms to make",
        "loader_workers = {num_workers = 2, persistent_workers = true}",
        "From: PyTorch performance tuning guide.",
        "read from code, not measured",
        "Over time",
        "NVIDIA H200 was held back: power cap.",
        "allocated on the GPU",
        "validation",
        "in channels 3, out channels 64",
        "aten::mkldnn_convolution",
        "212 operators a step",
        "decode",
        "2 cores are 52 % busy",
        "The GPU: this machine has none.",
        "Stopped after 200 steps.",
        "torch 2.13.0+cpu",
        "11,689,512 parameters",
        "/data on ext4",
        "hasten-diagnosis/1",
    ):
        assert figure in text, figure


@pytest.mark.parametrize("seen", [None, diagnoses.evidence(), diagnoses.on_gpu()], ids=["none", "cpu", "gpu"])
def test_the_page_loads_nothing_and_runs_nothing(seen):
    source = render(diagnoses.diagnosis(), seen)
    calm(Page(source), source)
    assert "://" not in source


def test_what_scripts_say_is_text_and_nothing_else(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"# {diagnoses.EVIL}\n", encoding="utf-8", errors="replace")
    found, seen = diagnoses.hostile()
    first = dataclasses.replace(found.findings[0], file=str(script), line=1)
    source = render(dataclasses.replace(found, findings=(first, *found.findings)), seen)
    page = Page(source)
    calm(page, source)
    assert "&lt;script&gt;alert(1)" in source
    assert "{{7*7}}" in page.text
    assert not set("\x00\x1b\u202e\u2028") & set(source)
    source.encode()
    assert drawings(source)


def test_drawings_are_well_formed_and_say_what_they_show():
    found = drawings(render(diagnoses.diagnosis(), diagnoses.on_gpu()))
    titles = [drawing[0].text for drawing in found]
    assert {"Where a steady step's time goes", "Steps over time", "CPU", "GPU busy", "Loss by step"} <= set(titles)
    for drawing in found:
        assert drawing[0].tag == "title"
        assert drawing[1].tag == "desc"
        assert drawing[1].text


LACKING = {
    "no use": {"use": None},
    "empty use": {"use": MachineUse()},
    "no steps": {"step_start": (), "step_phases": (), "losses": (), "steps": 0, "passes": (), "validations": ()},
    "one step": {"step_start": (3.0,), "step_phases": ((0.1,) * 9,), "losses": (1.0,), "steps": 1, "disturbed": ()},
    "nothing observed": {"events": (), "layers": (), "sampled": None, "stages": (), "memory": (), "surroundings": None},
    "no losses": {"losses": (None,) * 200},
    "alike losses": {"losses": (1.0,) * 200},
    "no facts": {"loaders": (), "models": (), "optimizers": (), "passes": ()},
    "steps of no time": {"step_phases": ((0.0,) * 9,) * 200},
    "a run that goes on": {"steps": 5000, "disturbed": (4990, 4991)},
    "not numbers": {"ended_at": math.nan, "step_start": (math.nan,) * 200},
}


@pytest.mark.parametrize("changes", LACKING.values(), ids=LACKING.keys())
def test_what_was_not_seen_is_not_drawn(changes):
    source = render(diagnoses.diagnosis(), diagnoses.evidence(**changes))
    calm(Page(source), source)
    drawings(source)


def test_a_run_that_never_trained_has_a_page_too():
    found = Diagnosis(("train.py",), Verdict("untrained", "No training step was seen"), error="ValueError: x")
    source = render(found, None)
    text = Page(source).text
    assert "The script failed: ValueError: x" in text
    assert "No findings: no whole training step was seen." in text
    calm(Page(source), source)


def test_nothing_found_is_said_calmly():
    text = Page(render(diagnoses.diagnosis(findings=()), diagnoses.evidence())).text
    assert wording.NO_FINDINGS in text


def test_many_steps_stay_a_small_page():
    source = render(diagnoses.diagnosis(), diagnoses.evidence(20_000))
    assert len(source.encode()) < 1_000_000
    assert "column is 67 steps" in Page(source).text


def test_reasons_for_what_is_unseen_are_told_once():
    found = diagnoses.diagnosis(unseen=("Layers: torch.compile was used",))
    source = render(found, diagnoses.evidence(skipped=("torch.compile was used", "another reason")))
    assert Page(source).text.count("torch.compile was used") == 1
    assert "another reason" in source


def test_the_line_of_a_finding_is_marked_in_its_source(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("".join(f"line_{number} = '<b>'\n" for number in range(1, 21)))
    one = dataclasses.replace(diagnoses.FINDINGS[0], file=str(script), line=7)
    source = render(diagnoses.diagnosis(findings=(one,)), None)
    assert re.search(r'<div class="at"><span class="n">7 &gt;</span><code>line_7 = &#39;&lt;b&gt;&#39;</code>', source)
    assert [number for number in range(1, 21) if f"line_{number} " in source] == [4, 5, 6, 7, 8, 9, 10]


def test_excerpts_are_of_python_files_that_can_be_read(tmp_path):
    script = tmp_path / "train.py"
    script.write_bytes(b"# -*- coding: latin-1 -*-\nif x:\n\ty = 1  # caf\xe9 \x1b[2J \x0c\n")
    shown = excerpt(str(script), 3)
    assert shown is not None
    assert shown.lines == (
        (1, "# -*- coding: latin-1 -*-"),
        (2, "if x:"),
        (3, "    y = 1  # café \ufffd[2J"),
    )
    for name, content in (("secret.txt", b"x\n"), ("other.py", b"\xff\xfe\x00"), ("codec.py", b"# coding: nonsense\n")):
        (tmp_path / name).write_bytes(content)
        assert excerpt(str(tmp_path / name), 1) is None
    os.mkfifo(tmp_path / "pipe.py")
    assert excerpt(str(tmp_path / "pipe.py"), 1) is None
    for file, line in ((str(script), 0), (str(script), 9), (str(tmp_path), 1), ("a\0.py", 1), ("", 1)):
        assert excerpt(file, line) is None


def test_a_script_that_changed_since_is_said_to_have(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("x = 1\n")
    now = datetime.datetime.now(datetime.UTC)
    before, after = ((now + datetime.timedelta(minutes=minutes)).isoformat() for minutes in (-5, 5))
    told = {created: excerpt(str(script), 1, created) for created in (before, after)}
    assert [one.changed for one in told.values() if one] == [True, False]


def test_write_replaces_the_page_whole(tmp_path: Path):
    path = tmp_path / "doctor.html"
    path.write_text('<!doctype html><meta name="generator" content="hasten 0.1">old')
    write(diagnoses.diagnosis(), diagnoses.evidence(), path)
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [each.name for each in tmp_path.iterdir()] == ["doctor.html"]
    with pytest.raises(HastenError, match="cannot write the report"):
        write(diagnoses.diagnosis(), None, tmp_path / "no" / "such.html")


# What the drawings say in lengths.


BAR = re.compile(r'<rect class="(ph-\S+?)" x="(\S+?)%" y="\S+" width="(\S+?)%"')


@given(st.dictionaries(st.sampled_from([*PHASES, "logging"]), st.floats(1e-6, 10), min_size=1))
def test_the_bar_of_a_step_adds_up(phases):
    rows = wording.phase_rows(diagnoses.diagnosis(phases=phases))
    bars = BAR.findall(charts.phase_bar(rows))
    assert sum(float(width) for *_, width in bars) == pytest.approx(100, abs=0.02)
    whole = sum(phases.values())
    assert [float(width) for *_, width in bars] == pytest.approx([row.seconds / whole * 100 for row in rows], abs=0.01)


STEPS = st.lists(st.tuples(*[st.floats(0, 2)] * len(PHASES)), min_size=1, max_size=60)


def run_of(steps: list[tuple[float, ...]]) -> Evidence:
    starts, at = [], 1.0
    for step in steps:
        starts.append(at)
        at += sum(step)
    return diagnoses.evidence(
        10, step_start=tuple(starts), step_phases=tuple(steps), losses=(), steps=len(steps), ended_at=at, disturbed=()
    )


@given(STEPS, st.integers(1, 70))
def test_columns_hold_every_step_once_and_its_time(steps, most):
    columns = timeline.step_columns(run_of(steps), most)
    assert len(columns) <= most
    numbers = [number for column in columns for number in range(column.first, column.last + 1)]
    assert numbers == list(range(len(steps)))
    total = sum(column.seconds * (column.last - column.first + 1) for column in columns)
    assert total == pytest.approx(sum(map(sum, steps)), abs=1e-9)
    for one, other in itertools.pairwise(columns):
        assert one.start <= one.end <= other.start + 1e-9


@given(STEPS)
def test_the_timeline_stays_inside_its_frame(steps):
    drawing = timeline.timeline(run_of(steps))
    assert "nan" not in drawing
    for corner in re.findall(r"M(\S+) (\S+)H(\S+)V(\S+)H(\S+)Z", drawing):
        assert all(-0.01 <= float(value) <= 100.1 for value in corner)


@given(st.floats(0, 1e6), st.floats(1e-2, 1e6))
def test_moments_are_few_and_inside(low, span):
    scale = Scale(low, low + span)
    found = timeline.moments(scale)
    assert len(found) <= 8
    assert all(-0.1 <= scale(moment) <= 100.1 for moment in found)


def test_groups_of_points_keep_peaks_where_that_is_asked():
    points = [(float(n), 100.0 if n == 500 else 1.0) for n in range(1000)]
    assert max(value for _, value in charts.thinned(points, 50, max)) == 100.0
    assert len(charts.thinned(points, 50)) <= 50
    assert charts.thinned([(0.0, math.nan), (math.inf, 1.0)]) == []
