"""Print the comparison of two runs on one screen."""

from __future__ import annotations

from rich.console import Console

from hasten.doctor.verdict.compare import RULE, Change, Comparison
from hasten.doctor.views import wording
from hasten.evidence import Finding
from hasten.evidence.finding import worst_first
from hasten.report import words
from hasten.report.screen import Screen

_LABEL_WIDTH = 10  # width of the column of labels
_MOST_FINDINGS = 8  # new findings to print, and as many of those that are gone
_ROW = "  {:<14.14}{:>13}{:>13}  {}"


def show(comparison: Comparison, console: Console) -> None:
    """Print a comparison: the answer, phases and memory before and after, findings that came and went.

    Args:
        comparison: The comparison.
        console: The console; its width, colours and encoding are respected.
    """
    screen = Screen(console)
    _answer(comparison, screen)
    _table(comparison, screen)
    _findings(comparison, screen)
    if comparison.differences or comparison.limits:
        console.print()
    for sentence in comparison.differences:
        screen.labelled("unlike", words.clean(sentence), _LABEL_WIDTH, "bold yellow")
    for sentence in comparison.limits:
        screen.labelled("note", words.clean(sentence), _LABEL_WIDTH)


def judge(comparison: Comparison, limit: float, slower: bool, console: Console) -> None:
    """Print whether the later run counts as slower, and by which rule.

    Args:
        comparison: The comparison.
        limit: Share by which the step may become slower (0.05: 5 %).
        slower: Whether it counts as slower (`Comparison.slower`).
        console: The console.
    """
    screen = Screen(console)
    console.print()
    sentence = f"{'SLOWER' if slower else 'Not slower'} by more than {words.percent(limit)}"
    if not slower and max(comparison.typical.ratio, comparison.mean.ratio) > 1 + limit:
        sentence = f"Longer by more than {words.percent(limit)}, but that may be chance"
    screen.say(screen.text(sentence, "bold red" if slower else "bold"), 0)
    screen.say(screen.text(f"{RULE}.", "dim"))


def _answer(comparison: Comparison, screen: Screen) -> None:
    """Print how much the step changed, and both verdicts."""
    screen.console.print()
    typical, mean = comparison.typical, comparison.mean
    if words.known(typical.ratio):
        style = "bold" if not typical.significant else "bold red" if typical.ratio > 1 else "bold green"
        unsure = words.known(typical.low) and not typical.significant
        sentence = f"The typical step takes {_change(typical)}{', which may be chance' if unsure else ''}"
        screen.say(screen.text(sentence, style), 0)
        screen.say(screen.text(f"{_times(typical)}; the mean step takes {_change(mean)}, {_times(mean)}"))
    else:
        screen.say(screen.text("No steady steps on both sides: nothing to compare", "bold yellow"), 0)
    verdicts = [words.clean(side.verdict.title) for side in (comparison.before, comparison.after)]
    if verdicts[0] == verdicts[1]:
        screen.labelled("verdict", f"{verdicts[0]}, as before", _LABEL_WIDTH)
    else:
        screen.labelled("before", verdicts[0], _LABEL_WIDTH)
        screen.labelled("after", verdicts[1], _LABEL_WIDTH, "bold", "bold")


def _change(change: Change) -> str:
    change_words = words.change(change.before, change.after)
    return "the same time" if change_words == "the same" else f"{change_words} time"


def _times(change: Change) -> str:
    """Return the ratio with its interval, as text."""
    if not words.known(change.low):
        return f"{words.times(change.ratio)}, without an interval"
    return f"{words.times(change.ratio)}, 95 % interval {words.interval(change.low, change.high)}"


def _table(comparison: Comparison, screen: Screen) -> None:
    """Print phases, steps and memory, a row each, before and after."""
    screen.console.print()
    longest = max([comparison.mean.before, comparison.mean.after, 1e-9])  # all times are printed in its unit
    phases = [(words.phase(name), change) for name, change in comparison.phases.items()]
    rows = [*phases, ("mean step", comparison.mean), ("typical step", comparison.typical)]
    _line(screen, _ROW.format("", "before", "after", ""), "dim")
    for label, change in rows:
        if change.before > 0 or change.after > 0:
            cells = (words.alike(side, longest) for side in (change.before, change.after))
            difference = _signed(change, words.alike(abs(change.after - change.before), longest))
            _line(screen, _ROW.format(label, *cells, difference), "bold" if label == "mean step" else "")
    for label, change in (("peak memory", comparison.memory), ("GPU memory", comparison.gpu_memory)):
        if change.before > 0 and change.after > 0:
            cells = (words.size(int(side)) for side in (change.before, change.after))
            _line(screen, _ROW.format(label, *cells, words.change(change.before, change.after)))


def _signed(change: Change, amount: str) -> str:
    return f"{'+' if change.after >= change.before else '-'}{amount}"


def _line(screen: Screen, line: str, style: str = "") -> None:
    screen.console.print(screen.text(line.rstrip(), style), soft_wrap=True)


def _findings(comparison: Comparison, screen: Screen) -> None:
    """Print the findings that came and went, worst first, and the names of those that stayed."""
    screen.console.print()
    for label, style, findings in (
        ("new", "bold red", comparison.new_findings),
        ("gone", "bold green", comparison.resolved_findings),
    ):
        ordered = worst_first(findings)
        for finding in ordered[:_MOST_FINDINGS]:
            screen.labelled(label, _finding_text(finding), _LABEL_WIDTH, style)
        if (hidden := len(ordered) - _MOST_FINDINGS) > 0:
            screen.labelled("", f"and {hidden} more; --json FILE has them", _LABEL_WIDTH)
    if not comparison.new_findings and not comparison.resolved_findings:
        screen.labelled("findings", "none came, none went", _LABEL_WIDTH)
    if comparison.remaining_findings:
        screen.labelled(
            "still",
            ", ".join(_remaining_text(before, after) for before, after in comparison.remaining_findings),
            _LABEL_WIDTH,
        )


def _finding_text(finding: Finding) -> str:
    place, worth = wording.place(finding), wording.worth(finding)
    head = " ".join(part for part in (words.clean(finding.name), place, f"({worth})" if worth else "") if part)
    return f"{head}: {words.clean(finding.what)}"


def _remaining_text(before: Finding, after: Finding) -> str:
    """Return a finding's name, with its worth before and after if both are known."""
    name = words.clean(after.name)
    if not (words.known(before.worth) and words.known(after.worth)):
        return name
    return f"{name} ({words.percent(before.worth)} -> {words.percent(after.worth)})"
