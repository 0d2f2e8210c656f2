"""A rank whose code differs from the others' is named before the first step; a checkpoint of another model likewise."""

from __future__ import annotations

import pytest
import torch

import hasten
from hasten.parallel import World, spawn
from tests.trainer.trainings import Regression, loader, quiet


def _fit(what):
    """Train where rank 1 has another version of the code."""
    other = World.from_environment().rank == 1
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    flags, rate = {}, 0.1
    if other and what == "layer":
        net.append(torch.nn.Linear(1, 1))
    if other and what == "frozen":
        net[0].weight.requires_grad_(False)
    if other and what == "rate":
        rate = 0.01
    if other and what == "flag":
        flags = {"accumulate_grad_batches": 2}
    module = Regression(lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9), net=net)
    quiet(devices=2, strategy="ddp", max_epochs=2, **flags).fit(module, loader())
    return [float(one.sum()) for one in net.parameters()]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("layer", r"model of rank 1 of 2 is not that of rank 0:\n +\+net\.3\.weight"),
        ("frozen", r"net\.0\.weight .*, frozen"),
        (
            "rate",
            r"optimizer of rank 1 of 2 .*\n +-SGD: 4 parameters, lr=0\.1,.*\n +\+SGD: 4 parameters, lr=0\.01,",
        ),
        ("flag", r"flags of rank 1 of 2 .*\n +-accumulate_grad_batches=1\n +\+accumulate_grad_batches=2"),
    ],
)
def test_a_rank_whose_code_differs_is_named(what, said):
    with pytest.raises(hasten.HastenError, match=said):
        spawn(_fit, 2, (what,), strategy="ddp_fork")


def test_ranks_of_one_code_train():
    assert all(torch.tensor(spawn(_fit, 2, ("",), strategy="ddp_fork")).isfinite())


def test_a_checkpoint_of_another_model_is_named(tmp_path):
    trainer = quiet()
    trainer.fit(Regression(), loader())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    other = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    with pytest.raises(hasten.HastenError, match=r"one\.ckpt is a checkpoint of another model") as caught:
        quiet(max_epochs=2).fit(Regression(net=other), loader(), ckpt_path=tmp_path / "one.ckpt")
    assert "size mismatch for net.0.weight" in str(caught.value)
    assert "another folder" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)  # as torch has it
