"""SLURM jobs: write a training's job script, submit it, and follow the job until it ends.

The job script restarts the training: if SLURM asks it to stop (time limit, preemption) or it fails, the script requeues
the job, up to a number of restarts after failures.
"""

from __future__ import annotations

import os
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
_LOOK = 2.0  # seconds between two queries about a job: each is answered by the cluster's only controller


@dataclass(frozen=True)
class Job:
    """A job's resources and command.

    Attributes:
        command: The training's command line, `["train.py", "--epochs", "90"]`.
        hasten: Command that runs it, `["hasten", "run"]`.
        under: Options of `hasten run`, `["--no-plan"]`.
        auto: Tune the training while it runs, and use the plan found when the job runs again; `under` is then empty.
        carried: Whether the script is written for one device: SLURM then starts one hasten, whose options `under` make
            it start the processes.
        nodes: Number of machines.
        devices: Processes per machine; with `accelerator="gpu"`, one GPU each.
        accelerator: "gpu" or "cpu".
        time: Time limit in SLURM's format ("4:00:00"); "": the partition's own.
        name: The job's name; its log is `<name>-<job number>.log`.
        resume: Further arguments for the training when the job runs again.
        restarts: How often a failed training is run again.
        save_seconds: Seconds before the time limit at which the training is asked to save and stop.
        setup: Shell lines before the training, such as modules to load or an environment to activate.
        options: Further options for sbatch, "--constraint=a100".
    """

    command: tuple[str, ...]
    hasten: tuple[str, ...]
    under: tuple[str, ...] = ()
    auto: bool = False
    carried: bool = False
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
        """Return the job's script, for sbatch."""
        return _SCRIPT.format(
            options="\n".join(f"#SBATCH {option}" for option in self._options()),
            setup="".join(f"{line}\n" for line in self.setup),
            command=self._command(),
            resume=self._resume(),
            run=self._run(),
            restarts=self.restarts,
        )

    @property
    def is_array(self) -> bool:
        """Whether the options make it a job array: many jobs, each with its own number."""
        return any(re.match(r"(--array|-a)\b", option) for option in self.options)

    def log(self, number: object) -> str:
        """Return the name of the log of the job with this number."""
        return f"{self.name}-{number}.log"

    def _command(self) -> str:
        training = shlex.join(self.command)
        if not self.auto:
            return f"command=({shlex.join([*self.hasten, *self.under])} {training})"
        return _AUTO.format(plan=self.name, hasten=shlex.join(self.hasten), command=training)

    def _options(self) -> list[str]:
        """Return the options of the script's `#SBATCH` lines."""
        tasks = 1 if self.carried else self.devices
        lines = [f"--job-name={self.name}", f"--nodes={self.nodes}", f"--ntasks-per-node={tasks}"]
        if self.carried:
            # Otherwise the processes may share one core. `options` come later and can ask for more.
            lines.append(f"--cpus-per-task={self.devices}")
        if self.accelerator == "gpu":
            lines.append(f"--gpus-per-node={self.devices}")
        if self.time:
            lines.append(f"--time={self.time}")
        lines += [
            f"--output={self.log('%A_%a' if self.is_array else '%j')}",
            "--open-mode=append",  # a requeued job appends to the same log
            "--requeue",  # SLURM may requeue it after a node failure or a preemption
            f"--signal=B:USR1@{self.save_seconds}",
        ]
        return [*lines, *self.options]

    def _resume(self) -> str:
        if not self.resume:
            return ""
        return f'[ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && command+=({self.resume})\n'

    def _run(self) -> str:
        if self.carried or self.nodes * self.devices == 1:
            return 'srun "${command[@]}" &'
        return _RANKS.format(devices=self.devices)


# SLURM asks a job to stop in three ways. Before the time limit it signals only this shell; for a preemption, and for a
# cancelled job, it signals all of the job's processes. After the first two the job must be requeued. A job that its
# user cancelled is no longer RUNNING when its training has stopped, which tells it apart. Exit code 0 means finished.
# sbatch passes on the environment of the submitting shell: with the variables of another training's rank, this training
# would wait for ranks that nobody starts. The last job of an array has the array's own number, so a signal to that
# number would reach all jobs of the array: hence the `<array>_<task>` form.
_SCRIPT = """\
#!/bin/bash
# Written by `hasten submit`. It can be edited, and sent with `sbatch`.
{options}

unset RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT HASTEN_LAUNCHED HASTEN_RUN
unset "${{!TORCHELASTIC_@}}"
{setup}for tool in srun scontrol scancel squeue; do
  command -v "$tool" >/dev/null || {{ echo "hasten: no $tool on the path of $(hostname)"; exit 127; }}
done
job="${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}"
job="${{job:-$SLURM_JOB_ID}}"
# Since SLURM 22.05 srun does not take this over by itself: loaders' workers would share one core.
[ -n "$SLURM_CPUS_PER_TASK" ] && export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
{command}
{resume}asked=
trap 'asked=1; scancel --signal=TERM "$job"' USR1  # to the training; srun itself would kill it
trap 'asked=1' TERM
{run}
step=$!
wait "$step"
while kill -0 "$step" 2>/dev/null; do wait "$step"; done  # a signal ends a wait
wait "$step"
code=$?

scontrol show job "$job" | grep -q ' PreemptTime=[0-9]' && asked=1
again=
if [ -n "$asked" ]; then
  again="the training was asked to stop"
elif [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
  again="the training failed with exit code $code"
fi
if [ "$code" -ne 0 ] && [ -n "$again" ] && [ "$(squeue --noheader --jobs="$job" --format=%T)" = RUNNING ]; then
  echo "hasten: $again; the job is queued again"
  if scontrol requeue "$job"; then
    sleep 60  # SLURM ends this shell
  else
    echo "hasten: SLURM does not queue job $job again; send it once more"
  fi
fi
exit "$code"
"""

