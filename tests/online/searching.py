"""A small training to search in, and what a search of it gave."""

from __future__ import annotations

from dataclasses import dataclass, field

from hasten.online.record import MeasuredBlock
from hasten.tuner.search_state import SearchState

TRAIN = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from tests.online.waiting import wait
torch.manual_seed(5)
class Net(torch.nn.Linear):
    def forward(self, x):
        wait(sum(getattr(torch, "waits", {"script": 0.012}).values()))
        return super().forward(x)
model = Net(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(400, 4)), batch_size=4, shuffle=True)
def step(x, optimizer=optimizer):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
def train(epochs, loader=loader, then=lambda epoch: None):
    for epoch in range(epochs):
        for (x,) in loader:
            step(x)
        then(epoch)
"""


@dataclass
class Searched:
    """A search that is over."""

    ok: bool
    found: SearchState
    said: list[str]
    told: list[MeasuredBlock] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """What was chosen."""
        return set(self.found.plan())

    @property
    def out(self) -> dict[str, str]:
        """What is off for good, and why."""
        return {self.found.course.candidates[i].name: why for i, why in self.found.course.dropped.items()}

    def blocks(self, *parts: str) -> list[MeasuredBlock]:
        """The good blocks of these parts."""
        return [one for one in self.found.blocks if one.part in parts and not one.trouble]
