"""Measure how long faults take until the training has ended or goes on: the seconds in docs/reliability.md.

python benchmarks/faults.py [--tests tests/faults/test_network.py ...]

It runs the tests that inject faults, once, and keeps what they noted in benchmarks/results/faults.json; other figures
of that file stay. About ten minutes, most of them of SLURM; what this machine lacks (root, iproute2) is skipped. Then
`python -m tests.faults.matrix` makes the page.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
TESTS = ["tests/faults", "tests/cli/test_submit.py"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--machine", default="two crowded cores")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder) / "seconds"
        env = {**os.environ, "HASTEN_FAULT_SECONDS": str(noted)}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rs",
            "-p",
            "no:cacheprovider",
            "-m",
            "slow or not slow",
            *arguments.tests,
        ]
        code = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
        lines = [json.loads(line) for line in noted.read_text().splitlines()] if noted.exists() else []
    seconds: dict[str, list[float]] = json.loads(RESULTS.read_text())["seconds"] if RESULTS.exists() else {}
    for name in {line["fault"] for line in lines}:
        seconds[name] = [line["seconds"] for line in lines if line["fault"] == name]
    RESULTS.write_text(json.dumps({"machine": arguments.machine, "seconds": seconds}, indent=1, sort_keys=True) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
