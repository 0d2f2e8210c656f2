"""Trains each module of `modules.toml` under Lightning's Trainer and under hasten's, and compares to the last bit.

    python benchmarks/lightning_modules/prepare.py /work/public/modules
    python benchmarks/lightning_modules/compare.py /work/public/modules --python /work/public/venv/bin/python

Each training is a process of its own, one thread, same seed. Lightning runs twice: a module whose own two runs differ
cannot be compared and is said so. Compared are, in this order: the loss, learning rates and logged metrics of every
training batch, the metrics of every validation, the final metrics, the weights, the optimizers' states, the states of
the random generators, and what `validate`, `test` and `predict` give. The order of the hooks is told beside.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
PARTS = ("steps", "validations", "final_metrics", "final_logged", "epoch", "global_step", "weights", "optimizers")
AFTER = ("validate", "test", "predict", "random_states")

LOGGED = ("validations", "final_metrics", "final_logged", "validate", "test")

Record = dict[str, Any]


def run(entry: Record, which: str, root: Path, python: str, out: Path, limit: float) -> Record:
    """One training in a process of its own: its record, or `{"error": ...}` with the last lines it printed."""
    out.unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [python, "-W", "ignore", str(HERE / "run_one.py"), entry["name"], which, str(root), str(out)]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {limit:g} s"}
    if done.returncode != 0 or not out.is_file():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": "\n".join(lines[-12:]) or f"exit {done.returncode}"}
    record: Record = json.loads(out.read_text())
    return {**record, "process_seconds": time.perf_counter() - start}


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of a nested structure by its path, such as `steps.3.loss`."""
    if isinstance(tree, dict):
        pairs = tree.items()
    elif isinstance(tree, list):
        pairs = enumerate(tree)  # type: ignore[assignment]
    else:
        return {path: tree}
    return {k: v for key, value in pairs for k, v in leaves(value, f"{path}.{key}" if path else str(key)).items()}


def number(text: Any) -> float | None:
    """The number behind an exact text, or None for a hash or a name."""
    if isinstance(text, int):
        return float(text)
    try:
        return float.fromhex(text) if isinstance(text, str) and "0x" in text else None
    except ValueError:
        return None


def compare(one: Record, other: Record) -> Record:
    """Where two records differ, and by how much.

    `equal`: nowhere. `training_equal`: losses, learning rates, weights and states are the same, and only what was
    logged differs. `largest_relative`: over all numbers. `first`: the first differences, as text.
    """
    first: list[str] = []
    worst, count, trained = 0.0, 0, True
    for part in (*PARTS, *AFTER):
        a, b = leaves(one.get(part), part), leaves(other.get(part), part)
        for path in sorted(a.keys() | b.keys(), key=lambda p: [int(x) if x.isdigit() else -1 for x in p.split(".")]):
            left, right = a.get(path, "missing"), b.get(path, "missing")
            if left == right:
                continue
            count += 1
            trained = trained and (".logged." in path or path.split(".")[0] in LOGGED)
            x, y = number(left), number(right)
            if x is not None and y is not None:
                worst = max(worst, abs(x - y) / max(abs(x), abs(y), 1e-30))
            if len(first) < 8:
                first.append(f"{path}: {left if x is None else x} / {right if y is None else y}")
    return {
        "equal": count == 0,
        "differences": count,
        "training_equal": trained,
        "largest_relative": worst,
        "first": first,
    }


def hooks(one: Record, other: Record) -> str:
    """Whether both called the same hooks in the same order, else the first place where they part."""
    a, b = one["hooks"], other["hooks"]
    for at, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return f"call {at}: {left} / {right}"
    return "same" if len(a) == len(b) else f"{len(a)} / {len(b)} calls"


