"""A CPU that lacks a 16-bit layer trains on in float32 under `precision`, and is told so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hasten.techniques.compute.narrow_kernels import missing_kernel
from tests.techniques.conftest import Train, identical

LSTM = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.out = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)
        def forward(self, x): return self.out(self.read(x)[0][:, -1])
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dtypes = set()
    model.out.register_forward_hook(lambda module, given, out: dtypes.add(str(out.dtype)))
    for _ in range(4):
        loss = nn.functional.cross_entropy(model(torch.randn(5, 7, 6)), torch.randint(0, 3, (5,)))
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    torch.save({"model": model.state_dict(), "dtypes": dtypes}, "left.pt")
"""


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
def test_an_lstm_trains_whether_this_cpu_has_it_in_16_bits_or_not(
    train: Train, precision: str, dtype: torch.dtype
) -> None:
    plain, changed = train(LSTM), train(LSTM, precision=precision)
    assert plain.code == changed.code == 0, changed.err
    missing = missing_kernel(nn.LSTM(1, 1), dtype)
    assert changed.left["dtypes"] == {"torch.float32" if missing else str(dtype)}
    assert (f"left alone: {missing}" in changed.installed["precision"]) is bool(missing)
    assert identical(plain.left["model"], changed.left["model"]) is bool(missing)


def test_asking_draws_nothing_and_leaves_autocast_off() -> None:
    layers = [nn.Linear(1, 1), nn.GRU(1, 1), nn.LSTM(1, 1)]
    before = torch.get_rng_state()
    assert missing_kernel(nn.ModuleList(layers[:2]), torch.bfloat16) == ""
    missing_kernel(layers[2], torch.float16)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), before)
