"""Two runs side by side, on one screen."""

from __future__ import annotations

from rich.console import Console

from hasten.doctor.verdict.compare import RULE, Change, Comparison
from hasten.doctor.views import wording
from hasten.evidence import Finding
from hasten.evidence.finding import worst_first
from hasten.report import words
from hasten.report.screen import Screen

_ROOM = 10
_MOST_FINDINGS = 8
_ROW = "  {:<14.14}{:>13}{:>13}  {}"


def show(found: Comparison, console: Console) -> None:
    """Print a comparison: the answer, phases and memory before and after, findings that came and went.

    Args:
        found: What to show.
        console: Where to print; its width, colours and encoding are respected.
    """
    screen = Screen(console)
    _answer(found, screen)
    _table(found, screen)
    _findings(found, screen)
    if found.differences or found.limits:
        console.print()
    for sentence in found.differences:
        screen.labelled("unlike", words.clean(sentence), _ROOM, "bold yellow")
    for sentence in found.limits:
        screen.labelled("note", words.clean(sentence), _ROOM)


def judge(found: Comparison, limit: float, slower: bool, console: Console) -> None:
    """Say whether the later run counts as slower, and by which rule."""
    screen = Screen(console)
    console.print()
    sentence = f"{'SLOWER' if slower else 'Not slower'} by more than {words.percent(limit)}"
    if not slower and max(found.typical.ratio, found.mean.ratio) > 1 + limit:
        sentence = f"Longer by more than {words.percent(limit)}, but that may be chance"
    screen.say(screen.text(sentence, "bold red" if slower else "bold"), 0)
    screen.say(screen.text(f"{RULE}.", "dim"))


def _answer(found: Comparison, screen: Screen) -> None:
    screen.console.print()
    typical, mean = found.typical, found.mean
    if words.known(typical.ratio):
        style = "bold" if not typical.sure else "bold red" if typical.ratio > 1 else "bold green"
        unsure = words.known(typical.low) and not typical.sure
        sentence = f"The typical step takes {_change(typical)}{', which may be chance' if unsure else ''}"
        screen.say(screen.text(sentence, style), 0)
        screen.say(screen.text(f"{_times(typical)}; the mean step takes {_change(mean)}, {_times(mean)}"))
    else:
        screen.say(screen.text("No steady steps on both sides: nothing to compare", "bold yellow"), 0)
    verdicts = [words.clean(side.verdict.title) for side in (found.before, found.after)]
    if verdicts[0] == verdicts[1]:
        screen.labelled("verdict", f"{verdicts[0]}, as before", _ROOM)
    else:
        screen.labelled("before", verdicts[0], _ROOM)
        screen.labelled("after", verdicts[1], _ROOM, "bold", "bold")


def _change(change: Change) -> str:
    change_words = words.change(change.before, change.after)
    return "the same time" if change_words == "the same" else f"{change_words} time"


def _times(change: Change) -> str:
    """The ratio with its interval."""
    if not words.known(change.low):
        return f"{words.times(change.ratio)}, without an interval"
    return f"{words.times(change.ratio)}, 95 % interval {words.interval(change.low, change.high)}"


def _table(found: Comparison, screen: Screen) -> None:
    screen.console.print()
    longest = max([found.mean.before, found.mean.after, 1e-9])
    rows = [(words.phase(name), change) for name, change in found.phases.items()]
    named = [*rows, ("mean step", found.mean), ("typical step", found.typical)]
    _line(screen, _ROW.format("", "before", "after", ""), "dim")
    for label, change in named:
        if change.before > 0 or change.after > 0:
            cells = (words.alike(side, longest) for side in (change.before, change.after))
            difference = _signed(change, words.alike(abs(change.after - change.before), longest))
            _line(screen, _ROW.format(label, *cells, difference), "bold" if label == "mean step" else "")
    for label, change in (("peak memory", found.memory), ("GPU memory", found.gpu_memory)):
        if change.before > 0 and change.after > 0:
            cells = (words.size(int(side)) for side in (change.before, change.after))
            _line(screen, _ROW.format(label, *cells, words.change(change.before, change.after)))


def _signed(change: Change, amount: str) -> str:
    return f"{'+' if change.after >= change.before else '-'}{amount}"


def _line(screen: Screen, line: str, style: str = "") -> None:
    screen.console.print(screen.text(line.rstrip(), style), soft_wrap=True)


def _findings(found: Comparison, screen: Screen) -> None:
    screen.console.print()
    for label, style, findings in (("new", "bold red", found.came), ("gone", "bold green", found.went)):
        ordered = worst_first(findings)
        for one in ordered[:_MOST_FINDINGS]:
            screen.labelled(label, _told(one), _ROOM, style)
        if (left := len(ordered) - _MOST_FINDINGS) > 0:
            screen.labelled("", f"and {left} more; --json FILE has them", _ROOM)
    if not found.came and not found.went:
        screen.labelled("findings", "none came, none went", _ROOM)
    if found.stayed:
        screen.labelled("still", ", ".join(_still(one, other) for one, other in found.stayed), _ROOM)


def _told(one: Finding) -> str:
    place, worth = wording.place(one), wording.worth(one)
    head = " ".join(part for part in (words.clean(one.name), place, f"({worth})" if worth else "") if part)
    return f"{head}: {words.clean(one.what)}"


def _still(before: Finding, after: Finding) -> str:
    name = words.clean(after.name)
    if not (words.known(before.worth) and words.known(after.worth)):
        return name
    return f"{name} ({words.percent(before.worth)} -> {words.percent(after.worth)})"
