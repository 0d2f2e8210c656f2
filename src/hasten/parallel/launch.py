"""Start the other ranks of a training on this machine, watch them, and end together with them.

Without a launcher, the process that calls `open_world` becomes rank 0 and starts its own command again for each further
rank. A thread waits for each of them. If a rank ends too early, rank 0 finds out which one caused it
(`rank_failures.verdict`), raises that error in its main thread through a signal handler, and ends all ranks.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from hasten import messages
from hasten.errors import HastenError
from hasten.evidence import this_machine
from hasten.parallel import rank_failures, world
from hasten.parallel.command import own_command, rank_environment
from hasten.parallel.devices import Devices, choose_devices
from hasten.parallel.place import RankPlace, find_place
from hasten.parallel.rendezvous import serve_store
from hasten.parallel.world import World

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_FOLLOW = str(Path(__file__).with_name("follow.py"))
_KEPT_BYTES = 16384  # of each rank's stderr, for the error message
_UNHEARD_SECONDS = 15.0  # after which this process exits, if its main thread has not raised a rank's failure by then
_ENDING_SECONDS = 60.0  # between two messages while rank 0 waits for the others at its exit
_LEAVING_SECONDS = 5.0  # for the others to end by themselves, when rank 0 ends by SystemExit or Ctrl-C
_ranks: Ranks | None = None
_ending = False  # whether all ranks have agreed to stop


def open_world(
    accelerator: str = "auto",
    devices: Devices = "auto",
    num_nodes: int = 1,
    strategy: str = "auto",
    timeout: timedelta | float | None = None,
    join_timeout: float = 1800.0,
) -> World:
    """Return the world that a training with these flags runs in; start its other processes if no launcher did.

    In a process that torchrun, srun or hasten started, the world is the launcher's. Otherwise, for several devices,
    this process becomes rank 0 and runs its own command again for each further rank. A second call returns the same
    world.

    Args:
        accelerator: "auto", "cpu", "gpu" or "cuda".
        devices: Number of devices, or which ones (see `choose_devices`); one process each.
        num_nodes: Number of machines; more than one needs a launcher.
        strategy: "auto" or "ddp"; for strategies that run a function in other processes, use `spawn`.
        timeout: Seconds that a rank waits for the others in a collective; None: torch's default.
        join_timeout: Seconds that a rank waits for the others to join: they run the script up to this call first.

    Raises:
        HastenError: The flags contradict the launcher, or there is no command to run again.
    """
    if strategy not in {"auto", "ddp"}:
        raise HastenError(f"strategy={strategy!r} is unknown here.", 'Use "auto" or "ddp".')
    place = find_place()
    chosen = choose_devices(accelerator, devices)
    if place is None:
        if num_nodes > 1:
            raise HastenError(
                f"num_nodes={num_nodes}, but no launcher started this process.",
                f"Start the script on each machine with torchrun --nnodes {num_nodes} ... or with srun.",
            )
        if len(chosen) == 1:
            return World(device=chosen[0])
        start_ranks(len(chosen))
    elif _stays_alone(place, chosen):
        return World(rank=place.rank, local_rank=place.local_rank, device=chosen[0], launcher="hasten")
    elif place.size > 1:
        chosen = _devices_of(place, chosen, devices, num_nodes)
    local_rank = place.local_rank if place else 0
    backend = "nccl" if chosen[0].type == "cuda" else "gloo"
    return World.from_environment(backend, chosen[local_rank % len(chosen)], timeout, join_timeout)


def size_of(accelerator: str, devices: Devices, num_nodes: int) -> tuple[int, int]:
    """Return the number of processes, and of machines, that `open_world` will use with these flags."""
    place, chosen = find_place(), choose_devices(accelerator, devices)
    if place is None:
        return len(chosen) * num_nodes, num_nodes
    return (1, 1) if _stays_alone(place, chosen) else (place.size, place.num_nodes)


def _stays_alone(place: RankPlace, chosen: list[torch.device]) -> bool:
    """Return whether a script of several ranks asks for one device: a second Trainer(devices=1), to test exactly.

    Each rank then works alone, but keeps its rank number, so that only rank 0 writes.
    """
    return len(chosen) == 1 and place.launcher == "hasten" and place.size > 1


def _devices_of(place: RankPlace, chosen: list[torch.device], devices: Devices, num_nodes: int) -> list[torch.device]:
    """Return the devices of this machine's ranks, by local rank.

    Raises:
        HastenError: The flags contradict what the launcher started.
    """
    if num_nodes not in (1, place.num_nodes):
        raise HastenError(
            f"num_nodes={num_nodes}, but {place.launcher} started this training on {place.num_nodes}.",
            f"Use num_nodes={place.num_nodes}.",
        )
    # On a CPU the number of devices means nothing. With `srun --gpus-per-task` each process sees one GPU, its own.
    alone = chosen[0].type == "cpu" or len(chosen) == 1
    if devices in ("auto", -1, "-1") and (alone or len(chosen) >= place.local_size):
        return chosen[: place.local_size]
    if len(chosen) != place.local_size:
        raise HastenError(
            f"devices={devices!r} is {len(chosen)} here, but {place.launcher} started {place.local_size} processes on "
            "this machine.",
            f'Use devices="auto" or devices={place.local_size}, or start {len(chosen)} processes.',
        )
    return chosen


def start_ranks(size: int) -> Ranks:
    """Make this process rank 0 of `size`, and run its own command again for each other rank."""
    global _ranks
    if threading.current_thread() is not threading.main_thread():
        raise HastenError(
            "Several processes can only be started from the main thread of a program.",
            'Call fit there, or use strategy="ddp_fork".',
        )
    command, folder = own_command()
    store = serve_store(size)
    cores = this_machine().cores
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, cores // size))
    children = []
    for rank in range(1, size):
        place = rank_environment(rank, size, "127.0.0.1", store.port, cores)
        children.append(ScriptChild(rank, command, folder, {**os.environ, **place}))
    os.environ.update(rank_environment(0, size, "127.0.0.1", store.port, cores))
    _ranks = Ranks(children, size, store)
    return _ranks


@contextmanager
def guard(of: World) -> Iterator[None]:
    """Return a context for a training: if one rank fails, all ranks end, with an error that names the failed rank.

    A SystemExit after `ending()` passes through: the ranks then end as after a successful training.
    """
    try:
        yield
    except BaseException as error:
        if of.size > 1 and not (_ending and isinstance(error, SystemExit)):
            world.mark_failed()
            if _ranks is not None and _ranks.is_mine():
                _ranks.explain(error)
            elif of.launcher != "hasten" and not isinstance(error, HastenError) and is_lost_partner(error):
                raise rank_failures.lost_partner(of.rank, of.size, str(error)) from error
        raise


def ending() -> None:
    """Declare that all ranks have agreed to stop: from now on a rank's exit, with any code, is not an error.

    Every rank must call this before it raises SystemExit.
    """
    global _ending
    _ending = True
    if _ranks is not None:
        _ranks.expected = True


def forward(number: int) -> None:
    """Send a signal to the other ranks, which run in process groups of their own and get none from the terminal."""
    if _ranks is not None and _ranks.is_mine():
        _ranks.forward(number)


class ScriptChild:
    """A rank that runs this process's own command. Its stderr is copied to ours, and the last part of it is stored."""

    def __init__(self, rank: int, command: list[str], folder: Path, env: dict[str, str]) -> None:
        self.rank = rank
        self._tail = b""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", _FOLLOW, str(os.getpid()), *command],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            bufsize=0,
            process_group=0,  # Ctrl-C reaches rank 0 only, which forwards it once
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, name=f"hasten-rank-{rank}-stderr", daemon=True)
        self._reader.start()

    def code(self) -> int | None:
        """Return its exit code: -N after signal N, None while it runs."""
        return self._process.poll()

    def wait(self) -> None:
        """Wait until it has ended and its stderr is read."""
        self._process.wait()
        self._reader.join(1.0)  # with a limit: a DataLoader worker that outlives the rank may hold the pipe

    def last_words(self) -> str:
        """Return the last part of its stderr."""
        if self.code() is not None:
            self._reader.join(1.0)
        return self._tail.decode(errors="replace")

    def _read(self) -> None:
        """Copy its stderr to ours until it closes, and store the last part. Runs in a thread."""
        assert self._process.stderr is not None
        while chunk := self._process.stderr.read(65536):
            self._tail = (self._tail + chunk)[-_KEPT_BYTES:]
            try:
                os.write(2, chunk)
            except OSError:  # our own stderr is closed: keep reading, for the error message
                continue


