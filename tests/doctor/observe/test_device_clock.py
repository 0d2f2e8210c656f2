"""Phases by a GPU's clock, on a GPU that is played: work is queued by the CPU and done one after the other."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hasten.doctor.observe import device_clock
from hasten.doctor.observe.device_clock import watch
from hasten.evidence import Phase
from hasten.evidence.recorder import Recorder
from hasten.taps.step_listeners import StepListeners
from tests.doctor.observe.sampling import sampled


class PlayedEvent:
    """A moment on the played GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.at = float("inf")

    def query(self) -> bool:
        """Whether the GPU has got there."""
        return self.at <= self.gpu.now

    def elapsed_time(self, later: PlayedEvent) -> float:
        """Milliseconds; asked only of events that are done, as CUDA demands."""
        assert self.query()
        assert later.query()
        return (later.at - self.at) * 1000


class Gpu:
    """A CPU's clock, a GPU that works off what is queued, and a training on both."""

    def __init__(self) -> None:
        self.now = 100.0
        self.free = 0.0  # when the GPU is done with all that is queued
        self.made = 0
        self.captures = False
        self.session = SimpleNamespace(
            step_listeners=StepListeners(), observers=[], run=SimpleNamespace(skip=self.skip)
        )
        self.skipped: list[str] = []
        self.recorder = Recorder(self.clock, on_step=self.on_step)
        watch(self.session, self.recorder, self)

    def skip(self, what: str, error: Exception) -> None:
        self.skipped.append(f"{what}: {error}")

    def clock(self) -> float:
        return self.now

    def on_step(self, steps: int) -> None:
        self.session.step_listeners(steps)

    def event(self) -> PlayedEvent:
        self.made += 1
        return PlayedEvent(self)

    def record(self, event: PlayedEvent) -> None:
        event.at = max(self.now, self.free)

    def capturing(self) -> bool:
        return self.captures

    def queue(self, phase: Phase, work: float, call: float = 0.001) -> None:
        """A call that takes `call` on the CPU and queues so much work."""
        self.recorder.mark(phase, True)
        start = self.now
        self.now += call
        self.free = max(self.free, self.now) + work
        if phase == Phase.BACKWARD:
            self.recorder.backward(self.now - start, [])
        elif phase == Phase.OPTIMIZER:
            self.recorder.mark(phase, False)
            self.recorder.optimizer_step(1, start, self.now, 0.0)
            return
        else:
            self.recorder.add(phase, self.now - start)
        self.recorder.mark(phase, False)

    def train(
        self, steps: int, wait: float, work: float, sync: bool = False, validate: int = -1, loader: Any = None
    ) -> None:
        """One pass: each step waits for its batch, then queues work: a third forward, the rest backward."""
        loader = loader or self.Loader()
        self.recorder.pass_begins(0, loader, self.now, self.now)
        for step in range(steps):
            self.recorder.batch_requested(loader, self.now)
            start = self.now
            self.now += wait
            self.recorder.batch_received(loader, start, self.now)
            if step == validate:
                self.queue(Phase.VALIDATION, work)
            self.queue(Phase.FORWARD, work / 3)
            self.queue(Phase.BACKWARD, 2 * work / 3)
            self.queue(Phase.OPTIMIZER, 0.001)
            if sync:
                self.now = max(self.now, self.free)
        self.recorder.batch_requested(loader, self.now)
        self.recorder.exhausted(loader, self.now)

    class Loader:
        """Any object will do."""

    def finish(self) -> None:
        """The script reads its last loss, and ends."""
        self.now = max(self.now, self.free)
        self.recorder.close()

    def phases(self, step: int) -> dict[Phase, float]:
        """Of one step, in seconds."""
        return dict(zip(Phase, self.recorder.kept.phases[step], strict=True))

    def ends(self) -> list[float]:
        """When each step is over by its own start and phases."""
        return [
            start + sum(phases)
            for start, phases in zip(self.recorder.kept.start, self.recorder.kept.phases, strict=True)
        ]


@pytest.fixture
def gpu() -> Gpu:
    """With a clock of its own that is watched."""
    return Gpu()


