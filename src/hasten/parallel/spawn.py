"""Run a function on several ranks, each in a new process; for notebooks, prompts and tests.

Each rank reports its result or its traceback through a pipe. The main process is not a rank: it waits for all of them,
and if one ends too early, it finds out which (`rank_failures.verdict`) and ends the others.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import torch

from hasten.errors import HastenError
from hasten.evidence import this_machine
from hasten.parallel import rank_failures
from hasten.parallel.command import rank_environment
from hasten.parallel.follow import follow
from hasten.parallel.rendezvous import serve_store
from hasten.parallel.world import close_current, mark_failed

T = TypeVar("T")

_METHODS = {"ddp_spawn": "spawn", "ddp_fork": "fork", "ddp_notebook": "fork"}


def spawn(
    function: Callable[..., T],
    world_size: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    strategy: str = "ddp_spawn",
) -> T:
    """Run `function(*args, **kwargs)` on every rank, and return rank 0's result.

    Inside the function, `World.from_environment()` or `open_world()` joins the ranks. This process is not a rank: what
    the function changes is lost here, unless it returns it. If one rank ends too early, all are ended; if this process
    ends, the ranks are killed.

    Args:
        function: With "ddp_spawn", it and its arguments must be picklable: importable by name from a module.
        world_size: Number of processes.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.
        strategy: "ddp_spawn": new Python processes that import the main script again, which therefore needs
            `if __name__ == "__main__":`. "ddp_fork", "ddp_notebook": forks of this process, with one CPU thread each;
            impossible after CUDA was used.

    Raises:
        HastenError: A rank raised, was killed or left early; names it, with its traceback.
    """
    if strategy not in _METHODS:
        raise HastenError(f"strategy={strategy!r} starts no function.", f"Use one of {', '.join(_METHODS)}.")
    if world_size < 1:
        raise HastenError(f"world_size={world_size}: at least one process must run.", "Use 1 or more.")
    method = _METHODS[strategy]
    if method == "fork" and torch.cuda.is_initialized():
        raise HastenError(
            f"strategy={strategy!r} copies this process, and a copy of a process that has used the GPU cannot use it.",
            "Restart the notebook and let nothing touch the GPU before fit, or train from a script with "
            'strategy="ddp".',
        )
    # torch.distributed.elastic's start_processes does not serve here (as of torch 2.13). It sets a rank's environment
    # after the new Python has imported torch, which has read OMP_NUM_THREADS by then. If this process is killed, it
    # sends its ranks SIGINT, to which a rank that hangs in C code never reacts. And Ctrl-C reaches the ranks as well as
    # this process; their tracebacks then hide the one that failed.
    store = serve_store(world_size)
    context = multiprocessing.get_context(method)
    children: list[_FunctionChild] = []
    try:
        for rank in range(world_size):
            env = rank_environment(rank, world_size, "127.0.0.1", store.port, this_machine().cores)
            # If this process has used OpenMP, a fork of it hangs as soon as it uses more than one thread.
            if method == "fork":
                env["OMP_NUM_THREADS"] = "1"
            children.append(_FunctionChild(context, rank, env, function, tuple(args), dict(kwargs or {})))
        result: T = _result_of(children)
        return result
    finally:  # also on Ctrl-C
        rank_failures.end_all(children)
        for child in children:
            child.process.join(1.0)
            child.report.close()


def _result_of(children: list[_FunctionChild]) -> Any:
    """Wait for all ranks. Return rank 0's result.

    Raises:
        HastenError: A rank ended too early.
    """
    while running := [child for child in children if child.code() is None]:
        wait([child.report for child in running if not child.reported] + [child.process.sentinel for child in running])
        for child in children:
            child.listen()
        if any(child.code() for child in children):
            rank_failures.settle(children)
            for child in children:
                child.listen()
            raise rank_failures.verdict(children, len(children)) or HastenError("A rank ended.", "")
    children[0].listen()
    if children[0].failed or not children[0].reported:
        raise rank_failures.verdict(children, len(children)) or HastenError("Rank 0 gave no result.", "")
    return children[0].result


class _FunctionChild:
    """A rank that runs a function, and its report."""

    def __init__(
        self,
        context: BaseContext,
        rank: int,
        env: dict[str, str],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.rank = rank
        self.reported = self.failed = False  # whether it has reported; whether the report is an error
        self.result: Any = None
        self._words = ""
        self.report, sending = context.Pipe(duplex=False)
        # Not a daemon: it may start DataLoader workers.
        self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=_run,
            args=(sending, os.getpid(), env, ByValue((function, args, kwargs))),
            name=f"rank {rank}",
            daemon=False,
        )
        # A new Python inherits this process's environment, and torch reads OMP_NUM_THREADS as it is imported, before
        # `_run` could set it.
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = env["OMP_NUM_THREADS"]
        try:
            self.process.start()
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
        sending.close()
        self.pid = self.process.pid or 0

    def code(self) -> int | None:
        """Return its exit code: -N after signal N, None while it runs."""
        return self.process.exitcode

    def last_words(self) -> str:
        """Return the traceback that it reported; "" if there is none."""
        self.listen()
        return self._words

    def listen(self) -> None:
        """Receive its report, if there is one."""
        if self.reported or not self.report.poll():
            return
        try:
            good, message = self.report.recv()
        except EOFError:  # it ended without a report; its exit code says how
            good, message = False, ""
        self.reported, self.failed = True, not good
        if good:
            self.result = pickle.loads(message) if message else None  # from our own process
        else:
            self._words = message


def _run(report: Connection, parent: int, env: dict[str, str], job: ByValue) -> None:
    """Run the function as a rank, in a new process, and report its result or its traceback."""
    function, args, kwargs = job.value
    follow(parent)
    os.setpgid(0, 0)  # Ctrl-C reaches the main process, which ends the ranks
    os.environ.update(env)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    try:
        result = function(*args, **kwargs)
        pickled = pickle.dumps(result) if env["RANK"] == "0" else b""
        close_current()
        report.send((True, pickled))
    except BaseException as error:
        mark_failed()
        if not isinstance(error, SystemExit):
            report.send((False, traceback.format_exc()))
        elif not error.code:
            close_current()
            report.send((False, "SystemExit: the function ended without a result"))
        raise SystemExit(error.code if isinstance(error, SystemExit) else 1) from None


class ByValue:
    """Wrapper that sends a copy of a value to another process, its tensors included.

    torch sends CPU tensors as shared memory. Ranks that train the same module would then step the same weights, each
    adding its update to the others'. Tensors that were shared before stay shared (a user's counter, say). Tensors that
    share storage within the value (tied weights) still do in the copy.

    Args:
        value: Anything that can be sent to a new process.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        written = io.BytesIO()
        _Copying(written, pickle.HIGHEST_PROTOCOL).dump(self.value)
        return _read, (written.getvalue(),)


def _read(written: bytes) -> ByValue:
    return ByValue(pickle.loads(written))  # from the process that started this one


class _Copying(ForkingPickler):
    """Pickler that writes CPU tensors as bytes, each storage once."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.storage.TypedStorage):  # created per tensor; the storage below is one object
            return _typed, (value._untyped_storage, value.dtype)
        if isinstance(value, torch.UntypedStorage) and value.device.type == "cpu" and not value.is_shared():
            return _memory, (torch.empty(0, dtype=torch.uint8).set_(value).numpy().tobytes(),)
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not _is_shared(value):
            return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _is_shared(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_shared()


def _typed(memory: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)


def _memory(written: bytes) -> torch.UntypedStorage:
    if not written:
        return torch.UntypedStorage(0)
    return torch.frombuffer(bytearray(written), dtype=torch.uint8).untyped_storage()
