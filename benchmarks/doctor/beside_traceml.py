"""`hasten doctor` beside TraceML 0.5.0 on the same scripts: what each costs per step, and what each found.

    python -m venv /tmp/traceml && /tmp/traceml/bin/pip install torch==2.13.0 traceml-ai==0.5.0 numpy
    python benchmarks/doctor/beside_traceml.py --traceml /tmp/traceml/bin

Four short trainings, each with a known truth. TraceML runs them twice: as they are, and with the
`with trace_step(model)` around each step that it asks for. Costs are CPU seconds of the training process in its median
step, plain Python beside, in turn. (So the few steps that doctor looks into do not show; its evidence leaves them out
too.)
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

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from hand_tuned import machine  # noqa: E402

FRAME = """
import contextlib, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
{imports}

class Rows(Dataset):
    def __len__(self):
        return {steps} * 32
    def __getitem__(self, i):
        {work}
        return torch.full((64,), i % 100 / 50 - 1), i % 10

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    loader = DataLoader(Rows(), batch_size=32)
    hidden = nn.Linear({width}, {width})
    model = nn.Sequential(nn.Linear(64, {width}), nn.ReLU(), hidden, nn.ReLU(), nn.Linear({width}, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, {steps})
    losses, times = [], []
    before = time.process_time()
    for step, (rows, targets) in enumerate(loader):
        with {around}:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(rows), targets)
            loss.backward()
            optimizer.step()
            schedule.step()
            {line}
        now = time.process_time()
        times.append(now - before)
        before = now
    print("seconds a step:", sorted(times)[len(times) // 2])
"""
SCRIPTS = {
    "healthy": ("none", {"steps": 600, "work": "pass", "line": "pass"}),
    "retained graphs": ("retained_graph", {"steps": 600, "work": "pass", "line": "losses.append(loss)"}),
    "slow samples": ("workers_zero", {"steps": 200, "work": "time.sleep(0.0005)", "line": "pass"}),
    "collected each step": ("garbage_collected", {"steps": 300, "work": "pass", "line": "import gc; gc.collect()"}),
}


def script(options: dict[str, object], traced: bool) -> str:
    imports = "from traceml_ai import trace_step" if traced else ""
    around = "trace_step(model)" if traced else "contextlib.nullcontext()"
    return FRAME.format(imports=imports, around=around, width=512, **options)


def run(command: list[str], folder: Path) -> tuple[float, str]:
    """CPU seconds of a median step, and all that was printed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env, timeout=300)
    text = done.stdout + "".join(log.read_text() for log in folder.glob("logs/**/training.stdout.log"))
    found = re.findall(r"seconds a step: (\S+)", text)
    if not found:
        raise SystemExit(f"{command}: no time was printed\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return float(found[-1]), done.stdout


def plain(folder: Path) -> tuple[float, str]:
    return run([sys.executable, "train.py"], folder)[0], ""


def doctor(folder: Path) -> tuple[float, str]:
    command = [sys.executable, "-m", "hasten", "doctor", "--whole", "--json", "out.json", "train.py"]
    seconds, _ = run(command, folder)
    diagnosis = json.loads((folder / "out.json").read_text())
    worst = ", ".join(one["name"] for one in diagnosis["findings"] if one["severity"] != "note")
    notes = ", ".join(one["name"] for one in diagnosis["findings"] if one["severity"] == "note")
    return seconds, f"{diagnosis['verdict']['title']} | {worst or '-'} | notes: {notes or '-'}"


def traceml(bin_folder: Path, name: str, folder: Path) -> tuple[float, str]:
    seconds, _ = run([str(bin_folder / "traceml"), "run", name, "--mode", "summary"], folder)
    newest = max(folder.glob("logs/*/final_summary.json"), key=lambda path: path.stat().st_mtime)
    verdict = json.loads(newest.read_text())["primary_diagnosis"]
    return seconds, f"{verdict['status']}: {verdict['summary']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traceml", type=Path, required=True, help="the bin folder of an environment with traceml-ai")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "doctor_beside_traceml.json")
    args = parser.parse_args()
    rows = {}
    for name, (truth, options) in SCRIPTS.items():
        seconds: dict[str, list[float]] = {"plain": [], "doctor": [], "traceml": [], "traceml, trace_step": []}
        said: dict[str, str] = {}
        for _ in range(args.turns):
            with tempfile.TemporaryDirectory() as made:
                folder = Path(made)
                (folder / "train.py").write_text(script(options, traced=False))
                (folder / "traced.py").write_text(script(options, traced=True))
                for side, answer in (
                    ("plain", plain(folder)),
                    ("doctor", doctor(folder)),
                    ("traceml", traceml(args.traceml, "train.py", folder)),
                    ("traceml, trace_step", traceml(args.traceml, "traced.py", folder)),
                ):
                    seconds[side].append(answer[0])
                    said[side] = answer[1]
        base = statistics.median(seconds["plain"])
        rows[name] = {
            "truth": truth,
            "step_ms": round(base * 1e3, 3),
            "added_us": {side: round((statistics.median(s) - base) * 1e6, 1) for side, s in seconds.items()},
            "ratio": {side: round(statistics.median(s) / base, 3) for side, s in seconds.items()},
            "said": said,
        }
        print(json.dumps({name: rows[name]}, indent=1), flush=True)
    args.out.write_text(json.dumps({"machine": machine(), "turns": args.turns, "scripts": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
