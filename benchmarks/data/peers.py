"""Rows per second of hasten's ParquetDataset beside the loaders that people would use instead.

    pip install -r benchmarks/data/requirements-peers.txt
    python benchmarks/data/peers.py --cifar ../shared/data/cifar10-train.parquet --out benchmarks/results/peers.json

Kinds: CIFAR-10 as JPEG in Parquet, a table of 2,000,000 x 32 float32, and 20,000 x 512 int32. A side is
a process of its own, which imports and converts before the clock runs and then waits. Sides are asked in turn, round by
round, each for a shuffled epoch or as much of it as `--seconds` allow, its start included. All give batches of 256 as
tensors, and decode by simplejpeg (torch's plain one by Pillow), so that loaders are compared. A peer that is not
installed, or fails, is named with the reason.

What a side shuffles and how it resumes stands beside its speed: a loader that reads in order has less to do. All sides
take some 15 minutes; a try of two: `--only hasten "torch, expert" daft limit --share 0.02 --seconds 0.3 --rounds 1`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.data.peer_sides import BATCH, SIDES
from benchmarks.data.peer_tables import KINDS, write_tables

_PATIENCE = 240.0  # seconds for a side to be ready, or to answer


class Side:
    """A process that measures one side, kind after kind."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._errors = (folder / f"{name}.err").open("w+")
        command = [sys.executable, str(Path(__file__).resolve()), "--side", name, "--folder", str(folder)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, cwd=folder
        )

    def prepare(self, kind: str) -> None:
        """Read or convert a kind of data, and make a first pass that does not count: threads start, pages are read."""
        self.speeds: list[float] = []
        self.first: list[float] = []
        self.failed = ""
        self.prepared = float(self._ask(kind, 0.0).get("prepared", 0.0))
        if not self.failed:
            self._ask(kind, 0.5)

    def measure(self, kind: str, seconds: float) -> None:
        """Make a pass of at most so many seconds."""
        if self.failed:
            return
        told = self._ask(kind, seconds)
        if not self.failed:
            self.speeds.append(told["rows"] / told["seconds"])
            self.first.append(told["first"])

    def _ask(self, kind: str, seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{kind} {seconds}\n")
            self._process.stdin.flush()
        except OSError:  # it has ended: `_hear` says how
            pass
        return self._hear()

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        hung = threading.Timer(_PATIENCE, self._process.kill)
        hung.start()
        try:
            for line in self._process.stdout:  # libraries print, too
                if line.startswith("PEER "):
                    told: dict[str, Any] = json.loads(line[5:])
                    self.failed = told.get("failed", "")
                    return told
        finally:
            hung.cancel()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines()
        self.failed = f"it ended: {said[-1] if said else 'without a word'}"[:200]
        return {}


def serve(name: str, folder: Path) -> None:
    """Measure one side as often as stdin asks for it: a kind, and seconds; 0: prepare it."""
    begin: Any = None
    for number, line in enumerate(sys.stdin):
        kind, seconds = line.split()
        try:
            start = time.perf_counter()
            if float(seconds):
                answer = _pass(begin(number), float(seconds))
            else:
                begin = None  # what the former kind holds in memory
                begin = SIDES[name].prepare(kind, folder)
                answer = {"prepared": time.perf_counter() - start}
        except Exception as error:  # a peer that is missing, or has changed: it is named, and the others go on
            answer = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        print(f"PEER {json.dumps(answer)}", flush=True)


def _pass(batches: Iterator[Any], limit: float) -> dict[str, Any]:
    """Rows and seconds of a pass, as far as the time goes, and the seconds to its first batch."""
    rows, first, start = 0, 0.0, time.perf_counter()
    for batch in batches:
        rows += len(batch)
        first = first or time.perf_counter() - start
        if time.perf_counter() - start > limit:
            break
    return {"rows": rows, "seconds": time.perf_counter() - start, "first": first}


def measured(sides: list[Side], kind: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Every side of a kind, asked in turn."""
    for side in sides:
        side.prepare(kind)
    for _ in range(rounds):
        for side in sides:
            side.measure(kind, seconds)
    return {side.name: told(side) for side in sides}


def told(side: Side) -> dict[str, Any]:
    """What is known of a side: its speed, or why there is none; what it shuffles and resumes."""
    facts = SIDES[side.name]
    version = _version(facts.package)
    found: dict[str, Any] = {"version": version, "shuffles": facts.shuffles, "resumes": facts.resumes}
    if side.failed or not side.speeds:
        return {**found, "missing": side.failed or "no round was measured"}
    return {
        **found,
        "rows_per_second": statistics.median(side.speeds),
        "lowest": min(side.speeds),
        "highest": max(side.speeds),
        "first_batch_seconds": statistics.median(side.first),
        "prepared_seconds": round(side.prepared, 1),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def show(kind: str, results: dict[str, Any]) -> None:
    """Print a kind's table, and hasten over the fastest peer and over the limit."""
    print(f"\n{kind}: rows/s (lowest-highest), seconds to the first batch")
    for name, side in results.items():
        facts = f"shuffles {side['shuffles']}; resumes {side['resumes']}"
        if "missing" in side:
            print(f"  {name:18} {'-':>11} {side['missing'][:60]:40} {facts}")
            continue
        between = f"({side['lowest']:,.0f}-{side['highest']:,.0f})"
        print(
            f"  {name:18} {side['rows_per_second']:11,.0f} {between:25} {side['first_batch_seconds']:6.2f} s  {facts}"
        )
    peers = {
        name: side["rows_per_second"]
        for name, side in results.items()
        if "rows_per_second" in side and name != "limit" and not name.startswith("hasten")
    }
    ours = max((s.get("rows_per_second", 0.0) for n, s in results.items() if n.startswith("hasten")), default=0.0)
    if peers and ours:
        best = max(peers, key=lambda name: peers[name])
        print(f"  hasten / {best}, the fastest peer: {ours / peers[best]:.2f}")
        for name in sorted(peers, key=lambda name: -peers[name]):
            print(f"    / {name}: {ours / peers[name]:.2f}")
    if ours and "rows_per_second" in results.get("limit", {}):
        print(f"  hasten / limit: {ours / results['limit']['rows_per_second']:.2f}")


def main() -> None:
    """Measure all that is asked for, or serve as one side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", default="", help="CIFAR-10 as Parquet; without it no images")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one pass, at most")
    parser.add_argument("--share", type=float, default=1.0, help="of the rows, to try the script")
    parser.add_argument("--only", nargs="+", default=list(SIDES), help='sides: hasten "torch, expert"; default: all')
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--out", default="")
    for name in ("--side", "--folder"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve(options.side, Path(options.folder))
        return
    if unknown := [name for name in options.only if name not in SIDES]:
        parser.error(f"no side {unknown[0]!r}; there are {', '.join(map(repr, SIDES))}")
    results: dict[str, Any] = {"python": platform.python_version(), "batch": BATCH, "rounds": options.rounds}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        written = write_tables(Path(place), options.share, Path(options.cifar).resolve() if options.cifar else None)
        sides = [Side(name, Path(place)) for name in options.only]
        try:
            for kind in options.kinds.split(","):
                if kind in written:
                    results[kind] = measured(sides, kind, options.rounds, options.seconds)
                    show(kind, results[kind])
        finally:
            for side in sides:
                side.end()
    print(f"\n{time.perf_counter() - start:.0f} s in all")
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
