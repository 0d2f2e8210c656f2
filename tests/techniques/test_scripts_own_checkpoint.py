"""A script's own `torch.utils.checkpoint` runs blocks again in the backward: they are no models of their own there."""

from __future__ import annotations

import pytest

from hasten.plan import Setting
from tests.techniques.conftest import Train, close, identical

# The same training with blocks that are run again in the backward, and without: the gradients must be the same.
SCRIPT = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        def forward(self, x):
            hidden = self.layers(x)
            return x + hidden * (1 + torch.rand_like(hidden))
    class Net(nn.Module):
        def __init__(self, again):
            super().__init__()
            self.again, self.blocks, self.head = again, nn.ModuleList([Block(), Block()]), nn.Linear(32, 4)
        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
            return self.head(x)
    left = {}
    for again in (True, False):
        torch.manual_seed(0)
        model = Net(again)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            x, y = torch.randn(16, 32), torch.randint(0, 4, (16,))
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        left["again" if again else "once"] = {"loss": loss.item(), "model": model.state_dict()}
    torch.save(left, "left.pt")
"""


@pytest.mark.parametrize("setting", ["bf16-mixed", "16-mixed"])
def test_a_block_that_is_run_again_draws_and_casts_as_before(train: Train, setting: Setting) -> None:
    plain, changed = train(SCRIPT), train(SCRIPT, precision=setting)
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert identical(changed.left["again"], changed.left["once"])
    assert not identical(plain.left["once"], changed.left["once"])  # it computed in 16 bits
    assert "autocast" not in changed.err


def test_a_block_that_is_run_again_is_not_compiled_by_itself(train: Train) -> None:
    plain, changed = train(SCRIPT), train(SCRIPT, compile="default")
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert close(plain.left["again"]["model"], changed.left["again"]["model"], 1e-4)
    assert changed.installed["compile"] == "2 x model"  # not the blocks