def test_work_that_is_queued_counts_where_it_is_done(gpu: Gpu) -> None:
    """The CPU takes 4 ms to queue a step, of which the GPU takes 91: that is the step, and its data is always there."""
    gpu.train(20, wait=0.001, work=0.09)
    gpu.finish()
    phases = gpu.phases(10)
    assert phases[Phase.FORWARD] == pytest.approx(0.03)
    assert phases[Phase.BACKWARD] == pytest.approx(0.06)
    assert phases[Phase.OPTIMIZER] == pytest.approx(0.001)
    assert phases[Phase.DATA] == pytest.approx(0)
    assert gpu.session.observers[0].facts() == {"device_clock": True}
    assert gpu.ends()[-1] == pytest.approx(gpu.now - gpu.recorder.origin)  # all of them add up to the wall
    assert gpu.ends()[:-1] == pytest.approx(gpu.recorder.kept.start[1:])


@pytest.mark.parametrize("sync", [False, True])
def test_a_gpu_that_stands_still_waits_for_data(gpu: Gpu, sync: bool) -> None:
    """It stands still for as long as the loader takes longer than it does itself; wholly, if the CPU waits for it."""
    gpu.train(20, wait=0.1, work=0.03, sync=sync)
    gpu.finish()
    phases = gpu.phases(10)
    waited = 0.1 if sync else 0.1 - 0.031 + 0.001  # while it works on the last step the next batch is being waited for
    assert phases[Phase.DATA] == pytest.approx(waited, abs=0.003)
    assert phases[Phase.BACKWARD] == pytest.approx(0.02, abs=0.002)
    assert sum(phases.values()) == pytest.approx(0.103 + 0.03 * sync, abs=0.002)


def test_the_first_step_of_a_pass_has_its_loaders_start(gpu: Gpu) -> None:
    """What lies between two passes is no step, and steps do not overlap."""
    for _ in range(3):
        gpu.train(5, wait=0.02, work=0.01)
        gpu.now += 1.0
    gpu.finish()
    starts = gpu.recorder.kept.start
    assert len(starts) == 15
    assert starts[5] - gpu.ends()[4] == pytest.approx(1.0, abs=0.02)
    assert all(end <= start + 1e-9 for end, start in zip(gpu.ends(), starts[1:], strict=False))
    assert all(sum(phases) < 0.1 for phases in gpu.recorder.kept.phases)


def test_steps_with_a_validation_keep_the_cpus_times(gpu: Gpu) -> None:
    """And those behind them go on by the GPU's."""
    gpu.train(10, wait=0.001, work=0.09, sync=True, validate=4)
    gpu.finish()
    assert gpu.phases(4)[Phase.VALIDATION] == pytest.approx(0.001)
    assert gpu.phases(4)[Phase.BACKWARD] == pytest.approx(0.001)
    assert gpu.phases(7)[Phase.BACKWARD] == pytest.approx(0.06, abs=0.002)
    assert all(end <= start + 1e-9 for end, start in zip(gpu.ends(), gpu.recorder.kept.start[1:], strict=False))


def test_nothing_gets_into_a_cuda_graph(gpu: Gpu) -> None:
    """While one is captured no event is recorded; such a step keeps the CPU's times."""
    gpu.captures = True
    gpu.train(3, wait=0.001, work=0.03, sync=True)
    assert gpu.session.observers[0].facts() == {}
    gpu.captures = False
    gpu.train(3, wait=0.001, work=0.03, sync=True)
    gpu.finish()
    assert gpu.phases(4)[Phase.BACKWARD] == pytest.approx(0.02, abs=0.002)


def test_events_are_used_again(gpu: Gpu) -> None:
    """Some dozens for ever so many steps."""
    gpu.train(500, wait=0.001, work=0.01, sync=True)
    assert gpu.made < 50


def test_a_driver_that_fails_is_asked_no_more(gpu: Gpu) -> None:
    """The training goes on by the CPU's clock."""

    def broken(event: PlayedEvent) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    gpu.train(3, wait=0.001, work=0.01)
    gpu.record = broken  # type: ignore[method-assign]
    gpu.train(3, wait=0.001, work=0.01)
    gpu.finish()
    assert gpu.skipped == ["the GPU's clock: CUDA error: unspecified launch failure"]
    assert gpu.recorder.steps == 6


