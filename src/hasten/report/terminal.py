"""Print a tune's result to a terminal, the most important first."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hasten.plan import DEFAULT_NAME
from hasten.report import parity_words, technique_words, verdict, words
from hasten.report.screen import Screen
from hasten.report.verdict import phases
from hasten.tuner.proof import Answer, Proof

_STYLES = {
    "faster": "bold green",
    "unproven": "bold yellow",
    "unclear": "bold yellow",
    "refuted": "bold red",
    "nothing": "bold",
}
_ANSWERS = {Answer.HOLDS: "green", Answer.DOES_NOT: "bold red", Answer.NOT_KNOWN: "yellow"}
_MOST_ROWS = 6
_WIDE = 76  # columns of a terminal that has room for all of the table


def show(proof: Proof, console: Console, plan_path: Path | None, html_path: Path | None) -> None:
    """Print a proof: the speed-up, whether it is proven, the techniques kept, lost and skipped, and the next command.

    Args:
        proof: The proof.
        console: Where to print; its width, colours and encoding are respected.
        plan_path: Where the plan was written; None if it was not.
        html_path: Where the page was written; None if it was not.
    """
    _TunePage(proof, console).show(plan_path, html_path)


class _TunePage:
    """Prints the sections of the screen, in order."""

    def __init__(self, proof: Proof, console: Console) -> None:
        self.proof = proof.without_paths()
        # With full paths, so that it can be pasted: a shell may not expand the "~" of a shortened one.
        self.command = proof.command
        self.console = console
        self.screen = Screen(console)
        self._text = self.screen.text

    def show(self, plan_path: Path | None, html_path: Path | None) -> None:
        self._verdict()
        self._parity()
        self._kept()
        self._phases()
        self._lost()
        self._would_ask()
        self._skipped()
        self._notes()
        self._files_and_next_command(plan_path, html_path)

    def _columns(self, rows: list[tuple[Text, ...]], indent: int = 2) -> None:
        """Print rows as borderless columns. The last column takes the remaining width and wraps."""
        table = Table.grid(padding=(0, 2, 0, 0))
        for index in range(len(rows[0]) - 1):
            table.add_column(overflow="fold", max_width=26 if index == 0 else 30)
        table.add_column(overflow="fold", ratio=1)
        for row in rows:
            table.add_row(*row)
        self.console.print(Padding(table, (0, 0, 0, indent), expand=False))

    def _verdict(self) -> None:
        answer = verdict.verdict(self.proof)
        self.console.print()
        self.screen.say(self._text(answer.title, _STYLES[answer.kind]), 0)
        self.screen.say(self._text(answer.detail))
        self.screen.say(self._text(f"Training: {words.command(self.proof.command)}", "dim"))
        if noisy := verdict.noisy(self.proof):
            self.screen.say(self._text(noisy, "dim"))
        if not self.proof.techniques:
            return
        self.console.print()
        promised = verdict.promises(self.proof)
        self._columns(
            [
                (self._text(p.name), self._text(p.answer.value, _ANSWERS[p.answer]), self._text(p.detail))
                for p in promised
            ]
        )
        self.console.print()
        rows = [*verdict.speed(self.proof), *verdict.memory(self.proof)]
        self._columns([(self._text(r.label), self._text(r.value, "bold"), self._text(r.detail)) for r in rows])

    def _parity(self) -> None:
        """Print the figures behind "same steps" and "same losses", if anything was compared."""
        agreement, checks = self.proof.agreement, self.proof.parity.checks
        if not self.proof.techniques or not (agreement or checks):
            return
        self.screen.heading("Is the result the same?")
        if agreement:
            line = f"{parity_words.agreement_in_short(agreement)}."
            self.screen.say(self._text(line, "" if parity_words.agrees(agreement) else "red"))
        for check in checks:
            self.screen.say(self._text(f"{parity_words.check(check)}.", "" if check.ok else "red"))
        note = words.clean(self.proof.parity.note)
        if note and note != parity_words.parity(self.proof).detail:
            self.screen.say(self._text(note, "dim"))

    def _kept(self) -> None:
        rows = technique_words.kept(self.proof)
        if not rows:
            return
        self.screen.heading("Kept")
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        table.add_column("technique", overflow="fold", min_width=12)
        # A narrow terminal leaves out setting and effect rather than the certainty: the plan has the settings.
        if wide := self.console.width >= _WIDE:
            table.add_column("setting", overflow="fold", min_width=7)
            table.add_column("effect", no_wrap=True)
        table.add_column("brings", justify="right", overflow="fold", min_width=5)
        table.add_column("interval", overflow="fold")
        table.add_column("helps", justify="right", overflow="fold", min_width=4)
        for row in rows:
            cells = (row.name, _short(row.setting, 60), row.effect) if wide else (row.name,)
            brings = self._text(row.brings, "bold")
            table.add_row(*map(self._text, cells), brings, self._text(row.interval), self._text(row.certainty))
        self.console.print(Padding(table, (0, 0, 0, 2), expand=False))
        self.screen.say(self._text(f"{technique_words.meaning(self.proof)}.", "dim"))
        self.screen.say(self._text(f"Effect: {technique_words.effects(self.proof)}.", "dim"))

    def _phases(self) -> None:
        rows = phases(self.proof)
        if not rows:
            return
        plan_measured = verdict.plan_was_phased(self.proof)
        sides = [("before", "dim"), ("after", "green")] if plan_measured else [("before", "dim")]
        self.screen.heading("Where a step's time goes" + (", baseline -> plan" if len(sides) == 2 else ""))
        longest = max(max(row.before, row.after) for row in rows)
        unit = max(sum(row.before for row in rows), sum(row.after for row in rows))
        bar_width = max(6, min(24, (self.console.width - 44) // 2))
        table = Table.grid(padding=(0, 1, 0, 0))
        for justify in ("left", "right", "left", "right", "left"):
            table.add_column(justify=justify, no_wrap=True)
        for row in rows:
            cells = [self._text(row.label)]
            for side, style in sides:
                seconds: float = getattr(row, side)
                bar = self.screen.bar(round(seconds / longest * bar_width), style, seconds > 0)
                cells += [self._text(words.alike(seconds, unit)), bar]
            table.add_row(*cells)
        total = [self._text("a whole step", "bold")]
        for side, _ in sides:
            total += [self._text(words.alike(sum(getattr(row, side) for row in rows), unit), "bold"), Text()]
        table.add_row(*total)
        self.console.print(Padding(table, (0, 0, 0, 2), expand=False))
        if gap := verdict.phase_gap(self.proof):
            self.screen.say(self._text(f"{gap}.", "yellow"))
        if self.proof.techniques and not plan_measured:
            self.screen.say(self._text(f"{verdict.PLAIN_PHASES}.", "dim"))

    def _lost(self) -> None:
        rows = technique_words.lost(self.proof)
        if not rows:
            return
        self.screen.heading("Tried and not kept")
        self._columns([self._lost_row(row) for row in rows[:_MOST_ROWS]])
        self._more_rows(len(rows) - _MOST_ROWS)

    def _lost_row(self, row: technique_words.Row) -> tuple[Text, Text]:
        figures = f"{row.brings} ({row.interval}), helps: {row.certainty}. " if words.known(row.ratio) else ""
        name = f"{row.name} = {_short(row.setting, 24)}"
        return self._text(name), self._text(_short(f"{figures}{row.why}", 160))

    def _would_ask(self) -> None:
        if not self.proof.would_ask:
            return
        self.screen.heading("With more time, tune would ask")
        for question in self.proof.would_ask[:_MOST_ROWS]:
            self._columns([(self._text("-"), self._text(_short(words.clean(question), 160)))])
        self._more_rows(len(self.proof.would_ask) - _MOST_ROWS)

    def _skipped(self) -> None:
        rows = self.proof.skipped
        if not rows:
            return
        self.screen.heading("Not tried, and why")
        self._columns(
            [
                (self._text(words.clean(row.name)), self._text(_short(words.clean(row.reason), 160)))
                for row in rows[:_MOST_ROWS]
            ]
        )
        self._more_rows(len(rows) - _MOST_ROWS)

    def _more_rows(self, count: int) -> None:
        if count > 0:
            self.screen.say(self._text(f"and {count} more, in the report", "dim"))

    def _notes(self) -> None:
        notes = [*self.proof.notes, *(f"tap skipped: {reason}" for reason in self.proof.taps_skipped)]
        if not notes:
            return
        self.screen.heading("Notes")
        for note in notes:
            self._columns([(self._text("-"), self._text(words.clean(note)))])

    def _files_and_next_command(self, plan_path: Path | None, html_path: Path | None) -> None:
        seconds_used, budget = words.duration(self.proof.used_seconds), words.duration(self.proof.budget_seconds)
        blocks, trials = len(self.proof.blocks), len(self.proof.trials)
        measured = words.count(blocks, "block") if blocks else words.count(trials, "trial")
        self.screen.heading(f"Files ({measured} in {seconds_used} of {budget})")
        rows = [("plan", plan_path), ("report", html_path)]
        if html_path is not None and html_path.with_suffix(".json").is_file():
            rows.append(("figures", html_path.with_suffix(".json")))
        for label, path in rows:
            if path is not None:
                self.console.print(self._text(f"  {label:<8}{words.clean(str(path))}"), soft_wrap=True)
        if spent := words.spent(self.proof.spent_seconds):
            self._columns([(self._text("time  "), self._text(spent))])
        command = _next_command(self.proof, self.command, plan_path)
        if command:
            self.console.print()
            self.console.print(self._text("Next: ") + self._text(command, "bold"), soft_wrap=True)


def _next_command(proof: Proof, command: Sequence[str], plan_path: Path | None) -> str:
    """Return the command that runs the training under the plan; "" if there is none, or the plan is refuted."""
    if plan_path is None or not proof.techniques or proof.proven is Answer.DOES_NOT:
        return ""
    default = plan_path.absolute() == Path.cwd() / DEFAULT_NAME
    option = "" if default else f"--plan {shlex.quote(str(plan_path))} "
    return f"hasten run {option}{words.command(command)}"


def _short(text: str, most: int) -> str:
    """Return text truncated to `most` characters, ending in dots if anything was cut."""
    return text if len(text) <= most else text[: most - 3].rstrip() + "..."