def words(result: Record) -> list[str]:
    """The cells of one row of the table."""
    lightning = result.get("lightning", {})
    verdicts = []
    for key in ("again", "hasten"):
        compared = result.get(key)
        if compared is None:
            verdicts.append("not run")
        elif "error" in compared:
            verdicts.append("error: " + compared["error"].splitlines()[-1][:140].replace("|", "/"))
        elif compared["equal"]:
            verdicts.append("equal")
        else:
            what = "training equal, logged values" if compared["training_equal"] else "training differs, values"
            far = f"{compared['differences']}, up to {compared['largest_relative']:.1e}"
            verdicts.append(f"{what}: {far}: {compared['first'][0]}")
    if "error" in lightning:
        verdicts[0] = "error: " + lightning["error"].splitlines()[-1][:140].replace("|", "/")
    times = [
        f"{seconds:.1f}" if seconds is not None else ""
        for seconds in (lightning.get("seconds"), result.get("hasten_seconds"))
    ]
    return [result["name"], str(lightning.get("steps", "")), *verdicts, result.get("hooks", ""), *times]


def table(results: list[Record]) -> str:
    """The results as a markdown table."""
    head = ["module", "batches", "Lightning twice", "hasten", "hook order", "Lightning fit, s", "hasten fit, s"]
    rows = [head, ["---"] * len(head), *(words(result) for result in results)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def check(entry: Record, trainers: list[str], given: argparse.Namespace, folder: Path) -> Record:
    """Runs one module under the trainers asked for and compares the records."""

    def path(which: str) -> Path:
        return folder / f"{entry['name']}.{which}.json"

    def run_as(which: str, name: str) -> Record:
        return run(entry, which, given.root, given.python, path(name), given.limit)

    result: Record = {"name": entry["name"], "repo": entry["repo"], "commit": entry["commit"], "what": entry["what"]}
    if "lightning" in trainers:
        stored = path("lightning")
        base = json.loads(stored.read_text()) if stored.is_file() else run_as("lightning", "lightning")
        again = run_as("lightning", "again") if "error" not in base else base
        result["again"] = again if "error" in again else compare(base, again)
    else:
        stored = path("lightning")
        base = json.loads(stored.read_text()) if stored.is_file() else {"error": "no record of Lightning"}
    result["lightning"] = base if "error" in base else {"steps": len(base["steps"]), "seconds": base["seconds"]}
    if "hasten" in trainers and "error" not in base:
        ours = run_as("hasten", "hasten")
        result["hasten"] = ours if "error" in ours else compare(base, ours)
        if "error" not in ours:
            result["hooks"], result["hasten_seconds"] = hooks(base, ours), ours["seconds"]
    return result


def main() -> int:
    """Runs what is asked, prints and writes the table. Exit 1 when something is not equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", type=Path, nargs="?", default=Path("/work/public/modules"))
    parser.add_argument("--only", metavar="NAME", action="append", help="only this module; may be given again")
    parser.add_argument("--trainer", choices=("lightning", "hasten", "both"), default="both")
    parser.add_argument("--python", default=sys.executable, help="the Python with Lightning, hasten and the rest")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one training (default 300)")
    parser.add_argument(
        "--records",
        type=Path,
        help="folder that keeps the full records; Lightning's found there are taken as its first run",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for lightning-modules.json and .md")
    given = parser.parse_args()
    given.root = given.root.resolve()
    trainers = ["lightning", "hasten"] if given.trainer == "both" else [given.trainer]
    entries = tomllib.loads((HERE / "modules.toml").read_text())["module"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(given.records or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        results = []
        for entry in entries:
            if not given.only or entry["name"] in given.only:
                results.append(check(entry, trainers, given, folder))
                print("  ".join(words(results[-1])), flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "lightning-modules.json").write_text(json.dumps(results, indent=1) + "\n")
    (given.out / "lightning-modules.md").write_text(table(results))
    judged = [result[key] for result in results for key in ("again", "hasten") if key in result]
    return 0 if results and all(one.get("equal") for one in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
