"""The screen that `hasten tune` ends with."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from hasten.check.agreement import Agreement
from hasten.report.terminal import show
from hasten.tuner.proof import Answer, Curves, Memory, Parity, Proof, TriedSetting


def screen(proof: Proof, width: int = 80, plan: Path | None = Path("hasten.toml"), **options: object) -> str:
    file = io.StringIO()
    show(proof, Console(file=file, width=width, **options), plan, Path("hasten-report.html"))  # type: ignore[arg-type]
    return file.getvalue()


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_most_important_comes_first(make):
    text = screen(make(), 120)
    order = [
        "2.31x faster, proven",
        "95 % interval 2.24x to 2.38x; baseline and plan in turn",
        "others kept 0.8 of 2 cores busy",
        "same losses         holds",
        "in fresh processes  holds",
        "whole epochs",
        "3 h 12 min -> 1 h 31 min for 90 epochs",
        "won back within the first epoch",
        "1.38 GiB -> 1.97 GiB",
        "cosine of the gradients 0.99991",
        "a change below 0.85 % goes",
        "Kept",
        "1.27x to 1.38x  > 99 %",
        "Where a step's time goes, baseline -> plan",
        "Tried and not kept",
        "0.71x (0.69x to 0.74x), helps: < 1 %. slower",
        "With more time, tune would ask",
        "86 % sure after 21 blocks",
        "Not tried, and why",
        "Notes",
        "38 blocks in 96 s",
        "hasten-report.html",
        "Next: hasten run train.py --epochs 90",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_what_is_kept_although_it_hardly_helps_is_explained(make):
    proof = make()
    doubtful = dataclasses.replace(proof.techniques[-1], helps=0.32)
    text = flat(screen(dataclasses.replace(proof, techniques=(*proof.techniques[:-1], doubtful)), 100))
    assert f"{doubtful.name}: kept since the whole plan was the fastest of those measured in turn." in text
    assert "kept since" not in flat(screen(proof, 100))


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_console(make, width):
    lines = screen(make(), width).splitlines()
    assert not [line for line in lines if len(line) > width and len(line.split()) > 1], "only a long word stays whole"


def test_it_is_one_screen(make):
    assert len(screen(make(tried=make().tried * 20, skipped=make().skipped * 20), 120).splitlines()) <= 77
    assert "more, in the report" in screen(make(tried=make().tried * 20))


def test_bars_are_proportional(make):
    text = screen(make(phases={"baseline": {"data": 0.4, "forward": 0.2}, "plan": {"data": 0.1, "forward": 0.2}}))
    data, forward = (line for line in text.splitlines() if "█" in line)
    before, after = (part.count("█") for part in data.split("100"))
    assert 0.2 <= after / before <= 0.3
    assert forward.count("█") == pytest.approx(before, abs=1)


def test_a_short_phase_is_still_seen(make):
    assert "▏" in screen(make(phases={"baseline": {"data": 1.0, "other": 0.001}, "plan": {"data": 1.0}}))


def test_phases_that_were_not_measured_are_not_shown_as_no_time(stopped):
    """The claim comes before the proof: a tune that ended in between has no phases of the plan."""
    text = screen(stopped(phases={"baseline": {"data": 0.4, "forward": 0.2}, "plan": {}}))
    assert "0 ms" not in text.replace("400 ms", "").replace("200 ms", "").replace("600 ms", "")
    assert "baseline -> plan" not in text
    assert "the phases of the plan's steps were not measured" in " ".join(text.split())


def test_without_a_terminal_there_are_no_escapes(make):
    assert "\x1b" not in screen(make())
    assert "\x1b[" in screen(make(), force_terminal=True, color_system="standard")


def test_an_ascii_terminal_gets_ascii(make):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    proof = make(notes=("données",), speedup=make().speedup)
    show(proof, Console(file=file, width=80), Path("hasten.toml"), Path("r.html"))
    file.flush()
    assert "#" in raw.getvalue().decode("ascii")


def test_what_scripts_say_cannot_steer_the_terminal(make):
    evil = "[bold red]x[/bold red] [/] \x1b[2J\x1b]0;title\x07 \r\n \udce9"
    kept = dataclasses.replace(make().techniques[0], name=evil, setting=evil, effect=evil)
    proof = make(
        command=("train.py", evil),
        techniques=(kept,),
        tried=(TriedSetting(evil, evil, "crashed", evil),),
        notes=(evil,),
        taps_skipped=(evil,),
        parity=Parity(Answer.DOES_NOT, "", (), evil),
        speedup_how=evil,
        would_ask=(evil,),
        agreement=Agreement(1, 0.1, 0.5, "", 0.1, evil),
        phases={"baseline": {evil: 1.0}},
    )
    text = screen(proof)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold red]x[/bold red]" in text
    text.encode()


def test_nothing_helped(nothing):
    text = screen(nothing(), plan=None)
    assert "Nothing helped here" in text
    assert "5 settings tried, none kept" in text
    assert "Next:" not in text
    assert "Kept" not in text


def test_a_plan_that_spoils_the_result_is_not_offered(make):
    parity = make().parity
    checks = tuple(dataclasses.replace(check, ok=False) for check in parity.checks)
    parity = dataclasses.replace(parity, answer=Answer.DOES_NOT, checks=checks)
    text = flat(screen(make(parity=parity)))
    assert "but the result is not the same" in text
    assert "Do not train with this plan" in text
    assert "training loss: NOT the same: -0.22 % under the plan" in text
    assert "Next:" not in text


def test_what_ctrl_c_left_open_is_not_known(stopped):
    text = flat(screen(stopped()))
    assert "2.31x faster, not proven" in text
    assert "same losses not known Ctrl-C came first" in text
    assert "does not hold" not in text
    assert "Next: hasten run" in text


def test_a_narrow_terminal_keeps_how_sure_it_is(make):
    for width in (60, 76, 80):
        assert len(re.findall("(?:> 99|99|97|86) %$", screen(make(), width), re.MULTILINE)) >= 5


def test_what_was_not_measured_is_said(make):
    text = flat(
        screen(
            make(
                epoch_speedup=None,
                full_run=None,
                phases={},
                memory=Memory(0, 0),
                curves=Curves((), (), ()),
                parity=Parity(Answer.NOT_KNOWN, "", (), "the script prints no loss that hasten can see"),
            )
        )
    )
    assert "no fresh process came to the end of an epoch" in text
    assert "no fresh process came to the end of an epoch" in text
    assert "peak memory not measured" in text
    assert "same losses not known the script prints no loss" in text


def test_the_next_command_can_be_pasted(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    proof = make(command=("-m", "pkg.train", "--name", "my run"))
    assert "Next: hasten run -m pkg.train --name 'my run'" in screen(proof, 40)
    assert "Next: hasten run --plan 'my plan.toml' -m pkg.train" in screen(proof, 40, Path("my plan.toml"))


def test_the_figures_file_is_named_where_it_lies(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "hasten-report.json" not in screen(make())
    Path("hasten-report.json").write_text("{}")
    assert "hasten-report.json" in screen(make())
