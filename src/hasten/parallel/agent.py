"""Starts the ranks of a carried script by torchrun's elastic agent, and says which of them is to blame."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from hasten import messages
from hasten.errors import HastenError
from hasten.parallel import rank_failures
from hasten.parallel.rank_stderr import RankStderr

_FOLLOW = str(Path(__file__).with_name("follow.py"))
_JOIN_SECONDS = 600  # until all machines must have come, as torchrun has it


@dataclass(frozen=True)
class Ranks:
    """The ranks to start.

    Attributes:
        command: What each of them runs.
        devices: How many on this machine.
        nodes: Machines.
        endpoint: `host:port` where the machines meet; "" on one machine.
        conf: Further settings of torchrun's rendezvous, `{"is_host": "1"}`.
        folder: What this launcher and its ranks leave for each other.
    """

    command: Sequence[str]
    devices: int
    nodes: int
    endpoint: str
    folder: str
    conf: dict[str, str] = field(default_factory=dict)


def run(ranks: Ranks) -> int:
    """Run the ranks of this machine to their end; return the exit code, 0 if all of them ended well.

    The ranks inherit `os.environ`. Nothing of them outlives this process.

    Raises:
        HastenError: A rank failed, or the machines did not meet; names the first culprit.
    """
    run_id = "hasten" if ranks.nodes > 1 else uuid.uuid4().hex
    os.environ.setdefault("PYTHONHASHSEED", str(zlib.crc32(run_id.encode())))  # sets of words: one order on all ranks
    # Shared with the agents, gloo's ranks hung or died at 8 of 18 restarts; in a store of their own at none of 8.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # What the agent would say of a failed rank is said below, with its error.
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with RankStderr(ranks.folder) as stderr:
        streams = _Streams(ranks.folder, stderr)
        config = LaunchConfig(
            min_nodes=ranks.nodes,
            max_nodes=ranks.nodes,
            nproc_per_node=ranks.devices,
            run_id=run_id,
            role="rank",
            rdzv_backend="c10d",
            rdzv_endpoint=ranks.endpoint or "127.0.0.1:0",
            rdzv_configs={"timeout": _JOIN_SECONDS, **ranks.conf},
            max_restarts=0,
            logs_specs=streams,
            local_addr="127.0.0.1" if ranks.nodes == 1 else None,
        )
        command = ["-I", "-S", _FOLLOW, str(os.getpid()), *ranks.command]
        late = threading.Timer(_seconds(ranks), _give_up, (ranks, streams))
        late.daemon = True
        late.start()
        try:
            with _second_ctrl_c():
                launch_agent(config, sys.executable, command)
        except ChildFailedError as error:
            stderr.close()
            return _explain(error, ranks)
        except SignalException as error:
            return 128 + int(error.sigval)
        except (RendezvousError, DistNetworkError) as error:
            if ranks.nodes == 1:
                raise HastenError(f"torch's agent could not start the ranks: {_cause(error)}", "", 1) from error
            raise HastenError(f"the machines did not meet at {ranks.endpoint}: {_cause(error)}", _MEET, 1) from error
        finally:
            late.cancel()
    return 0


@contextmanager
def _second_ctrl_c() -> Iterator[None]:
    """A second Ctrl-C kills the ranks: at the first, torch's agent waits half a minute for those that do not end.

    Its handlers raise where it waits, and then it waits once more. So signals are heard beside them.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_hear, args=(ours,), name="second Ctrl-C", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        theirs.close()


def _hear(signals: socket.socket) -> None:
    heard = 0
    with signals:
        while numbers := signals.recv(64):
            heard += numbers.count(signal.SIGINT)
            for child in psutil.Process().children(recursive=True) if heard > 1 else ():
                with suppress(psutil.NoSuchProcess):
                    child.kill()


def _seconds(ranks: Ranks) -> float:
    """Return how long the machines may take to meet."""
    timeout = ranks.conf.get("timeout", "")
    return (float(timeout) if timeout.isdecimal() else _JOIN_SECONDS) + 30.0


