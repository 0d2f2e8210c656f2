"""TensorParallelStrategy: ranks that share the layers end where one process ends, alone and beside data parallel."""

from __future__ import annotations

import functools
import re
import shutil

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

import hasten
from hasten.callbacks import EMA, NaNWatch
from hasten.parallel import spawn
from hasten.strategies import TensorParallelStrategy
from tests.trainer.strategies.ranks import Block, Case, Tokens, assert_close, loader, refusals, saved, train
from tests.trainer.trainings import quiet

PLAN = {"net.blocks.*.wide": ColwiseParallel(), "net.blocks.*.narrow": RowwiseParallel()}
ALONG = {  # activations split along the sequence between the layers, as torchtitan does
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.norm": SequenceParallel(),
    "blocks.*.wide": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.narrow": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(use_local_output=True),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
WHOLE_IN = {
    **{path: style for path, style in ALONG.items() if path != "embed"},
    "blocks.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True),
}


class Untied(Tokens):
    """With dropout between the blocks, where each rank has whole activations."""

    def __init__(self, **options):
        super().__init__(tied=False, **options)
        torch.manual_seed(5)
        self.rest = nn.Dropout(0.3)

    def training_step(self, batch, batch_idx):
        tokens, target = batch
        self.log("hits", (tokens == target).float().sum(), on_epoch=True, reduce_fx="sum", sync_dist=True)
        return F.cross_entropy(self.rest(self.net(tokens)), target)


class Sequences(hasten.Module):
    """Predicts the tokens of a sequence; one norm is frozen."""

    length = 4

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(12, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.norm = nn.LayerNorm(6).requires_grad_(False)
        self.head = nn.Linear(6, 12)

    def training_step(self, batch, batch_idx):
        tokens = torch.stack([(batch[0] + shift) % 12 for shift in range(self.length)], 1)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), (tokens * 5 + 1).flatten() % 12)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Unused(Tokens):
    """A layer that no batch uses, and one that every other does: momentum and decay must not see zeros for them."""

    def __init__(self):
        super().__init__("sgd", tied=False)
        self.never, self.now_and_then = nn.Linear(2, 2), nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.now_and_then.weight.square().mean() if batch_idx % 2 else loss


ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
CASES = [
    Case("plain", {"max_epochs": 1}, kind=Untied, shuffles=True),
    Case("scheduled", ACCUMULATED, {"scheduled": True}, kind=Untied, validates=True, saves_at=2),
    Case("averaged", {"max_epochs": 1}, kind=Untied, callbacks=lambda: [EMA(0.8), NaNWatch("skip")], validates=True),
]
DETERMINED = [  # no dropout, which groups of ranks draw for themselves
    Case("clipped", {**ACCUMULATED, "max_epochs": 1}, {"tied": False}, saves_at=2),
    Case("values", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {"tied": False}),
]
RESUMED = [
    Case("plain on", {"max_epochs": 2}, kind=Untied, goes_on="plain", shuffles=True),
    Case("scheduled on", ACCUMULATED, {"scheduled": True}, kind=Untied, goes_on="scheduled-within", validates=True),
]
ON = [
    Case("clipped on", {**ACCUMULATED, "max_epochs": 2}, {"tied": False}, goes_on="clipped"),
    Case("within on", {**ACCUMULATED, "max_epochs": 1}, {"tied": False}, goes_on="clipped-within"),
]
HALF = [Case(name, {"max_epochs": 1, "precision": name}, {"tied": False}) for name in ("bf16-mixed", "bf16-true")]
SEQUENCE = [Case("sequence", {"max_epochs": 2, "gradient_clip_val": 0.5}, kind=Sequences)]
UNUSED = Case("unused", kind=Unused)
INSIDE = [Case("inside", {"max_epochs": 1}, kind=Sequences)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, train([*CASES, *RESUMED, *DETERMINED, *ON, *HALF, *SEQUENCE, *INSIDE, UNUSED], folder)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    return folder, train([*CASES, *RESUMED, *DETERMINED, *ON, *HALF], folder, 2, TensorParallelStrategy(PLAN), copies=2)


@pytest.mark.parametrize("case", [*CASES, *RESUMED, *DETERMINED, *ON], ids=lambda case: case.name)
def test_two_ranks_end_where_one_process_ends(case, alone, split):
    """Dropout and the order of samples included: both ranks draw what one process draws."""
    assert_close(saved(split[0], case.name), saved(alone[0], case.name))


@pytest.mark.parametrize("case", HALF, ids=lambda case: case.name)
def test_in_16_bits_it_ends_near_one_process(case, alone, split):
    assert_close(saved(split[0], case.name), saved(alone[0], case.name), rtol=0.05, atol=0.02)


def test_what_is_logged_is_that_of_one_process(alone, split):
    """Sums count each sample once, though two ranks have it."""
    assert alone[1][0]["hits"] > 0
    for one, two in zip(alone[1], split[1]):
        assert one == pytest.approx(two, rel=2e-6)


def test_the_checkpoint_is_an_ordinary_one(alone, split, tmp_path):
    one, two = saved(alone[0], "averaged"), saved(split[0], "averaged")
    assert one.keys() == two.keys()
    assert all(type(value) is torch.Tensor for value in two["state_dict"].values())
    shutil.copy(split[0] / "plain.ckpt", tmp_path)
    train(RESUMED[:1], tmp_path)
    assert_close(saved(tmp_path, "plain on"), saved(alone[0], "plain on"))


def test_it_goes_on_from_a_checkpoint_of_one_process(alone, tmp_path):
    for name in ("plain", "scheduled-within"):
        shutil.copy(alone[0] / f"{name}.ckpt", tmp_path)
    train(RESUMED, tmp_path, 2, TensorParallelStrategy(PLAN), copies=2)
    for case in RESUMED:
        assert_close(saved(tmp_path, case.name), saved(alone[0], case.name))


def test_along_the_sequence(alone, tmp_path):
    train(SEQUENCE, tmp_path, 2, TensorParallelStrategy(ALONG), copies=2)
    assert_close(saved(tmp_path, "sequence"), saved(alone[0], "sequence"))
    train(INSIDE, tmp_path, 2, TensorParallelStrategy(WHOLE_IN), copies=2)
    assert_close(saved(tmp_path, "inside"), saved(alone[0], "inside"))


@pytest.mark.parametrize("data", ["ddp", "fsdp"])
def test_two_groups_of_two_end_where_one_process_ends(data, alone, tmp_path):
    strategy = TensorParallelStrategy(PLAN, tensor_parallel_size=2, data_parallel=data)
    cases = [DETERMINED[0], ON[1], *([UNUSED] if data == "ddp" else [])]
    train(cases, tmp_path, 4, strategy, copies=2)
    for case in cases:
        assert_close(saved(tmp_path, case.name), saved(alone[0], case.name))


@pytest.mark.slow  # four processes on two cores, twice more
@pytest.mark.parametrize("data", ["ddp", "fsdp"])
def test_two_groups_along_the_sequence(data, alone, tmp_path):
    train(SEQUENCE, tmp_path, 4, TensorParallelStrategy(ALONG, 2, data), copies=2)
    assert_close(saved(tmp_path, "sequence"), saved(alone[0], "sequence"))


@pytest.mark.parametrize(("devices", "strategy", "copies"), [(4, TensorParallelStrategy(PLAN, 2), 2), (2, "fsdp", 1)])
def test_others_go_on_from_its_checkpoint(devices, strategy, copies, alone, split, tmp_path):
    shutil.copy(split[0] / "clipped.ckpt", tmp_path)
    train(ON[:1], tmp_path, devices, strategy, copies)
    assert_close(saved(tmp_path, "clipped on"), saved(alone[0], "clipped on"))


# -- what each rank holds ------------------------------------------------------------------------------------


class Holding(Tokens):
    def __init__(self):
        super().__init__(tied=False)

    def on_train_end(self):
        wide = self.net.blocks[0].wide.weight
        state = self.trainer.optimizers[0].state[wide]["exp_avg"]
        self.held = wide.to_local().numel(), state.to_local().numel()


def _held(data, devices):
    strategy = TensorParallelStrategy(PLAN, 2, data)
    module = Holding()
    trainer = quiet(max_epochs=1, devices=devices, strategy=strategy)
    trainer.fit(module, loader(4), loader(4))
    again = trainer.validate(module, loader(4), verbose=False)  # the same module, split already
    return type(module), module.held, again[0]["val_loss"]


@pytest.mark.parametrize(
    ("data", "devices", "share"),
    [("ddp", 2, 2), pytest.param("fsdp", 4, 4, marks=pytest.mark.slow)],  # four processes on two cores
)
def test_each_rank_holds_its_part(data, devices, share):
    kind, held, loss = spawn(_held, devices, (data, devices), strategy="ddp_fork")
    assert kind is Holding
    assert held == (72 // share, 72 // share)
    assert loss > 0


# -- what cannot be right --------------------------------------------------------------------------------------


class Manual(Tokens):
    def __init__(self):
        super().__init__(tied=False)
        self.automatic_optimization = False


class Together(Tokens):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), foreach=True)


