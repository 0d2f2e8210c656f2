"""A NaN sample reaches BatchNorm's statistics in the forward, before anybody knows the loss: they count as weights."""

import warnings
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten.trainer.callbacks import Callback, ModelCheckpoint, NaNWatch
from hasten.trainer.checkpoint import read
from tests.trainer.callbacks.test_nan_watch import Elsewhere

pytestmark = pytest.mark.filterwarnings("ignore:NaNWatch", "ignore:step")
BATCHES, SIZE = 6, 4


def samples(bad=()):
    """Batches of numbers; those in `bad` have one NaN sample."""
    x = torch.randn(BATCHES * SIZE, 4, generator=torch.Generator().manual_seed(0))
    for batch in bad:
        x[batch * SIZE] = float("nan")
    return DataLoader(TensorDataset(x), batch_size=SIZE)


class Normed(hasten.Module):
    """A net with BatchNorm. `left_out`: batches that are not looked at."""

    def __init__(self, left_out=(), optimizer=torch.optim.SGD):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        self.left_out, self.kind = left_out, optimizer

    def training_step(self, batch, batch_idx):
        return None if batch_idx in self.left_out else self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return self.kind(self.parameters(), lr=0.05)


class TwoOptimizers(Normed):
    """Two nets, each with its optimizer; the second sees no NaN."""

    def __init__(self, together, left_out=()):
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        self.together, self.left_out = together, left_out

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        clean = torch.nan_to_num(batch[0])
        for one in (first, second):
            one.zero_grad()
        if not self.together:
            self._step(first, self.layers, batch[0], batch_idx)
            self._step(second, self.other, clean, -1)
            return
        for net, x in ((self.other, clean), (self.layers, batch[0])):
            if net is self.other or batch_idx not in self.left_out:
                self.manual_backward(net(x).square().mean())
        second.step()
        if batch_idx not in self.left_out:
            first.step()

    def _step(self, optimizer, net, x, batch_idx):
        if batch_idx not in self.left_out:
            self.manual_backward(net(x).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.layers.parameters(), lr=0.05), torch.optim.SGD(self.other.parameters(), lr=0.05)]


def trained(tmp_path, module, callbacks=(), bad=(), ckpt_path=None, **flags):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    if not any(isinstance(one, ModelCheckpoint) for one in callbacks):
        quiet["enable_checkpointing"] = False
    flags = {"max_epochs": 1, **quiet, **flags}
    trainer = hasten.Trainer(callbacks=list(callbacks), default_root_dir=tmp_path, **flags)
    trainer.fit(module, samples(bad), ckpt_path=ckpt_path)
    return trainer


def same(one, other, but=()):
    pairs = one.state_dict().items()
    return all(torch.equal(kept, other.state_dict()[name]) for name, kept in pairs if name not in but)


def finite(state):
    return all(torch.isfinite(one).all() for one in state.values())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, partial(torch.optim.Adam, fused=True)])
@pytest.mark.parametrize("reads_freely", [True, False])
def test_skip_puts_the_statistics_back(tmp_path, optimizer, reads_freely):
    watch = NaNWatch("skip")
    model = Normed(optimizer=optimizer)
    trained(tmp_path, model, [watch] if reads_freely else [watch, Elsewhere(watch)], bad=[0, 3])
    other = Normed(left_out=[0, 3], optimizer=optimizer)
    trained(tmp_path, other)
    assert watch.skipped == 2
    assert same(model, other)


