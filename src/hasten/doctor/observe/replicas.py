"""Models that are trained in several copies: DataParallel, and DistributedDataParallel's needless work."""

from __future__ import annotations

import statistics
import sys
import weakref
from typing import Any

from hasten.doctor.observe.event_log import EventLog, script_place
from hasten.evidence import Event, Phase
from hasten.evidence.recorder import Recorder
from hasten.taps.protocol import Session
from hasten.taps.wrapping import tap

_LOOKED = 20  # backwards after which it is known whether parameters stay unused


def tap_replicas(session: Session, log: EventLog) -> None:
    """Set the taps on what builds replicas."""
    import torch

    def data_parallel(plain: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            plain(self, *args, **kwargs)
            devices = len(getattr(self, "device_ids", ()))
            log.note("data_parallel", detail=f"{devices} devices", anywhere=True)

        return __init__

    replicas = Replicas(session, log)

    def distributed(plain: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            plain(self, *args, **kwargs)
            with session.run.guard("observing DistributedDataParallel"):
                replicas.built(self, script_place(sys._getframe(1)) or "")

        return __init__

    tap(torch.nn.DataParallel, "__init__", data_parallel)
    tap(torch.nn.parallel.DistributedDataParallel, "__init__", distributed)


class _Replica:
    """One DistributedDataParallel."""

    def __init__(self, module: Any, place: str) -> None:
        self.module = weakref.ref(module)
        self.place = place
        self.seeks_unused = bool(module.find_unused_parameters)
        self.unused = False
        first = next((p for p in module.parameters() if p.requires_grad), None)
        self.first = None if first is None else weakref.ref(first)
        self.gradient: tuple[weakref.ref[Any], int] | None = None  # its first parameter's, and its version
        self.backwards = 0  # that synchronised
        self.synchronised: list[str] = []  # where, since its optimizer stepped
        self.parameters = frozenset(map(id, module.parameters()))
        self.clock = SyncClock(module)

    def went_through(self) -> bool:
        """Whether the backward that is over added to this module's gradients."""
        first = None if self.first is None else self.first()
        before, self.gradient = self.gradient, None
        if first is None or first.grad is None:
            return False
        version: int = first.grad._version
        self.gradient = weakref.ref(first.grad), version
        return before is None or before[0]() is not first.grad or before[1] != version


class Replicas:
    """Watches the backwards of DistributedDataParallel modules."""

    def __init__(self, session: Session, log: EventLog) -> None:
        self._session = session
        self._log = log
        self._all: list[_Replica] = []
        self._sync: GradientSync | None = None

    def built(self, module: Any, place: str) -> None:
        """One was built; from the first on, backwards and steps are listened to."""
        # By the end of the run the process group may be gone.
        self._session.run.seen["distributed"] = max(module.process_group.size(), 1)
        recorder = self._session.run.recorder
        if not self._all and recorder is not None:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            self._session.observers.append(self)
            self._session.on_backward.append(self._on_backward)
            register_optimizer_step_post_hook(self._stepped)
            self._sync = GradientSync(recorder)  # here, in the process that trains: it may have been forked
            # Which backward of several was for nothing shows only where all are seen.
            recorder.wake()
            recorder.may_rest = False
        self._all.append(_Replica(module, place))

    def _on_backward(self, *_: Any) -> None:
        with self._session.run.guard("observing DistributedDataParallel"):  # a module like no other
            for replica in self._all:
                module = replica.module()
                if module is None or not replica.went_through():
                    continue
                if not (module.require_backward_grad_sync and module.require_forward_param_sync):
                    continue  # under no_sync, which counts where the forward is
                replica.backwards += 1
                if self._sync is not None:
                    self._sync.synced(replica.clock)
                replica.synchronised.append(script_place(sys._getframe(2), past_torch=True) or "")
                if replica.seeks_unused and replica.backwards <= _LOOKED and not replica.unused:
                    replica.unused = any(p.requires_grad and p.grad is None for p in module.module.parameters())

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        first = next((id(p) for group in optimizer.param_groups for p in group["params"]), None)
        for replica in self._all:
            if first in replica.parameters:
                for place in replica.synchronised[:-1]:  # the last one's sums are what the step is made with
                    self._log.note_at("ddp_sync", place)
                replica.synchronised.clear()

    def facts(self) -> dict[str, Any]:
        """Searches for unused parameters, and whether there were any."""
        return {
            "events": tuple(
                Event(
                    "ddp_unused",
                    replica.place,
                    max(1, replica.backwards),
                    detail="some unused" if replica.unused else "none unused" if replica.backwards else "",
                )
                for replica in self._all
                if replica.seeks_unused
            )
        }


_TIMED_EVERY = 10  # iterations on a CPU, where a clock is cheap; torch's own default is 100
_READ_EVERY = 5  # backwards
_WARM_UP = 3  # iterations: in the second one DDP lays its buckets out again


class SyncClock:
    """Waiting times of one DistributedDataParallel."""

    def __init__(self, module: Any) -> None:
        self._module = weakref.ref(module)
        self._backwards = 0
        self._waits: dict[int, float] = {}  # iteration -> seconds
        if next(module.parameters()).device.type == "cpu":
            module._set_ddp_runtime_logging_sample_rate(_TIMED_EVERY)

    def went_backward(self) -> None:
        """A backward that synchronised is over."""
        self._backwards += 1
        module = self._module()
        if module is None or self._backwards % _READ_EVERY:
            return
        times = module._get_ddp_logging_data()
        if "backward_comm_time" in times:
            alone = times["backward_comm_time"] - times["backward_compute_comm_overlap_time"]
            self._waits[times["iteration"]] = max(0, alone) / 1e9

    def seconds(self) -> float:
        """Return the median seconds of waiting in one backward; 0 where none was timed."""
        known = [wait for iteration, wait in self._waits.items() if iteration >= _WARM_UP] or list(self._waits.values())
        return statistics.median(known) if known else 0.0


class GradientSync:
    """Moves the waiting of all replicas from the steps' backwards to their gradient sync, when the run is over."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._synced: dict[int, list[SyncClock]] = {}  # step -> who synchronised in it
        recorder.on_close.append(self._move)

    def synced(self, clock: SyncClock) -> None:
        """A backward that synchronised is over."""
        clock.went_backward()
        if (step := self._recorder.steps) >= self._recorder.kept.next:  # of others nobody will ask
            self._synced.setdefault(step, []).append(clock)

    def _move(self) -> None:
        kept = self._recorder.kept
        for number, phases in zip(kept.numbers, kept.phases, strict=True):
            waited = sum(clock.seconds() for clock in self._synced.get(number, ()))
            moved = min(waited, phases[Phase.BACKWARD])
            phases[Phase.BACKWARD] -= moved
            phases[Phase.SYNC] += moved