class Flat(Tokens):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


def _untied():
    return Tokens(tied=False)


def _own_share():
    """Each rank takes its own share of the samples, as under DDP."""
    data = loader(4).dataset
    return DataLoader(data, 4, sampler=DistributedSampler(data))


class Narrow(hasten.Module):
    """Its loss is a mean over an output of which each rank has a half."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(1, 4)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0].float()[:, None]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Odd(Sequences):
    """Torch's processes would exchange three tokens and two, and crash."""

    length = 5


REFUSED = [
    (Odd, ALONG, 2, None, "embed splits dimension 1 of a tensor of shape (4, 5, 6) over 2 processes"),
    (Odd, WHOLE_IN, 2, None, "blocks.0 splits dimension 1 of a tensor of shape (4, 5, 6) over 2 processes"),
    (_untied, {"net.block.*.wide": ColwiseParallel()}, 2, None, "'net.block.*.wide' is no part"),
    (_untied, {"net.blocks.*": ColwiseParallel()}, 2, None, "net.blocks.0, which is a Block"),
    (_untied, {"net.head": ColwiseParallel()}, 2, None, "out_features=11"),
    (_untied, PLAN, 3, None, "2 processes do not come out even"),
    (_untied, {**PLAN, "net.blocks.0.wide": RowwiseParallel()}, 2, None, "net.blocks.0.wide is split twice"),
    (Tokens, {"net.embed": ColwiseParallel()}, 2, None, "embed"),
    (Tokens, {"net.head": SequenceParallel()}, 2, None, "net.embed.weight and net.head.weight are one weight"),
    (Manual, PLAN, 2, None, "manual optimization"),
    (lambda: Together(tied=False), PLAN, 2, None, "foreach=True"),
    (lambda: Flat(tied=False), PLAN, 2, None, "LBFGS"),
    (_untied, PLAN, 2, _own_share, "other batches"),
    (_untied, {"net.blocks.1.wide": ColwiseParallel()}, 2, None, "got a part of a tensor for the whole"),
    (_untied, {"net.blocks.1.wide": RowwiseParallel()}, 2, None, "the whole for a part"),
    (Sequences, {k: v for k, v in ALONG.items() if k != "blocks.*.norm"}, 2, None, "blocks.0.norm"),
    (Narrow, {"layer": ColwiseParallel()}, 2, None, "other losses for the same batch"),
]


