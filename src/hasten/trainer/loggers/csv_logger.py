"""CSVLogger: write metrics to a CSV file, and hyperparameters to a YAML file beside it."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.files import write_whole
from hasten.trainer.loggers.base import FolderLogger, plain_params


class CSVLogger(FolderLogger):
    """Log to `save_dir/name/version_N/metrics.csv` and `hparams.yaml`.

    Rows are appended, so the cost of a row does not grow with the file. A new metric needs a new header line: the file
    is then copied once, however many new metrics came since the last flush.

    Args:
        save_dir: Folder for all experiments.
        name: Subfolder of this experiment; None or "": none.
        version: Number or name; None: the next free number. Rows are appended if the version has some already.
        prefix: Prefix of metric names, joined with "-".
        flush_logs_every_n_steps: Rows to buffer before they are written.
    """

    NAME_METRICS_FILE = "metrics.csv"
    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "hasten_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        self.hparams: dict[str, Any] = {}
        self._flush_every = flush_logs_every_n_steps
        self._rows: list[dict[str, float]] = []
        self._columns: list[str] | None = None  # the file's columns; None: not read yet
        self._count = 0

    @property
    def experiment(self) -> CSVLogger:
        """The logger itself."""
        return self

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add a row."""
        if not self.writes:
            return
        row = self._named(metrics)
        row["step"] = self._count if step is None else step
        self._rows.append(row)
        self._count += 1
        if len(self._rows) >= self._flush_every:
            self.save()

    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Write hyperparameters at once, together with earlier ones."""
        self.hparams.update(plain_params(params))
        if not self.writes:
            return
        # JSON is valid YAML: each value is written as JSON after its name, so no YAML library is needed.
        lines = [f"{json.dumps(str(name))}: {json.dumps(value, default=str)}\n" for name, value in self.hparams.items()]
        write_whole(self._made_log_dir() / self.NAME_HPARAMS_FILE, "".join(lines))

    def save(self) -> None:
        """Write the buffered rows."""
        if not self._rows:
            return
        path = self._made_log_dir() / self.NAME_METRICS_FILE
        if self._columns is None:
            self._columns = _columns(path)
        new = [name for name in dict.fromkeys(name for row in self._rows for name in row) if name not in self._columns]
        if new:
            self._columns = self._columns + new
            _widen(path, self._columns)
        with path.open("a", newline="") as file:
            columns = self._columns
            csv.writer(file).writerows([row.get(name, "") for name in columns] for row in self._rows)
        self._rows = []

    def finalize(self, status: str) -> None:
        """Write the remaining rows."""
        self.save()


def _columns(path: Path) -> list[str]:
    """Return the columns of a file from an earlier run; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return next(csv.reader(file), [])


def _widen(path: Path, columns: list[str]) -> None:
    """Rewrite the file with new columns, appended to the old ones: earlier rows get empty fields. Atomic."""
    new = io.StringIO(newline="")
    writer = csv.writer(new)
    writer.writerow(columns)
    if path.exists():
        with path.open(newline="") as old:
            rows = csv.reader(old)
            next(rows, None)
            for row in rows:
                writer.writerow(row + [""] * (len(columns) - len(row)))
    write_whole(path, new.getvalue())
