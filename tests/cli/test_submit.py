"""`hasten submit` on a real SLURM of two nodes on this machine; its script is in test_submit_script.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.slurm import running, told, until, why_not
from tests.faults.seconds import counted

pytestmark = pytest.mark.timeout(600)

HASTEN = (sys.executable, "-m", "hasten", "submit")

WORDS = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
names += ("SLURM_RESTART_COUNT", "SRUN_CPUS_PER_TASK", "TORCHELASTIC_USE_AGENT_STORE")
print(json.dumps([sys.argv[1:], {name: os.environ.get(name) for name in names}]))
"""


def submit(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # n1 and n2 are names that only SLURM knows.
    command = [*HASTEN, "--setup", "export MASTER_ADDR=127.0.0.1", *words]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory):
    if why := why_not():
        pytest.skip(why)
    with running(tmp_path_factory.mktemp("slurm")) as folder:
        yield folder


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


@pytest.mark.slow  # a job of a real SLURM
def test_one_device_has_nothing_of_the_training_or_job_that_sent_it(slurm: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORDS)
    outer = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29500", "GROUP_RANK": "0"}
    outer |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "HASTEN_LAUNCHED": "29500"}
    outer |= {"SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": "1", "SLURM_CPUS_PER_TASK": "64"}
    words = ["--follow", "--accelerator", "cpu", "--no-plan", "--resume", "--again"]
    done = submit(tmp_path, *words, "train.py", **outer)
    assert done.returncode == 0, done.stdout + done.stderr
    [told] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert told[0] == []
    assert {name for name, value in told[1].items() if value is not None} == {"MASTER_ADDR"}  # of --setup
    done = submit(tmp_path, *words, "--sbatch", "--cpus-per-task=2", "train.py")
    assert '"SRUN_CPUS_PER_TASK": "2"' in done.stdout


@pytest.mark.slow  # jobs of a real SLURM, one of them queued again
def test_of_an_array_only_the_job_whose_time_is_up_is_stopped(slurm: Path, tmp_path: Path) -> None:
    """SLURM gives the last job of an array the array's own number."""
    (tmp_path / "train.py").write_text(
        "import os, sys, time\nprint('runs', sys.argv[1:], flush=True)\n"
        "ends = time.monotonic() + 60\n"
        "while time.monotonic() < ends and len(sys.argv) == 1 and not os.path.exists('end'):\n    time.sleep(0.1)"
    )
    words = ["--accelerator", "cpu", "--sbatch", "--array=0-1", "--resume", "--again", "train.py"]
    job = job_number(submit(tmp_path, *words))
    logs = [tmp_path / f"train-{job}_{task}.log" for task in (0, 1)]
    until(lambda: all(log.exists() and "runs" in log.read_text() for log in logs))
    told("scancel", "--signal=USR1", "--batch", f"{job}_1")
    until(lambda: "the job is queued again" in logs[1].read_text())
    (tmp_path / "end").touch()
    until(lambda: state(f"{job}_0") == "COMPLETED")
    until(lambda: state(f"{job}_1") == "COMPLETED")
    assert "queued again" not in logs[0].read_text()
    assert "runs ['--again']" in logs[1].read_text()


FIT = """
import os, sys, time
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
    max_epochs=2,
    accelerator="cpu",
    num_nodes=int(os.environ["SLURM_NNODES"]),
    default_root_dir=sys.argv[1],
    enable_progress_bar=False,
    logger=False,
)
loader = DataLoader(TensorDataset(torch.randn(160, 16)), batch_size=4, shuffle=True)
trainer.fit(line, loader, ckpt_path="last")
if trainer.global_rank == 0:
    torch.save(line.net.state_dict(), sys.argv[1] + ".pt")
"""


@pytest.mark.slow  # a real SLURM lets its time run out
@pytest.mark.parametrize(
    ("how", "nodes"), [("time limit", "2"), ("pre-empted", "2"), ("time limit", "1"), ("pre-empted", "1")]
)
def test_a_training_that_is_stopped_saves_is_queued_again_and_ends_the_same(
    how: str, nodes: str, slurm: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(FIT)
    (tmp_path / "hasten.toml").write_text('[techniques]\nprecision = "bf16-mixed"\n')
    words = ["--nodes", nodes, "--accelerator", "cpu", "--time", "10"]
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
WAITS = FIT.replace("float(sys.argv[2])", 'float(sys.argv[2]) * ("SLURM_RESTART_COUNT" not in os.environ)')


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


LOOP = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
net = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(torch.randn(64, 16), torch.randn(64, 4)), batch_size=8, shuffle=True)
begin = 0
if "--resume" in sys.argv:
    kept = torch.load(sys.argv[1])
    net.load_state_dict(kept["net"]), optimizer.load_state_dict(kept["optimizer"])
    begin = kept["epoch"] + 1
for epoch in range(begin, 4):
    torch.manual_seed(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, sys.argv[1])
    print("epoch", epoch, flush=True)
    while epoch == 1 and "waits" in sys.argv and "--resume" not in sys.argv:
        time.sleep(0.1)
"""


@pytest.mark.slow  # a job of a real SLURM, queued again
def test_a_carried_script_is_stopped_goes_on_and_ends_as_on_one_device(slurm: Path, tmp_path: Path) -> None:
    import torch

    (tmp_path / "train.py").write_text(LOOP)
    subprocess.run([sys.executable, "train.py", "alone.pt"], cwd=tmp_path, check=True, capture_output=True)
    words = ["--devices", "2", "--batch", "global", "--accelerator", "cpu", "--no-plan", "--resume", "--resume"]
    job = job_number(submit(tmp_path, *words, "train.py", "carried.pt", "waits"))
    log = tmp_path / f"train-{job}.log"
    until(lambda: log.exists() and "epoch 1" in log.read_text())
    told("scancel", "--signal=USR1", "--batch", job)
    until(lambda: state(job) == "COMPLETED")
    assert log.read_text().count("epoch 1\n") == 1
    ended = [torch.load(tmp_path / name)["net"] for name in ("alone.pt", "carried.pt")]
    for name, weight in ended[0].items():
        torch.testing.assert_close(weight, ended[1][name], rtol=2e-6, atol=2e-6)


ENDLESS = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(12)])
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(1024, 64), torch.randn(1024, 64)), batch_size=8, shuffle=True)
while True:
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    if "--again" in sys.argv:
        break
"""


@pytest.mark.slow  # a job of a real SLURM that is searched, and queued again
def test_a_job_that_is_tuned_runs_again_under_what_was_found(slurm: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENDLESS)
    job = job_number(submit(tmp_path, "--auto", "--accelerator", "cpu", "--resume", "--again", "train.py"))
    log = tmp_path / f"train-{job}.log"
    until(lambda: log.exists() and "auto: settled" in log.read_text())
    plan = (tmp_path / f"train-{job}.toml").read_text()
    told("scancel", "--signal=USR1", "--batch", job)
    until(lambda: state(job) == "COMPLETED")
    assert log.read_text().count("auto: ") == 1
    assert (tmp_path / f"train-{job}.toml").read_text() == plan


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