@pytest.fixture(scope="module")
def said():
    batches = functools.partial(loader, 4)
    return refusals(
        [
            (kind, functools.partial(TensorParallelStrategy, plan, size), data or batches)
            for kind, plan, size, data, _ in REFUSED
        ]
    )


@pytest.mark.parametrize("at", range(len(REFUSED)), ids=[case[4] for case in REFUSED])
def test_what_cannot_be_right_ends_with_what_to_do(at, said):
    assert REFUSED[at][4] in said[at]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"plan": {}}, "plan"),
        ({"plan": {"net": ColwiseParallel}}, "ColwiseParallel()"),
        ({"plan": PLAN, "tensor_parallel_size": 1}, "tensor_parallel_size"),
        ({"plan": PLAN, "data_parallel": "zero"}, "data_parallel"),
        ({"plan": PLAN, "blocks": "Block"}, "blocks"),
    ],
)
def test_arguments_out_of_their_range(options, said):
    with pytest.raises(hasten.HastenError, match=re.escape(said)):
        TensorParallelStrategy(**options)


@pytest.mark.parametrize(
    "flags", [{"precision": "16-mixed"}, {"compile": True}, {"plan": "auto"}, {"activation_checkpointing": True}]
)
def test_what_does_not_go_with_it_is_refused_when_the_trainer_is_built(flags):
    with pytest.raises(hasten.HastenError, match="TensorParallelStrategy"):
        quiet(devices=2, strategy=TensorParallelStrategy(PLAN), **flags)


def test_on_one_device_it_is_a_plain_training():
    module = _untied()
    quiet(devices=1, strategy=TensorParallelStrategy(PLAN)).fit(module, loader(8))
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
