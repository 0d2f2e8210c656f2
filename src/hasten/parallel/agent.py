"""Start a script's ranks by torchrun's elastic agent, and report which rank caused a failure.

The agent ends all ranks as soon as one fails, so most ranks end because of another one. Each rank leaves a report of
its error in a shared folder. After the end, the exit codes and reports are ranked by how likely each rank is the
culprit (`_End.guilt`), and only the likeliest is shown.
"""

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
_JOIN_SECONDS = 600  # time limit for all machines to join: torchrun's default


@dataclass(frozen=True)
class Ranks:
    """The ranks to start.

    Attributes:
        command: Command that each rank runs.
        devices: Number of ranks on this machine.
        nodes: Number of machines.
        endpoint: `host:port` where the machines meet; "" on one machine.
        conf: Further settings of torchrun's rendezvous, such as `{"is_host": "1"}`.
        folder: Folder for files that the launcher and its ranks exchange.
    """

    command: Sequence[str]
    devices: int
    nodes: int
    endpoint: str
    folder: str
    conf: dict[str, str] = field(default_factory=dict)


def run(ranks: Ranks) -> int:
    """Run this machine's ranks until they end. Return the exit code: 0 if all ranks succeeded.

    The ranks inherit `os.environ`, and are killed when this process ends.

    Raises:
        HastenError: A rank failed with one of hasten's own errors, the machines did not meet, or torch's agent could
            not start the ranks.
    """
    run_id = "hasten" if ranks.nodes > 1 else uuid.uuid4().hex
    # All ranks must iterate sets of strings in the same order.
    os.environ.setdefault("PYTHONHASHSEED", str(zlib.crc32(run_id.encode())))
    # Give the ranks a store separate from the agents' store. With a shared one, gloo ranks hung or died at 8 of 18
    # restarts; with separate ones at none of 8.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # Silence the agent: `_explain` reports the failed rank, together with its error.
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
        timer = threading.Timer(_join_limit(ranks), _give_up, (ranks, streams))
        timer.daemon = True
        timer.start()
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
            timer.cancel()
    return 0


@contextmanager
def _second_ctrl_c() -> Iterator[None]:
    """Kill the ranks at a second Ctrl-C: after the first, torch's agent waits half a minute for ranks that do not end.

    A second signal would only make the agent's handler raise inside that wait, after which the agent waits once more.
    So a thread counts the signals through a wake-up file descriptor, independently of the handlers.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_kill_at_second, args=(reading,), name="second Ctrl-C", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writing.close()


def _kill_at_second(signals: socket.socket) -> None:
    """Read signal numbers from a socket until it closes; from the second SIGINT on, kill all child processes."""
    interrupts = 0
    with signals:
        while numbers := signals.recv(64):
            interrupts += numbers.count(signal.SIGINT)
            for child in psutil.Process().children(recursive=True) if interrupts > 1 else ():
                with suppress(psutil.NoSuchProcess):
                    child.kill()


def _join_limit(ranks: Ranks) -> float:
    """Return how long the machines may take to meet, in seconds; half a minute longer than torch's own limit."""
    timeout = ranks.conf.get("timeout", "")
    return (float(timeout) if timeout.isdecimal() else _JOIN_SECONDS) + 30.0


def _give_up(ranks: Ranks, streams: _Streams) -> None:
    """End this process if the machines have not met.

    torch's own limit does not cover this case: if some other program listens at the endpoint and never answers, torch
    waits for its answer forever.
    """
    if not streams.have_met:
        messages.tell(f"hasten: the machines did not meet at {ranks.endpoint} in {_join_limit(ranks):g} s\n  {_MEET}")
        shutil.rmtree(ranks.folder, ignore_errors=True)
        os._exit(1)


_MEET = (
    "all machines need the same --nodes and --rdzv-endpoint: the name of one of them, by which the others reach it, "
    "and a port that no other program has there"
)


