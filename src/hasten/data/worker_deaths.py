"""Reports the death of a worker process where the training waits for its batch, not anywhere in the training."""

from __future__ import annotations

from multiprocessing import connection
from typing import Any

from torch._C import (
    _error_if_any_worker_fails,
    _remove_worker_pids,
    _set_worker_pids,
)

_DYING = 5.0  # seconds to wait for the end of a worker that has closed its connection


class DeferredWorkerDeath:
    """A mixin before torch's iterator over worker processes.

    torch raises a worker's death from a SIGCHLD handler, wherever the main thread is at that moment: in the middle of
    an optimizer step or a checkpoint write, and without the loader or sample. The handler only checks registered
    pids, so this mixin registers the workers' pids only while the training waits for one of their batches.
    """

    _workers: list[Any]
    _workers_status: list[bool]
    _worker_pids_set: bool

    def _hasten_forget(self) -> None:
        """Unregister the workers, which torch registers as it starts them; call it right after that."""
        if self._worker_pids_set:
            _remove_worker_pids(id(self))
            self._worker_pids_set = False

    def _try_get_data(self, timeout: float = 5.0) -> Any:
        if self._worker_pids_set:  # still in torch's __init__
            return super()._try_get_data(timeout)  # type: ignore[misc]
        try:
            _set_worker_pids(id(self), tuple(process.pid for process in self._workers))
            _error_if_any_worker_fails()  # for workers that died since the last batch
            return super()._try_get_data(timeout)  # type: ignore[misc]
        except (EOFError, OSError) as error:  # the worker died while its batch was fetched over a socket
            awaited = [worker for worker, works in zip(self._workers, self._workers_status, strict=True) if works]
            ended = connection.wait([worker.sentinel for worker in awaited], timeout=_DYING)
            for worker in awaited:
                if worker.sentinel in ended:
                    worker.join(_DYING)
                    raise RuntimeError(f"DataLoader worker (pid {worker.pid}) exited unexpectedly") from error
            raise
        finally:
            _remove_worker_pids(id(self))
