"""A loader bench as a screen and as a page, from figures that are known."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from hasten.doctor.diagnose import diagnose
from hasten.doctor.flame import loading_stacks
from hasten.doctor.verdict.diagnosis import Diagnosis
from hasten.doctor.verdict.loader import title
from hasten.doctor.views import flame_graph
from hasten.doctor.views.page import render
from hasten.doctor.views.terminal import show
from hasten.evidence import Consumed, LoaderBench, Rate, Stages
from tests.doctor.views.diagnoses import EVIL
from tests.report.test_html import Page, drawings
from tests.tuner.evidence import TRAIN, evidence

STACKS = """fetch (torch/f.py:1);__getitem__ (train.py:4);load (PIL/Image.py:7) 60
fetch (torch/f.py:1);__getitem__ (train.py:4);<genexpr> (a&b "c".py:7) 30
fetch (torch/f.py:1);collate (torch/c.py:2) 10"""
BENCH = LoaderBench(
    loader=dataclasses.replace(TRAIN, num_workers=1),
    rates=(
        Rate(0, 1000.0, 125.0, 900.0, 1100.0, 6, 700, 0.01, 0.008),
        Rate(1, 1050.0, 131.25, 900.0, 1100.0, 6, 700, 0.1, 0.02),
        Rate(2, 3100.0, 387.5, 2900.0, 3300.0, 6, 2000, 0.2, None),
        Rate(4, 3150.0, 393.75, 2900.0, 3300.0, 6, 2000, 0.4, 0.02),
        Rate(8, error="RuntimeError: no [bold]room[/bold]", where="/x/train.py:3"),
    ),
    stages=Stages(0, 4, 0.001, 0.005, 0.0005, 0.0005, 0.001, 0.4, "/x/train.py:9", "PIL", 0.0),
    stages_workers=1,
    flame=STACKS,
    flame_note="of a worker",
    consumed=Consumed(800.0, 100.0, 0.6, 1),
    notes=("a note <b>",),
    ended="finished",
)


def diagnosed(bench: LoaderBench) -> Diagnosis:
    return diagnose(dataclasses.replace(evidence([]), loader_bench=bench))


def page(bench: LoaderBench) -> str:
    return render(diagnosed(bench), dataclasses.replace(evidence([]), loader_bench=bench))


def shown(bench: LoaderBench, width: int = 100, encoding: str = "utf-8") -> str:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show(diagnosed(bench), None, Console(file=out, width=width))
    out.flush()
    return " ".join(out.buffer.getvalue().decode(encoding).split())  # type: ignore[attr-defined]


def test_the_verdict_is_the_least_number_that_gives_the_most() -> None:
    assert title(BENCH) == (
        "2 workers give 3.10x of what 0 give; the loader alone can feed 3,100 samples/s; decoding is 62 % of it"
    )


@pytest.mark.parametrize("view", [shown, lambda bench: Page(page(bench)).text])
def test_both_views_say_it_all(view) -> None:
    said = view(BENCH)
    for words in (
        "2 workers give 3.10x",
        "the script's own 1 worker gives 1,050 samples/s: num_workers=2 gives 2.95x of that",
        "with 8 workers it fails: RuntimeError: no [bold]room[/bold] (/x/train.py:3)",
        "waits 100 ms for the first batch; with persistent_workers=True, 20 ms",
        "the training took 800 samples/s with 1 worker and waited 60 % of its step for data; the loader alone",
        "40 % of a sample's time is the dataset's own pure Python, most of it in /x/train.py:9",
        "a note <b>",
        "decoding (PIL)",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("consumed", "says"),
    [
        (Consumed(500.0, 62.5, 0.01, 1), "the loader does not hold it up"),
        (Consumed(1000.0, 125.0, 0.5, 2), "although these workers alone give 3.10x of that"),
        (Consumed(1000.0, 125.0, 0.5, 16), "waited 50 % of its step for data"),
    ],
)
def test_what_the_training_took(consumed: Consumed, says: str) -> None:
    assert says in shown(dataclasses.replace(BENCH, consumed=consumed))


def test_what_a_script_says_of_its_loader_is_text_and_nothing_else() -> None:
    loader = dataclasses.replace(BENCH.loader, where=EVIL, dataset=EVIL)
    bench = dataclasses.replace(
        BENCH, loader=loader, rates=(*BENCH.rates, Rate(9, error=EVIL, where=EVIL)), notes=(EVIL,)
    )
    assert "script" not in Page(page(bench)).tags
    assert "\x1b" not in shown(bench)


def test_a_narrow_terminal_without_other_letters() -> None:
    said = shown(BENCH, width=40, encoding="ascii")
    assert "3.10x" in said


@pytest.mark.parametrize(
    "changes",
    [
        {"rates": BENCH.rates[-1:], "stages": None, "flame": "", "consumed": None},
        {"rates": BENCH.rates[:1], "stages": None, "flame": "", "ended": "stopped"},
        {"rates": (), "stages": None, "flame": ""},
    ],
)
def test_where_little_was_measured(changes: dict) -> None:
    bench = dataclasses.replace(BENCH, **changes)
    assert shown(bench)
    assert Page(page(bench)).text
    assert ("returns no batches" in title(bench)) == (not bench.measured)


def test_the_flame_graph_adds_up_and_escapes() -> None:
    graph = next(one for one in drawings(page(BENCH)) if one.findtext("title") == "Flame graph")
    frames = {frame.findtext("title"): float(frame.get("width", "").rstrip("%")) for frame in graph.findall("rect")}
    assert frames == {
        "fetch (torch/f.py:1): 100 %, 100 samples": 100.0,
        "__getitem__ (train.py:4): 90 %, 90 samples": 90.0,
        "load (PIL/Image.py:7): 60 %, 60 samples": 60.0,
        '<genexpr> (a&b "c".py:7): 30 %, 30 samples': 30.0,
        "collate (torch/c.py:2): 10 %, 10 samples": 10.0,
    }
    assert flame_graph.draw("") == ""
    assert flame_graph.draw("not stacks at all") == ""


def test_stacks_begin_where_batches_are_made_and_leave_out_waits() -> None:
    worker = "_worker_loop (torch/utils/data/_utils/worker.py:3)"
    stacks = f"a (x.py:1);{worker};fetch (f.py:2) 7\nb (t.py:1);Condition.wait (threading.py:327) 9\n"
    assert loading_stacks(stacks) == "fetch (f.py:2) 7"