def _cause(error: BaseException) -> str:
    """Return the first line of the innermost cause's message."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0]


class _Streams(LogsSpecs):
    """Streams of the ranks: rank 0 inherits this process's stdout and stderr.

    The other ranks' stderr is shown with a rank prefix on each line; their stdout is discarded.
    """

    def __init__(self, folder: str, stderr: RankStderr) -> None:
        super().__init__()
        self._folder = folder
        self._stderr = stderr
        self.have_met = (
            False  # whether the machines have met: torch asks for the streams right before it starts the ranks
        )

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the streams of each local rank."""
        self.have_met = True
        others = {local: int(env["RANK"]) for local, env in envs.items() if int(env["RANK"])}
        return LogsDest(
            stdouts={local: os.devnull if local in others else "" for local in envs},
            stderrs={local: self._stderr.of(others[local]) if local in others else "" for local in envs},
            error_files={local: f"{self._folder}/elastic-{local}" for local in envs},
        )

    @property
    def root_log_dir(self) -> str:
        """Folder for torch's own files."""
        return self._folder


def _explain(error: ChildFailedError, ranks: Ranks) -> int:
    """Report the rank that made all ranks end. Return the exit code.

    Raises:
        HastenError: That rank raised a HastenError; it is raised again here.
    """
    # `failures` is in the order in which the agent noticed them, so the first entry ended first.
    ends = [_End(rank, failure, _report(ranks.folder, failure.local_rank)) for rank, failure in error.failures.items()]
    culprit = min(ends, key=lambda end: end.guilt(ends[0] is end))
    if culprit.report.get("message"):
        where = f" (rank {culprit.rank})" if culprit.code == 1 else ""
        raise HastenError(culprit.report["message"] + where, culprit.report["fix"], culprit.report["code"])
    size = ranks.devices * ranks.nodes
    ending = f"rank {culprit.rank} of {size} on {socket.gethostname()} {rank_failures.how_it_ended(culprit.code)}"
    messages.tell(f"hasten: {ending}, so all ranks were ended{culprit.words()}")
    return culprit.code if culprit.code > 0 else 128 - culprit.code


class _End:
    """How a rank ended."""

    def __init__(self, rank: int, failure: Any, report: dict[str, Any]) -> None:
        self.rank = rank
        self.report = report
        # A rank that failed by itself may have been killed by the agent before it exited: its reported code counts.
        self.code = int(report["code"]) if report and failure.exitcode < 0 else int(failure.exitcode)

    def guilt(self, first: bool) -> int:
        """Return a sort key: the lower, the likelier this rank is the culprit.

        In order: an error of hasten's own; an error that is not a consequence of a lost rank; an end without a report,
        if it was the first or was not the agent's doing; an error that only says that another rank is gone; the rest.

        Args:
            first: Whether the agent saw this rank end first.
        """
        text = self.report.get("text", "")
        if self.report.get("message"):
            return 0
        if text and not rank_failures.is_symptom(text):
            return 1
        # SIGTERM: the agent ended it. SIGABRT: torch aborts a process whose partners are gone.
        if not text and (first or self.code not in (-signal.SIGTERM, -signal.SIGABRT)):
            return 2
        return 3 if text else 4

    def words(self) -> str:
        """Return the last line of its error, formatted as the end of a sentence; "" if it left none."""
        lines = str(self.report.get("text", "")).strip().splitlines()
        if not lines:
            return "; look for lack of memory with `dmesg`" if self.code == -signal.SIGKILL else ""
        return f": {lines[-1]}"


def _report(folder: str, local_rank: int) -> dict[str, Any]:
    """Return the error report that a rank left; {} if it left none."""
    try:
        report: dict[str, Any] = json.loads((Path(folder) / f"error-{local_rank}").read_text())
    except (OSError, ValueError):  # the rank left no report, or was killed while it wrote one
        return {}
    return report
