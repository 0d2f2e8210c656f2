"""The table of public scripts that run.py prints and writes: one row a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def applied(row: dict[str, Any]) -> str:
    listed = row["report"].get("techniques", [])
    return ", ".join(f"{t['name']}={t.get('setting')}" for t in listed) or "nothing"


def refused(row: dict[str, Any]) -> str:
    named = [(e.get("name", "?"), e.get("reason") or e.get("why") or "") for e in row["report"].get("skipped", [])]
    return "; ".join(f"{name}: {why}" if why else name for name, why in named)


def claim(row: dict[str, Any]) -> str:
    said = row["report"].get("speedup") or {}
    parity = (row["report"].get("parity") or {}).get("answer", "not known")
    ratio = f"{said['ratio']:.2f} ({said['low']:.2f}-{said['high']:.2f})" if said.get("ratio") else "-"
    return f"{ratio}, parity {parity}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    head = [
        "script",
        "runs unchanged",
        "whole run",
        "steps",
        "tune's own figure",
        "applied",
        "refused, and why",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        unchanged = ("yes" if row["unchanged"] else "no") + (f": {row['why']}" if row["why"] else "")
        ratios = [str(row.get("whole_run") or "-"), str(row.get("steps") or "-")]
        cells = [row["name"], unchanged, *ratios, claim(row), applied(row), refused(row)]
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)
