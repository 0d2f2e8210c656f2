"""The scripts of tune_regret.py: how each is tuned, and run in plain Python or under a plan."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from hand_tuned import BENCHMARKS, CASES, result_of
from public.run import Script, Workplace, execute, load_scripts

from hasten.plan import Plan
from hasten.tuner.training_key import without_paths

OWN = ("image", "lstm", "mlp", "gpt")
PUBLIC = (
    "mnist", "vae", "mnist_rnn", "imagenet_dummy", "dcgan_fake", "super_resolution", "word_language_model_lstm",
    "word_language_model_transformer", "nanogpt", "mingpt_adder", "timm_train", "yunjey_feedforward",
    "hf_trainer_run_clm", "accelerate_image_classification",
)  # fmt: skip


class Failed(Exception):
    """A script, or a tune of it, did not come to its end."""


class Training(Protocol):
    """A script that is tuned and run."""

    def tune(self, options: Sequence[str], folder: Path) -> Path:
        """Tune it; where plan and report lie."""

    def seconds(self, plan: Path | None) -> float:
        """Run it in plain Python, or under a plan: seconds a step, an epoch, or a progress line."""

    @property
    def takes(self) -> float:
        """Seconds that a run takes, roughly."""


class Own:
    """One of tune_vs_hand.py."""

    def __init__(self, name: str, epochs: int) -> None:
        case = CASES[name]
        self.script = str(BENCHMARKS / "scripts" / f"{case.script}.py")
        self.arguments, self.epochs = shlex.split(case.arguments), epochs

    def tune(self, options: Sequence[str], folder: Path) -> Path:
        command = [sys.executable, "-m", "hasten", "tune", *options, self.script, "--epochs", "90", *self.arguments]
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return checked(done.returncode, done.stdout, folder)

    def seconds(self, plan: Path | None) -> float:
        under = ["-m", "hasten", "run", "--quiet", "--plan", str(plan)] if plan else []
        command = [sys.executable, *under, self.script, "--epochs", str(self.epochs), *self.arguments]
        try:
            return result_of(command, self.epochs).epoch
        except SystemExit as error:
            raise Failed(str(error)) from None

    takes = 20.0


class Public:
    """One of benchmarks/public/scripts.toml."""

    def __init__(self, script: Script, workplace: Workplace) -> None:
        self.script, self.workplace = script, workplace

    def tune(self, options: Sequence[str], folder: Path) -> Path:
        cwd = self.workplace.fresh(self.script, "tune")
        command = [str(self.workplace.hasten), "tune", *options, *self.script.command]
        patient = replace(self.script, progress=None, stop_after=None, seconds=360)
        done = execute(command, cwd, self.workplace.environment(self.script), patient)
        return checked(done.code, done.tail, cwd)

    def seconds(self, plan: Path | None) -> float:
        done = self.workplace.run(self.script, "regret", plan)
        if not done.ok:
            raise Failed(f"{done.said}: {done.tail}")
        return done.pace or done.seconds

    @property
    def takes(self) -> float:
        return max(30.0, self.script.stop_after or self.script.seconds)


def checked(code: int, said: str, folder: Path) -> Path:
    if code or not (folder / "hasten-report.json").is_file():
        raise Failed(f"tune: exit code {code}: {' '.join(said.split())[-300:]}")
    return folder


# --- tuning ---


def tuned(training: Training, budget: float, order: int) -> dict[str, Any]:
    """Tune once, knowing nothing of other tunes; the plan and what its report says."""
    with tempfile.TemporaryDirectory() as scratch:
        options = ["--budget", f"{budget:g}s", "--order", str(order), "--no-memory"]
        start = time.perf_counter()
        try:
            folder = training.tune(options, Path(scratch))
        except Failed as error:
            return {"budget": budget, "order": order, "plan": {}, "failed": without_paths(str(error))[-300:]}
        report = json.loads((folder / "hasten-report.json").read_text(encoding="utf-8"))
        return {
            "budget": budget,
            "order": order,
            "plan": dict(Plan.read(folder / "hasten.toml").techniques),
            "claimed": report["speedup"],
            "disturbed": report["disturbed"],
            "parity": report["parity"]["answer"],
            "warm": report["warm"],
            "blocks": len(report["blocks"]),
            "seconds": time.perf_counter() - start,
        }


def trainings(args: argparse.Namespace) -> dict[str, Training]:
    """Those that were asked for, as far as they are here."""
    found: dict[str, Training] = {name: Own(name, args.epochs) for name in args.scripts or OWN if name in CASES}
    if "image" in found:
        subprocess.run([sys.executable, str(BENCHMARKS / "scripts" / "unpack_cifar.py")], check=True)
    public = [name for name in args.scripts or PUBLIC if name not in CASES]
    workplace = Workplace(args.work)
    for script in load_scripts(public) if public else []:
        if workplace.hasten.exists() and (args.work / "src" / script.source).is_dir():
            found[script.name] = Public(script, workplace)
        else:
            print(f"{script.name:34} is not fetched: see benchmarks/public/run.py", flush=True)
    return found
