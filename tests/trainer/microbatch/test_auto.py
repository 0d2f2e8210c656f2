"""`microbatch="auto"`: a try that ran out of memory leaves nothing, and what was found is kept."""

import json

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hasten import HastenError
from hasten.strategies import FSDPStrategy
from hasten.trainer.strategies.fsdp import FSDP
from tests.fork_here import ran_here
from tests.trainer.microbatch.trainings import Counted, Net, assert_close, assert_equal, loader, trained, weights
from tests.trainer.trainings import quiet


class Stateful(Net):
    """Draws random numbers, has a buffer, a generator of its own, and a metric."""

    def __init__(self, **options):
        super().__init__(dropout=0.3, **options)
        self.net.append(Counted())
        self.noise = torch.Generator().manual_seed(5)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss((x + 0.1 * torch.randn(x.shape, generator=self.noise, dtype=x.dtype), y))


@pytest.mark.parametrize("backward", [False, True], ids=["in the forward", "in the backward"])
@pytest.mark.parametrize("every", [1, 2])
def test_what_it_finds_trains_to_the_bit_like_that_number_from_the_start(backward, every):
    told = trained(Stateful(), microbatch=2, accumulate_grad_batches=every)
    found = trained(Stateful(most=3, backward=backward), microbatch="auto", accumulate_grad_batches=every)
    assert found.limited.failed == 2  # with 8 and with 4 samples
    assert found.trainer.progress.microbatch == 2
    assert_equal(weights(found), weights(told))
    assert torch.equal(found.noise.get_state(), told.noise.get_state())


class SecondPart(Stateful):
    """Has no memory for 8 samples, nor for a second part of 4: by then the first one's backward is over."""

    def training_step(self, batch, batch_idx):
        part = self.sizes[-1:] == [4] and torch.is_grad_enabled()
        self.limited.most = 3 if part else 4
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_beside_mixed_precision_too(precision):
    nets = []
    for make, flag in ((Stateful, 2), (SecondPart, "auto")):
        torch.manual_seed(7)
        nets.append(make())
        batches = DataLoader([(x.float(), y.float()) for x, y in loader()], batch_size=None)
        quiet(max_epochs=2, precision=precision, microbatch=flag).fit(nets[-1], batches)
    assert nets[1].limited.failed == 2
    assert_equal(weights(nets[0]), weights(nets[1]))


@pytest.mark.parametrize("backward", [False, True])
def test_the_weights_are_those_of_whole_batches(backward):
    whole = trained(Net(), gradient_clip_val=0.5, accumulate_grad_batches=2)
    found = trained(Net(3, backward), gradient_clip_val=0.5, accumulate_grad_batches=2, microbatch="auto")
    assert_close(weights(found), weights(whole))


def test_it_says_what_it_found(capfd, caplog):
    trained(Net(3), microbatch="auto")
    said = [line for line in (capfd.readouterr().err + caplog.text).splitlines() if "memory ran out" in line]
    assert "4 samples" in said[0]
    assert "2 samples" in said[1]
    assert len(said) == 2


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_memory_that_runs_out_later_is_found_later(every, backward):
    """Within a window: the gradients of its first batch are there already."""

    class Later(Net):
        def training_step(self, batch, batch_idx):
            self.limited.most = 5 if batch_idx or self.trainer.current_epoch else None
            return self.loss(batch)

    found = trained(Later(backward=backward), microbatch="auto", accumulate_grad_batches=every)
    assert found.limited.failed == 1
    assert_close(weights(found), weights(trained(Net(), accumulate_grad_batches=every)))


def test_an_overflow_of_a_try_that_failed_leaves_the_scale():
    class Overflows(SecondPart):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * 1e30 if len(batch[0]) == 4 and loss.requires_grad else loss

    nets = []
    for make, flag in ((Stateful, 2), (Overflows, "auto")):
        torch.manual_seed(7)
        nets.append(make())
        batches = DataLoader([(x.float(), y.float()) for x, y in loader()], batch_size=None)
        quiet(max_epochs=2, precision="16-mixed", microbatch=flag).fit(nets[-1], batches)
    assert nets[1].limited.failed == 2
    assert_equal(weights(nets[0]), weights(nets[1]))
    told, found = (net.trainer.engine.run.techniques[0].state_dict() for net in nets)
    assert told == found  # the scale, and the steps for which it has held
    assert told["scale"] > 1


