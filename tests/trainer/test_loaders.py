"""Where batches come from: arguments, modules, datamodules; lists, dicts and modes of several loaders."""

from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import hasten
from hasten import HastenError
from hasten.callbacks import NaNWatch
from tests.trainer.trainings import Regression, dataset, loader, quiet


class Seen(hasten.Module):
    """Keeps the batches it is given."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch)
        return next(self.parameters()).sum()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.batches.append((dataloader_idx, batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def numbers(count, first=0):
    return DataLoader(torch.arange(first, first + count), batch_size=1)


def plain(batch):
    """A batch with numbers in place of tensors."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()[0]
    if isinstance(batch, dict):
        return {key: plain(part) for key, part in batch.items()}
    return batch if batch is None else type(batch)(map(plain, batch))


def trained(loaders, **flags):
    module = Seen()
    quiet(**flags).fit(module, loaders)
    return [plain(batch) for batch in module.batches]


class Combined:
    """As Lightning's CombinedLoader is built, which is known by these attributes."""

    def __init__(self, iterables, mode):
        self.iterables, self._mode = iterables, mode

    def __iter__(self):
        raise AssertionError


def test_lists_and_dicts_give_batches_of_their_shape():
    assert trained([numbers(2), numbers(2, 10)]) == [[0, 10], [1, 11]]
    assert trained((numbers(2), numbers(2, 10))) == [(0, 10), (1, 11)]
    assert trained({"a": numbers(2), "b": [numbers(2, 10)]}) == [{"a": 0, "b": [10]}, {"a": 1, "b": [11]}]


def test_the_shorter_loader_begins_again():
    found = trained([numbers(5), numbers(2, 10)], max_epochs=2)
    assert found == [[0, 10], [1, 11], [2, 10], [3, 11], [4, 10]] * 2


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("max_size_cycle", [[0, 10], [1, 11], [2, 10]]),
        ("min_size", [[0, 10], [1, 11]]),
        ("max_size", [[0, 10], [1, 11], [2, None]]),
    ],
)
def test_modes(mode, expected):
    assert trained(Combined([numbers(3), numbers(2, 10)], mode)) == expected


def test_training_cannot_be_sequential():
    with pytest.raises((HastenError, ValueError), match="sequential"):
        trained(Combined([numbers(3), numbers(2)], "sequential"))


def test_limits_count_within_each_loader():
    assert trained([numbers(5), numbers(9, 10)], limit_train_batches=2) == [[0, 10], [1, 11]]
    assert trained([numbers(4), numbers(2, 10)], limit_train_batches=0.5) == [[0, 10], [1, 10]]


def test_validation_runs_one_loader_after_the_other_or_together():
    module = Seen()
    quiet().validate(module, [numbers(2), numbers(1, 10)], verbose=False)
    assert [(index, plain(batch)) for index, batch in module.batches] == [(0, 0), (0, 1), (1, 10)]
    module = Seen()
    quiet().validate(module, Combined({"a": numbers(2), "b": numbers(1, 10)}, "max_size_cycle"), verbose=False)
    assert [(index, plain(batch)) for index, batch in module.batches] == [
        (0, {"a": 0, "b": 10}), (0, {"a": 1, "b": 10}),
    ]  # fmt: skip


def test_anything_iterable_is_a_loader():
    class Own:
        def __iter__(self):
            return iter([torch.tensor([1]), torch.tensor([2])])

    assert trained(Own(), max_epochs=2) == [1, 2, 1, 2]


@pytest.mark.parametrize("wrong", [3, [torch.zeros(1), 3], {"a": None}, object()])
def test_what_is_no_loader(wrong):
    with pytest.raises(TypeError, match="dataloader"):
        trained(wrong)


def test_loaders_of_the_module_and_arguments_that_win():
    class Own(Seen):
        def train_dataloader(self):
            return numbers(2)

    module = Own()
    quiet().fit(module)
    assert [plain(batch) for batch in module.batches] == [0, 1]
    module = Own()
    quiet().fit(module, numbers(2, 10))
    assert [plain(batch) for batch in module.batches] == [10, 11]