def _give_up(ranks: Ranks, streams: _Streams) -> None:
    """End this process: torch waits without end for an answer of a program that listens there and never gives one."""
    if not streams.asked:
        messages.tell(f"hasten: the machines did not meet at {ranks.endpoint} in {_seconds(ranks):g} s\n  {_MEET}")
        shutil.rmtree(ranks.folder, ignore_errors=True)
        os._exit(1)


_MEET = (
    "all machines need the same --nodes and --rdzv-endpoint: the name of one of them, by which the others reach it, "
    "and a port that no other program has there"
)


def _cause(error: BaseException) -> str:
    """The innermost reason, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0]


class _Streams(LogsSpecs):
    """Rank 0 has this process's own stdout and stderr; of the others, stderr comes with the rank before each line."""

    def __init__(self, folder: str, stderr: RankStderr) -> None:
        super().__init__()
        self._folder = folder
        self._stderr = stderr
        self.asked = False  # the machines have met, and the ranks start

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The streams of each local rank."""
        self.asked = True
        other = {local: int(env["RANK"]) for local, env in envs.items() if int(env["RANK"])}
        return LogsDest(
            stdouts={local: os.devnull if local in other else "" for local in envs},
            stderrs={local: self._stderr.of(other[local]) if local in other else "" for local in envs},
            error_files={local: f"{self._folder}/elastic-{local}" for local in envs},
        )

    @property
    def root_log_dir(self) -> str:
        """Where torch's own files lie."""
        return self._folder


def _explain(error: ChildFailedError, ranks: Ranks) -> int:
    """Say who is to blame for the end of all ranks; return the exit code.

    Raises:
        HastenError: One of hasten's own, raised in a rank.
    """
    # In the order in which the agent saw them.
    ends = [_End(rank, failure, _said(ranks.folder, failure.local_rank)) for rank, failure in error.failures.items()]
    culprit = min(ends, key=lambda end: end.guilt(ends[0] is end))
    if culprit.said.get("message"):
        where = f" (rank {culprit.rank})" if culprit.code == 1 else ""
        raise HastenError(culprit.said["message"] + where, culprit.said["fix"], culprit.said["code"])
    size = ranks.devices * ranks.nodes
    what = f"rank {culprit.rank} of {size} on {socket.gethostname()} {rank_failures.how_it_ended(culprit.code)}"
    messages.tell(f"hasten: {what}, so all ranks were ended{culprit.words()}")
    return culprit.code if culprit.code > 0 else 128 - culprit.code


class _End:
    """How a rank ended."""

    def __init__(self, rank: int, failure: Any, said: dict[str, Any]) -> None:
        self.rank = rank
        self.said = said
        # One that failed may still have been on its way out when the agent ended it.
        self.code = int(said["code"]) if said and failure.exitcode < 0 else int(failure.exitcode)

    def guilt(self, first: bool) -> int:
        """The less, the more this rank is to blame; `first`: it was the first that was seen to have ended."""
        text = self.said.get("text", "")
        if self.said.get("message"):
            return 0
        if text and not rank_failures.is_symptom(text):
            return 1
        if not text and (first or self.code not in (-signal.SIGTERM, -signal.SIGABRT)):  # by which the agent ends them
            return 2
        return 3 if text else 4

    def words(self) -> str:
        """Return what it said, in one line."""
        lines = str(self.said.get("text", "")).strip().splitlines()
        if not lines:
            return "; look for lack of memory with `dmesg`" if self.code == -signal.SIGKILL else ""
        return f": {lines[-1]}"


def _said(folder: str, local_rank: int) -> dict[str, Any]:
    try:
        said: dict[str, Any] = json.loads((Path(folder) / f"error-{local_rank}").read_text())
    except (OSError, ValueError):  # it left nothing, or was killed while it wrote
        return {}
    return said