class Ranks:
    """The ranks that this process started. A thread waits for each; if one ends too early, all are ended."""

    def __init__(self, children: list[ScriptChild], size: int, store: TCPStore) -> None:
        self.children = children
        self.size = size
        self.store = store  # held here so that it is served until this process ends
        self.expected = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._failure: HastenError | None = None
        self._failure_handled = threading.Event()  # set once the main thread knows of the failure, or ends
        self._before: dict[int, Any] = {}
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            # Leave signals ignored that the process was started to ignore, as under nohup.
            if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGCHLD:
                self._before[number] = signal.signal(number, self._on_signal)
        for child in children:
            threading.Thread(target=self._watch, args=(child,), name=f"hasten-rank-{child.rank}", daemon=True).start()
        atexit.register(self._at_exit)

    def is_mine(self) -> bool:
        """Return whether this process started them, and is not a fork of the one that did."""
        return os.getpid() == self._pid

    def forward(self, number: int) -> None:
        """Send a signal to every rank that runs."""
        for child in self.children:
            if child.code() is None:
                rank_failures.send(child, number)

    def explain(self, error: BaseException) -> None:
        """End the other ranks, because this rank ends with `error`.

        Raises:
            HastenError: `error` is the consequence of another rank's failure; names that rank.
        """
        self._failure_handled.set()
        if isinstance(error, SystemExit | KeyboardInterrupt):
            self.expected = True
            self._wait(_LEAVING_SECONDS)  # the others may be exiting, too
            rank_failures.end_all(self.children)
        elif isinstance(error, HastenError) and error is self._failure:
            rank_failures.end_all(self.children)
        elif is_lost_partner(error):
            failure = self._conclude()
            rank_failures.end_all(self.children)
            if failure is not None:
                raise failure from error
        else:
            self.expected = True
            rank_failures.end_all(self.children)

    def _conclude(self) -> HastenError | None:
        """Return the error that names the failed rank; None if no rank is to blame. Decided at the first call."""
        with self._lock:
            if self._failure is None and not self.expected:
                rank_failures.settle(self.children)
                self._failure = rank_failures.verdict(self.children, self.size)
                self.expected = True
            return self._failure

    def _watch(self, child: ScriptChild) -> None:
        """Wait for a rank; if it ends too early, raise that in the main thread and end all ranks. Runs in a thread."""
        child.wait()
        if self.expected or _ending or (child.code() == 0 and world.has_joined()):
            return
        failure = self._conclude()
        if failure is None or self._failure_handled.is_set():
            return
        # A signal interrupts the main thread in any Python code; `_on_signal` raises the failure there.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGCHLD)
        rank_failures.end_all(self.children)
        if not self._failure_handled.wait(
            _UNHEARD_SECONDS
        ):  # stuck in native code, in a collective with a rank that is gone
            messages.tell(f"hasten: {failure}")
            os._exit(1)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to the ranks, or raise the failure that `_watch` found; then call the handler before."""
        before: Callable[[int, FrameType | None], Any] | int | None = self._before[number]
        if self.is_mine():
            if number == signal.SIGCHLD:
                if self._failure is not None and not self._failure_handled.is_set():
                    self._failure_handled.set()
                    raise self._failure
            else:
                self.forward(number)
        if callable(before):
            before(number, frame)
        # Repeat the default action, which ends this process. Not if another handler was installed since and calls this
        # one: then that handler decides what the signal does.
        elif before == signal.SIG_DFL and number != signal.SIGCHLD and signal.getsignal(number) == self._on_signal:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _wait(self, seconds: float) -> bool:
        """Wait until all other ranks have ended. Return False if the time is over first."""
        end = time.monotonic() + seconds
        while any(child.code() is None for child in self.children):
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def _at_exit(self) -> None:
        """Wait for the other ranks to end, as a launcher does, and report those that failed."""
        if not self.is_mine():
            return
        failed = world.has_failed()
        already, self.expected = self.expected or _ending, True
        self._failure_handled.set()
        if not failed:
            while not self._wait(_ENDING_SECONDS):
                left = ", ".join(str(child.rank) for child in self.children if child.code() is None)
                messages.tell(f"hasten: rank 0 is done and waits for rank {left} to end; Ctrl-C ends it")
        rank_failures.end_all(self.children)
        bad = [child for child in self.children if child.code()]
        if bad and not already and not failed:
            messages.tell(f"hasten: {rank_failures.verdict(bad, self.size)}")


def is_lost_partner(error: BaseException) -> bool:
    """Return whether an error, or one in its chain, only means that another rank is gone or does not answer."""
    import torch.distributed as dist

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError) or rank_failures.is_symptom(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