# The plan is named after the job: other jobs may tune in the same folder.
_AUTO = """\
plan={plan}-"$job".toml
if [ -f "$plan" ]; then under=(--plan "$plan"); else under=(--auto --out "$plan"); fi
command=({hasten} "${{under[@]}}" {command})"""

# Sets the variables that torchrun sets, for scripts that read them. A failed rank ends the others, which would wait.
_RANKS = """\
export MASTER_ADDR="${{MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}}"
export MASTER_PORT="${{MASTER_PORT:-$((15000 + SLURM_JOB_ID % 15000))}}"
export LOCAL_WORLD_SIZE={devices}
srun --kill-on-bad-exit=1 bash -c '
  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID GROUP_RANK=$SLURM_NODEID
  exec "$@"' rank "${{command[@]}}" &"""


def send(script: str, folder: Path) -> int:
    """Submit a job's script and return the job's number.

    Args:
        script: The script's text.
        folder: Folder in which the job runs and writes its log.

    Raises:
        HastenError: There is no SLURM here, it rejects the job, or the log cannot be written.
    """
    if shutil.which("sbatch") is None:
        raise HastenError(
            "there is no SLURM on this machine: no sbatch on the path",
            "run this on the cluster's login node, or print the script with --dry-run",
        )
    if not os.access(folder, os.W_OK):  # SLURM would accept the job, which would end at its start without a message
        raise HastenError(f"the job's log would be in {folder}, where nothing can be written", "go to another folder")
    # Submitted from within a job, the SLURM_ variables of that job (restart count, cores) would be taken for this
    # one's.
    inside = "SLURM_JOB_ID" in os.environ
    kept = {n: v for n, v in os.environ.items() if not (inside and n.startswith("SLURM_")) or n == "SLURM_CONF"}
    done = subprocess.run(
        ["sbatch", "--parsable"], check=False, input=script, cwd=folder, env=kept, capture_output=True, text=True
    )
    number = re.search(r"^(\d+)(;\S+)?$", done.stdout, re.MULTILINE)  # a site's sbatch may print a greeting first
    if done.returncode or number is None:
        raise HastenError(
            f"SLURM did not take the job: {done.stderr.strip() or done.stdout.strip()}", _fix(done.stderr)
        )
    return int(number[1])


def _fix(message: str) -> str:
    """Return what to do about sbatch's error message."""
    if "node configuration" in message or "gres" in message.lower():
        return "ask for less per node, or say --accelerator cpu where there are no GPUs; `sinfo -N -l` lists the nodes"
    if "partition" in message or "account" in message:
        return "name another with --partition or --account; `sinfo` lists the partitions"
    return "print the script with --dry-run and look at its #SBATCH lines"


def follow(number: int, log: Path, say: Callable[[str], None]) -> int:
    """Print a job's log and its changes of state until it has ended; return its exit code.

    Args:
        number: The job's number.
        log: The job's log file.
        say: Receives the log's text as it comes, and a line for each change of state.
    """
    before, heard = "", 0  # the state at the last query; bytes of the log that were printed
    while True:
        state, code = state_of(number)
        heard = _tell_further(log, heard, say)
        # Only if seen twice: a job that is requeued passes through some of these states for a moment.
        if state in _ENDED and state == before:
            return code
        if state != before:
            answers = "SLURM does not answer; asking again" if state == _UNKNOWN else f"it is {state.lower()}"
            say(f"hasten: job {number}: {answers}\n")
            before = state
        time.sleep(_LOOK)


def _tell_further(log: Path, offset: int, say: Callable[[str], None]) -> int:
    """Print what was added to the log after `offset` bytes; return its new length."""
    if not log.is_file():
        return offset
    with log.open("rb") as file:
        file.seek(offset)
        content = file.read()
    if content:
        say(content.decode(errors="replace"))
    return offset + len(content)


def state_of(number: int) -> tuple[str, int]:
    """Return a job's state, as SLURM names it, and its exit code once it has ended (1 if SLURM knows none).

    The state is "UNKNOWN" while SLURM does not answer, for example because its controller restarts or is busy.

    Raises:
        HastenError: SLURM does not know the job.
    """
    ask = ["scontrol", "--oneliner", "show", "job", str(number)]
    answer = subprocess.run(ask, check=False, capture_output=True, text=True)
    state = re.search(r"JobState=(\w+)", answer.stdout)
    if state is None and "Invalid job id" not in answer.stderr:
        return _UNKNOWN, 1
    if state is None:
        raise HastenError(f"SLURM does not know job {number} any more", "`sacct -j` may; its log says how it ended")
    code = re.search(r"ExitCode=(\d+):(\d+)", answer.stdout)
    ended, killed = (int(code[1]), int(code[2])) if code else (1, 0)
    status = ended or (128 + killed if killed else 0)
    return state[1], 0 if state[1] == "COMPLETED" else status or 1