def test_going_on_begins_with_what_was_found_and_is_exact(tmp_path):
    through = trained(Net(most=3, dropout=0.3), microbatch="auto", max_epochs=3)

    class Stops(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.trainer.global_step == 4:
                self.trainer.save_checkpoint(tmp_path / "middle.ckpt")
                self.trainer.should_stop = True

    trained(Stops(most=3, dropout=0.3), microbatch="auto", max_epochs=3)
    resumed = Net(most=3, dropout=0.3)
    trainer = quiet(max_epochs=3, microbatch="auto")
    trainer.fit(resumed.double(), loader(), ckpt_path=tmp_path / "middle.ckpt")
    assert resumed.limited.failed == 0
    assert trainer.progress.microbatch == 2
    assert_equal(weights(resumed), weights(through))


def test_a_new_fit_begins_with_whole_batches():
    trainer = quiet(microbatch="auto", max_steps=3, max_epochs=-1)
    trainer.fit(Net(3).double(), loader())
    assert trainer.progress.microbatch == 2
    trainer.max_steps = 6
    net = Net().double()
    trainer.fit(net, loader())
    assert net.sizes[:2] == [8, 8]
    assert trainer.progress.microbatch is None


def test_a_single_sample_that_does_not_fit_ends_it():
    with pytest.raises(HastenError, match=r"(?s)with a single sample at a time: CUDA out of memory.*checkpointing"):
        trained(Net(0), microbatch="auto")


def test_another_error_is_not_taken_for_memory():
    class Wrong(Net):
        def training_step(self, batch, batch_idx):
            raise ValueError("shapes")

    with pytest.raises(ValueError, match="shapes"):
        trained(Wrong(), microbatch="auto")


def test_a_loss_that_is_no_mean_is_refused_once_parts_are_needed():
    class Summed(Net):
        def training_step(self, batch, batch_idx):
            return F.mse_loss(self.net(batch[0]), batch[1], reduction="sum")

    trained(Summed(), microbatch="auto")  # whole batches: nothing is wrong with it
    with pytest.raises(HastenError, match="mean over samples"):
        trained(Summed(3), microbatch="auto")


def test_a_batch_that_was_changed_in_place_is_not_tried_again():
    class InPlace(Net):
        def training_step(self, batch, batch_idx):
            batch[0].mul_(0.5)
            return self.loss(batch)

    with pytest.raises(HastenError, match="changed its batch in place"):
        trained(InPlace(3), microbatch="auto")


def test_metrics_of_torchmetrics_count_each_sample_once():
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measured(Net):
        def __init__(self, most=None):
            super().__init__(most)
            self.error = torchmetrics.MeanSquaredError()

        def training_step(self, batch, batch_idx):
            self.error(self.net[0](batch[0])[:, :1], batch[1])  # before memory runs out
            self.log("error", self.error, on_step=False, on_epoch=True)
            return self.loss(batch)

    found = trained(Measured(3), microbatch="auto")
    whole = trained(Measured())
    assert found.limited.failed
    error = [float(net.trainer.callback_metrics["error"]) for net in (found, whole)]
    assert error[0] == pytest.approx(error[1], rel=1e-5)


RANKS = """
import sys, torch
from tests.trainer.microbatch.trainings import Counted, Net, loader
from tests.trainer.trainings import quiet

class Even(Net):
    def __init__(self, **options):
        super().__init__(**options)
        self.net.append(Counted())  # a buffer, which ranks exchange with the first forward of a step

class Uneven(Even):
    def on_train_start(self):
        self.limited.most = 3 if self.trainer.global_rank == 1 else None  # memory runs out on one rank alone

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

torch.set_num_threads(1)
auto = {"microbatch": "auto"}
for name, flags in {"whole": {}, "forward": auto, "backward": auto, "number": {"microbatch": 3}}.items():
    net = (Uneven(backward=name == "backward") if flags is auto else Even()).double()
    trainer = quiet(max_epochs=2, devices=2, strategy="ddp_fork", accumulate_grad_batches=2, **flags)
    trainer.fit(net, loader(samples=40, batch_size=8))
    torch.save({"net": net.net.state_dict(), "found": trainer.progress.microbatch}, name + ".pt")
"""


def test_ranks_try_again_together(tmp_path):
    done = ran_here(RANKS, tmp_path)
    assert done.code == 0, done.err
    kept = {name: torch.load(tmp_path / f"{name}.pt") for name in ("whole", "forward", "backward", "number")}
    assert [one["found"] for one in kept.values()] == [None, 2, 2, None]
    for name in ("forward", "backward", "number"):
        assert_close(kept[name]["net"], kept["whole"]["net"])


REAL = """
import json, resource, sys, torch, hasten
from pathlib import Path
from torch.utils.data import DataLoader

class Wide(hasten.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 4096), torch.nn.Tanh(), torch.nn.Linear(4096, 1))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def on_train_start(self):
        self.training_step(batches[0], 0).backward() if not limited else None
        if limited:
            warm = torch.nn.functional.mse_loss(self.net(batches[0][0][:1]), batches[0][1][:1])
            warm.backward()  # the threads of autograd are there now
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + 200 * 2**20, -1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(1)
batches = [(torch.randn(4096, 8, generator=generator).double(), torch.randn(4096, 1, generator=generator).double())] * 2
results = {}
for limited in (False, True):  # 4096 x 4096 doubles are 134 MB, and a step keeps several of them
    net = Wide().double()
    trainer = hasten.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, microbatch="auto" if limited else None,
    )
    trainer.fit(net, DataLoader(batches, batch_size=None))
    results[limited] = net.net.state_dict()
worst = max(float((one - results[True][name]).abs().max()) for name, one in results[False].items())
print(json.dumps({"found": trainer.progress.microbatch, "worst": worst}))
"""


def test_the_real_allocator_runs_out(tmp_path):
    done = ran_here(REAL, tmp_path)
    assert done.code == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    assert found["found"] is not None
    assert found["found"] < 4096
    assert found["worst"] < 1e-12
    assert "memory ran out" in done.err


STRATEGIES = """
import torch, hasten
from hasten.strategies import DDPStrategy, FSDPStrategy
from tests.trainer.microbatch.trainings import Net, loader
from tests.trainer.trainings import quiet

if __name__ == "__main__":
    for flag, strategy in [
        (3, DDPStrategy(static_graph=True, start="ddp_fork")),
        ("auto", DDPStrategy(gradient_compression="bf16", start="ddp_fork")),
    ]:
        try:
            quiet(devices=2, strategy=strategy, microbatch=flag).fit(Net(), loader())
        except hasten.HastenError as error:
            print(error)
"""


def test_strategies_beside_which_it_cannot_be(tmp_path):
    done = ran_here(STRATEGIES, tmp_path)
    assert "microbatch and static_graph=True" in done.out
    assert "exchanges gradients itself" in done.out
    with pytest.raises(HastenError, match='microbatch and strategy="fsdp"'):
        FSDP(FSDPStrategy()).exchange(tries=False)
