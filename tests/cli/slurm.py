"""A real SLURM of two nodes which are both this machine, and how tests ask it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hasten.child import start_logged

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


def why_not() -> str:
    """Why no SLURM can be started here; "" where it can."""
    missing = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(name) is None]
    if missing or os.geteuid():
        return f"no SLURM to start here: {', '.join(missing) or 'only root may'} (slurmctld slurmd slurm-client munge)"
    try:
        socket.gethostbyname(_host())
    except OSError:
        return f"no SLURM to start here: the host name {_host()} does not resolve"
    return ""


def _host() -> str:
    return socket.gethostname().split(".")[0]


@contextmanager
def running(folder: Path) -> Iterator[Path]:
    """A SLURM that keeps its files in a folder, with SLURM_CONF set; its daemons end with it."""
    for name in ("state", "spool.n1", "spool.n2", "munge"):
        (folder / name).mkdir()
    # munged wants a socket that all users may reach, and so a folder none of whose parents they may change.
    reachable = Path("/run/hasten-test-slurm")
    reachable.mkdir(mode=0o755, exist_ok=True)
    key = folder / "munge/key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=_host(), folder=folder, socket=reachable / "munge"))
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


def until(holds: Callable[[], object], seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.2)
