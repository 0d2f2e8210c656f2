"""Print a diagnosis on one terminal screen, the most important first."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from hasten.doctor.verdict.diagnosis import Diagnosis
from hasten.doctor.views import loader_bench, wording
from hasten.evidence import Evidence, Finding, Severity
from hasten.evidence.finding import worst_first
from hasten.report import words
from hasten.report.screen import Screen, stacked

_STYLES = {Severity.HIGH: "bold red", Severity.MEDIUM: "yellow", Severity.LOW: "cyan", Severity.NOTE: "dim"}
_CALM = {"none": "bold green", "untrained": "bold yellow", "loader": "bold"}
_WIDEST_BAR = 40
_WIDEST_LABEL = 16
_LABEL_WIDTH = 10  # width of the column of labels
_LINES_BESIDE_FINDINGS = 26  # estimated lines of everything but findings
_LINES_A_FINDING = 4  # estimated lines of a finding
_MOST_SENTENCES = 3  # sentences on the machine to print; as many on what was not seen, and notes


def show(
    diagnosis: Diagnosis,
    evidence: Evidence | None,
    console: Console,
    html: Path | None = None,
    json: Path | None = None,
) -> None:
    """Print a diagnosis: the verdict, where a step's time goes, the findings worst first, what was not seen.

    Args:
        diagnosis: The diagnosis to show.
        evidence: The evidence it was made from, for use of the machine and the loader's stages; None if it is no longer
            there.
        console: The console; its width, height, colours and encoding are respected.
        html: The HTML page that was written; None if none was.
        json: The JSON file that was written; None if none was.
    """
    page = _DiagnosisPage(diagnosis, evidence, console)
    page.verdict()
    if diagnosis.loader_bench is not None:
        loader_bench.show(diagnosis.loader_bench, page.screen, html is not None)
    else:
        page.phases()
        page.findings(html)
    page.sentences(html)
    page.files(html, json)


class _DiagnosisPage:
    """Prints the parts of the screen, one method each."""

    def __init__(self, diagnosis: Diagnosis, evidence: Evidence | None, console: Console) -> None:
        self.diagnosis = diagnosis
        self.evidence = evidence
        self.console = console
        self.screen = Screen(console)

    def verdict(self) -> None:
        """Print the verdict, how it is known, and which command was observed."""
        verdict, screen = self.diagnosis.verdict, self.screen
        self.console.print()
        screen.say(screen.text(words.clean(verdict.title), _CALM.get(verdict.resource, "bold red")), 0)
        for sentence in verdict.details:
            screen.say(screen.text(words.clean(sentence)))
        if self.diagnosis.loader_bench is None:
            screen.say(screen.text(wording.listened_to(self.diagnosis), "dim"))
        if self.diagnosis.error:
            screen.labelled("failed", words.clean(self.diagnosis.error), _LABEL_WIDTH, "bold red")

    def phases(self) -> None:
        """Print the phases of a steady step as bars, and beside them figures such as pauses and outliers."""
        rows = wording.phase_rows(self.diagnosis)
        if rows:
            on_gpu = self.evidence is not None and self.evidence.device_clock
            self.screen.heading("Where a steady step's time goes", "on the GPU's clock" if on_gpu else "")
            total = sum(row.seconds for row in rows)
            wide = max(len("a whole step"), min(_WIDEST_LABEL, max(len(row.label) for row in rows)))
            lengths = stacked([row.seconds for row in rows], max(4, min(_WIDEST_BAR, self.console.width - wide - 22)))
            for row, length in zip(rows, lengths, strict=True):
                style = "blue" if row.name in ("forward", "backward") else "yellow"
                self._row(row.label[:wide].ljust(wide), words.alike(row.seconds, total), row.share, length, style)
            self._row("a whole step".ljust(wide), words.alike(total, total), "100 %", None, "bold")
        asides = wording.asides(self.diagnosis, self.evidence)
        if asides and not rows:
            self.console.print()
        for label, line in asides:
            self.screen.labelled(label, line, _LABEL_WIDTH)

    def _row(self, label: str, seconds: str, share: str, length: int | None, style: str) -> None:
        line = self.screen.text(f"  {label}  {seconds:>9}  {share:>5}", style if length is None else "")
        if length is not None:
            line += self.screen.text("  ") + self.screen.bar(length, style)
        self.console.print(line, soft_wrap=True)

    def findings(self, html: Path | None) -> None:
        """Print as many costly findings as fit on the screen; name the others and the notes."""
        ordered = worst_first(self.diagnosis.findings)
        costly = [finding for finding in ordered if finding.severity is not Severity.NOTE]
        notes = [finding for finding in ordered if finding.severity is Severity.NOTE]
        if not costly:
            self.console.print()
            if self.diagnosis.steps:
                self.console.print(self.screen.text(wording.NO_FINDINGS, "bold"))
            elif not notes:
                self.console.print(self.screen.text("No findings: no whole training step was seen.", "bold"))
        else:
            self.screen.heading("Findings, worst first")
            height = self.console.height if self.console.is_terminal else 40
            most = max(3, (height - _LINES_BESIDE_FINDINGS) // _LINES_A_FINDING)
            for finding in costly[:most]:
                self._finding(finding)
            self._summary(costly[most:], "more finding", html)
        self._summary(notes, "note", html)

    def _finding(self, finding: Finding) -> None:
        screen = self.screen
        head = screen.text(f"{finding.severity.value.upper():<7}", _STYLES[finding.severity])
        head += screen.text(words.clean(finding.name), "bold")
        if place := wording.place(finding):
            head += screen.text(f"  {place}")
        worth = screen.text(wording.worth(finding), "bold" if finding.severity is Severity.HIGH else "")
        fits = head.cell_len + worth.cell_len + 4 <= self.console.width
        screen.say(head + screen.text("  ") + worth if fits and worth else head)
        if worth and not fits:
            screen.say(worth, 9)
        screen.say(screen.text(words.clean(finding.what)), 9)
        if finding.fix:
            screen.say(screen.text("fix: ", "green") + screen.text(words.clean(finding.fix)), 9)

    def _summary(self, findings: list[Finding], noun: str, html: Path | None) -> None:
        """Print the names of the findings that are not shown in full, and where to see them."""
        if not findings:
            return
        places = ((words.clean(finding.name), wording.place(finding)) for finding in findings)
        names = list(dict.fromkeys(f"{name} ({place})" if place else name for name, place in places))
        shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        self.screen.say(self.screen.text(f"and {words.count(len(findings), noun)}: {shown}; {_elsewhere(html)}", "dim"))

    def sentences(self, html: Path | None) -> None:
        """Print the advice on the machine, what could not be observed, and how the run was changed."""
        diagnosis = self.diagnosis
        if diagnosis.machine or diagnosis.unseen or diagnosis.notes:
            self.console.print()
        for label, lines in (("machine", diagnosis.machine), ("unseen", diagnosis.unseen), ("notes", diagnosis.notes)):
            for sentence in lines[:_MOST_SENTENCES]:
                self.screen.labelled(label, words.clean(sentence), _LABEL_WIDTH, "bold")
                label = ""  # only the first sentence has the label
            if (hidden := len(lines) - _MOST_SENTENCES) > 0:
                self.screen.labelled("", f"and {hidden} more; {_elsewhere(html)}", _LABEL_WIDTH, text_style="dim")

    def files(self, html: Path | None, json: Path | None) -> None:
        """Print which files were written, and what to do next."""
        trace = self.evidence.sampled.trace if self.evidence and self.evidence.sampled else ""
        rows = [("page", html), ("JSON", json), ("trace", trace)]
        rows = [(label, path) for label, path in rows if path]
        curable = wording.techniques(self.diagnosis)
        if rows or curable:
            self.console.print()
        for label, path in rows:
            self.console.print(self.screen.text(f"  {label:<{_LABEL_WIDTH}}{words.clean(str(path))}"), soft_wrap=True)
        if curable and self.diagnosis.command:
            self.screen.say(self.screen.text(f"Next: tune measures and installs {_and(curable[:4])} for you:"), 0)
            command = f"  hasten tune {words.command(self.diagnosis.command)}"
            self.console.print(self.screen.text(command, "bold"), soft_wrap=True)


def _elsewhere(html: Path | None) -> str:
    return f"see {words.clean(str(html))}" if html is not None else "--html FILE shows them"


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
