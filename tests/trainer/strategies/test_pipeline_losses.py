"""PipelineStrategy: losses that are no mean over samples, layers at the ends of stages, errors of one rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten.parallel import spawn
from hasten.strategies import PipelineStrategy
from tests.trainer.strategies.ranks import loader, refusals
from tests.trainer.strategies.test_pipeline import NAMES, Stacked, piped
from tests.trainer.trainings import quiet


class Strided(nn.Module):
    def forward(self, x):
        return x.t().contiguous().t()  # not contiguous


class Awkward(Stacked):
    """Stages that end in what cannot be sent as it is, and begin with what works in place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        rest = nn.ReLU(inplace=True), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 11)
        self.stack = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), Strided(), *rest)


class Narrow(Awkward):
    """Its first stage ends in float32 under autocast: the second must compute in 16 bits all the same."""

    def __init__(self):
        super().__init__()
        self.stack.insert(2, nn.LayerNorm(6))
        self.kinds = set()
        self.stack[5].register_forward_hook(lambda part, given, out: self.kinds.add(out.dtype))


def _awkward(devices):
    strategy = PipelineStrategy(**NAMES, split_points=[3]) if devices > 1 else "auto"
    trainer = quiet(max_epochs=1, devices=devices, strategy=strategy)
    module = Awkward()
    trainer.fit(module, loader(8))
    weights = trainer.engine.strategy.full_state(module.state_dict(), True)
    narrow = Narrow()
    strategy = PipelineStrategy(**NAMES, split_points=[4]) if devices > 1 else "auto"
    quiet(max_epochs=1, devices=devices, strategy=strategy, precision="bf16-mixed").fit(narrow, loader(8))
    world = trainer.world
    return weights, world.gather(torch.tensor(float(narrow.kinds == {torch.bfloat16}))).tolist()


def test_what_cannot_be_sent_is_made_so_and_each_stage_computes_in_the_precision(tmp_path):
    one, two = _awkward(1), spawn(_awkward, 2, (2,), strategy="ddp_fork")
    for name, value in one[0].items():
        torch.testing.assert_close(two[0][name], value, rtol=2e-6, atol=2e-6)
    assert two[1][1] == 1.0  # the stage that has this layer


class Logging(Stacked):
    """Its loss logs, which the last stage alone computes, with all ranks to meet for it."""

    def criterion(self, output, target):
        self.log("accuracy", (output.argmax(1) == target).float().mean(), sync_dist=True)
        return super().criterion(output, target)


class Widening(hasten.callbacks.Callback):
    """Changes the window while it trains, as a GradientAccumulationScheduler does."""

    def on_train_epoch_start(self, trainer, module):
        trainer.accumulate_grad_batches = 1 + trainer.current_epoch


def _widened(devices):
    strategy = PipelineStrategy(**NAMES, timeout=20) if devices > 1 else "auto"
    trainer = quiet(max_epochs=2, devices=devices, strategy=strategy, callbacks=[Widening()])
    module = Logging("sgd")
    trainer.fit(module, loader(8), loader(8))
    weights = trainer.engine.strategy.full_state(module.state_dict(), True)
    return weights, float(trainer.callback_metrics["val_loss"])


def test_a_loss_may_log_and_windows_may_change():
    one, two = _widened(1), spawn(_widened, 2, (2,), strategy="ddp_fork")
    for name, value in one[0].items():
        torch.testing.assert_close(two[0][name], value, rtol=2e-6, atol=2e-6)
    assert two[1] == pytest.approx(one[1], rel=2e-6)


# -- refused --------------------------------------------------------------------------------------------------


class IgnoringLate(Stacked):
    """Its third batch alone has targets that are ignored: no batch that is looked at anyway."""

    def criterion(self, output, target):
        return F.cross_entropy(output, target, ignore_index=-1)


class WeighedFlat(Stacked):
    """All samples cost the same before anything is learnt: the values of the losses do not tell."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.stack[-1].weight)
        nn.init.zeros_(self.stack[-1].bias)

    def criterion(self, output, target):
        return F.cross_entropy(output, target, weight=torch.arange(1.0, 12.0))


class Warming(Stacked):
    """Its loss is another one later."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (2 if self.global_step > 2 else 1)


class InTraining(Stacked):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (2 if self.training else 1)


class Twice(Stacked):
    """One layer stands at two places, of two stages."""

    def __init__(self):
        super().__init__()
        self.stack.insert(2, self.stack[3])


class Instances(Stacked):
    def __init__(self):
        super().__init__()
        self.stack.insert(1, nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True)))
        self.stack.insert(2, nn.Flatten())


def _batches():
    return loader(8)


def _ignored_late():
    tokens, target = loader(8).dataset.tensors
    target = target.clone()
    target[17] = -1
    return DataLoader(TensorDataset(tokens, target), batch_size=8)


REFUSED = [
    (IgnoringLate, _ignored_late, "no mean over samples"),
    (WeighedFlat, _batches, "gradients of the whole batch's loss"),
    (Warming, _batches, "training_step computes another loss"),
    (InTraining, _batches, "training_step computes another loss"),
    (Twice, _batches, "one weight in stages 0 and 1"),
    (Instances, _batches, "InstanceNorm no running statistics"),
]


def test_what_cannot_be_right_ends_with_what_to_do():
    said = refusals([(kind, piped(), data) for kind, data, _ in REFUSED])
    for message, (kind, _, why) in zip(said, REFUSED, strict=True):
        assert why in message, kind


# -- errors of one rank ------------------------------------------------------------------------------------------


class NotOne(Stacked):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).mean()

    def criterion(self, output, target):
        return F.cross_entropy(output, target, reduction="none" if self.training else "mean")


class Raising(Stacked):
    def __init__(self):
        super().__init__()
        self.stack.insert(3, Squaring())


class Squaring(nn.Module):
    def forward(self, x):
        return x.square_()


class Pieces(Stacked):
    def training_step(self, batch, batch_idx):
        return self.criterion(self.stack[3:](self.stack[:3](batch[0])), batch[1])


def _trained(kind, points):
    strategy = PipelineStrategy(**NAMES, split_points=points)
    quiet(devices=2, max_epochs=1, strategy=strategy).fit(kind(), loader(8))


@pytest.mark.parametrize(
    ("kind", "points", "said"),
    [(NotOne, None, "not one number"), (Pieces, None, "or a slice"), (Raising, [3], "in place")],
)
def test_an_error_of_one_stage_ends_all_with_what_it_was(kind, points, said):
    with pytest.raises(hasten.HastenError, match=said):
        spawn(_trained, 2, (kind, points), strategy="ddp_fork")