class Moved(Normed):
    """Gives a statistic other memory in each step, but leaves the buffer the same object."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        mean = self.layers[1].running_mean
        mean.data = mean.data.clone()


def test_statistics_in_other_memory_are_put_back_as_they_are_there(tmp_path):
    model, other = Moved(), Moved(left_out=[3])
    trained(tmp_path, model, [NaNWatch("skip")], bad=[3])
    trained(tmp_path, other)
    assert same(model, other)


@pytest.mark.parametrize("reads_freely", [True, False])
@pytest.mark.parametrize("bad", [2, 3])
def test_with_accumulation_the_whole_step_is_undone(tmp_path, reads_freely, bad):
    watch, model, other = NaNWatch("skip"), Normed(), Normed(left_out=[2, 3])
    callbacks = [watch] if reads_freely else [watch, Elsewhere(watch)]
    trained(tmp_path, model, callbacks, bad=[bad], accumulate_grad_batches=2)
    trained(tmp_path, other, accumulate_grad_batches=2)
    assert same(model, other)


@pytest.mark.parametrize("together", [True, False], ids=["steps together", "one after the other"])
@pytest.mark.parametrize("action", ["skip", "stop"])
def test_of_several_optimizers_only_the_one_that_is_hurt_is_dropped(tmp_path, together, action):
    model, other = TwoOptimizers(together), TwoOptimizers(together, left_out=[5])
    trained(tmp_path, model, [NaNWatch(action)], bad=[5])  # the last batch: "stop" ends there too
    trained(tmp_path, other, bad=[5])
    assert finite(model.state_dict())
    # Where both forwards come before both steps, the statistics of the other net go back with those of the first.
    assert same(model, other, but=[name for name, _ in model.named_buffers()] if together else ())


@pytest.mark.parametrize("action", ["stop", "raise"])
def test_a_training_that_ends_there_leaves_all_finite(tmp_path, action):
    model = Normed()
    try:
        trained(tmp_path, model, [NaNWatch(action)], bad=[2])
    except hasten.HastenError:
        assert action == "raise"
    assert finite(model.state_dict())


def test_every_kept_checkpoint_is_finite_and_training_goes_on(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1, save_top_k=-1)
    trained(tmp_path, Normed(), [NaNWatch("skip"), checkpoint], bad=[1])
    kept = list((tmp_path / "kept").glob("*.ckpt"))
    assert len(kept) == BATCHES
    assert all(finite(read(path)["state_dict"]) for path in kept)


def test_without_a_watch_no_spoilt_statistics_are_saved(tmp_path):
    class LeavesOut(Normed):
        """The person drops the step by hand, when the statistics are lost already."""

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if torch.isfinite(loss) else None

    checkpoint = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1, save_top_k=-1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained(tmp_path, LeavesOut(), [checkpoint], bad=[2])
    kept = list((tmp_path / "kept").glob("*.ckpt"))
    assert len(kept) == 2
    assert all(finite(read(path)["state_dict"]) for path in kept)
    assert any("layers.1.running_mean" in str(one.message) for one in said)


def test_buffers_that_are_not_finite_by_design_are_saved(tmp_path):
    class Masked(Normed):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
            self.register_buffer("best", torch.tensor(float("nan")))
            self.register_buffer("made_later", torch.zeros(2))

        def on_train_batch_start(self, batch, batch_idx):
            self.made_later = torch.full((2,), float("-inf"))

    checkpoint = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2, save_top_k=-1)
    trained(tmp_path, Masked(), [NaNWatch(), checkpoint])
    assert len(list((tmp_path / "kept").glob("*.ckpt"))) == BATCHES // 2


class Save(Callback):
    """Saves after a batch, in the middle of an accumulation."""

    def __init__(self, path, after):
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == self.after:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("bad", [[3], [4], [5]])
def test_resumed_in_the_middle_of_a_step_that_is_dropped(tmp_path, bad):
    path, whole, resumed = tmp_path / "middle.ckpt", Normed(), Normed()
    flags = {"accumulate_grad_batches": 3}
    trained(tmp_path, whole, [NaNWatch("skip"), Save(path, 3)], bad=bad, **flags)
    assert finite(read(path)["state_dict"])
    trained(tmp_path, resumed, [NaNWatch("skip")], bad=bad, ckpt_path=path, **flags)
    other = Normed(left_out=[3, 4, 5])
    trained(tmp_path, other, **flags)
    assert same(whole, other)
    assert same(resumed, other)


def _in_ranks(folder):
    model, watch = Normed(), NaNWatch("skip")
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    trained(folder, model, [watch, checkpoint], bad=[2], strategy="ddp", devices=2)
    return watch.skipped, finite(model.state_dict())


def test_in_every_rank(tmp_path):
    from hasten.parallel import spawn

    skipped, all_finite = spawn(_in_ranks, 2, (tmp_path / "kept",), strategy="ddp_fork")
    assert (skipped, all_finite) == (1, True)
    assert all(finite(read(path)["state_dict"]) for path in (tmp_path / "kept").glob("*.ckpt"))
