"""`optimizer_in_backward`: the numbers of a run without it, to the bit, and what is refused."""

import json

import pytest
import torch
from torch.nn import functional as F

from hasten import HastenError, Plan
from hasten.callbacks import EMA, Callback, GradientAccumulationScheduler
from tests.fork_here import ran_here
from tests.trainer.trainings import Regression, assert_same, loader, quiet

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "foreach": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=True, amsgrad=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.01),
}


class Grouped(Regression):
    """Two groups, a frozen layer, a weight that is used twice, and a schedule of the rate by steps."""

    def __init__(self, kind="SGD"):
        super().__init__()
        self.kind = kind
        self.net.insert(1, torch.nn.Linear(16, 16))
        self.net[1].weight.requires_grad_(False)
        self.tied = torch.nn.Parameter(torch.eye(4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net((x @ self.tied).tanh() @ self.tied), y)

    def configure_optimizers(self):
        first, *others = self.parameters()
        optimizer = OPTIMIZERS[self.kind]([{"params": others}, {"params": [first], "lr": 0.02}])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trained(module, steps=8, path=None, **flags):
    torch.manual_seed(7)
    trainer = quiet(max_epochs=-1, max_steps=steps, **flags)
    trainer.fit(module, loader(), ckpt_path=path)
    return trainer


def assert_equal(one, other):
    assert_same(one.model.state_dict(), other.model.state_dict())
    first, second = (trainer.optimizers[0].state_dict() for trainer in (one, other))
    assert first["param_groups"] == second["param_groups"]
    assert first["state"].keys() == second["state"].keys()
    for number, state in first["state"].items():
        for name, value in state.items():
            same = torch.equal(value, second["state"][number][name]) if isinstance(value, torch.Tensor) else True
            assert same, (number, name)
            assert isinstance(value, torch.Tensor) or value == second["state"][number][name]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weights_and_states_are_equal_to_the_bit(kind):
    plain = trained(Grouped(kind))
    inside = trained(Grouped(kind), optimizer_in_backward=True)
    assert_equal(plain, inside)
    assert all(parameter.grad is None for parameter in inside.model.parameters())


def test_in_combination():
    flags = {"precision": "bf16-mixed", "activation_checkpointing": "Linear", "callbacks": [EMA(decay=0.9)]}
    assert_equal(trained(Grouped("AdamW"), **flags), trained(Grouped("AdamW"), optimizer_in_backward=True, **flags))


@pytest.mark.parametrize("first", [False, True])
def test_a_checkpoint_of_either_goes_on_with_the_other(first, tmp_path):
    through = trained(Grouped("AdamW"))
    begun = trained(Grouped("AdamW"), steps=5, optimizer_in_backward=first)
    begun.save_checkpoint(tmp_path / "middle.ckpt")
    ended = trained(Grouped("AdamW"), path=tmp_path / "middle.ckpt", optimizer_in_backward=not first)
    assert_equal(through, ended)


def test_after_the_fit_backwards_step_nothing():
    module = Grouped()
    trained(module, optimizer_in_backward=True)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.train(False)
    module.training_step(next(iter(loader())), 0).backward()
    assert_same(before, module.state_dict())
    assert module.tied.grad is not None


class Looks(Callback):
    def on_after_backward(self, trainer, module):
        pass


class Twice(Grouped):
    def backward(self, loss):
        loss.backward()
        self.training_step(next(iter(loader())), 0).backward()


class ReadsAgain(Grouped):
    def training_step(self, batch, batch_idx):
        x, _ = batch
        stopped = F.mse_loss((x @ self.tied) @ self.net[0].weight.data.t(), torch.zeros(len(x), 16))
        return stopped + super().training_step(batch, batch_idx)


class Drops(Callback):
    """Takes a group of parameters out of the optimizer as training goes on."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        trainer.optimizers[0].param_groups[0]["params"].clear()


def test_a_parameter_that_was_taken_out_of_the_optimizer_stays_as_it_is():
    plain = trained(Grouped(), callbacks=[Drops()])
    inside = trained(Grouped(), optimizer_in_backward=True, callbacks=[Drops()])
    assert_same(plain.model.state_dict(), inside.model.state_dict())


class Manual(Grouped):
    automatic_optimization = False


class Third(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("module", "flags", "said"),
    [
        (Grouped(), {"gradient_clip_val": 1.0}, "needs all gradients at once"),
        (Grouped(), {"accumulate_grad_batches": 2}, "gathers gradients over several batches"),
        (Grouped(), {"callbacks": [GradientAccumulationScheduler({1: 2})]}, "gathers gradients over several batches"),
        (Grouped(), {"precision": "16-mixed"}, "looks for overflows"),
        (Grouped(), {"microbatch": 4}, "several backwards"),
        (Grouped(), {"plan": Plan({"lr_scale": 3.0})}, "lr_scale of the plan acts within the optimizer's step"),
        (Grouped(), {"plan": Plan({"batch_scale": 2})}, "batch_scale of the plan acts within the optimizer's step"),
        (Grouped(), {"plan": Plan({"schedule": {"kind": "linear", "steps": 8}})}, "schedule of the plan acts within"),
        (Grouped(), {"callbacks": [Looks()]}, "Looks.on_after_backward would find no gradients"),
        (Manual(), {}, "manual optimization"),
        (Regression(lambda parameters: Third(parameters, lr=0.1)), {}, "Third may need more than one parameter"),
        (Regression(lambda parameters: torch.optim.LBFGS(parameters)), {}, "LBFGS may need"),
        (Twice(), {}, "stepped are used again in it"),
        (ReadsAgain(), {}, "stepped are used again in it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_come_to_something_else_is_refused(module, flags, said):
    if "microbatch" in flags:
        module.net[4].eval()
    with pytest.raises((HastenError, RuntimeError), match=said):
        trained(module, optimizer_in_backward=True, **flags)


PEAK = """
import json, sys, torch, hasten
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset

class Deep(hasten.Module):  # 24 layers of 4 MB
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(24)])
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()
    def on_train_start(self):
        Path("/proc/self/clear_refs").write_text("5")
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

torch.set_num_threads(1)
peaks = []
for flag in (True, False):
    trainer = hasten.Trainer(
        max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, optimizer_in_backward=flag,
    )
    trainer.fit(Deep(), DataLoader(TensorDataset(torch.ones(8, 1024)), batch_size=2))
    status = Path("/proc/self/status").read_text()
    peaks.append(int(status.partition("VmHWM:")[2].split()[0]) * 1024)
print(json.dumps(peaks))
"""


def test_gradients_are_never_all_there(tmp_path):
    done = ran_here(PEAK, tmp_path)
    assert done.code == 0, done.err
    inside, plain = json.loads(done.out)
    assert plain - inside > 60 * 2**20  # of 96 MB of gradients
