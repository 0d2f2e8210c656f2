"""The screen that `hasten tune` ends with."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from hasten.report.terminal import show
from hasten.tuner.proof import Curves, Memory, Parity, Proof, Tried


def screen(proof: Proof, width: int = 80, plan: Path | None = Path("hasten.toml"), **options: object) -> str:
    file = io.StringIO()
    show(proof, Console(file=file, width=width, **options), plan, Path("hasten-report.html"))  # type: ignore[arg-type]
    return file.getvalue()


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_most_important_comes_first(make):
    text = screen(make(), 120)
    order = [
        "2.31x faster",
        "95 % interval 2.24x to 2.38x",
        "whole epochs",
        "3 h 12 min -> 1 h 31 min for 90 epochs",
        "won back within the first epoch",
        "1.38 GiB -> 1.97 GiB",
        "Parity holds",
        "a change below 4.1 % goes",
        "Kept",
        "1.57x to 1.68x",
        "Where a step's time goes, baseline -> plan",
        "Tried and not kept",
        "compilation of 38 s is not won back",
        "Not tried, and why",
        "Notes",
        "hasten-report.html",
        "Next: hasten run train.py --epochs 90",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_console(make, width):
    lines = screen(make(), width).splitlines()
    assert not [line for line in lines if len(line) > width and len(line.split()) > 1], "only a long word stays whole"


def test_it_is_one_screen(make):
    assert len(screen(make(tried=make().tried * 20, skipped=make().skipped * 20), 120).splitlines()) <= 66
    assert "more, in the report" in screen(make(tried=make().tried * 20))


def test_bars_are_proportional(make):
    text = screen(make(phases={"baseline": {"data": 0.4, "forward": 0.2}, "plan": {"data": 0.1, "forward": 0.2}}))
    data, forward = (line for line in text.splitlines() if "█" in line)
    before, after = (part.count("█") for part in data.split("100"))
    assert 0.2 <= after / before <= 0.3
    assert forward.count("█") == pytest.approx(before, abs=1)


def test_a_short_phase_is_still_seen(make):
    assert "▏" in screen(make(phases={"baseline": {"data": 1.0, "other": 0.001}, "plan": {"data": 1.0}}))


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
    kept = dataclasses.replace(make().techniques[0], name=evil, setting=evil, effect=evil, contribution_how=evil)
    proof = make(
        command=("train.py", evil),
        techniques=(kept,),
        tried=(Tried(evil, evil, "crashed", evil),),
        notes=(evil,),
        taps_skipped=(evil,),
        parity=Parity(False, "", (), evil),
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
    assert "6 settings measured, none kept" in text
    assert "Next:" not in text
    assert "Kept" not in text


def test_a_plan_that_spoils_the_result_is_not_offered(make):
    parity = make().parity
    checks = tuple(dataclasses.replace(check, ok=False) for check in parity.checks)
    text = flat(screen(make(parity=dataclasses.replace(parity, ok=False, checks=checks))))
    assert "parity does not hold" in text
    assert "Do not train with this plan" in text
    assert "OUTSIDE the band 1.470 to 1.600" in text
    assert "Next:" not in text


def test_what_was_not_measured_is_said(make):
    text = flat(
        screen(
            make(
                epoch_speedup=None,
                full_run=None,
                phases={},
                memory=Memory(0, 0),
                curves=Curves((), (), ()),
                parity=Parity(True, "", (), "the script prints no loss that hasten can see"),
            )
        )
    )
    assert "no trial came to the end of an epoch" in text
    assert "the length of the full run is not known" in text
    assert "peak memory not measured" in text
    assert "Parity was not checked: the script prints no loss" in text


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
