"""Results of validation and test as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten import messages

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer


def print_results(trainer: Trainer, results: list[dict[str, Any]], fn: str) -> None:
    """Print what each loader's values are, a row a value."""
    stripped = [{name.split("/dataloader_idx_")[0]: value for name, value in one.items()} for one in results]
    names = sorted({name for one in stripped for name in one})
    if not names or not trainer.is_global_zero:
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(f"{fn} metric", *(f"DataLoader {index}" for index in range(len(stripped))))
    for name in names:
        cells = [one.get(name) for one in stripped]
        table.add_row(name, *("" if cell is None else f"{float(cell):.6g}" for cell in cells))
    with messages.harmless():
        Console().print(table)
