"""`hasten submit`: the job's script, what is refused, and a real SLURM of two nodes on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hasten.child import start_logged
from tests.faults.seconds import counted
from tests.taps.forks import command

pytestmark = pytest.mark.timeout(600)

HASTEN = (sys.executable, "-m", "hasten", "submit")

WORDS = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
print(json.dumps([sys.argv[1:], {name: os.environ.get(name) for name in names}]))
"""


def submit(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", **variables}
    return subprocess.run([*HASTEN, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_the_script_is_printed_and_is_bash(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORDS)
    words = ["--dry-run", "--nodes", "2", "--devices", "4", "--time", "4:00:00", "--partition", "big"]
    words += ["--resume", "--resume 'my last.pt'", "--setup", "module load cuda", "--sbatch", "--mem=64G"]
    done = submit(tmp_path, *words, "train.py", "--name", "it's")
    assert done.returncode == 0, done.stderr
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --time=4:00:00",
        "#SBATCH --partition=big",
        "#SBATCH --mem=64G",
        "#SBATCH --job-name=train",
    ):
        assert line in done.stdout.splitlines()
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0
    # What the shell makes of the command, at the first start and when the job runs again.
    shell = done.stdout[done.stdout.index("command=(") : done.stdout.index("trap")]
    for count, more in (("0", []), ("1", ["--resume", "my last.pt"])):
        told = subprocess.run(
            ["bash", "-c", shell + 'printf "%s\\0" "${command[@]}"'],
            env={**os.environ, "SLURM_RESTART_COUNT": count},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\0")[:-1]
        assert told == [sys.executable, "-m", "hasten", "run", "--no-plan", "train.py", "--name", "it's", *more]


def test_the_plan_of_the_folder_is_used_and_checked(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORDS)
    (tmp_path / "hasten.toml").write_text('[techniques]\nprecision = "bf16-mixed"\n')
    done = submit(tmp_path, "--dry-run", "train.py")
    assert "hasten run --plan hasten.toml train.py" in done.stdout, done.stderr
    (tmp_path / "hasten.toml").write_text('[techniques]\nprecison = "bf16-mixed"\n')
    done = submit(tmp_path, "--dry-run", "train.py")
    assert done.returncode == 2
    assert "precison" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--time", "soon", "train.py"], "--time soon: not a time limit"),
        (["--accelerator", "tpu", "train.py"], "--accelerator tpu: not known"),
        (["--name", "a/b", "train.py"], "--name 'a/b'"),
        (["--resume", "'open", "train.py"], "No closing quotation"),
        (["torchrun", "--nproc-per-node", "2", "train.py"], "name the script itself"),
        (["trian.py"], "no such script: trian.py"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_sent(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORDS)
    done = command(tmp_path, "submit", *words)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_without_slurm_the_message_says_where_to_go(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORDS)
    done = submit(tmp_path, "train.py", PATH=str(tmp_path))
    assert done.returncode == 2
    assert "no sbatch on the path" in done.stderr
    assert "--dry-run" in done.stderr


CONF = """
ClusterName=hasten
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket}
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort=16917
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port=17101 CPUs=4 RealMemory=8000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port=17102 CPUs=4 RealMemory=8000
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=n1,n2 MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory):
    """A SLURM of two nodes that are this machine, with SLURM_CONF set; its daemons end with the module."""
    missing = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(name) is None]
    if missing or os.geteuid():
        pytest.skip(
            f"no SLURM to start here: {', '.join(missing) or 'only root may'} (slurmctld slurmd slurm-client munge)"
        )
    host = socket.gethostname().split(".")[0]
    try:
        socket.gethostbyname(host)
    except OSError:
        pytest.skip(f"no SLURM to start here: the host name {host} does not resolve")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool.n1", "spool.n2", "munge"):
        (folder / name).mkdir()
    # munged wants a socket that all users may reach, and so a folder none of whose parents they may change.
    reachable = Path("/run/hasten-test-slurm")
    reachable.mkdir(mode=0o755, exist_ok=True)
    key = folder / "munge/key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, folder=folder, socket=reachable / "munge"))
    munge = ["munged", "--force", "--foreground", f"--socket={reachable}/munge", f"--key-file={key}"]
    munge += [f"--{name}-file={folder}/munge/{name}" for name in ("pid", "log", "seed")]
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    children = []
    with (folder / "log").open("wb") as log, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(conf))
        for command in (munge, ["slurmctld", "-D", "-i"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]):
            children.append(start_logged(command, environment, log))
            if command is munge:
                until(lambda: (reachable / "munge").exists())
        try:
            until(lambda: told("sinfo", "--noheader", "--format=%t %D").split() == ["idle", "2"])
            yield folder
            told("scancel", "--user=root")
        finally:
            for child in reversed(children):
                child.end()
            shutil.rmtree(reachable, ignore_errors=True)


def told(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def until(holds, seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.2)


def job_number(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[2]


def state(job: str) -> str:
    if "BeginTime" in told("squeue", "--noheader", f"--jobs={job}", "--format=%r"):
        time.sleep(3)  # SLURM revokes what it gave the former run, by whole seconds
        told("scontrol", "update", f"jobid={job}", "StartTime=now")  # else it waits two minutes
    return told("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()


# The rest is slow: SLURM looks at its jobs every second or so, and each job imports torch.


@pytest.mark.slow  # a job of a real SLURM
def test_each_process_finds_what_torchrun_would_set(slurm: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORDS)
    words = ["--follow", "--nodes", "2", "--devices", "2", "--accelerator", "cpu", "--no-plan", "train.py", "--lr", "1"]
    done = submit(tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    heard = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert all(words == ["--lr", "1"] for words, _ in heard)
    places = sorted((it["RANK"], it["WORLD_SIZE"], it["LOCAL_RANK"], it["GROUP_RANK"]) for _, it in heard)
    assert places == [("0", "4", "0", "0"), ("1", "4", "1", "0"), ("2", "4", "0", "1"), ("3", "4", "1", "1")]
    assert {(it["LOCAL_WORLD_SIZE"], it["MASTER_ADDR"]) for _, it in heard} == {("2", "127.0.0.1")}


FIT = """
import sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import hasten

class Line(hasten.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(16, 4)

    def training_step(self, batch, batch_idx):
        time.sleep(float(sys.argv[2]))
        return (self.net(batch[0]) + torch.randn(1)).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

torch.manual_seed(0)
line = Line()
trainer = hasten.Trainer(
    max_epochs=2, accelerator="cpu", num_nodes=2, default_root_dir=sys.argv[1], enable_progress_bar=False, logger=False
)
loader = DataLoader(TensorDataset(torch.randn(160, 16)), batch_size=4, shuffle=True)
trainer.fit(line, loader, ckpt_path="last")
if trainer.global_rank == 0:
    torch.save(line.net.state_dict(), sys.argv[1] + ".pt")
"""


@pytest.mark.slow  # a real SLURM lets its time run out
@pytest.mark.parametrize("how", ["time limit", "pre-empted"])
def test_a_training_that_is_stopped_saves_is_queued_again_and_ends_the_same(
    how: str, slurm: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(FIT)
    words = ["--nodes", "2", "--accelerator", "cpu", "--time", "10"]
    whole = submit(tmp_path, "--follow", *words, "train.py", "whole", "0")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    job = job_number(submit(tmp_path, *words, "train.py", "stopped", "0.5"))
    log = tmp_path / f"train-{job}.log"
    until(lambda: log.exists() and "parameters" in log.read_text())
    time.sleep(2)  # some steps
    if how == "time limit":  # the signal that SLURM sends so long before it
        told("scancel", "--signal=USR1", "--batch", job)
    else:
        first = ["--partition", "high", "--accelerator", "cpu", "--nodes", "2", "--sbatch", "--exclusive"]
        (tmp_path / "short.py").write_text("print('first')")
        job_number(submit(tmp_path, *first, "short.py"))
    with counted(how):
        until(lambda: "the job is queued again" in log.read_text())
    assert "SIGTERM: saved" in log.read_text()
    until(lambda: state(job) == "COMPLETED")
    assert "going on from" in log.read_text()
    assert equal(tmp_path, "whole", "stopped")


# Of what it waits for only the first time: at its time limit, or for a machine that is taken away.
WAITS = FIT.replace("float(sys.argv[2])", 'float(sys.argv[2]) * ("SLURM_RESTART_COUNT" not in os.environ)').replace(
    "import sys", "import os, sys"
)


def equal(folder: Path, one: str, other: str) -> bool:
    import torch

    ended = [torch.load(folder / f"{name}.pt") for name in (one, other)]
    return all(torch.equal(value, ended[1][name]) for name, value in ended[0].items())


@pytest.mark.slow  # SLURM knows no time limit below a minute
def test_the_real_time_limit(slurm: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    words = ["--nodes", "2", "--accelerator", "cpu"]
    whole = submit(tmp_path, "--follow", *words, "--time", "10", "train.py", "whole", "0")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    limits = ["--time", "1", "--save-seconds", "30"]
    job = job_number(submit(tmp_path, *words, *limits, "train.py", "stopped", "4"))
    log = tmp_path / f"train-{job}.log"
    until(lambda: log.exists() and "the job is queued again" in log.read_text())
    assert "SIGTERM: saved" in log.read_text()
    until(lambda: state(job) == "COMPLETED")
    assert "going on from" in log.read_text()
    assert equal(tmp_path, "whole", "stopped")


@pytest.mark.slow  # a job of a real SLURM, queued again
def test_a_machine_that_dies(slurm: Path, tmp_path: Path) -> None:
    """SLURM takes a machine to be dead, ends what the job has on the other, and queues it again."""
    (tmp_path / "train.py").write_text(WAITS.replace("logger=False", "logger=False, callbacks=[often]").replace(
        "trainer = ", "often = hasten.callbacks.ModelCheckpoint(sys.argv[1], every_n_train_steps=2)\ntrainer = "
    ))  # fmt: skip
    words = ["--nodes", "2", "--accelerator", "cpu", "--time", "10", "train.py"]
    whole = submit(tmp_path, "--follow", *words, "whole", "0")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    job = job_number(submit(tmp_path, *words, "stopped", "0.5"))
    until(lambda: any((tmp_path / "stopped").glob("*.ckpt")))
    told("scontrol", "update", "nodename=n2", "state=down", "reason=power")
    until(lambda: state(job) == "PENDING")
    told("scontrol", "update", "nodename=n2", "state=resume")
    until(lambda: state(job) == "COMPLETED")
    log = (tmp_path / f"train-{job}.log").read_text()
    assert "going on from" in log
    assert equal(tmp_path, "whole", "stopped")


@pytest.mark.slow  # a real SLURM lets its time run out
def test_another_script_runs_again_with_the_arguments_of_resume(slurm: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys, time\nprint(sys.argv[1:], flush=True)\ntime.sleep(60 * (len(sys.argv) == 1))"
    )
    job = job_number(submit(tmp_path, "--accelerator", "cpu", "--resume", "--resume last.pt", "train.py"))
    log = tmp_path / f"train-{job}.log"
    until(lambda: log.exists() and "[]" in log.read_text())
    told("scancel", "--signal=USR1", "--batch", job)
    until(lambda: state(job) == "COMPLETED")
    assert "['--resume', 'last.pt']" in log.read_text()


@pytest.mark.slow  # jobs of a real SLURM, queued again
def test_a_rank_that_is_killed_ends_the_job_and_a_failure_is_run_again_as_often_as_asked(
    slurm: Path, tmp_path: Path
) -> None:
    script = (
        f"import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), {int(signal.SIGKILL)})\ntime.sleep(100)"
    )
    (tmp_path / "train.py").write_text(script)
    words = ["--nodes", "2", "--accelerator", "cpu", "--restarts", "1", "train.py"]
    job = job_number(submit(tmp_path, *words))
    until(lambda: state(job) == "FAILED")
    assert (tmp_path / f"train-{job}.log").read_text().count("hasten: the training failed with exit code") == 1


@pytest.mark.slow  # a job of a real SLURM
def test_a_job_that_its_user_cancels_is_not_queued_again(slurm: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nprint('trains', flush=True)\ntime.sleep(100)")
    job = job_number(submit(tmp_path, "--accelerator", "cpu", "train.py"))
    log = tmp_path / f"train-{job}.log"
    until(lambda: log.exists() and "trains" in log.read_text())
    told("scancel", job)
    until(lambda: state(job) == "CANCELLED")
    time.sleep(3)
    assert state(job) == "CANCELLED"
