"""One screen that says what a tune found, the most important first."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hasten.check import words as check_words
from hasten.plan import DEFAULT_NAME
from hasten.report import verdict, words
from hasten.report.screen import Screen
from hasten.report.verdict import phases
from hasten.tuner.proof import Proof

_STYLES = {"faster": "bold green", "nothing": "bold", "unclear": "bold yellow", "parity": "bold red"}
_PARITY_STYLES = {"ok": "green", "spoilt": "bold red", "unchecked": "yellow"}
_CHECK_STYLES = {True: "green", False: "bold red", None: "yellow"}
_MOST_ROWS = 8


def show(proof: Proof, console: Console, plan_path: Path | None, html_path: Path | None) -> None:
    """Print a proof: the speed-up, parity, memory, what was kept, lost and skipped, and what to do next.

    Args:
        proof: What was measured.
        console: Where to print; its width, colours and encoding are respected.
        plan_path: Where the plan was written; None where there is none.
        html_path: Where the page was written; None where there is none.
    """
    _Page(proof, console).show(plan_path, html_path)


class _Page:
    """The parts of the screen, in order."""

    def __init__(self, proof: Proof, console: Console) -> None:
        self.proof = proof
        self.console = console
        self.screen = Screen(console)
        self._text = self.screen.text

    def show(self, plan_path: Path | None, html_path: Path | None) -> None:
        self._verdict()
        self._parity()
        self._kept()
        self._phases()
        self._lost()
        self._skipped()
        self._notes()
        self._next(plan_path, html_path)

    def _columns(self, rows: list[tuple[Text, ...]], indent: int = 2) -> None:
        """Borderless columns: the last one wraps, the others keep their width."""
        table = Table.grid(padding=(0, 2, 0, 0))
        for index in range(len(rows[0]) - 1):
            table.add_column(overflow="fold", max_width=26 if index == 0 else 30)
        table.add_column(overflow="fold", ratio=1)
        for row in rows:
            table.add_row(*row)
        self.console.print(Padding(table, (0, 0, 0, indent), expand=False))

    def _verdict(self) -> None:
        found = verdict.verdict(self.proof)
        self.console.print()
        self.console.print(self._text(found.title, _STYLES[found.kind]))
        self.screen.say(self._text(found.detail))
        self.screen.say(self._text(f"Training: {words.command(self.proof.command)}", "dim"))
        if not self.proof.techniques:
            return
        self.console.print()
        rows = [*verdict.speed(self.proof), *verdict.memory(self.proof)]
        self._columns([(self._text(r.label), self._text(r.value, "bold"), self._text(r.detail)) for r in rows])

    def _parity(self) -> None:
        if not self.proof.techniques:
            return
        if self.proof.check is not None:
            self.console.print()
            answer = check_words.answer(self.proof.check)
            self.console.print(self._text(f"Checked step by step: {answer}", _CHECK_STYLES[self.proof.check.ok]))
            for reason in check_words.reason(self.proof.check):
                self.screen.say(self._text(words.clean(reason), "red"))
        found = verdict.parity(self.proof)
        self.console.print()
        line = self._text(found.title, _PARITY_STYLES[found.kind])
        self.console.print(line + self._text(f": {found.detail}."))
        for check in self.proof.parity.checks:
            self.screen.say(self._text(verdict.check(check), "" if check.ok else "red"))
        if (note := words.clean(self.proof.parity.note)) and note != found.detail:
            self.screen.say(self._text(note, "dim"))

    def _kept(self) -> None:
        if not self.proof.techniques:
            return
        self.screen.heading("Kept")
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        table.add_column("technique", overflow="fold", min_width=12)
        table.add_column("setting", overflow="fold", min_width=7)
        table.add_column("effect", no_wrap=True)
        table.add_column("contribution", justify="right", overflow="fold", min_width=5)
        table.add_column("interval", overflow="fold")
        for one in self.proof.techniques:
            table.add_row(
                self._text(words.clean(one.name)),
                self._text(words.setting(one.setting)),
                self._text(words.clean(one.effect)),
                self._text(words.times(one.contribution), "bold"),
                self._text(words.interval(one.contribution_low, one.contribution_high)),
            )
        self.console.print(Padding(table, (0, 0, 0, 2), expand=False))
        self.screen.say(self._text(f"Contribution: {verdict.contributions(self.proof)}.", "dim"))
        self.screen.say(self._text(f"Effect: {verdict.effects(self.proof)}.", "dim"))

    def _phases(self) -> None:
        shown = phases(self.proof)
        if not shown:
            return
        sides = [("before", "dim"), ("after", "green")] if self.proof.techniques else [("before", "dim")]
        self.screen.heading("Where a step's time goes" + (", baseline -> plan" if len(sides) == 2 else ""))
        longest = max(max(row.before, row.after) for row in shown)
        unit = max(sum(row.before for row in shown), sum(row.after for row in shown))
        room = max(6, min(24, (self.console.width - 44) // 2))
        table = Table.grid(padding=(0, 1, 0, 0))
        for justify in ("left", "right", "left", "right", "left"):
            table.add_column(justify=justify, no_wrap=True)
        for row in shown:
            cells = [self._text(row.label)]
            for side, style in sides:
                seconds: float = getattr(row, side)
                bar = self.screen.bar(round(seconds / longest * room), style, seconds > 0)
                cells += [self._text(words.alike(seconds, unit)), bar]
            table.add_row(*cells)
        total = [self._text("a whole step", "bold")]
        for side, _ in sides:
            total += [self._text(words.alike(sum(getattr(row, side) for row in shown), unit), "bold"), Text()]
        table.add_row(*total)
        self.console.print(Padding(table, (0, 0, 0, 2), expand=False))

    def _lost(self) -> None:
        rows = verdict.lost(self.proof)
        if not rows:
            return
        self.screen.heading("Tried and not kept")
        self._columns([self._lost_row(*row) for row in rows[:_MOST_ROWS]])
        self._more(len(rows) - _MOST_ROWS)

    def _lost_row(self, name: str, setting: str, reason: str) -> tuple[Text, Text]:
        return self._text(f"{name} = {_short(setting, 24)}"), self._text(_short(reason, 160))

    def _skipped(self) -> None:
        rows = self.proof.skipped
        if not rows:
            return
        self.screen.heading("Not tried, and why")
        self._columns(
            [
                (self._text(words.clean(one.name)), self._text(_short(words.clean(one.reason), 160)))
                for one in rows[:_MOST_ROWS]
            ]
        )
        self._more(len(rows) - _MOST_ROWS)

    def _more(self, left: int) -> None:
        if left > 0:
            self.screen.say(self._text(f"and {left} more, in the report", "dim"))

    def _notes(self) -> None:
        notes = [*self.proof.notes, *(f"tap skipped: {reason}" for reason in self.proof.taps_skipped)]
        if not notes:
            return
        self.screen.heading("Notes")
        for note in notes:
            self._columns([(self._text("-"), self._text(words.clean(note)))])

    def _next(self, plan_path: Path | None, html_path: Path | None) -> None:
        used, budget = words.duration(self.proof.used_seconds), words.duration(self.proof.budget_seconds)
        trials = words.count(len(self.proof.trials), "trial")
        self.screen.heading(f"Files ({trials} in {used} of {budget})")
        rows = [("plan", plan_path), ("report", html_path)]
        if html_path is not None and html_path.with_suffix(".json").is_file():
            rows.append(("figures", html_path.with_suffix(".json")))
        for label, path in rows:
            if path is not None:
                self.console.print(self._text(f"  {label:<8}{words.clean(str(path))}"), soft_wrap=True)
        command = _next_command(self.proof, plan_path)
        if command:
            self.console.print()
            self.console.print(self._text("Next: ") + self._text(command, "bold"), soft_wrap=True)


def _next_command(proof: Proof, plan_path: Path | None) -> str:
    """The command that runs the training under the plan, unless the plan is no good."""
    if plan_path is None or not proof.techniques or not proof.parity.ok:
        return ""
    default = plan_path.absolute() == Path.cwd() / DEFAULT_NAME
    option = "" if default else f"--plan {shlex.quote(str(plan_path))} "
    return f"hasten run {option}{words.command(proof.command)}"


def _short(text: str, most: int) -> str:
    """Text cut at `most` letters, said by dots."""
    return text if len(text) <= most else text[: most - 3].rstrip() + "..."
