"""`hasten convert`: convert images, CSV, JSON lines, tar files or a torch Dataset to Parquet."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hasten import messages
from hasten.cli.size import size_in_bytes
from hasten.errors import HastenError
from hasten.report import words

if TYPE_CHECKING:
    from hasten.data.convert.write import Conversion


def convert(
    source: str = typer.Argument(
        metavar="SOURCE", help="A folder of images, a .csv, .jsonl or .tar file, or a dataset: data.py:train_set."
    ),
    out: Path = typer.Argument(metavar="FOLDER", help="Where the Parquet files go; new, empty, or half converted."),
    kind: str = typer.Option(
        "auto", metavar="KIND", help="images, csv, jsonl, webdataset or dataset; auto: by what is there."
    ),
    shuffle: bool = typer.Option(
        True, help="Write images and a dataset's samples in a random order, always the same one."
    ),
    skip_bad: bool = typer.Option(False, "--skip-bad", help="Leave bad records out and count them; else one ends it."),
    text: list[str] = typer.Option([], metavar="COLUMN", help="A CSV column that stays text; may be repeated."),
    group_size: str = typer.Option(
        "", metavar="SIZE", help="Bytes of a row group (default: 16MiB, or a 32nd of small data)."
    ),
    file_size: str = typer.Option("256MiB", metavar="SIZE", help="Bytes of a file."),
) -> None:
    """Convert data to Parquet that hasten.data.ParquetDataset shuffles and reads quickly.

    Each file is written atomically: after Ctrl-C, a crash or kill -9, the same command resumes after the finished files
    and produces the same files as an uninterrupted run. CSV, JSON lines and tar files keep their order, so shuffle them
    beforehand if it matters. Needs pyarrow: pip install 'hasten[data]'.

    Example: hasten convert photos/train train-parquet
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise HastenError("hasten convert needs pyarrow", "pip install 'hasten[data]'") from None
    from hasten.data.convert.kinds import source_of
    from hasten.data.convert.write import Conversion

    group = size_in_bytes(group_size, "--group-size") if group_size else None
    found = source_of(source, kind, shuffle, tuple(text))
    conversion = Conversion(found, out, group, size_in_bytes(file_size, "--file-size"), skip_bad)
    if conversion.done:
        messages.tell(f"hasten: {out} is finished: {conversion.rows:,} rows in {_files(conversion)}")
        return
    if conversion.resumed:
        messages.tell(f"hasten: resuming after {_files(conversion)} of {conversion.rows:,} rows")
    try:
        _with_a_bar(conversion, found.what, found.records)
    except KeyboardInterrupt:
        messages.tell(f"hasten: stopped; {_files(conversion)} finished; the same command resumes from there")
        raise typer.Exit(130) from None
    count, some = conversion.bad
    for line in some:
        messages.tell(f"hasten: left out: {line}")
    left_out = f"; left out: {words.count(count, 'bad record')}" if count else ""
    typer.echo(f"{conversion.rows:,} {found.what} in {_files(conversion)} in {out}{left_out}")


def _files(conversion: Conversion) -> str:
    return words.count(conversion.resumed, "file")


def _with_a_bar(conversion: Conversion, noun: str, total: int | None) -> None:
    """Convert, with a progress bar on a terminal, or a line per finished file elsewhere."""
    if messages.is_terminal(sys.stderr):
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task(noun, total=total, completed=conversion.records)
            conversion.run(lambda records: bar.update(task, completed=records))
        return
    files_shown = conversion.resumed

    def tell(records: int) -> None:
        nonlocal files_shown
        if conversion.resumed > files_shown:
            files_shown = conversion.resumed
            of_total = f" of {total:,}" if total else ""
            messages.tell(f"hasten: {records:,}{of_total} {noun}, {_files(conversion)} finished")

    conversion.run(tell)
