"""A pytest plugin: puts hasten's Trainer in Lightning's Trainer's place, and writes every outcome to a file.

`run.py` loads it with `-p plugin` in a child process, and speaks to it through environment variables:

- ``HASTEN_LT_TRAINER``: ``hasten`` or ``lightning``: whose Trainer the tests get.
- ``HASTEN_LT_OUT``: the file that gets one line of JSON for each event (collected, started, done).
- ``HASTEN_LT_SKIP``: a JSON list of test ids that must not run (they ran before, or are not wanted);
  an id without brackets stands for all its cases.

Lightning's own modules keep their own references; only the names that tests import are replaced.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

NAMES = ("lightning.pytorch", "lightning.pytorch.trainer", "lightning.pytorch.trainer.trainer", "pytorch_lightning")
"""The modules from which a test may take ``Trainer``."""

BEFORE = ("lightning.pytorch.cli", "lightning.pytorch.tuner.tuning", "lightning.pytorch.demos.boring_classes")
"""Modules of Lightning that keep a Trainer of their own: imported before the name is replaced."""


def put_hasten_in_place() -> None:
    """Replace ``Trainer`` in the modules that tests import it from. Lightning's internals keep theirs."""
    trainer = getattr(importlib.import_module("hasten"), "Trainer", None)
    if trainer is None:
        raise pytest.UsageError("there is no hasten.Trainer to put in place")
    for name in BEFORE:
        importlib.import_module(name)
    for name in NAMES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            continue  # pytorch_lightning, the standalone package, need not be there
        module.Trainer = trainer  # type: ignore[attr-defined]


def write(event: dict[str, Any]) -> None:
    """Append one event. The file is opened for each, so that a killed process loses nothing."""
    with Path(os.environ["HASTEN_LT_OUT"]).open("a") as out:
        out.write(json.dumps(event) + "\n")


def error_line(report: pytest.TestReport) -> str:
    """The one line that says what failed, without addresses and folders that differ from run to run."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    line = lines[0]
    if line.startswith(("assert", "AssertionError")):  # pytest says further down where two values differ
        telling = ("At index", "Left contains", "Right contains", "Extra items")
        line = " | ".join([line, *(other for other in lines[1:] if other.startswith(telling))][:2])
    line = re.sub(r"0x[0-9a-f]+", "0x..", line)
    return re.sub(r"/tmp/[\w./-]*", "/tmp/..", line)[:300]


def where(report: pytest.TestReport) -> str:
    """The last line of code in hasten or Lightning before the failure: ``trainer/loop.py:120``; or empty."""
    entries = getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", [])
    for entry in reversed(entries):
        place = getattr(entry, "reprfileloc", None)
        if place is not None and re.search(r"/(hasten|lightning)/(?!.*tests_pytorch)", place.path):
            path = re.sub(r".*/(?=(hasten|lightning)/)", "", place.path)
            return f"{path}:{place.lineno}"
    return ""


def pytest_configure(config: pytest.Config) -> None:
    """Before any test file is imported."""
    if os.environ["HASTEN_LT_TRAINER"] == "hasten":
        put_hasten_in_place()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what must not run, and write down what was found."""
    skip_file = os.environ.get("HASTEN_LT_SKIP")
    skip = set(json.loads(Path(skip_file).read_text())) if skip_file else set()
    keep = [item for item in items if not skip & {item.nodeid, item.nodeid.partition("[")[0]}]
    config.hook.pytest_deselected(items=[item for item in items if item not in keep])
    items[:] = keep
    write({"event": "collected", "ids": [item.nodeid for item in keep]})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that does not import is an error of the file."""
    if report.failed:
        text = str(report.longrepr).strip().splitlines()
        write({"event": "import_failed", "file": report.nodeid, "error": text[-1][:300] if text else "?"})


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins; without a matching end it killed the process."""
    write({"event": "started", "id": nodeid})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One phase (setup, call, teardown) of a test is over."""
    event = {"event": "phase", "id": report.nodeid, "when": report.when, "seconds": round(report.duration, 3)}
    if report.failed:
        event |= {"outcome": "failed", "error": error_line(report), "where": where(report)}
    elif report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        event |= {"outcome": "xfailed" if hasattr(report, "wasxfail") else "skipped", "error": reason[:200]}
    else:
        event |= {"outcome": "passed"}
    write(event)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """The test is over."""
    write({"event": "finished", "id": nodeid})
