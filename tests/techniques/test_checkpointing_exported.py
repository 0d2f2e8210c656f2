"""Models whose activations are computed again, compiled by TorchScript, traced and exported by their script."""

from __future__ import annotations

from typing import Any

import pytest

from tests.techniques.conftest import Train, identical
from tests.trainer.test_switches_put_back import quiet

EXPORTED = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        def forward(self, x): return x + self.b(torch.relu(self.a(x)))
    model = nn.Sequential(nn.Linear(8, 8), Block(), Block(), Block(), Block(), nn.Linear(8, 4))
    optimizer, x, losses, outputs = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 8), [], []
    for _ in range(4):
        loss = (model(torch.randn(8, 8)) - 1).pow(2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        EXPORT
        losses.append(loss.item())
    torch.save({"losses": losses, "outputs": outputs, "names": list(vars(model[1]))}, "left.pt")
"""
EXPORTS = {
    "script": "torch.jit.script(model).save('m'); outputs.append(torch.jit.load('m')(x))",
    "trace": "torch.jit.trace(model, x).save('m'); outputs.append(torch.jit.load('m')(x))",
    "export": "outputs.append(torch.export.export(model, (x,)).module()(x))",
}


@pytest.mark.parametrize("setting", [True, "sqrt"])
@pytest.mark.parametrize("case", EXPORTS)
def test_a_training_may_export_its_model(train: Train, case: str, setting: Any) -> None:
    script = EXPORTED.replace("EXPORT", EXPORTS[case])
    plain, changed = train(script), train(script, activation_checkpointing=setting)
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert identical(plain.left["losses"], changed.left["losses"])
    assert identical([one.detach() for one in plain.left["outputs"]], [one.detach() for one in changed.left["outputs"]])
    assert changed.installed["activation_checkpointing"].startswith("4 x block" if setting is True else "sequence in")


def test_behind_a_training_modules_are_as_they_were() -> None:
    import torch
    from torch import nn

    import hasten

    class Net(hasten.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))

        def training_step(self, batch: Any, index: int) -> Any:
            for layer in self.layers:
                assert ("forward" in vars(layer)) is True
                batch = layer(batch)
            return batch.sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Net()
    trainer = quiet(plan=hasten.Plan({"activation_checkpointing": True}), limit_train_batches=2)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(8, 4), 4))
    assert not any("forward" in vars(layer) for layer in module.layers)
    torch.jit.script(module.layers[0])
