"""PipelineStrategy: ranks that each have some of the layers end where one process ends, by both schedules."""

from __future__ import annotations

import functools
import itertools
import re
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten.callbacks import EMA, NaNWatch
from hasten.parallel import spawn
from hasten.parallel.pipeline import bounds_of, parts_of
from hasten.strategies import PipelineStrategy
from tests.trainer.strategies.ranks import Block, Case, assert_close, loader, refusals, saved, train
from tests.trainer.trainings import quiet


class Lengths(hasten.Module):
    """Sequences of ten lengths, and a norm in eval mode that stays in it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.BatchNorm1d(6).eval()
        self.stack = nn.Sequential(nn.Embedding(11, 6), Rows(self.norm), Block(6), nn.Linear(6, 11))

    def criterion(self, output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def training_step(self, batch, batch_idx):
        return self.criterion(self.stack(batch[0]), batch[1])

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1)
        return [torch.randint(0, 11, (2, 4, 1 + at % 10), generator=generator).unbind() for at in range(12)]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Rows(nn.Module):
    """Has a norm see rows of a table."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.flatten(0, 1)).view_as(x)


class Counting(nn.Module):
    """A layer with a buffer that each training forward changes once; stages must not run made-up batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        return x


def layers(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    rest = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Embedding(11, 6), Block(6), *rest, Counting(), Block(6), nn.Linear(6, 11))


class Stacked(hasten.Module):
    """A Module of one's own, whose training_step is the loss of its layers' output."""

    def __init__(self, optimizer: str = "adamw", scheduled: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.stack = layers(dropout)
        self.kind, self.scheduled = optimizer, scheduled

    def criterion(self, output, target):
        return F.cross_entropy(output, target)

    def training_step(self, batch, batch_idx):
        return self.criterion(self.stack(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.criterion(self.stack(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        if self.kind == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if not self.scheduled:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


WINDOW = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
CASES = [
    Case("plain", {"max_epochs": 1}, kind=Stacked, shuffles=True),
    Case("scheduled", WINDOW, {"scheduled": True}, kind=Stacked, validates=True, saves_at=2),
    # 32 samples by 12: the last batch has 8, and parts of other sizes.
    Case("values", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {"optimizer": "sgd"}, batch=12),
    Case("averaged", {"max_epochs": 1}, callbacks=lambda: [EMA(0.8), NaNWatch("skip")], validates=True),
]
for one in CASES:
    one.kind = Stacked
RESUMED = [
    Case("plain on", {"max_epochs": 2}, kind=Stacked, goes_on="plain", shuffles=True),
    Case("scheduled on", WINDOW, {"scheduled": True}, kind=Stacked, goes_on="scheduled-within", validates=True),
    Case("averaged on", {"max_epochs": 2}, kind=Stacked, goes_on="averaged", callbacks=lambda: [EMA(0.8)]),
]
HALF = [Case(name, {"max_epochs": 1, "precision": name}, kind=Stacked) for name in ("bf16-mixed", "bf16-true")]
NAMES = {"layers": "stack", "loss": "criterion"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, train([*CASES, *RESUMED, *HALF], folder)


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("staged")
    return folder, train([*CASES, *RESUMED, *HALF], folder, 2, PipelineStrategy(**NAMES), copies=2)


@pytest.mark.parametrize("case", [*CASES, *RESUMED], ids=lambda case: case.name)
def test_two_stages_end_where_one_process_ends(case, alone, staged):
    assert_close(saved(staged[0], case.name), saved(alone[0], case.name))


@pytest.mark.parametrize("case", HALF, ids=lambda case: case.name)
def test_in_16_bits_it_ends_near_one_process(case, alone, staged):
    assert_close(saved(staged[0], case.name), saved(alone[0], case.name), rtol=0.05, atol=0.02)


def test_validation_sees_the_same_losses(alone, staged):
    validated = [at for at, logged in enumerate(alone[1]) if "val_loss" in logged]
    assert validated
    for at in validated:
        assert staged[1][at]["val_loss"] == pytest.approx(alone[1][at]["val_loss"], rel=2e-6)


def test_the_checkpoint_is_an_ordinary_one(alone, staged, tmp_path):
    one, two = saved(alone[0], "averaged"), saved(staged[0], "averaged")
    assert one.keys() == two.keys()
    for name, value in one["current_model_state"].items():
        torch.testing.assert_close(value, two["current_model_state"][name], rtol=2e-6, atol=2e-6)
    shutil.copy(staged[0] / "scheduled-within.ckpt", tmp_path)
    train(RESUMED[1:2], tmp_path)
    assert_close(saved(tmp_path, "scheduled on"), saved(alone[0], "scheduled on"))


def test_it_goes_on_from_a_checkpoint_of_one_process(alone, tmp_path):
    for name in ("plain", "averaged", "scheduled-within"):
        shutil.copy(alone[0] / f"{name}.ckpt", tmp_path)
    train(RESUMED, tmp_path, 2, PipelineStrategy(**NAMES, schedule="gpipe"), copies=2)
    for case in RESUMED:
        assert_close(saved(tmp_path, case.name), saved(alone[0], case.name))


@pytest.mark.parametrize(("stages", "schedule"), [(2, "1f1b"), (4, "gpipe")])
def test_four_ranks_end_where_one_process_ends(stages, schedule, alone, staged, tmp_path):
    """As two pipelines that share out the data, and as one; going on from what two stages saved."""
    shutil.copy(staged[0] / "scheduled-within.ckpt", tmp_path)
    cases = [CASES[1], RESUMED[1]]
    strategy = PipelineStrategy(**NAMES, schedule=schedule, pipeline_parallel_size=stages)
    train(cases, tmp_path, 4, strategy, copies=stages)
    for case in cases:
        assert_close(saved(tmp_path, case.name), saved(alone[0], case.name))


# -- a network and a loss, without a Module ------------------------------------------------------------------


def _plainly(devices, strategy):
    trainer = quiet(max_epochs=1, devices=devices, strategy=strategy)
    net = layers()
    trainer.fit(net, loader(8), loader(4), loss=F.cross_entropy, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))
    logged = float(trainer.callback_metrics["train_loss"])
    again = trainer.validate(net, loader(4), verbose=False)
    predictions = torch.cat(trainer.predict(net, loader(4)))
    held = [name for name, parameter in net.named_parameters() if not parameter.is_meta]
    return logged, again[0]["val_loss"], predictions, held


def test_a_sequential_and_a_loss(tmp_path):
    one = _plainly(1, "auto")
    two = spawn(_plainly, 2, (2, PipelineStrategy(split_points=[2])), strategy="ddp_fork")
    assert two[0] == pytest.approx(one[0], rel=2e-6)
    assert two[1] == pytest.approx(one[1], rel=2e-6)
    torch.testing.assert_close(two[2], one[2], rtol=2e-6, atol=2e-6)
    assert {name.split(".")[0] for name in two[3]} == {"0", "1"}  # rank 0's stage


def _lengths(folder, devices, strategy):
    trainer = quiet(max_epochs=1, devices=devices, strategy=strategy)
    module = Lengths()
    trainer.fit(module, DataLoader(module.train_dataloader(), batch_size=None))
    trainer.save_checkpoint(folder / f"{devices}.ckpt")
    assert not module.norm.training


def test_sequences_of_many_lengths(tmp_path):
    _lengths(tmp_path, 1, "auto")
    spawn(_lengths, 2, (tmp_path, 2, PipelineStrategy(**NAMES)), strategy="ddp_fork")
    assert_close(saved(tmp_path, "2"), saved(tmp_path, "1"))


def _dropped(_):
    draws = []
    module = Stacked(dropout=0.5)
    module.stack = nn.Sequential(nn.Embedding(11, 6), nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(6, 11))
    for at in (1, 2):
        module.stack[at].register_forward_hook(lambda part, given, out: draws.append((out != 0).float().mean().item()))
    trainer = quiet(max_epochs=1, devices=2, strategy=PipelineStrategy(**NAMES, split_points=[2]))
    trainer.fit(module, loader(8))
    state = torch.get_rng_state()
    return draws, trainer.world.gather(state.float()).diff(dim=0).abs().max().item()


def test_stages_draw_by_themselves_and_the_common_random_state_stays_common():
    draws, apart = spawn(_dropped, 2, (None,), strategy="ddp_fork")
    assert len(set(draws)) > 2  # another mask for each part
    assert apart == 0


# -- what cannot be right --------------------------------------------------------------------------------------


class Besides(Stacked):
    """Its loss uses more than the output."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.stack[0].weight.square().mean()


