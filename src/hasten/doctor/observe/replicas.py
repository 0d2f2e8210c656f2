"""Observe replicated models: use of DataParallel, and DistributedDataParallel's needless syncs, searches and waits.

A sync is needless if the optimizer has not stepped before the next one, as in gradient accumulation without `no_sync`.
A search for unused parameters is needless if none are unused. How long backwards wait for the sync is read from DDP's
own runtime statistics, and moved in the evidence from the backward phase to the gradient sync phase.
"""

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

_CHECKED = 20  # synchronising backwards in which to look for unused parameters


def tap_replicas(session: Session, log: EventLog) -> None:
    """Tap the constructors of DataParallel and DistributedDataParallel."""
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
    """State kept for one DistributedDataParallel module."""

    def __init__(self, module: Any, place: str) -> None:
        self.module = weakref.ref(module)
        self.place = place
        self.seeks_unused = bool(module.find_unused_parameters)
        self.unused = False  # whether parameters without a gradient were seen
        first = next((p for p in module.parameters() if p.requires_grad), None)
        self.first = None if first is None else weakref.ref(first)
        self.gradient: tuple[weakref.ref[Any], int] | None = None  # the first parameter's gradient, and its version
        self.backwards = 0  # backwards that synchronised
        self.synchronised: list[str] = []  # places of those since its optimizer stepped
        self.parameters = frozenset(map(id, module.parameters()))
        self.clock = SyncClock(module)

    def went_through(self) -> bool:
        """Return whether the last backward added to this module's gradients.

        The first parameter's gradient then is another tensor than before, or has another version.
        """
        first = None if self.first is None else self.first()
        previous, self.gradient = self.gradient, None
        if first is None or first.grad is None:
            return False
        version: int = first.grad._version
        self.gradient = weakref.ref(first.grad), version
        return previous is None or previous[0]() is not first.grad or previous[1] != version


class Replicas:
    """Watches the backwards of DistributedDataParallel modules."""

    def __init__(self, session: Session, log: EventLog) -> None:
        self._session = session
        self._log = log
        self._replicas: list[_Replica] = []
        self._sync: GradientSync | None = None

    def built(self, module: Any, place: str) -> None:
        """Watch a new module; with the first one, start listening to backwards and optimizer steps."""
        # Read now: by the end of the run the process group may be destroyed.
        self._session.run.facts["distributed"] = max(module.process_group.size(), 1)
        recorder = self._session.run.recorder
        if not self._replicas and recorder is not None:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            self._session.observers.append(self)
            self._session.on_backward.append(self._on_backward)
            register_optimizer_step_post_hook(self._stepped)
            self._sync = GradientSync(recorder)
            # Whether a sync was needless can be told only if every backward is seen, so the recorder must not rest.
            recorder.wake()
            recorder.may_rest = False
        self._replicas.append(_Replica(module, place))

    def _on_backward(self, *_: Any) -> None:
        """Record a backward with each module that it went through and that synchronised."""
        with self._session.run.guard("observing DistributedDataParallel"):
            for replica in self._replicas:
                module = replica.module()
                if module is None or not replica.went_through():
                    continue
                if not (module.require_backward_grad_sync and module.require_forward_param_sync):
                    continue  # the forward was under `no_sync`: what counts is where the forward runs, not the backward
                replica.backwards += 1
                if self._sync is not None:
                    self._sync.synced(replica.clock)
                replica.synchronised.append(script_place(sys._getframe(2), past_torch=True) or "")
                if replica.seeks_unused and replica.backwards <= _CHECKED and not replica.unused:
                    replica.unused = any(p.requires_grad and p.grad is None for p in module.module.parameters())

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        """Note the needless syncs since the optimizer's previous step: all but the last. This is a step hook."""
        first = next((id(p) for group in optimizer.param_groups for p in group["params"]), None)
        for replica in self._replicas:
            if first in replica.parameters:
                for place in replica.synchronised[:-1]:  # only the last sync produced the gradients of the step
                    self._log.note_at("ddp_sync", place)
                replica.synchronised.clear()

    def facts(self) -> dict[str, Any]:
        """Return an event per module that searches for unused parameters, with whether there were any."""
        return {
            "events": tuple(
                Event(
                    "ddp_unused",
                    replica.place,
                    max(1, replica.backwards),
                    detail="some unused" if replica.unused else "none unused" if replica.backwards else "",
                )
                for replica in self._replicas
                if replica.seeks_unused
            )
        }


_TIMED_EVERY = 10  # iterations, on a CPU, where timing is cheap; torch's own default is 100
_READ_EVERY = 5  # backwards between two readings of the statistics
_WARM_UP = 3  # iterations: DDP rebuilds its buckets in the second one


class SyncClock:
    """Reads how long a DistributedDataParallel module's backwards wait for communication."""

    def __init__(self, module: Any) -> None:
        self._module = weakref.ref(module)
        self._backwards = 0
        self._waits: dict[int, float] = {}  # iteration -> seconds
        if next(module.parameters()).device.type == "cpu":
            module._set_ddp_runtime_logging_sample_rate(_TIMED_EVERY)

    def went_backward(self) -> None:
        """Count a backward that synchronised, and read the module's statistics now and then."""
        self._backwards += 1
        module = self._module()
        if module is None or self._backwards % _READ_EVERY:
            return
        times = module._get_ddp_logging_data()
        if "backward_comm_time" in times:
            exposed = times["backward_comm_time"] - times["backward_compute_comm_overlap_time"]
            self._waits[times["iteration"]] = max(0, exposed) / 1e9

    def seconds(self) -> float:
        """Return the median seconds that a backward waits for communication; 0 if none was timed."""
        waits = [wait for iteration, wait in self._waits.items() if iteration >= _WARM_UP] or list(self._waits.values())
        return statistics.median(waits) if waits else 0.0


class GradientSync:
    """Moves the waits of all replicas from the backward phase to the gradient sync phase, when the run is over."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._synced: dict[int, list[SyncClock]] = {}  # step -> clocks of the modules that synchronised in it
        recorder.on_close.append(self._move)

    def synced(self, clock: SyncClock) -> None:
        """Record a backward that synchronised in the current step."""
        clock.went_backward()
        if (step := self._recorder.steps) >= self._recorder.kept.next:  # steps before it are not kept
            self._synced.setdefault(step, []).append(clock)

    def _move(self) -> None:
        """Move the waits in every kept step, at most as much as its backward took."""
        kept = self._recorder.kept
        for number, phases in zip(kept.numbers, kept.phases, strict=True):
            waited = sum(clock.seconds() for clock in self._synced.get(number, ()))
            moved = min(waited, phases[Phase.BACKWARD])
            phases[Phase.BACKWARD] -= moved
            phases[Phase.SYNC] += moved
