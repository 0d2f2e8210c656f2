"""Runs a function on several ranks, each a process of its own; for notebooks, prompts and tests."""

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
    """Run `function(*args, **kwargs)` on every rank and bring back what rank 0 returned.

    Inside of it, `World.from_environment()` or `open_world()` joins the ranks. This process is none of them: what the
    function changes here stays there, unless it returns it. When one rank ends too early, all are ended; when this
    process ends, they are killed.

    Args:
        function: With "ddp_spawn", as its arguments, picklable: found by name in a module.
        world_size: How many processes.
        args: Handed to the function.
        kwargs: Handed to the function.
        strategy: "ddp_spawn": fresh Pythons that import the main script again, so it needs
            `if __name__ == "__main__":`. "ddp_fork", "ddp_notebook": copies of this process, with one
            thread each on the CPU; not after CUDA was used.

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
    # Not torch.distributed.elastic's start_processes (as of torch 2.13): it sets a rank's environment after the fresh
    # Python has imported torch, which has read OMP_NUM_THREADS by then; when this process is killed it sends its ranks
    # SIGINT, which one that hangs in C code never acts on; and Ctrl-C reaches the ranks beside this process, whose
    # tracebacks then hide the one that failed.
    store = serve_store(world_size)
    context = multiprocessing.get_context(method)
    children: list[_FunctionChild] = []
    try:
        for rank in range(world_size):
            env = rank_environment(rank, world_size, "127.0.0.1", store.port, this_machine().cores)
            # OpenMP cannot be used by a copy of a process that has used it: with more than one thread, it hangs.
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
    """Wait for all ranks; return what rank 0 returned.

    Raises:
        HastenError: One ended too early.
    """
    while running := [child for child in children if child.code() is None]:
        wait([child.report for child in running if not child.told] + [child.process.sentinel for child in running])
        for child in children:
            child.listen()
        if any(child.code() for child in children):
            rank_failures.settle(children)
            for child in children:
                child.listen()
            raise rank_failures.verdict(children, len(children)) or HastenError("A rank ended.", "")
    children[0].listen()
    if children[0].failed or not children[0].told:
        raise rank_failures.verdict(children, len(children)) or HastenError("Rank 0 gave no result.", "")
    return children[0].result


class _FunctionChild:
    """A rank that runs a function, and what it has reported."""

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
        self.told = self.failed = False
        self.result: Any = None
        self._words = ""
        self.report, theirs = context.Pipe(duplex=False)
        # Not a daemon: it may start DataLoader workers.
        self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=_run,
            args=(theirs, os.getpid(), env, ByValue((function, args, kwargs))),
            name=f"rank {rank}",
            daemon=False,
        )
        # A fresh Python reads its number of threads when it imports torch, before our code runs.
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = env["OMP_NUM_THREADS"]
        try:
            self.process.start()
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
        theirs.close()
        self.pid = self.process.pid or 0

    def code(self) -> int | None:
        """Its exit code, -N after signal N, None while it runs."""
        return self.process.exitcode

    def last_words(self) -> str:
        """The traceback that it reported."""
        self.listen()
        return self._words

    def listen(self) -> None:
        """Take its report, if it is there."""
        if self.told or not self.report.poll():
            return
        try:
            good, message = self.report.recv()
        except EOFError:  # it ended without a word; its exit code says how
            good, message = False, ""
        self.told, self.failed = True, not good
        if good:
            self.result = pickle.loads(message) if message else None  # from our own process
        else:
            self._words = message


def _run(report: Connection, parent: int, env: dict[str, str], job: ByValue) -> None:
    """A rank's whole life."""
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
    """A value that each process it is sent to gets a copy of, its tensors too.

    torch sends a tensor on the CPU as shared memory. Ranks that train one module would then all step the same
    weights, each adding its update to those of the others. Tensors that were shared before stay so: a person's
    counter, say. What shares memory within the value (tied weights) still does in the copy.

    Args:
        value: Anything that can be sent to a process that is being started.
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
    """Writes tensors as bytes, each piece of memory once."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.storage.TypedStorage):  # a new one for each tensor: the memory below is one object
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