class Weighed(Stacked):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * 2


class Summed(Stacked):
    def criterion(self, output, target):
        return F.cross_entropy(output, target, reduction="sum")


class Ignoring(Stacked):
    def criterion(self, output, target):
        return F.cross_entropy(output, target, ignore_index=4)


class Outside(Stacked):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class Tied(Stacked):
    def __init__(self):
        super().__init__()
        self.stack[-1].weight = self.stack[0].weight


class Normed(Stacked):
    def __init__(self):
        super().__init__()
        self.stack.insert(1, nn.BatchNorm1d(6))


class Listed(Stacked):
    def __init__(self):
        super().__init__()
        self.stack = nn.ModuleList(self.stack)


class Before(Stacked):
    def on_before_backward(self, loss):
        pass


def _triples():
    data = loader(8).dataset.tensors
    return DataLoader(TensorDataset(*data, data[0]), batch_size=8)


REFUSED = [
    (Besides, {}, None, "training_step computes another loss"),
    (Weighed, {}, None, "training_step computes another loss"),
    (Summed, {}, None, "no mean over samples"),
    (Ignoring, {}, None, "ignore_index"),
    (Outside, {}, None, "scale lies outside"),
    (Tied, {}, None, "one weight in stages 0 and 1"),
    (Normed, {}, None, "BatchNorm into eval mode"),
    (Listed, {}, None, "a ModuleList there"),
    (Before, {}, None, "on_before_backward"),
    (Stacked, {"layers": "net"}, None, "no such part"),
    (Stacked, {"loss": "cost"}, None, "no such method"),
    (Stacked, {"split_points": [6]}, None, "split_points"),
    (Stacked, {"pipeline_parallel_size": 3}, None, "do not come out even"),
    (Stacked, {}, _triples, "a list of 3"),
]


