"""What the guards of techniques cost: each technique as it is, beside itself in an older checkout that has none.

    git worktree add /tmp/before 474bcd3
    python benchmarks/guard_cost.py --before /tmp/before/src --pairs 7

Each side is a process of its own under `hasten run`, in turn, on one thread, on a training in which the technique acts
(of `exact/trainings.py`) made so wide that a step takes some milliseconds. Steps are taken in CPU time, in blocks, of
which the first fifth counts: other processes disturb only upwards. The first block, in which things are set up, is left
out. Passes are 100 batches long, so that what is done once for each pass is in it, too.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hand_tuned import BENCHMARKS, machine

from benchmarks.exact.rows import SETTINGS, alone
from benchmarks.exact.trainings import WIDE, training
from hasten.plan import Plan
from hasten.techniques import CATALOGUE

EPOCHS = 6
BATCHES = 100
# Wide enough for steps of milliseconds: what a guard costs does not depend on it, what it is compared with does.
WIDER = {
    # First, before its parts are replaced: the layer follows one of 512 features, and 2 M gradients are enough.
    WIDE: "nn.Linear(512, 4000), nn.Tanh(), nn.AdaptiveAvgPool1d(512)",
    "192, 3, 12, 12": f"{16 * BATCHES}, 3, 20, 20",
    "192, 20": f"{16 * BATCHES}, 128",
    "192, 12": f"{16 * BATCHES}, 12",
    "(192,)": f"({16 * BATCHES},)",
    "nn.Linear(20, 32)": "nn.Linear(128, 512)",
    "nn.Linear(32, 32)": "nn.Linear(512, 512)",
    "nn.Linear(32, 5)": "nn.Linear(512, 5)",
}
# A checkout without guards drops the checks for NaN that anomaly mode was switched on for: 7 us for each node of the
# graph. They are the script's own, not a guard's, so here it asks for none.
NO_NAN_CHECKS = {"set_detect_anomaly(True)": "set_detect_anomaly(True, check_nan=False)"}
TIMED = """
import time as _time
_blocks, _last = [], [_time.process_time()]
_step = torch.optim.Optimizer.zero_grad
_count = [0]
def _counted(*args, **kwargs):
    _count[0] += 1
    if _count[0] % 20 == 0:
        now = _time.process_time()
        _blocks.append((now - _last[0]) / 20)
        _last[0] = now
    return _step(*args, **kwargs)
torch.optim.Optimizer.zero_grad = _counted
"""
TOLD = """
_blocks = sorted(_blocks[5:])
print("seconds a step:", _blocks[len(_blocks) // 5])
"""


def wide(script: str) -> str:
    """The training, wider, and with its steps timed."""
    for narrow, wider in {**WIDER, **NO_NAN_CHECKS}.items():
        script = script.replace(narrow, wider)
    return script.replace("random.seed(1)", TIMED + "random.seed(1)", 1) + TOLD


def script_for(name: str) -> str:
    """A training in which this technique acts, as often as it can."""
    row = next(iter(alone([name])))
    return wide(training(row.model, "adamw" if row.optimizer != "sparse" else "sparse", row.data, row.extras, EPOCHS))


def seconds_a_step(source: Path, folder: Path) -> float:
    """Run the training under the plan in the folder, with hasten from these sources."""
    env = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hasten", "run", "train.py"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
    found = re.search(r"seconds a step: (\S+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of guards, per step.")
    parser.add_argument("--before", type=Path, required=True, help="the src folder of a checkout without them")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[name for name in SETTINGS if name != "compile"])
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "guard_cost.json")
    args = parser.parse_args()
    now = BENCHMARKS.parent / "src"
    record: dict[str, Any] = {"machine": machine(), "techniques": {}}
    for name in args.only:
        assert name in CATALOGUE
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            (folder / "train.py").write_text(script_for(name), encoding="utf-8")
            Plan({name: SETTINGS[name]}).write(folder / "hasten.toml")
            sides = [(seconds_a_step(args.before, folder), seconds_a_step(now, folder)) for _ in range(args.pairs)]
        ratios = sorted(after / before for before, after in sides)
        step = 1e3 * statistics.median(before for before, _ in sides)
        record["techniques"][name] = {"ms_before": step, "ratios": ratios}
        print(
            f"{name:26} step of {step:5.2f} ms: x {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