class Data:
    """A datamodule by its hooks."""

    prepare_data_per_node = True

    def __init__(self):
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(f"setup {stage}")

    def teardown(self, stage):
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self):
        return numbers(2)

    val_dataloader = train_dataloader

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch + 100


@pytest.mark.parametrize("by_name", [True, False])
def test_a_datamodule(by_name):
    data, module = Data(), Seen()
    trainer = quiet(num_sanity_val_steps=0)
    trainer.fit(module, datamodule=data) if by_name else trainer.fit(module, data)
    assert data.calls == ["prepare_data", "setup fit", "teardown fit"]
    assert [plain(batch) for batch in module.batches[:2]] == [100, 101]
    assert data.trainer is trainer
    with pytest.raises(HastenError, match="both"):
        quiet().fit(module, numbers(2), datamodule=data)


def test_batches_go_through_the_hooks_of_transfer():
    class Moves(Seen):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch + 1

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            assert device.type == "cpu"
            return batch * 10

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch + 5

    module = Moves()
    quiet().fit(module, numbers(2))
    assert [plain(batch) for batch in module.batches] == [15, 25]


def test_a_batch_that_is_none_is_skipped_and_that_is_said():
    class Holes:
        def __iter__(self):
            return iter([torch.tensor([1]), None, torch.tensor([2])])

    with pytest.warns(UserWarning, match="None"):
        assert trained(Holes()) == [1, 2]


@pytest.mark.parametrize("share", [(2, 0), (1, 0), (4, 1)], ids=["rank 0's for all", "all for each", "of four"])
def test_a_sampler_that_gives_a_rank_another_share_is_refused(share):
    samples = dataset()
    train = DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples, *share))
    with pytest.raises(HastenError, match=rf"gives rank \d of 2 the share {share[1]} of {share[0]}: samples would be"):
        quiet(devices=2, strategy="ddp_fork").fit(Regression(), train)


def test_samplers_hear_of_epochs():
    epochs = []

    class Sampler(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch):
            epochs.append(epoch)

    data = dataset()
    quiet(max_epochs=3).fit(Regression(), DataLoader(data, batch_size=8, sampler=Sampler(data)))
    assert epochs == [0, 1, 2]


def test_what_the_trainer_says_of_its_loaders():
    module = Regression()
    trainer = quiet(limit_train_batches=3, limit_val_batches=0.5)
    trainer.fit(module, loader(), [loader(), loader(16)])
    assert (trainer.num_training_batches, trainer.num_val_batches) == (3, [2, 1])
    assert trainer.num_sanity_val_batches == [2, 1]
    assert len(trainer.train_dataloader) == 4
    assert [len(one) for one in trainer.val_dataloaders] == [4, 2]


def test_the_batch_that_a_module_sees_is_the_loaders_own_on_a_cpu():
    Pair = namedtuple("Pair", "x y")
    batch = Pair(torch.ones(1), ["text", torch.zeros(1)])

    class Same:
        def __iter__(self):
            return iter([batch])

    module = Seen()
    quiet().fit(module, Same())
    assert module.batches[0] is batch


class DrawsTwo(Regression):
    """Steps that draw two batches each from the loader."""

    def __init__(self):
        super().__init__()
        self.drawn = {"training": [], "validation": []}

    def _draw(self, stage, batches):
        loss = 0.0
        for _ in range(2):
            (x, y), batch_idx, _ = next(batches)
            self.drawn[stage].append(batch_idx)
            loss = loss + (self.net(x) - y).pow(2).mean()
        return loss

    def training_step(self, dataloader_iter):
        return self._draw("training", dataloader_iter)

    def validation_step(self, dataloader_iter):
        self._draw("validation", dataloader_iter)


@pytest.mark.parametrize("sized", [True, False], ids=["with a length", "without"])
def test_steps_that_draw_their_batches_themselves(sized):
    def batches():
        return loader() if sized else DataLoader(Stream(dataset()), batch_size=8)

    module = DrawsTwo()
    trainer = quiet(max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, batches(), batches())
    assert module.drawn == {"training": [0, 1, 2, 3] * 2, "validation": [0, 1, 2, 3] * 2}
    assert (trainer.global_step, trainer.current_epoch) == (4, 2)