def piped(**options):
    return functools.partial(PipelineStrategy, **{**NAMES, **options})


@pytest.fixture(scope="module")
def said():
    batches = functools.partial(loader, 8)
    return refusals([(kind, piped(**options), data or batches) for kind, options, data, _ in REFUSED])


@pytest.mark.parametrize("at", range(len(REFUSED)), ids=[case[3] for case in REFUSED])
def test_what_cannot_be_right_ends_with_what_to_do(at, said):
    assert REFUSED[at][3] in said[at]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": "2f2b"}, "schedule"),
        ({"microbatches": 0}, "microbatches"),
        ({"pipeline_parallel_size": 1}, "pipeline_parallel_size"),
        ({"layers": nn.Sequential()}, "layers"),
    ],
)
def test_arguments_out_of_their_range(options, said):
    with pytest.raises(hasten.HastenError, match=re.escape(said)):
        PipelineStrategy(**options)


@pytest.mark.parametrize("flags", [{"precision": "16-mixed"}, {"compile": True}, {"activation_checkpointing": True}])
def test_what_does_not_go_with_it_is_refused_when_the_trainer_is_built(flags):
    with pytest.raises(hasten.HastenError, match="PipelineStrategy"):
        quiet(devices=2, strategy=PipelineStrategy(), **flags)


# -- how batches and layers are split --------------------------------------------------------------------------


@given(st.integers(1, 500), st.integers(1, 16))
def test_parts_are_equal_and_as_many_as_can_be(samples, most):
    parts = parts_of(samples, most)
    assert parts <= most
    assert samples % parts == 0
    assert all(samples % more for more in range(parts + 1, min(most, samples) + 1))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 7))
def test_the_largest_stage_is_as_small_as_can_be(sizes, stages):
    net = nn.Sequential(*(nn.Linear(size, 1, bias=False) if size else nn.ReLU() for size in sizes))
    if stages > len(sizes):
        with pytest.raises(hasten.HastenError, match=f"{len(sizes)} layers cannot be split into {stages}"):
            bounds_of(net, stages, None)
        return

    def largest(bounds):
        return max(sum(size + 1 for size in sizes[a:b]) for a, b in itertools.pairwise(bounds))

    found = bounds_of(net, stages, None)
    all_cuts = itertools.combinations(range(1, len(sizes)), stages - 1)
    assert found in ([0, *cuts, len(sizes)] for cuts in itertools.combinations(range(1, len(sizes)), stages - 1))
    assert largest(found) == min(largest([0, *cuts, len(sizes)]) for cuts in all_cuts)
