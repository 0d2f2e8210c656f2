"""strategy="fsdp": two ranks that each hold half of the model end where one process ends, fresh and resumed."""

from __future__ import annotations

import contextlib
import functools
import shutil

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

import hasten
from hasten.callbacks import EMA, NaNWatch
from hasten.parallel import spawn
from hasten.parallel.fsdp import apart
from hasten.strategies import FSDPStrategy
from tests.trainer.strategies.ranks import Block, Case, Tokens, assert_close, fit, loader, refusals, saved, train
from tests.trainer.trainings import quiet

CLIPPED = {"gradient_clip_val": 0.5}
CASES = [
    Case("plain", {"max_epochs": 1}),
    Case("scheduled", {"accumulate_grad_batches": 2, **CLIPPED}, {"scheduled": True}, validates=True, saves_at=2),
    Case("values", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {"optimizer": "sgd"}),
    Case("untied", {"max_epochs": 1}, {"tied": False}),
    Case("checkpointed", {"max_epochs": 1, "activation_checkpointing": True}),
    Case("averaged", CLIPPED, callbacks=lambda: [EMA(0.8), NaNWatch("skip")], validates=True),
]
RESUMED = [
    Case("plain on", {"max_epochs": 2}, goes_on="plain"),
    Case("averaged on", {"max_epochs": 3}, callbacks=lambda: [EMA(0.8), NaNWatch("skip")], goes_on="averaged"),
    Case("scheduled on", CASES[1].flags, CASES[1].model, goes_on="scheduled-within", validates=True),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, train([*CASES, *RESUMED], folder)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    return folder, train([*CASES, *RESUMED], folder, 2, "fsdp")


@pytest.mark.parametrize("case", [*CASES, *RESUMED], ids=lambda case: case.name)
def test_two_ranks_end_where_one_process_ends(case, alone, sharded):
    assert_close(saved(sharded[0], case.name), saved(alone[0], case.name))


def test_a_training_that_went_on_within_a_window_ends_as_one_that_was_not_stopped(sharded):
    within = saved(sharded[0], "scheduled-within")
    assert within["loops"]["hasten"]["gradients"]
    assert_close(saved(sharded[0], "scheduled on"), saved(sharded[0], "scheduled"))


def test_validation_sees_the_same_losses(alone, sharded):
    for one, two in zip(alone[1], sharded[1], strict=True):
        assert one == pytest.approx(two, rel=2e-6)


def test_the_checkpoint_is_an_ordinary_one(alone, sharded):
    one, two = saved(alone[0], "averaged"), saved(sharded[0], "averaged")
    assert one.keys() == two.keys()
    for name, value in one["current_model_state"].items():
        torch.testing.assert_close(value, two["current_model_state"][name], rtol=2e-6, atol=2e-6)
    size = [(folder / "plain.ckpt").stat().st_size for folder in (alone[0], sharded[0])]
    assert size[0] == pytest.approx(size[1], rel=0.01)  # the tied weight once


@pytest.mark.parametrize(("devices", "strategy"), [(1, "auto"), (2, "ddp")])
def test_others_go_on_from_its_checkpoint(devices, strategy, alone, sharded, tmp_path):
    shutil.copy(sharded[0] / "plain.ckpt", tmp_path)
    train(RESUMED[:1], tmp_path, devices, strategy)
    assert_close(saved(tmp_path, "plain on"), saved(alone[0], "plain on"))


def test_it_goes_on_from_a_checkpoint_of_one_process(alone, tmp_path):
    for name in ("plain", "averaged", "scheduled-within"):
        shutil.copy(alone[0] / f"{name}.ckpt", tmp_path)
    train(RESUMED, tmp_path, 2, "fsdp")
    for case in RESUMED:
        assert_close(saved(tmp_path, case.name), saved(alone[0], case.name))


# -- precision ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_in_16_bits_it_ends_near_one_process_and_goes_on_within_a_window(precision, tmp_path):
    flags = {"precision": precision, "max_epochs": 1, "accumulate_grad_batches": 2}
    whole = Case("whole", flags, callbacks=lambda: [EMA(0.8)], saves_at=2)
    on = Case("on", flags, callbacks=lambda: [EMA(0.8)], goes_on="whole-within")
    train([whole], tmp_path / "one")
    train([whole, on], tmp_path / "two", 2, "fsdp")
    one, two, resumed = (
        saved(tmp_path / "one", "whole"),
        saved(tmp_path / "two", "whole"),
        saved(tmp_path / "two", "on"),
    )
    for name, weight in one["state_dict"].items():
        assert weight.dtype == two["state_dict"][name].dtype
        torch.testing.assert_close(weight, two["state_dict"][name], rtol=0.05, atol=0.02)  # bf16 has 8 bits
        torch.testing.assert_close(two["state_dict"][name], resumed["state_dict"][name], rtol=0.02, atol=0.002)


class OneBad(Tokens):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        bad = self.trainer.global_step == 1 and self.trainer.global_rank == self.trainer.world_size - 1
        return loss * float("nan") if bad else loss


def test_a_step_that_is_not_finite_on_one_rank_is_dropped_on_all(tmp_path):
    case = Case("bad", {"max_epochs": 1}, kind=OneBad, callbacks=lambda: [NaNWatch("skip")])
    train([case], tmp_path / "one")
    train([case], tmp_path / "two", 2, "fsdp")
    assert_close(saved(tmp_path / "two", "bad"), saved(tmp_path / "one", "bad"))


@pytest.mark.slow  # four processes on two cores
def test_two_copies_of_two_halves_end_where_one_process_ends(alone, tmp_path):
    cases = [*CASES[:2], RESUMED[0]]
    train(cases, tmp_path, 4, FSDPStrategy(shard_size=2))
    for case in cases:
        assert_close(saved(tmp_path, case.name), saved(alone[0], case.name))


# -- a fit behind one that ended early -----------------------------------------------------------------------


class Ends(Tokens):
    """Its first fit ends within an accumulation window: half of its gradients are gathered by then."""

    how = "asks to stop"

    def training_step(self, batch, batch_idx):
        middle = self.trainer.global_step == 1 and self.how
        if middle == "breaks" and batch_idx == 3:
            raise KeyError("a broken batch")
        loss = super().training_step(batch, batch_idx)
        if middle == "breaks in a block" and batch_idx == 3:
            self.net.blocks[1](batch[0])  # no floating-point numbers
        self.trainer.should_stop = middle == "asks to stop" and batch_idx == 2
        return loss


def _twice(folder, devices, strategy, how, every):
    flags = {"max_epochs": 1, "devices": devices, "strategy": strategy}
    module = Ends()
    module.how = how
    broken = "breaks" in how
    with pytest.raises((KeyError, RuntimeError)) if broken else contextlib.nullcontext():
        quiet(accumulate_grad_batches=2, **flags).fit(module, loader(8 // devices))
    module.how = ""
    trainer = quiet(accumulate_grad_batches=every, **flags)
    trainer.fit(module, loader(8 // devices))
    trainer.save_checkpoint(folder / f"{how} {every}.ckpt")


@pytest.mark.parametrize(("how", "every"), [("asks to stop", 1), ("breaks", 1), ("breaks in a block", 2)])
def test_a_fit_behind_one_that_ended_within_a_window_trains_all_and_without_its_gradients(how, every, tmp_path):
    """And exchanges gradients, which FSDP was told to leave out when the first one ended."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    if "breaks" in how and not hasattr(FSDPModule, "reset_iter_state"):  # torch 2.9: refused, not trained in part
        with pytest.raises(hasten.HastenError, match="Build the module again, and go on from a checkpoint"):
            spawn(_twice, 2, (two, 2, "fsdp", how, every), strategy="ddp_fork")
        return
    _twice(one, 1, "auto", how, every)
    spawn(_twice, 2, (two, 2, "fsdp", how, every), strategy="ddp_fork")
    assert_close(saved(two, f"{how} {every}"), saved(one, f"{how} {every}"))


# -- optimizers that look beyond an element --------------------------------------------------------------------


class Factored(Tokens):
    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters(), lr=0.01)


def test_an_optimizer_that_changes_a_sum_over_ranks_in_place_is_refused():
    """torch 2.9 would train with other weights, without a word."""
    (said,) = refusals([(Factored, FSDPStrategy, functools.partial(loader, 4))])
    assert "cannot do in place: aten.pow_" in said


# -- what each rank holds ------------------------------------------------------------------------------------


class Looking(Tokens):
    """Notes what a rank holds while it trains."""

    def on_train_end(self):
        optimizer = self.trainer.optimizers[0]
        self.held = sum(p.to_local().numel() for p in self.parameters())
        self.states = sum(state["exp_avg"].to_local().numel() for state in optimizer.state.values())


class Own(Looking):
    """Shards itself; leaves the embedding to hasten."""

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        for block in self.net.blocks:
            if not hasattr(block, "unshard"):  # it is called for each run
                fully_shard(block)


def _held(kind, strategy):
    trainer = quiet(max_epochs=1, devices=2, strategy=strategy)
    module = kind()
    trainer.fit(module, loader(4), loader(4))
    sharded = [type(part).__name__ for part in module.modules() if type(part).__name__.startswith("FSDP")]
    again = trainer.validate(module, loader(4), verbose=False)  # the same module, sharded already
    held = int(trainer.world.sum(torch.tensor(module.held))), int(trainer.world.sum(torch.tensor(module.states)))
    return type(module), module.held, held, sharded, again[0]["val_loss"]


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [(Looking, "fsdp"), (Own, "fsdp"), (Looking, FSDPStrategy(blocks="Block", reshard_after_forward=False))],
)
def test_each_rank_holds_its_part_of_weights_and_states(kind, strategy):
    whole = sum(p.numel() for p in Tokens().parameters())
    found, held, together, sharded, loss = spawn(_held, 2, (kind, strategy), strategy="ddp_fork")
    assert found is kind  # the module's class is its own
    assert sharded == ["FSDPBlock", "FSDPBlock"]
    assert together == (whole, whole)
    assert held < 0.6 * whole
    assert loss > 0


def test_blocks_whose_weights_lie_elsewhere_too_are_no_units():
    net = nn.ModuleList([Block(4), Block(4), Block(4)])
    net[1].wide.weight = net[0].wide.weight
    assert apart(net, list(net)) == [net[2]]


def test_ranks_that_were_seeded_differently_train_the_model_of_rank_0(tmp_path):
    spawn(_seeded, 2, (tmp_path,), strategy="ddp_fork")
    train([Case("one", {"max_steps": 1})], tmp_path)
    assert_close(saved(tmp_path, "two"), saved(tmp_path, "one"))


class Seeded(Tokens):
    def __init__(self):
        import os

        super().__init__()
        if os.environ["RANK"] == "1":
            for parameter in self.parameters():
                nn.init.normal_(parameter)


def _seeded(folder):
    fit(Case("two", {"max_steps": 1}, kind=Seeded), folder, 2, "fsdp")


# -- refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"precision": "16-mixed"}, "bf16-mixed"),
        ({"compile": True}, "compile"),
        ({"channels_last": True}, "channels_last"),
        ({"fused_optimizer": True}, "fused=True"),
        ({"plan": "auto"}, "plan"),
        ({"plan": hasten.Plan({"compile": "default"})}, "compile"),
    ],
)
def test_what_does_not_go_with_it_is_refused_when_the_trainer_is_built(flags, said):
    with pytest.raises(hasten.HastenError, match=said):
        quiet(devices=2, strategy="fsdp", **flags)


@pytest.mark.parametrize("blocks", ["", [], 3, [3]])
def test_blocks_are_names_of_classes(blocks):
    with pytest.raises(hasten.HastenError, match="blocks"):
        FSDPStrategy(blocks=blocks)


@pytest.mark.parametrize("size", [1, True, 2.0])
def test_a_copy_is_shared_by_two_or_more(size):
    with pytest.raises(hasten.HastenError, match="shard_size"):
        FSDPStrategy(shard_size=size)


class Manual(Tokens):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Scalar(Tokens):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


class Skipping(Tokens):
    def training_step(self, batch, batch_idx):
        return None if self.trainer.global_rank else super().training_step(batch, batch_idx)


class Outside(Tokens):
    def on_train_epoch_end(self):
        self.net(torch.zeros(2, dtype=torch.long))


class Flat(Tokens):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


def _fails(kind, strategy):
    try:
        quiet(devices=2, strategy=strategy).fit(kind(), loader(4))
    except hasten.HastenError as error:
        return f"{error}"
    return "nothing was wrong"


@pytest.mark.parametrize(
    ("kind", "strategy", "said"),
    [
        (Manual, "fsdp", "manual optimization"),
        (Scalar, "fsdp", "scale is a scalar"),
        (Outside, "fsdp", "outside of its steps"),
        (Flat, "fsdp", "LBFGS"),
        (Tokens, FSDPStrategy(blocks="Blok"), "no Blok.*Block"),
        (Tokens, FSDPStrategy(shard_size=3), "come out even"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_sharded_ends_with_what_to_do(kind, strategy, said):
    import re

    told = spawn(_fails, 2, (kind, strategy), strategy="ddp_fork")
    assert re.search(said, told, re.DOTALL), told


def test_a_step_without_a_loss_on_one_rank_ends_all():
    with pytest.raises(hasten.HastenError, match="no loss on rank 1"):
        spawn(_alone, 2, strategy="ddp_fork")


def _alone():
    quiet(devices=2, strategy="fsdp").fit(Skipping(), loader(4))


def test_on_one_device_it_is_a_plain_training():
    module = Tokens()
    quiet(devices=1, strategy="fsdp").fit(module, loader(8))
    assert F.cross_entropy(module.net(torch.arange(11)), (torch.arange(11) * 3 + 1) % 11) > 0
    assert all(type(p) is nn.Parameter for p in module.parameters())
