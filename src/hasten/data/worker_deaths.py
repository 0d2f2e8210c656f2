"""Raises the death of a worker process where its batch is waited for, not anywhere in the training."""

from __future__ import annotations

from multiprocessing import connection
from typing import Any

from torch._C import (
    _error_if_any_worker_fails,
    _remove_worker_pids,
    _set_worker_pids,
)

_DYING = 5.0  # seconds for a worker that has closed its connection to be seen to have ended


class DeferredWorkerDeath:
    """A mixin before torch's iterator over worker processes.

    torch raises a worker's death from a handler of SIGCHLD: wherever the main thread is at that moment, in the middle
    of an optimizer's step or of a checkpoint's write, with nothing to say which loader or sample it was. The handler
    asks about the processes it was told of, so it is told of these only while a batch of theirs is waited for.
    """

    _workers: list[Any]
    _workers_status: list[bool]
    _worker_pids_set: bool

    def _hasten_forget(self) -> None:
        """To be called once the workers have started: torch tells its handler of them there."""
        if self._worker_pids_set:
            _remove_worker_pids(id(self))
            self._worker_pids_set = False

    def _try_get_data(self, timeout: float = 5.0) -> Any:
        if self._worker_pids_set:  # still in torch's own start
            return super()._try_get_data(timeout)  # type: ignore[misc]
        try:
            _set_worker_pids(id(self), tuple(process.pid for process in self._workers))
            _error_if_any_worker_fails()  # one that died since the last batch
            return super()._try_get_data(timeout)  # type: ignore[misc]
        except (EOFError, OSError) as error:  # a batch is fetched from its worker, which closes that when it dies
            awaited = [worker for worker, works in zip(self._workers, self._workers_status, strict=True) if works]
            ended = connection.wait([worker.sentinel for worker in awaited], timeout=_DYING)
            for worker in awaited:
                if worker.sentinel in ended:
                    worker.join(_DYING)
                    raise RuntimeError(f"DataLoader worker (pid {worker.pid}) exited unexpectedly") from error
            raise
        finally:
            _remove_worker_pids(id(self))
