"""Learning rates, schedules, gradients set to zero, replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.evidence import Evidence, OptimizerFacts
from tests.doctor.observe.listening import HEAD, at, event, kinds, observed
from tests.taps.forks import forked

SEVERAL = """
def train(optimizer, scheduler=None, each=False, epochs=1, warm=False):
    step = 0
    for epoch in range(epochs):
        for x, y in loader:
            if warm:
                optimizer.param_groups[0]["lr"] = 0.01 * min(step + 1, 3)
            optimizer.zero_grad(set_to_none=False)  # zeros
            criterion(model(x), y).backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)  # clip
            optimizer.step()
            step += 1
            if each:
                scheduler.step()
        if scheduler and not each:
            scheduler.step(1.0) if "Plateau" in type(scheduler).__name__ else scheduler.step()
schedules, kept = torch.optim.lr_scheduler, []
def new(kind=torch.optim.SGD, **options):
    kept.append(kind(model.parameters(), **options))
    return kept[-1]
constant = new(torch.optim.Adam, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9))
train(constant)
by_hand = new(lr=1.0)
train(by_hand, warm=True)
epochs = new(lr=0.1, momentum=0.9)
train(epochs, schedules.StepLR(epochs, 1, gamma=0.5), epochs=3)
chain = new(lr=0.1)
warm = schedules.LinearLR(chain, start_factor=0.5, total_iters=4)
train(chain, schedules.SequentialLR(chain, [warm, schedules.ConstantLR(chain, 1.0)], [4]), each=True)
plateau = new(lr=0.1)
train(plateau, schedules.ReduceLROnPlateau(plateau, patience=0), epochs=2)
cosine = new(lr=0.1)
train(cosine, schedules.CosineAnnealingLR(cosine, 400), each=True, epochs=9)
tensor = new(torch.optim.Adam, lr=torch.tensor(0.5), capturable=False, foreach=False)
train(tensor)
model.zero_grad(set_to_none=False)
print([p.double().sum().item() for p in model.parameters()])
torch.nn.DataParallel(model)  # parallel
"""


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Evidence]:
    folder = tmp_path_factory.mktemp("several")
    done, evidence = observed(folder, HEAD + SEVERAL)
    assert done == forked(folder, "train.py")
    return folder, evidence


def test_rates_and_schedules(several: tuple[Path, Evidence]) -> None:
    _, evidence = several
    constant, by_hand, epochs, chain, plateau, cosine, tensor = _trained(evidence)
    assert (constant.name, constant.schedule, constant.rates) == ("Adam", "", (0.01,))
    assert constant.options["weight_decay"] == 0.1
    assert constant.options["betas"] == "0.8, 0.9"
    assert constant.options["amsgrad"] is False
    assert constant.shapes == ((16, 6), (16,), (3, 16), (3,))
    assert by_hand.rates == pytest.approx((0.01, 0.02, 0.03))
    assert by_hand.schedule == ""
    assert (epochs.schedule, epochs.options["momentum"]) == ("StepLR", 0.9)
    assert epochs.rates == pytest.approx((0.1, 0.05, 0.025))
    assert chain.schedule == "SequentialLR"
    assert chain.rates[0] == pytest.approx(0.05)
    assert plateau.schedule == "ReduceLROnPlateau"
    assert (cosine.schedule, len(cosine.rates)) == ("CosineAnnealingLR", 64)
    assert list(cosine.rates) == sorted(cosine.rates, reverse=True)
    assert tensor.rates == (0.5,)


def _trained(evidence: Evidence) -> list[OptimizerFacts]:
    return [optimizer for optimizer in evidence.optimizers if optimizer.steps]


def test_zeros_clips_and_data_parallel(several: tuple[Path, Evidence]) -> None:
    folder, evidence = several
    assert event(evidence, "zero_grad", at(folder, "zeros")).count == evidence.steps
    clipped = event(evidence, "clip", at(folder, "clip"))
    assert (clipped.count, clipped.detail) == (evidence.steps, "clip_grad_value_")
    assert event(evidence, "data_parallel", at(folder, "parallel")).detail.endswith("devices")
    assert kinds(evidence) == {"zero_grad": 1, "clip": 1, "data_parallel": 1}


REPLICAS = """
import contextlib, os
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meet", rank=0, world_size=1)
class Partly(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)
    def forward(self, x):
        return self.used(x)
def train(model, careful=False, every=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(loader):
        last = step % every == every - 1
        with contextlib.nullcontext() if last or not careful else model.no_sync():
            criterion(model(x), y).backward()  # backward
        if last:
            optimizer.step()
            optimizer.zero_grad()
train(DistributedDataParallel(model))  # plain
train(DistributedDataParallel(model), careful=True)
train(DistributedDataParallel(model), every=1)
train(DistributedDataParallel(model, find_unused_parameters=True), every=1)  # needless
train(DistributedDataParallel(Partly(), find_unused_parameters=True), every=1)  # needed
dist.destroy_process_group()
"""


def test_replicas_that_talk_too_much(tmp_path: Path) -> None:
    """Accumulation without no_sync, and searches for unused parameters, under a real DistributedDataParallel."""
    _, evidence = observed(tmp_path, HEAD + REPLICAS)
    assert evidence.steps == 200
    assert event(evidence, "ddp_sync", at(tmp_path, "backward")).count == 30  # three of four, of the first training
    assert event(evidence, "ddp_unused", at(tmp_path, "needless")).detail == "none unused"
    assert event(evidence, "ddp_unused", at(tmp_path, "needed")).detail == "some unused"
    assert kinds(evidence) == {"ddp_sync": 1, "ddp_unused": 2}
