"""Print a check's result to a terminal."""

from __future__ import annotations

from rich.console import Console

from hasten.check import words
from hasten.check.result import CheckResult
from hasten.report.screen import Screen
from hasten.report.words import clean

_STYLES = {True: "bold green", False: "bold red", None: "bold yellow"}


def show(result: CheckResult, console: Console) -> None:
    """Print a check's result: whether the plan changes the training, the first difference, and what was compared.

    Args:
        result: The check's result.
        console: Where to print; its width, colours and encoding are respected.
    """
    screen = Screen(console)
    console.print()
    console.print(screen.text(words.answer(result), _STYLES[result.ok]))
    for line in words.reason(result):
        screen.say(screen.text(clean(line)))
    for plan, outcome, well in words.runs(result):
        console.print()
        screen.say(screen.text(clean(plan), "bold"))
        screen.say(screen.text(clean(outcome), "" if well else "red"))
    remarks = words.remarks(result)
    if remarks:
        console.print()
    for line in remarks:
        screen.say(screen.text(clean(line), "dim"))
