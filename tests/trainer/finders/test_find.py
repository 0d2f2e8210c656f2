"""`Trainer.find_batch_size`: real attempts in this process, which leave everything as it was."""

import json
import threading

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import hasten
from hasten import HastenError
from hasten.data import rng
from tests.fork_here import ran_here
from tests.trainer.trainings import Regression, assert_same, loader, network, quiet

FITS = """
import hasten, json, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from hasten.data import rng

class Wide(hasten.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 2048), torch.nn.Tanh(), torch.nn.Linear(2048, 1))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

torch.set_num_threads(1)
torch.manual_seed(3)
net = Wide()
x = torch.randn(40_000, 16)
data = TensorDataset(x, x.sum(1, keepdim=True))
trainer = hasten.Trainer(max_epochs=1, accelerator="cpu", batched_fetch=True)
memory = int(open("/proc/self/statm").read().split()[1]) * 4096 + 150 * 2**20
found = trainer.find_batch_size(
    net, DataLoader(data, batch_size=64, shuffle=True), DataLoader(data, batch_size=64), memory=memory
)
print(found, file=sys.stderr)
print(json.dumps({
    "memory": memory, "largest": found.largest, "saturated": found.saturated, "rates": found.rates,
    "peaks": found.peaks, "split": found.memory, "bound": found.found.bound,
}))
"""


def test_the_largest_that_it_names_ran_within_the_limit(tmp_path):
    done = ran_here(FITS, tmp_path)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    largest = found["largest"]
    assert found["bound"] == "memory"
    assert 512 < largest < 40_000
    assert found["peaks"][str(largest)] <= found["memory"]
    assert found["rates"][str(found["saturated"])] >= 0.95 * max(found["rates"].values())
    weights = (16 * 2048 + 2048 + 2048 + 1) * 4
    assert found["split"]["parameters"] == found["split"]["gradients"] == weights
    assert 2 * weights <= found["split"]["optimizer"] <= 2 * weights + 100  # and a count a tensor
    assert found["split"]["activations_and_batches"] > largest * 2048 * 4
    assert f"largest batch that is safe: {largest}" in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == []


class Noisy(Regression):
    """Draws random numbers and keeps things in plain attributes."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def training_step(self, batch, batch_idx):
        self.steps.append(batch_idx)
        return super().training_step(batch, batch_idx) + 0 * torch.randn(())


def shuffled():
    return loader(shuffle=True, generator=torch.Generator().manual_seed(4))


def test_what_was_given_is_left_as_it_was_and_trains_as_ever():
    plain, tried = Noisy(), Noisy()
    torch.manual_seed(7)
    quiet(max_epochs=2).fit(plain, shuffled(), loader())

    torch.manual_seed(7)
    trainer, batches, validation = quiet(max_epochs=2), shuffled(), loader()
    before = rng.digest(), batches.generator.get_state(), dict(tried.state_dict())
    attributes = set(vars(tried))
    found = trainer.find_batch_size(tried, batches, validation)
    assert rng.digest() == before[0]
    assert torch.equal(batches.generator.get_state(), before[1])
    assert_same(before[2], tried.state_dict())
    assert set(vars(tried)) == attributes
    assert tried.steps == []
    assert (batches.batch_size, trainer.global_step, trainer.callback_metrics) == (8, 0, {})
    assert (found.largest, found.found.bound, found.found.own) == (32, "samples", 8)

    trainer.fit(tried, batches, validation)
    assert_same(plain.state_dict(), tried.state_dict())


def test_a_network_with_a_loss_and_its_own_optimizer():
    net = network()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    found = quiet().find_batch_size(net, loader(), loss=F.mse_loss, optimizer=optimizer)
    assert found.largest == 32
    assert found.memory["optimizer"] > 0
    assert_same(before, net.state_dict())
    assert not optimizer.state


def test_loaders_of_the_module_and_of_a_datamodule():
    class Brings(Regression):
        def train_dataloader(self):
            return loader()

    class Data:
        calls = 0

        def prepare_data(self):
            pass

        def setup(self, stage):
            self.samples = 48

        def train_dataloader(self):
            return loader(self.samples)

    assert quiet().find_batch_size(Brings()).largest == 32
    data = Data()
    assert quiet().find_batch_size(Regression(), data).largest == 48
    assert vars(data) == {}


SEEN = []


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.ones(1 + index % 12)


class Longest(Regression):
    def training_step(self, batch, batch_idx):
        SEEN.append(tuple(batch.shape))
        return self.net[0].weight.mean() * batch.mean()


def test_the_longest_samples_come_first():
    padded = DataLoader(
        Sentences(), 2, collate_fn=lambda samples: torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    )
    SEEN.clear()
    quiet().find_batch_size(Longest(), padded)
    assert SEEN[0] == (2, 12)


def test_auto_parts_do_not_make_every_size_fit():
    class Small(Regression):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) > 20:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().training_step(batch, batch_idx)

    found = quiet(microbatch="auto").find_batch_size(Small(), loader())
    assert 8 <= found.largest <= 20
    assert 32 in {one.size for one in found.found.attempts if one.outcome == "out of memory"}


def test_its_own_batch_size_that_does_not_fit():
    class Never(Regression):
        def training_step(self, batch, batch_idx):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(HastenError, match=r"does not fit into .* with its own batch size"):
        quiet().find_batch_size(Never(), loader())


def test_errors_of_the_training_come_through():
    class Wrong(Regression):
        def training_step(self, batch, batch_idx):
            raise ValueError("shapes")

    with pytest.raises(ValueError, match="shapes"):
        quiet().find_batch_size(Wrong(), loader())


class Locked(Regression):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


data = TensorDataset(torch.zeros(8, 4), torch.zeros(8, 1))


@pytest.mark.parametrize(
    ("module", "batches", "said"),
    [
        (Regression, iter([(torch.zeros(8, 4), torch.zeros(8, 1))] * 99), "is no DataLoader"),
        (Regression, DataLoader(data, batch_size=None), "batch sampler of its own"),
        (
            Regression,
            DataLoader(data, batch_sampler=type("Own", (BatchSampler,), {})(SequentialSampler(data), 2, False)),
            "batch sampler of its own",
        ),
        (Locked, loader(), "cannot be copied"),
    ],
)
def test_what_cannot_be_tried_is_said(module, batches, said):
    with pytest.raises(HastenError, match=said):
        quiet().find_batch_size(module(), batches)


def test_of_several_devices_one_is_tried_and_that_is_said(capfd, caplog):
    assert quiet(devices=2, strategy="ddp").find_batch_size(Regression(), loader()).largest == 32
    assert "trying on one of 2 devices" in capfd.readouterr().err + caplog.text


def test_it_is_for_one_process(monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(HastenError, match="one of several"):
        hasten.Trainer(accelerator="cpu", logger=False).find_batch_size(Regression(), loader())
