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

from hasten.check.agreement import Agreement
from hasten.errors import HastenError
from hasten.report import charts, verdict
from hasten.report.html import render, write
from hasten.tuner.proof import (
    Answer,
    Block,
    Curves,
    FullRun,
    Machine,
    MachineNoise,
    Memory,
    Pair,
    Parity,
    ParityCheck,
    Proof,
    Ratio,
    Skipped,
    TriedSetting,
)
from tests.report.conftest import build, checked

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
    "no parity checks": {"parity": Parity(Answer.HOLDS, "not made")},
    "parity not known": {"parity": Parity(Answer.NOT_KNOWN, "")},
    "no blocks": {"blocks": ()},
    "no plain block": {"blocks": tuple(b for b in build().blocks if b.on)},
    "only blocks in trouble": {"blocks": tuple(b for b in build().blocks if b.trouble)},
    "not warm": {"blocks": (), "warm": False, "agreement": None, "check": None},
    "no noise": {"noise": None},
    "noise unseen": {"noise": MachineNoise(None, None, None)},
    "nothing tried": {"tried": (), "skipped": (), "trials": (), "notes": ()},
    "no memory": {"memory": Memory(0, 0)},
}


def test_the_figures_are_on_the_page(make):
    text = Page(render(make())).text
    for figure in (
        "2.31x faster, proven",
        "95 % interval 2.24x to 2.38x; baseline and plan in turn, A B B A",
        "in fresh processes holds 2.31x over 2 pairs",
        "2.12x",
        "3 h 12 min → 1 h 31 min for 90 epochs",
        "3.1 s → 9.4 s",
        "1.38 GiB → 1.97 GiB",
        "43 % more",
        "Parity holds",
        "a change below 0.85 % goes unseen",
        "1.27x to 1.38x > 99 %",
        "0.69x to 0.74x < 1 %",
        "the smallest cosine is 0.99991",
        "0.61 % of a tensor, in layer4.1.conv2.weight; rounding explains up to 1.2 %",
        "others kept 0.8 of 2 cores busy and the hypervisor gave 3 % of the CPU time to others",
        "whether fused_optimizer helps at all: 86 % sure",
        "31.2 ms",
        "prefetch_factor = 4",
        "too little to be sure of",
        "the dataset augments at random",
        "torch 2.13.0+cpu",
        "Those runs end at step 238",
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
    kept = dataclasses.replace(proof.techniques[0], name=evil, setting=evil, effect=evil, why=evil)
    trial = dataclasses.replace(proof.trials[0], plan={evil: {evil: evil}}, outcome=evil, reason=evil)
    source = render(
        make(
            command=("train.py", evil),
            created=evil,
            techniques=(kept,),
            tried=(TriedSetting(evil, evil, evil, evil, 1.0, 0.9, 1.1, 0.5, 3),),
            skipped=(Skipped(evil, evil),),
            notes=(evil,),
            taps_skipped=(evil,),
            versions={evil: evil},
            trials=(trial,),
            phases={"baseline": {evil: 0.1}, "plan": {evil: 0.1}},
            parity=Parity(Answer.DOES_NOT, evil, (check, dataclasses.replace(check, ok=False)), evil),
            speedup_how=evil,
            agreement=Agreement(1, 0.1, 0.5, "", 0.1, evil, 0.01),
            blocks=(
                Block(0.0, 1.0, 9, 0.1, (), evil),
                Block(2.0, 1.0, 9, 0.1, (evil,), evil),
                Block(4.0, 1.0, 0, 0.0, (f"{evil}={evil}",), evil, evil),
            ),
            would_ask=(evil,),
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
    assert len(found) == 7
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
            parity=Parity(Answer.HOLDS, "t", (ParityCheck("loss", (nan,), (1.0,), nan, nan, nan, nan, True),)),
            agreement=Agreement(1, nan, nan, "", nan, "", nan),
            blocks=(Block(0.0, 1.0, 9, 0.1, (), "search"), Block(nan, 1.0, 9, nan, ("x",), "search")),
            noise=MachineNoise(nan, nan, nan),
            phases={"baseline": {"data": nan, "forward": 0.1}, "plan": {"forward": math.inf}},
        )
    )
    assert not re.search(r"\b(nan|inf)\b", source)
    drawings(source)


def test_nothing_helped_is_said_plainly(nothing):
    text = Page(render(nothing())).text
    assert "Nothing helped here" in text
    assert "5 settings tried, none kept" in text
    assert "Is the result the same?" not in text


def test_a_plan_that_spoils_the_result_is_not_called_faster(make):
    proof = make()
    checks = tuple(dataclasses.replace(check, ok=False) for check in proof.parity.checks)
    parity = dataclasses.replace(proof.parity, answer=Answer.DOES_NOT, checks=checks)
    text = Page(render(make(parity=parity))).text
    assert "2.31x as fast, but the result is not the same" in text
    assert "Parity does NOT hold : training loss -0.22 %, validation loss +0.01 %" in text
    assert "2.31x faster" not in text


def test_a_check_that_failed_is_said_with_its_place(make):
    text = Page(render(make(check=checked(False)))).text
    assert "2.31x as fast, but the result is not the same" in text
    assert (
        "same steps does not hold The plan changes the training more than its techniques may. step 2: conv1.weight"
        in text
    )


def test_what_was_not_looked_at_is_not_known_and_not_refuted(stopped):
    text = Page(render(stopped())).text
    assert "2.31x faster, not proven" in text
    assert "Not known: same steps, same losses, in fresh processes." in text
    assert "same losses not known Ctrl-C came first" in text
    assert "does not hold" not in text
    assert "does NOT" not in text


def test_a_plan_that_is_slower_in_fresh_processes_is_not_proven(make):
    proof = make(pairs=(Pair(0, 0.02, 0.03),))
    assert proof.proven is Answer.NOT_KNOWN
    text = Page(render(proof)).text
    assert "2.31x faster, not proven" in text
    assert "in fresh processes not known 0.67x over 1 pair" in text


def test_an_interval_down_to_one_is_no_speed_up(make):
    text = Page(render(make(speedup=Ratio(1.02, 0.98, 1.06)))).text
    assert "No speed-up shown: 1.02x, not proven" in text
    assert "faster not known" in text


def test_a_plan_that_is_slower_is_said_to_be(make):
    text = Page(render(make(speedup=Ratio(0.9, 0.86, 0.94)))).text
    assert "The plan is slower: 0.90x" in text
    assert "faster does not hold" in text


@pytest.mark.parametrize("answer", Answer)
@pytest.mark.parametrize("check", [True, False, None])
@pytest.mark.parametrize("speedup", [Ratio(2.0, 1.9, 2.1), Ratio(1.0, 0.9, 1.1), Ratio(0.8, 0.7, 0.9)])
@pytest.mark.parametrize("pairs", [(), (Pair(0, 2.0, 1.0),)])
@pytest.mark.parametrize("disturbed", [None, 0.45])
def test_the_headline_and_its_promises_agree(make, answer, check, speedup, pairs, disturbed):
    proof = make(parity=Parity(answer, ""), check=checked(check), speedup=speedup, pairs=pairs, disturbed=disturbed)
    answers = {promise.answer for promise in verdict.promises(proof)}
    if proof.proven is Answer.HOLDS:
        assert answers == {Answer.HOLDS}
    assert (Answer.DOES_NOT in answers) == (proof.proven is Answer.DOES_NOT)
    found = verdict.verdict(proof)
    assert (found.kind == "faster") == (proof.proven is Answer.HOLDS)
    assert (found.kind == "refuted") == (proof.proven is Answer.DOES_NOT)


def test_bars_and_headline_tell_the_same(make):
    """The sums of the phase bars have the claim's ratio; where they have not, the page says so."""
    proof = make()
    ends = [bars[-1].end for bars in charts.phase_bars(proof).values()]
    assert ends[0] / ends[1] == pytest.approx(proof.speedup.ratio, rel=0.03)
    assert "These sums give" not in Page(render(proof)).text
    other = {"baseline": {"forward": 0.392}, "plan": {"forward": 0.102}}
    text = Page(render(make(phases=other))).text
    assert "These sums give 3.84x, the claim is 2.31x: steps were not the same ones" in text
    text = Page(render(make(phases={"baseline": {"forward": 0.392}, "plan": {}}))).text
    assert "the phases of the plan's steps were not measured" in text
    assert "saved" not in text.split("Where a step's time goes")[1].split("What each technique brings")[0]


def test_nothing_measured_is_not_nothing_that_helps(nothing):
    text = Page(render(nothing(tried=(), blocks=()))).text
    assert "Nothing was measured" in text
    assert "Nothing helped" not in text


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
    for proof in (make(), nothing(), make(memory=Memory(1, 2, 3, 4)), make(noise=None)):
        path = tmp_path / "hasten-report.json"
        path.write_text(proof.to_json())
        assert Proof.read(path) == proof
        assert render(Proof.read(path)) == render(proof)


def test_one_pair_and_no_check_are_said(make):
    check = ParityCheck("training loss", (1.5,), (1.5,), 0.0, -0.07, 0.07, 0.07, True)
    assert "One pair proves nothing" in render(make(parity=Parity(Answer.HOLDS, "t", (check,))))
    text = Page(render(make(parity=Parity(Answer.NOT_KNOWN, "t")))).text
    assert "Whether the losses stay the same is not known : no losses were compared." in text