def test_in_a_script(tmp_path: Path) -> None:
    """The boundaries that the taps tell of: by a clock that shows the CPU's time they give what the CPU's gave."""
    _, evidence = sampled(
        tmp_path,
        """
import time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hasten.doctor.observe.device_clock import watch
from hasten.taps.step_listeners import StepListeners
from hasten.taps.session import ProcessSession
class Event:
    def query(self): return True
    def elapsed_time(self, later): return (later.at - self.at) * 1000
class Stream:
    def event(self): return Event()
    def record(self, event): event.at = time.perf_counter()
    def capturing(self): return False
watch(ProcessSession.current, ProcessSession.current.run.recorder, Stream())
class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
    def forward(self, x):
        time.sleep(0.01)
        return self.layer(x)
def collate(samples):
    time.sleep(0.005)
    return torch.stack([sample[0] for sample in samples])
model = Slow()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x in DataLoader(TensorDataset(torch.randn(160, 3)), 8, collate_fn=collate):
        loss = model(x).mean()
        time.sleep(0.003)
        loss.backward()
        optimizer.step()
""",
    )
    assert evidence.device_clock
    for index in evidence.steady():
        phases = dict(zip(Phase, evidence.step_phases[index], strict=True))
        assert phases[Phase.FORWARD] >= 0.01
        assert phases[Phase.DATA] >= 0.005
        assert phases[Phase.OTHER] >= 0.003
        assert phases[Phase.BACKWARD] > 0 < phases[Phase.OPTIMIZER]
    ends = [start + sum(step) for start, step in zip(evidence.step_start, evidence.step_phases, strict=True)]
    assert all(end <= start + 1e-4 for end, start in zip(ends, evidence.step_start[1:], strict=False))


class OnDevices:
    """A model whose parameters are on devices that this machine may not have."""

    def __init__(self, *devices: str, train_calls: int = 1) -> None:
        self.train_calls, self.backward_through_eval = train_calls, 0
        self.devices = devices

    def __repr__(self) -> str:
        return f"{'trains' if self.train_calls else 'waits'} on {'+'.join(self.devices)}"

    def module(self) -> OnDevices:
        return self

    def parameters(self) -> list[Any]:
        return [SimpleNamespace(device=torch.device(one)) for one in self.devices]


ONE, TWO = ("cuda:1",), ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("models", "clock"),
    [
        ([OnDevices(*ONE)], 1),
        ([OnDevices("cpu", *ONE, "cpu")], 1),  # a table on the host comes first
        ([OnDevices("cpu"), OnDevices(*ONE)], 1),
        ([OnDevices("cpu")], None),
        ([OnDevices()], None),
        ([OnDevices("cpu", *TWO)], "2 GPUs"),
        ([OnDevices(*ONE), OnDevices("cuda:0")], "2 GPUs"),  # two models that train
        ([OnDevices(*ONE), OnDevices("cuda:0", train_calls=0)], 1),  # and one that is only asked
        ([OnDevices(*ONE, train_calls=0)], 1),  # nothing is known yet
    ],
    ids=str,
)
def test_the_clock_is_that_of_the_one_gpu_that_trains(
    monkeypatch: pytest.MonkeyPatch, models: list[OnDevices], clock: int | str | None
) -> None:
    """Wherever the first parameter is. Of several GPUs none is taken: the times of one are not those of the step."""
    gpu = Gpu()
    gpu.session = SimpleNamespace(step_listeners=StepListeners(), observers=[], run=SimpleNamespace(skip=gpu.skip))
    gpu.session.run.models, gpu.session.run.skipped = dict(enumerate(models)), gpu.skipped
    gpu.session.run.recorder = gpu.session.recorder = gpu.recorder
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(device_clock, "CudaStream", lambda device: asked.append(device) or gpu)
    device_clock.install(gpu.session)
    for step in range(1, 6):
        gpu.session.step_listeners(step)
    assert asked == ([clock] if isinstance(clock, int) else [])
    assert len(gpu.session.observers) == len(asked)
    assert [isinstance(clock, str) and clock in line for line in gpu.skipped] == [True] * isinstance(clock, str)


def test_without_a_gpu_there_is_no_such_clock(tmp_path: Path) -> None:
    """torch.cuda is not even looked at."""
    done, evidence = sampled(
        tmp_path,
        """
import torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    model(torch.randn(4, 3)).mean().backward()
    optimizer.step()
print(torch.cuda.is_initialized())
""",
    )
    assert done.out == "False\n"
    assert not evidence.device_clock
