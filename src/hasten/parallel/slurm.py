"""A SLURM job for a training: its script, its sending, and following it until it ends."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hasten.errors import HastenError

_ENDED = {
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE",
}  # fmt: skip
_UNKNOWN = "UNKNOWN"
_LOOK = 2.0  # seconds between two questions about a job: squeue asks the cluster's one controller


@dataclass(frozen=True)
class Job:
    """What a job asks for and runs.

    Attributes:
        command: The training's own command, `["train.py", "--epochs", "90"]`.
        hasten: What runs it, `["hasten", "run", "--no-plan"]`.
        nodes: Machines.
        devices: Processes on each machine; with `accelerator="gpu"` one GPU each.
        accelerator: "gpu" or "cpu".
        time: The time limit as SLURM writes it ("4:00:00"); "": the partition's own.
        name: The job's name; its log is `<name>-<job number>.log`.
        resume: Further arguments for the training when the job runs again.
        restarts: How often a training that failed is run again.
        save_seconds: Seconds before the time limit at which the training is asked to save and stop.
        setup: Lines of shell before the training: modules to load, an environment to activate.
        options: Further lines for sbatch, "--constraint=a100".
    """

    command: tuple[str, ...]
    hasten: tuple[str, ...]
    nodes: int = 1
    devices: int = 1
    accelerator: str = "gpu"
    time: str = ""
    name: str = "hasten"
    resume: str = ""
    restarts: int = 0
    save_seconds: int = 120
    setup: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def script(self) -> str:
        """The job's script, for sbatch."""
        return _SCRIPT.format(
            options="\n".join(f"#SBATCH {option}" for option in self._options()),
            setup="".join(f"{line}\n" for line in self.setup),
            command=shlex.join([*self.hasten, *self.command]),
            resume=self._resume(),
            run=self._run(),
            restarts=self.restarts,
        )

    def _options(self) -> list[str]:
        yes = [f"--job-name={self.name}", f"--nodes={self.nodes}", f"--ntasks-per-node={self.devices}"]
        if self.accelerator == "gpu":
            yes.append(f"--gpus-per-node={self.devices}")
        if self.time:
            yes.append(f"--time={self.time}")
        yes += [
            f"--output={self.name}-%j.log",
            "--open-mode=append",  # when it runs again, it goes on in the same log
            "--requeue",  # after a dead node, or for a job that goes first
            f"--signal=B:USR1@{self.save_seconds}",
        ]
        return [*yes, *self.options]

    def _resume(self) -> str:
        if not self.resume:
            return ""
        return f'[ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && command+=({self.resume})\n'

    def _run(self) -> str:
        if self.nodes * self.devices == 1:
            return 'srun "${command[@]}" &'
        return _RANKS.format(devices=self.devices)


# SLURM asks a job to stop in three ways: the signal before the time limit comes to this shell alone, the one of a job
# that goes first to all its processes, a cancelled job's too. After the first two it is to be queued again; a job that
# its user cancelled is not RUNNING any more when its training has stopped. What exits with 0 has come to its end.
_SCRIPT = """\
#!/bin/bash
# Written by `hasten submit`. It can be edited, and sent with `sbatch`.
{options}

{setup}command=({command})
{resume}asked=
trap 'asked=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1  # to the training; srun itself would kill it
trap 'asked=1' TERM
{run}
step=$!
wait "$step"
code=$?
while [ "$code" -gt 128 ] && kill -0 "$step" 2>/dev/null; do
  wait "$step"
  code=$?
done

scontrol show job "$SLURM_JOB_ID" | grep -q ' PreemptTime=[0-9]' && asked=1
again=
if [ -n "$asked" ]; then
  again="the training was asked to stop"
elif [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
  again="the training failed with exit code $code"
fi
if [ "$code" -ne 0 ] && [ -n "$again" ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
  echo "hasten: $again; the job is queued again"
  scontrol requeue "$SLURM_JOB_ID" && sleep 60  # SLURM ends this shell
fi
exit "$code"
"""

# With the variables that torchrun sets, for scripts that read them. A rank that fails ends the others: they would wait.
_RANKS = """\
export MASTER_ADDR="${{MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}}"
export MASTER_PORT="${{MASTER_PORT:-$((15000 + SLURM_JOB_ID % 15000))}}"
export LOCAL_WORLD_SIZE={devices}
srun --kill-on-bad-exit=1 bash -c '
  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID GROUP_RANK=$SLURM_NODEID
  exec "$@"' rank "${{command[@]}}" &"""


def send(script: str, folder: Path) -> int:
    """Send a job's script and return the job's number.

    Args:
        script: Its text.
        folder: Where the job runs; its log lies there.

    Raises:
        HastenError: There is no SLURM here, or it does not take the job.
    """
    if shutil.which("sbatch") is None:
        raise HastenError(
            "there is no SLURM on this machine: no sbatch on the path",
            "run this on the cluster's login node, or print the script with --dry-run",
        )
    done = subprocess.run(
        ["sbatch", "--parsable"], check=False, input=script, cwd=folder, capture_output=True, text=True
    )
    number = re.match(r"\d+", done.stdout)
    if done.returncode or number is None:
        raise HastenError(
            f"SLURM did not take the job: {done.stderr.strip() or done.stdout.strip()}", _fix(done.stderr)
        )
    return int(number[0])


def _fix(said: str) -> str:
    if "node configuration" in said or "gres" in said.lower():
        return "ask for less per node, or say --accelerator cpu where there are no GPUs; `sinfo -N -l` lists the nodes"
    if "partition" in said or "account" in said:
        return "name another with --partition or --account; `sinfo` lists the partitions"
    return "print the script with --dry-run and look at its #SBATCH lines"


def follow(number: int, log: Path, say: Callable[[str], None]) -> int:
    """Say what a job writes and which state it is in, until it has ended; return its exit code.

    Args:
        number: The job's.
        log: The file it writes.
        say: Gets text as it comes, and a line for each change of state.
    """
    before, heard = "", 0
    while True:
        state, code = state_of(number)
        heard = _tell_further(log, heard, say)
        if state in _ENDED and state == before:  # one that is queued again passes through some of these for a moment
            return code
        if state != before:
            answers = "SLURM does not answer; asking again" if state == _UNKNOWN else f"it is {state.lower()}"
            say(f"hasten: job {number}: {answers}\n")
            before = state
        time.sleep(_LOOK)


def _tell_further(log: Path, heard: int, say: Callable[[str], None]) -> int:
    if not log.is_file():
        return heard
    with log.open("rb") as file:
        file.seek(heard)
        new = file.read()
    if new:
        say(new.decode(errors="replace"))
    return heard + len(new)


def state_of(number: int) -> tuple[str, int]:
    """A job's state in SLURM's word, and its exit code once it has ended (1 where SLURM knows none).

    "UNKNOWN" while SLURM cannot be asked: its controller restarts, or is busy.

    Raises:
        HastenError: SLURM does not know the job.
    """
    ask = ["scontrol", "--oneliner", "show", "job", str(number)]
    done = subprocess.run(ask, check=False, capture_output=True, text=True)
    state = re.search(r"JobState=(\w+)", done.stdout)
    if state is None and "Invalid job id" not in done.stderr:
        return _UNKNOWN, 1
    if state is None:
        raise HastenError(f"SLURM does not know job {number} any more", "`sacct -j` may; its log says how it ended")
    code = re.search(r"ExitCode=(\d+):(\d+)", done.stdout)
    ended, killed = (int(code[1]), int(code[2])) if code else (1, 0)
    status = ended or (128 + killed if killed else 0)
    return state[1], 0 if state[1] == "COMPLETED" else status or 1
