"""DDPStrategy: ZeRO-1 ends where one process ends; compressed gradients end near it, and go on exactly."""

from __future__ import annotations

import os
import shutil
import time
from datetime import timedelta

import pytest
import torch

import hasten
from hasten.parallel import spawn
from hasten.strategies import DDPStrategy, FSDPStrategy
from tests.trainer.strategies.ranks import Case, Tokens, assert_close, loader, saved, train
from tests.trainer.trainings import quiet

CLIPPED = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
CASES = [
    Case("plain", {"max_epochs": 1}),
    Case("sgd", CLIPPED, {"optimizer": "sgd", "scheduled": True}, validates=True, saves_at=2),
]
RESUMED = [
    Case("plain on", {"max_epochs": 2}, goes_on="plain"),
    Case("sgd on", CLIPPED, {"optimizer": "sgd", "scheduled": True}, goes_on="sgd-within"),
]
STRATEGIES = {
    "plain": DDPStrategy(),
    "static": DDPStrategy(static_graph=True, gradient_as_bucket_view=False, bucket_cap_mb=0.001),
    "zero": DDPStrategy(shard_optimizer=True),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    train([*CASES, *RESUMED], folder)
    return folder


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_two_ranks_end_where_one_process_ends(strategy, alone, tmp_path):
    train([*CASES, *RESUMED], tmp_path, 2, strategy)
    for case in (*CASES, *RESUMED):
        assert_close(saved(tmp_path, case.name), saved(alone, case.name))


# -- ZeRO-1 ------------------------------------------------------------------------------------------------


def test_sharded_states_change_no_bit(tmp_path):
    for name in ("plain", "zero"):
        train(CASES[:1], tmp_path / name, 2, STRATEGIES[name])
    assert_close(saved(tmp_path / "zero", "plain"), saved(tmp_path / "plain", "plain"), rtol=0, atol=0)


def test_processes_started_within_fit_bring_the_weights_back(alone):
    module = Tokens()
    quiet(devices=2, strategy=DDPStrategy(start="ddp_fork", shard_optimizer=True)).fit(module, loader(4))
    for name, weight in saved(alone, "plain")["state_dict"].items():
        torch.testing.assert_close(module.state_dict()[name], weight, rtol=2e-6, atol=2e-6)


def test_sharded_states_go_on_from_a_checkpoint_of_one_process(alone, tmp_path):
    shutil.copy(alone / "plain.ckpt", tmp_path)
    train(RESUMED[:1], tmp_path, 2, STRATEGIES["zero"])
    assert_close(saved(tmp_path, "plain on"), saved(alone, "plain on"))


def test_sharded_states_of_four_go_on_within_a_window_with_two(alone, tmp_path):
    train(CASES[1:], tmp_path, 4, STRATEGIES["zero"])
    train(RESUMED[1:], tmp_path, 2, STRATEGIES["zero"])
    assert_close(saved(tmp_path, "sgd on"), saved(alone, "sgd on"))


def _states():
    module, trainer = Tokens(), quiet(devices=2, strategy=STRATEGIES["zero"])
    trainer.fit(module, loader(4))
    own = [state["exp_avg"].numel() for state in trainer.optimizers[0].state.values()]
    return sum(own), int(trainer.world.sum(torch.tensor(sum(own)))), sum(p.numel() for p in module.parameters())


def test_each_rank_keeps_the_states_of_its_share():
    own, together, whole = spawn(_states, 2, strategy="ddp_fork")
    assert together == whole
    assert abs(own - whole / 2) < 0.1 * whole


class ByClosure(Tokens):
    """Its own optimizer_step hands the closure on, as many do."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)

    def on_train_end(self):
        self.kept = len(self.trainer.optimizers[0].state)


def _by_closure(folder):
    module, trainer = ByClosure(), quiet(devices=2, strategy=STRATEGIES["zero"])
    trainer.fit(module, loader(4))
    trainer.save_checkpoint(folder / "closure.ckpt")
    return module.kept, len(list(module.parameters()))


def test_a_closure_steps_only_this_rank_s_share_too(alone, tmp_path):
    kept, of = spawn(_by_closure, 2, (tmp_path,), strategy="ddp_fork")
    assert kept < of
    assert_close(saved(tmp_path, "closure"), saved(alone, "plain"))


class Flat(Tokens):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


def test_an_optimizer_that_looks_at_all_parameters_together_is_refused():
    with pytest.raises(hasten.HastenError, match="LBFGS"):
        spawn(_fit, 2, (Flat, STRATEGIES["zero"]), strategy="ddp_fork")


def _fit(kind, strategy):
    quiet(devices=2, strategy=strategy).fit(kind(), loader(4))


# -- compressed gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "near"), [("bf16", 0.02), ("fp16", 0.003)])
def test_gradients_in_16_bits_end_near_one_process(kind, near, alone, tmp_path):
    strategy = DDPStrategy(gradient_compression=kind)
    cases = [
        Case("plain", {"max_epochs": 1}, {"optimizer": "sgd"}),
        Case("exact", {"max_epochs": 1}, {"optimizer": "sgd"}),
    ]
    train(cases[:1], tmp_path, 2, strategy)
    train(cases[1:], tmp_path)
    one, two = saved(tmp_path, "exact")["state_dict"], saved(tmp_path, "plain")["state_dict"]
    start = Tokens().state_dict()
    moved = torch.cat([(one[n] - start[n]).flatten() for n in one])
    apart = torch.cat([(one[n] - two[n]).flatten() for n in one])
    assert 0 < apart.norm() < near * moved.norm()


POWER = DDPStrategy(gradient_compression="powersgd", powersgd_rank=2, powersgd_start=2)
POWER_CASES = [
    Case("whole", {"max_epochs": 4}, {"optimizer": "sgd"}),
    Case("half", {"max_epochs": 2}, {"optimizer": "sgd"}),
    Case("on", {"max_epochs": 4}, {"optimizer": "sgd"}, goes_on="half"),
]


def test_powersgd_trains_and_goes_on_exactly(tmp_path):
    train(POWER_CASES, tmp_path, 2, POWER)
    assert_close(saved(tmp_path, "on"), saved(tmp_path, "whole"))  # errors are averaged in a checkpoint
    train(POWER_CASES[:1], tmp_path / "one")
    loss = [_loss(saved(folder, "whole")) for folder in (tmp_path / "one", tmp_path)]
    assert loss[1] < 0.5 * _loss({"state_dict": Tokens().state_dict()})
    assert loss[0] != loss[1]


def _loss(state):
    module = Tokens()
    module.load_state_dict(state["state_dict"])
    tokens, target = loader(32).dataset.tensors
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(module.eval().net(tokens), target))


def _sent():
    trainer = quiet(devices=2, strategy=POWER)
    sent = []

    class Counting(Tokens):
        def on_after_backward(self):
            power = self.trainer.engine.strategy._power
            sent.append((power.sent, power.unreduced))

    trainer.fit(Counting(), loader(4))
    return sent


def test_powersgd_sends_less_once_it_has_begun():
    sent = spawn(_sent, 2, strategy="ddp_fork")
    assert [some == whole for some, whole in sent] == [True, True, False, False]
    assert sent[-1][0] < 0.9 * sent[-1][1]


class Hanging(Tokens):
    """Rank 1 hangs in its second step until rank 0 has given up."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def training_step(self, batch, batch_idx):
        end = time.monotonic() + 60
        while self.trainer.global_rank and batch_idx and not (self.folder / "0").exists() and time.monotonic() < end:
            time.sleep(0.1)
        return super().training_step(batch, batch_idx)


def _gives_up(strategy, folder):
    try:
        quiet(devices=2, strategy=strategy).fit(Hanging(folder), loader(4))
    except BaseException:
        (folder / os.environ["RANK"]).touch()
        raise


@pytest.mark.parametrize("strategy", [DDPStrategy(timeout=2), FSDPStrategy(timeout=timedelta(seconds=2))])
def test_a_rank_that_hangs_is_waited_for_no_longer_than_the_timeout(strategy, tmp_path):
    with pytest.raises(hasten.HastenError, match="Rank"):
        spawn(_gives_up, 2, (strategy, tmp_path), strategy="ddp_fork")
    assert (tmp_path / "0").exists()  # while rank 1 was hanging


# -- refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_compression": "int8"},
        {"powersgd_rank": 0},
        {"powersgd_start": True},
        {"start": "ddp_forkserver"},
        {"bucket_cap_mb": 0},
        {"timeout": 0},
        {"timeout": "10"},
        {"gradient_compression": "bf16", "ddp_comm_hook": print},
    ],
)
def test_options_out_of_range_and_contradictions_are_refused(options):
    with pytest.raises(hasten.HastenError, match=next(iter(options))):
        DDPStrategy(**options)


@pytest.mark.parametrize("kind", ["fp16", "powersgd"])
def test_loss_scaling_is_refused_where_it_would_spoil_gradients(kind):
    with pytest.raises(hasten.HastenError, match="16-mixed"):
        quiet(devices=2, strategy=DDPStrategy(gradient_compression=kind), precision="16-mixed")


@pytest.mark.parametrize("given", [DDPStrategy, object(), 3])
def test_what_is_no_strategy_is_refused_by_name(given):
    with pytest.raises(hasten.HastenError, match=r"hasten\.strategies"):
        quiet(strategy=given)