class ToldOfBatches(Regression):
    """Steps that draw one batch each from numbers, and hooks that note what they are given."""

    def __init__(self):
        super().__init__()
        self.begun, self.drawn, self.ended = [], [], []

    def training_step(self, dataloader_iter):
        self.drawn.append(next(dataloader_iter))
        return next(self.parameters()).sum()

    def validation_step(self, dataloader_iter):
        self.drawn.append(next(dataloader_iter))

    def predict_step(self, dataloader_iter):
        self.drawn.append(next(dataloader_iter))

    def on_train_batch_start(self, batch, batch_idx):
        self.begun.append((batch, batch_idx, 0))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ended.append((batch, batch_idx, 0))

    def _begins(self, batch, batch_idx, dataloader_idx=0):
        self.begun.append((batch, batch_idx, dataloader_idx))

    def _ends(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.ended.append((batch, batch_idx, dataloader_idx))

    on_validation_batch_start = on_predict_batch_start = _begins
    on_validation_batch_end = on_predict_batch_end = _ends


@pytest.mark.parametrize(
    ("fn", "loaders", "drawn"),
    [
        ("fit", [10, 11, 12], [(10, 0, 0), (11, 1, 0), (12, 2, 0)]),
        ("validate", {"a": [10, 11], "b": [12]}, [(10, 0, 0), (11, 1, 0), (12, 0, 1)]),
        ("validate", [10, 11], [(10, 0, 0), (11, 1, 0)]),
        ("predict", {"a": [10, 11], "b": [12]}, [(10, 0, 0), (11, 1, 0), (12, 0, 1)]),
    ],
)
def test_hooks_around_a_step_that_draws_are_told_the_batch_drawn_last(fn, loaders, drawn):
    module = ToldOfBatches()
    getattr(quiet(), fn)(module, loaders)
    assert module.drawn == module.ended == drawn
    assert module.begun == [(None, 0, 0), *drawn[:-1]]  # the step has not drawn its own yet


class EndsItsEpoch(Regression):
    """A step that draws, and stops its epoch by -1 once the second batch has been."""

    def training_step(self, dataloader_iter):
        x, y = next(dataloader_iter)[0]
        return (self.net(x) - y).pow(2).mean()

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch is not None and batch_idx == 1 else None


def test_a_step_that_draws_ends_its_epoch_by_its_hook_too():
    trainer = quiet(max_epochs=2)
    trainer.fit(EndsItsEpoch(), loader())
    assert trainer.global_step == 4


class SeesBatches(EndsItsEpoch):
    """Ends its epoch by the number of a batch."""

    def __init__(self):
        super().__init__()
        self.told = []

    def on_train_batch_start(self, batch, batch_idx):
        self.told.append(batch_idx)
        return -1 if batch_idx == 2 else None


def test_a_step_that_draws_is_told_the_same_numbers_when_its_epoch_is_resumed(tmp_path):
    quiet(max_epochs=1).fit(whole := SeesBatches(), loader())
    first = quiet(max_epochs=1, max_steps=2)
    first.fit(stopped := SeesBatches(), loader())
    first.save_checkpoint(tmp_path / "step2.ckpt")
    quiet(max_epochs=1).fit(resumed := SeesBatches(), loader(), ckpt_path=tmp_path / "step2.ckpt")
    assert stopped.told + resumed.told == whole.told == [0, 0, 1, 2]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


class Poisoned(Regression):
    """Whose loss of one batch is infinite."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.net(x) - y).pow(2).mean() + (float("inf") if batch_idx == 2 else 0.0)


class PoisonedDraws(Poisoned):
    def training_step(self, dataloader_iter):
        return super().training_step(*next(dataloader_iter)[:2])


def test_hastens_own_callbacks_count_the_batches_of_a_step_that_draws():
    """In windows of two batches, of which NaNWatch leaves out the second."""
    trained = []
    for kind in (Poisoned, PoisonedDraws):
        watch = NaNWatch(action="skip", patience=5)
        quiet(max_epochs=1, accumulate_grad_batches=2, callbacks=[watch]).fit(module := kind(), loader())
        assert watch.skipped == 1
        trained.append(module)
    one, other = trained
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return (self.samples[i] for i in range(len(self.samples)))
