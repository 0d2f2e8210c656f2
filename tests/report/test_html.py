"""The HTML page of a proof."""

from __future__ import annotations

import dataclasses
import math
import re
import stat
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hasten.errors import HastenError
from hasten.report.html import render, write
from hasten.tuner.proof import (
    Curves,
    FullRun,
    Machine,
    Memory,
    Parity,
    ParityCheck,
    Proof,
    Ratio,
    Skipped,
    Tried,
)

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """Reads a page, and fails where an element is closed that was not opened last."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> in the wrong place"

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def drawings(source: str) -> list[ElementTree.Element]:
    """Every drawing of the page, read as XML."""
    figures = [ElementTree.fromstring(figure) for figure in re.findall(r"<figure>.*?</figure>", source, re.DOTALL)]
    return [drawing for figure in figures for drawing in figure.findall("svg")]


EMPTY = {
    "no techniques": {"techniques": ()},
    "no curves": {"curves": Curves((), (), ())},
    "no plan curves": {"curves": Curves((0, 1, 2), ((1.0, 0.9, 0.8),), ())},
    "no baseline curves": {"curves": Curves((0, 1, 2), (), ((1.0, 0.9, 0.8),))},
    "one point": {"curves": Curves((0,), ((1.0,),), ((1.0,),))},
    "no epochs": {"epoch_speedup": None, "full_run": None},
    "no pairs": {"pairs": ()},
    "no phases": {"phases": {}},
    "phases of one side": {"phases": {"baseline": {"data": 0.1}}},
    "phases of no time": {"phases": {"baseline": {"data": 0.0}, "plan": {"data": 0.0}}},
    "no parity checks": {"parity": Parity(True, "not made")},
    "nothing tried": {"tried": (), "skipped": (), "trials": (), "notes": ()},
    "no memory": {"memory": Memory(0, 0)},
}


def test_the_figures_are_on_the_page(make):
    text = Page(render(make())).text
    for figure in (
        "2.31x faster",
        "95 % interval 2.24x to 2.38x",
        "2.12x",
        "3 h 12 min → 1 h 31 min for 90 epochs",
        "3.1 s → 9.4 s",
        "1.38 GiB → 1.97 GiB",
        "43 % more",
        "Parity holds",
        "a change below 4.1 % goes unseen",
        "1.57x to 1.68x",
        "31.2 ms",
        "prefetch_factor = 4",
        "compilation of 38 s is not won back",
        "the dataset augments at random",
        "torch 2.13.0+cpu",
        "Trials end at step 238",
        "train.py --epochs 90",
    ):
        assert figure in text


def test_every_trial_is_in_a_collapsed_table(make):
    source = render(make())
    table = source[source.index("<summary>All 7 trials") :]
    assert table.count("<tr>") == 8
    assert "<details open" not in source


def test_the_page_loads_nothing_and_runs_nothing(make):
    source = render(make())
    page = Page(source)
    assert "://" not in source
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href", "srcset") or name.startswith("on")]
    assert "@import" not in source
    assert "url(" not in source
    assert "default-src 'none'" in source


def test_what_scripts_say_is_text_and_nothing_else(make):
    evil = "<script>alert(1)</script>\"'><img src=http://x/y onerror=z> & \x1b[31m \x00 \udce9 \u202e"
    proof = make()
    check = dataclasses.replace(proof.parity.checks[0], what=evil)
    kept = dataclasses.replace(
        proof.techniques[0], name=evil, setting=evil, effect=evil, why=evil, contribution_how=evil
    )
    trial = dataclasses.replace(proof.trials[0], plan={evil: {evil: evil}}, outcome=evil, reason=evil)
    source = render(
        make(
            command=("train.py", evil),
            created=evil,
            techniques=(kept,),
            tried=(Tried(evil, evil, evil, evil, 1.0),),
            skipped=(Skipped(evil, evil),),
            notes=(evil,),
            taps_skipped=(evil,),
            versions={evil: evil},
            trials=(trial,),
            phases={"baseline": {evil: 0.1}, "plan": {evil: 0.1}},
            parity=Parity(False, evil, (check, dataclasses.replace(check, ok=False)), evil),
            full_run=FullRun(1, evil, 1.0, 1.0, 1.0, 1.0, 1.0, None),
            machine=dataclasses.replace(proof.machine, cpu=evil, gpus=(evil,)),
        )
    )
    page = Page(source)
    assert not {"script", "img"} & set(page.tags)
    assert "&lt;script&gt;alert(1)" in source
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not set("\x00\x1b\u202e") & set(source)
    source.encode()
    assert drawings(source)


def test_drawings_are_well_formed_and_say_what_they_show(make):
    found = drawings(render(make()))
    assert len(found) == 6
    for drawing in found:
        assert drawing[0].tag == "title"
        assert drawing[0].text
        assert drawing[1].tag == "desc"
        assert drawing[1].text


@pytest.mark.parametrize("changes", EMPTY.values(), ids=EMPTY.keys())
def test_what_was_not_measured_is_not_drawn(make, changes):
    source = render(make(**changes))
    page = Page(source)
    drawings(source)
    assert not re.search(r"\b(nan|inf|None|Undefined)\b", page.text)
    assert 'width="nan' not in source


def test_numbers_that_are_none_are_shown_as_missing(make):
    nan = math.nan
    proof = make()
    source = render(
        make(
            speedup=Ratio(2.0, nan, nan),
            curves=Curves((0, 1, 2), ((1.0, nan, 0.8), (math.inf, 0.9)), ((nan, nan, nan),)),
            techniques=(dataclasses.replace(proof.techniques[0], contribution=nan, contribution_low=nan),),
            parity=Parity(True, "t", (ParityCheck("loss", (nan,), (1.0,), nan, nan, 1.0, nan, True),)),
            phases={"baseline": {"data": nan, "forward": 0.1}, "plan": {"forward": math.inf}},
        )
    )
    assert not re.search(r"\b(nan|inf)\b", source)
    drawings(source)


def test_nothing_helped_is_said_plainly(nothing):
    text = Page(render(nothing())).text
    assert "Nothing helped here" in text
    assert "6 settings measured, none kept" in text
    assert "What each technique brings" not in text


def test_a_plan_that_spoils_the_result_is_not_called_faster(make):
    proof = make()
    checks = tuple(dataclasses.replace(check, ok=False) for check in proof.parity.checks)
    text = Page(render(make(parity=dataclasses.replace(proof.parity, ok=False, checks=checks)))).text
    assert "2.31x as fast, but parity does not hold" in text
    assert "training loss, validation loss outside the baseline's own seed-to-seed band" in text
    assert "2.31x faster" not in text


def test_an_interval_down_to_one_is_no_speed_up(make):
    assert "No speed-up shown" in render(make(speedup=Ratio(1.02, 0.98, 1.06)))


def test_a_start_up_that_is_never_won_back_is_said_first(make):
    run = FullRun(1, "--epochs 1", 60.0, 95.0, 0.63, 2.0, 40.0, None)
    text = Page(render(make(full_run=run))).text
    assert "the full run not" in text
    assert "the longer start-up is never won back" in text


def test_gpu_memory_and_names_are_shown(make):
    proof = make()
    machine: Machine = dataclasses.replace(proof.machine, device="cuda", gpus=("NVIDIA H200",))
    text = Page(render(make(machine=machine, memory=Memory(1 << 30, 1 << 30, 40 << 30, 20 << 30)))).text
    assert "cuda: NVIDIA H200" in text
    assert "peak GPU memory 40 GiB → 20 GiB 50 % less" in text


def test_write_replaces_the_page_whole(make, tmp_path: Path):
    path = tmp_path / "hasten-report.html"
    path.write_text('<!doctype html><meta name="generator" content="hasten 0.1">old')
    write(make(), path)
    assert path.read_text(encoding="utf-8") == render(make())
    assert [each.name for each in tmp_path.iterdir()] == ["hasten-report.html"]


def test_write_says_where_it_cannot(make, tmp_path: Path):
    with pytest.raises(HastenError, match="cannot write the report"):
        write(make(), tmp_path / "no" / "such" / "report.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(HastenError, match="cannot write the report"):
        write(make(), tmp_path / "folder")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_a_page_is_as_readable_as_any_other_file(make, tmp_path: Path):
    (tmp_path / "plain").write_text("")
    write(make(), tmp_path / "page.html")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "page.html")}
    assert len(modes) == 1


def test_a_proof_survives_its_json(make, nothing, tmp_path: Path):
    for proof in (make(), nothing(), make(memory=Memory(1, 2, 3, 4))):
        path = tmp_path / "hasten-report.json"
        path.write_text(proof.to_json())
        assert Proof.read(path) == proof
        assert render(Proof.read(path)) == render(proof)


def test_one_seed_and_no_check_are_said(make):
    check = ParityCheck("training loss", (1.5,), (1.5,), 1.4, 1.6, 1.5, 0.07, True)
    assert "One seed proves nothing" in render(make(parity=Parity(True, "t", (check,))))
    assert "was not checked" in Page(render(make(parity=Parity(True, "t")))).text
