"""Every flag of the Trainer does what it says: a table with one entry a flag, and limits in detail."""

import inspect
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import hasten
from hasten import Plan
from hasten.callbacks import Callback, GradientAccumulationScheduler, ModelSummary, Progress, Timer
from hasten.loggers import CSVLogger
from tests.trainer.trainings import Regression, dataset, loader, quiet

FLAGS = [name for name in inspect.signature(hasten.Trainer).parameters if name != "unknown"]
EFFECTS = {}


def effect(function):
    """The function tests the flag that it is named after."""
    EFFECTS[function.__name__] = function
    return function


class Counting(Regression):
    """Notes by epoch how often each step ran, and under what."""

    def __init__(self, **options):
        super().__init__(**options)
        self.steps = {"train": [], "validate": [], "sanity_check": [], "test": [], "predict": []}
        self.validated_at = []

    def _note(self):
        self.steps[str(self.trainer.stage.stage)].append(self.trainer.current_epoch)

    def training_step(self, batch, batch_idx):
        self._note()
        self.autocast = torch.is_autocast_enabled("cpu")
        self.anomaly = torch.is_anomaly_enabled()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self._note()
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.validated_at.append(self.trainer.global_step)
        self.inference = torch.is_inference_mode_enabled()
        self.gradients = torch.is_grad_enabled()
        super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self._note()
        super().test_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        self._note()
        return super().predict_step(batch, batch_idx)

    def count(self, stage):
        return len(self.steps[stage])


def fitted(module=None, batches=None, validation=None, **flags):
    """A module that was trained with these flags."""
    module = module or Counting()
    quiet(**flags).fit(module, loader() if batches is None else batches, validation)
    return module


@effect
def accelerator(tmp_path):
    assert quiet(accelerator="cpu").device == torch.device("cpu")
    assert quiet(accelerator="auto").device.type == ("cuda" if torch.cuda.is_available() else "cpu")


@effect
def strategy(tmp_path):
    assert (
        quiet(strategy="ddp").engine.strategy.collective == "ddp"
    )  # `devices` and `sync_batchnorm` below start processes by it


@effect
def devices(tmp_path):
    sizes = tmp_path / "sizes"

    class Sized(Regression):
        def on_train_start(self):
            with sizes.open("a") as file:
                file.write(f"{self.trainer.world_size}{self.trainer.global_rank} ")

    fitted(Sized(), devices=2, strategy="ddp_fork")
    assert sorted(sizes.read_text().split()) == ["20", "21"]


@effect
def num_nodes(tmp_path):
    with pytest.raises(hasten.HastenError, match="num_nodes=2"):
        fitted(num_nodes=2)


@effect
def precision(tmp_path):
    assert fitted(precision="bf16-mixed").autocast
    assert not fitted().autocast
    assert fitted(precision="64-true").net[0].weight.dtype == torch.float64


@effect
def logger(tmp_path):
    logger = CSVLogger(tmp_path)
    fitted(Regression(log=True), logger=logger, log_every_n_steps=1)
    assert "loss" in (Path(logger.log_dir) / "metrics.csv").read_text()
    trainer = quiet(logger=True, default_root_dir=tmp_path)
    assert isinstance(trainer.logger, CSVLogger)
    assert quiet(logger=[logger, trainer.logger]).loggers == [logger, trainer.logger]
    assert quiet(logger=False).loggers == []


@effect
def callbacks(tmp_path):
    class Seen(Callback):
        def on_train_start(self, trainer, module):
            self.seen = module

    one, two = Seen(), Seen()
    module = fitted(callbacks=one)
    assert one.seen is module
    fitted(callbacks=[one, two])
    assert one.seen is two.seen


@effect
def fast_dev_run(tmp_path):
    for batches in (True, 2):
        module = Counting()
        trainer = quiet(
            fast_dev_run=batches, max_epochs=5, min_epochs=3, logger=True, enable_checkpointing=True,
            default_root_dir=tmp_path, max_steps=50, limit_train_batches=0.5,
        )  # fmt: skip
        trainer.fit(module, loader(), loader())
        trainer.test(module, loader(), verbose=False)
        trainer.predict(module, loader())
        expected = {stage: int(batches) for stage in ("train", "validate", "test", "predict")}
        assert {stage: module.count(stage) for stage in module.steps} == {**expected, "sanity_check": 0}
    assert list(tmp_path.iterdir()) == []


@effect
def max_epochs(tmp_path):
    assert fitted(max_epochs=3).count("train") == 12
    assert fitted(max_epochs=0).count("train") == 0
    with pytest.warns(UserWarning, match="1000 epochs"):
        assert quiet_default().max_epochs == 1000
    endless = Counting()
    quiet(max_epochs=-1, callbacks=StopsAt(50)).fit(endless, loader())
    assert endless.count("train") == 50


def quiet_default():
    trainer = quiet(max_epochs=None, callbacks=StopsAt(1))
    trainer.fit(Regression(), loader())
    return trainer


class StopsAt(Callback):
    """Asks for an end after so many steps."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step >= self.step:
            trainer.should_stop = True


@effect
def min_epochs(tmp_path):
    assert fitted(max_epochs=5, min_epochs=3, callbacks=StopsAt(2)).count("train") == 12
    assert fitted(max_epochs=5, callbacks=StopsAt(2)).count("train") == 2


@effect
def max_steps(tmp_path):
    assert fitted(max_epochs=None, max_steps=6).count("train") == 6
    assert fitted(max_steps=3, max_epochs=9, accumulate_grad_batches=2).count("train") == 6
    assert fitted(max_steps=0).count("train") == 0
    assert fitted(max_steps=99, max_epochs=1).count("train") == 4


@effect
def min_steps(tmp_path):
    assert fitted(max_epochs=5, min_steps=7, callbacks=StopsAt(2)).count("train") == 7


@effect
def max_time(tmp_path):
    for duration in ("00:00:00:01", timedelta(seconds=0.3), {"seconds": 0.3}):
        trainer = quiet(max_epochs=-1, max_time=duration)
        assert any(isinstance(callback, Timer) for callback in trainer.callbacks)
        begin = time.monotonic()
        trainer.fit(Regression(), loader())
        assert time.monotonic() - begin >= 0.3
        assert trainer.global_step > 0
    assert (
        quiet(max_time="01:02:03:04").callbacks[-1].time_remaining()
        == timedelta(days=1, hours=2, minutes=3, seconds=4).total_seconds()
    )


@effect
def limit_train_batches(tmp_path):
    assert [fitted(limit_train_batches=limit).count("train") for limit in (3, 0.5, 1.0, 99, 1)] == [3, 2, 4, 4, 1]
    for nothing in (0, 0.0):
        module = fitted(validation=loader(), limit_train_batches=nothing)
        assert module.count("train") == module.count("validate") == 0
    with pytest.raises(hasten.HastenError, match=r"limit_train_batches=0.1 of 4 batches"):
        fitted(limit_train_batches=0.1)


@effect
def limit_val_batches(tmp_path):
    def validated(limit):
        return fitted(validation=loader(), limit_val_batches=limit, num_sanity_val_steps=0).count("validate")

    assert [validated(limit) for limit in (3, 0.5, 1.0, 99, 0, 0.0)] == [3, 2, 4, 4, 0, 0]


@effect
def limit_test_batches(tmp_path):
    for limit, count in ((3, 3), (0.5, 2), (1.0, 4), (0, 0)):
        module = Counting()
        results = quiet(limit_test_batches=limit).test(module, loader(), verbose=False)
        assert module.count("test") == count
        assert bool(results) == bool(count)


@effect
def limit_predict_batches(tmp_path):
    for limit, count in ((3, 3), (0.5, 2), (1.0, 4), (0, 0)):
        assert len(quiet(limit_predict_batches=limit).predict(Regression(), loader())) == count


@effect
def overfit_batches(tmp_path):
    class Batches(Regression):
        seen = None

        def training_step(self, batch, batch_idx):
            self.seen.append(batch[0])
            return super().training_step(batch, batch_idx)

    for given, count in ((2, 2), (0.5, 2), (1.0, 4)):
        Batches.seen = seen = []
        module = Batches()
        with pytest.warns(UserWarning, match="shuffling"):
            quiet(max_epochs=2, overfit_batches=given).fit(module, loader(shuffle=True))
        assert len(seen) == 2 * count
        for first, second in zip(seen[:count], seen[count:]):
            assert torch.equal(first, second)
        assert torch.equal(seen[0], dataset()[:8][0])


@effect
def val_check_interval(tmp_path):
    def validated_at(interval, epochs=2, **flags):
        return fitted(validation=loader(), val_check_interval=interval, max_epochs=epochs, **flags).validated_at

    assert validated_at(2) == [2, 4, 6, 8]
    assert validated_at(3) == [3, 7]
    assert validated_at(1) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert validated_at(0.25, epochs=1) == [1, 2, 3, 4]
    assert validated_at(0.5) == [2, 4, 6, 8]
    assert validated_at(1.0) == [4, 8]
    assert validated_at(3, check_val_every_n_epoch=None) == [3, 6]
    assert validated_at(6, check_val_every_n_epoch=None) == [6]
    assert validated_at("00:00:00:00", epochs=1) == [1, 2, 3, 4]
    assert validated_at({"milliseconds": 0}, epochs=1) == [1, 2, 3, 4]
    assert validated_at(timedelta(hours=1)) == []


@effect
def check_val_every_n_epoch(tmp_path):
    module = fitted(validation=loader(), check_val_every_n_epoch=2, max_epochs=5)
    assert sorted(set(module.steps["validate"])) == [1, 3]
    module = fitted(validation=loader(), check_val_every_n_epoch=None, max_epochs=3, val_check_interval=5)
    assert module.validated_at == [5, 10]


@effect
def num_sanity_val_steps(tmp_path):
    for steps, count in ((None, 2), (0, 0), (3, 3), (99, 4), (-1, 4)):
        module = fitted(validation=loader(), num_sanity_val_steps=steps)
        assert module.count("sanity_check") == count
        assert module.count("validate") == 4


@effect
def log_every_n_steps(tmp_path):
    for every, steps in ((None, 0), (1, 6), (2, 3), (4, 1), (0, 0)):
        logger = Remembering()
        fitted(Regression(log=True), batches=loader(48), logger=logger, log_every_n_steps=every)
        assert [step for step, values in logger.got if "loss" in values] == [
            (number + 1) * every - 1 for number in range(steps)
        ]


class Remembering(hasten.loggers.Logger):
    """Keeps what it is given."""

    def __init__(self):
        self.got = []
        self.hparams = {}

    name = version = "remembering"

    def log_metrics(self, metrics, step=None):
        self.got.append((step, dict(metrics)))

    def log_hyperparams(self, params, *args, **kwargs):
        self.hparams = dict(params)


@effect
def enable_checkpointing(tmp_path):
    quiet(enable_checkpointing=True, default_root_dir=tmp_path).fit(Regression(), loader())
    assert len(list(tmp_path.rglob("*.ckpt"))) == 1
    assert quiet(enable_checkpointing=None).checkpoint_callback is not None
    assert quiet(enable_checkpointing=False).checkpoint_callback is None


@effect
def enable_progress_bar(tmp_path):
    assert isinstance(quiet(enable_progress_bar=True).progress_bar_callback, Progress)
    assert isinstance(quiet(enable_progress_bar=None).progress_bar_callback, Progress)
    assert quiet(enable_progress_bar=False).progress_bar_callback is None


@effect
def enable_model_summary(tmp_path):
    def summaries(on):
        return [one for one in quiet(enable_model_summary=on).callbacks if isinstance(one, ModelSummary)]

    assert [len(summaries(on)) for on in (True, None, False)] == [1, 1, 0]


@effect
def accumulate_grad_batches(tmp_path):
    def steps(every, epochs=1):
        return fitted(accumulate_grad_batches=every, max_epochs=epochs).trainer.global_step

    assert [steps(every) for every in (1, 2, 3, 99)] == [4, 2, 2, 1]
    assert steps({0: 1, 1: 4, 3: 2}, epochs=4) == 4 + 1 + 1 + 2
    assert steps({2: 4}, epochs=3) == 4 + 4 + 1
    trainer = quiet(accumulate_grad_batches={2: 4})
    assert any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)


@effect
def optimizer_in_backward(tmp_path):
    class Watching(Counting):
        def on_train_start(self):
            self.changed = 0
            first, last = self.net[0].weight, self.net[-1].weight
            first.register_post_accumulate_grad_hook(lambda _: setattr(self, "changed", last._version))

    assert fitted(Watching(), optimizer_in_backward=True).changed > fitted(Watching()).changed  # the last was stepped


@effect
def microbatch(tmp_path):
    looks = 2 * (2 + 2 + 4)  # at the first batch and the fourth: in parts as they are run, first with last, and smaller
    assert fitted(microbatch=4).count("train") == 2 * 4 + looks
    assert fitted(microbatch=4).trainer.global_step == 4


@effect
def gradient_clip_val(tmp_path):
    class Norms(Regression):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.step(optimizer_closure)
            self.norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])

    assert fitted(Norms(), gradient_clip_val=0.01).norm <= 0.01
    assert fitted(Norms(), gradient_clip_val=0).norm > 0.01


@effect
def gradient_clip_algorithm(tmp_path):
    class Largest(Regression):
        def on_before_zero_grad(self, optimizer):
            if self.trainer.global_step:
                self.largest = max(float(p.grad.abs().max()) for p in self.parameters())

    assert fitted(Largest(), gradient_clip_val=0.001, gradient_clip_algorithm="value").largest == pytest.approx(0.001)
    assert fitted(Largest(), gradient_clip_val=0.001, gradient_clip_algorithm="norm").largest < 0.001


@effect
def deterministic(tmp_path):
    seen = []

    class Watching(Regression):
        def on_train_start(self):
            seen.append(
                (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
            )

    try:
        for wish in (True, "warn", False):
            fitted(Watching(), deterministic=wish)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [(True, False), (True, True), (False, False)]


class Switches(Regression):
    """Notes what is set for the process while it trains."""

    def on_train_start(self):
        self.benchmark = torch.backends.cudnn.benchmark
        self.products = torch.get_float32_matmul_precision()


@effect
def benchmark(tmp_path):
    before = torch.backends.cudnn.benchmark
    try:
        assert fitted(Switches(), benchmark=True).benchmark
        assert torch.backends.cudnn.benchmark is before
        assert not fitted(Switches(), benchmark=False).benchmark
    finally:
        torch.backends.cudnn.benchmark = before


@effect
def inference_mode(tmp_path):
    for on in (True, False):
        module = Counting()
        quiet(inference_mode=on).validate(module, loader(), verbose=False)
        assert (module.inference, module.gradients) == (on, False)
    module = fitted(validation=loader())  # within fit weights must stay ordinary tensors
    assert (module.inference, module.gradients) == (False, False)


@effect
def use_distributed_sampler(tmp_path):
    for on, sizes in ((True, ["2", "2"]), (False, ["4", "4"])):
        seen = tmp_path / f"batches{on}"

        class Sized(Regression):
            def on_train_start(self):
                with seen.open("a") as file:  # noqa: B023
                    file.write(f"{self.trainer.num_training_batches} ")

        fitted(Sized(), devices=2, strategy="ddp_fork", use_distributed_sampler=on)
        assert seen.read_text().split() == sizes


@effect
def profiler(tmp_path):
    trainer = quiet(profiler="simple")
    trainer.fit(Regression(), loader())
    calls = {label.rpartition(".")[2]: len(times) for label, times in trainer.profiler.recorded.items()}
    assert calls["training_step"] == 4
    trainer = quiet(profiler="pytorch", default_root_dir=tmp_path)
    trainer.fit(Regression(), loader(96))
    assert (tmp_path / "trace.json").is_file()


@effect
def detect_anomaly(tmp_path):
    assert fitted(detect_anomaly=True).anomaly
    assert not fitted().anomaly
    assert not torch.is_anomaly_enabled()

    class Bad(Regression):
        def training_step(self, batch, batch_idx):
            return (super().training_step(batch, batch_idx) * 0).sqrt().mul(0)

    with pytest.raises(RuntimeError, match="returned nan values"):
        fitted(Bad(), detect_anomaly=True)


@effect
def barebones(tmp_path):
    flags = {"logger": None, "enable_checkpointing": None, "enable_progress_bar": None, "enable_model_summary": None}
    module = Counting(log=True)
    trainer = quiet(barebones=True, default_root_dir=tmp_path, **flags)
    trainer.fit(module, loader(), loader())
    assert (trainer.callbacks, trainer.loggers, trainer.callback_metrics) == ([], [], {})
    assert (module.count("train"), module.count("sanity_check"), module.count("validate")) == (4, 0, 4)
    assert list(tmp_path.iterdir()) == []


@effect
def sync_batchnorm(tmp_path):
    said = "runs on GPUs only" if not torch.cuda.is_available() else "Rank"
    with pytest.raises(hasten.HastenError, match=said):
        fitted(devices=2, strategy="ddp_fork", sync_batchnorm=True)


@effect
def reload_dataloaders_every_n_epochs(tmp_path):
    class Own(Regression):
        asked = None

        def train_dataloader(self):
            self.asked.append(("train", self.trainer.current_epoch))
            return loader()

        def val_dataloader(self):
            self.asked.append(("val", self.trainer.current_epoch))
            return loader()

    for every, train, val in ((0, [0], [0]), (1, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), (2, [0, 2, 4], [0, 2, 4])):
        Own.asked = []
        quiet(max_epochs=5, reload_dataloaders_every_n_epochs=every).fit(Own())
        assert [epoch for kind, epoch in Own.asked if kind == "train"] == train
        assert [epoch for kind, epoch in Own.asked if kind == "val"] == val


@effect
def default_root_dir(tmp_path):
    trainer = quiet(
        default_root_dir=str(tmp_path / "here"), logger=True, enable_checkpointing=True, log_every_n_steps=1
    )
    trainer.fit(Regression(log=True), loader())
    assert {path.suffix for path in (tmp_path / "here").rglob("*.*") if path.is_file()} >= {".csv", ".ckpt"}
    assert quiet(default_root_dir="~").default_root_dir == str(Path.home())
    assert quiet().default_root_dir == str(Path.cwd())


@effect
def enable_autolog_hparams(tmp_path):
    class Saved(Regression):
        def __init__(self, width=3):
            super().__init__()
            self.save_hyperparameters()

    for on, expected in ((True, {"width": 3}), (False, {})):
        logger = Remembering()
        fitted(Saved(), logger=logger, enable_autolog_hparams=on)
        assert logger.hparams == expected


@effect
def plan(tmp_path):
    assert [one.name for one in quiet(plan=Plan({"batched_fetch": True})).run.techniques] == ["batched_fetch"]


def technique_of(**flags):
    [technique] = quiet(**flags).run.techniques
    return technique.name, technique.setting


@effect
def compile(tmp_path):
    assert technique_of(compile=True) == ("compile", "default")
    assert technique_of(compile="reduce-overhead") == ("compile", "reduce-overhead")


@effect
def channels_last(tmp_path):
    assert technique_of(channels_last=True) == ("channels_last", True)


@effect
def fused_optimizer(tmp_path):
    assert technique_of(fused_optimizer=True) == ("fused_optimizer", True)


@effect
def matmul_precision(tmp_path):
    assert fitted(Switches(), matmul_precision="medium").products == "medium"
    assert torch.get_float32_matmul_precision() == "highest"


@effect
def device_prefetch(tmp_path):
    names = [technique.name for technique in quiet(device_prefetch=True).run.techniques]
    assert names == ["pin_memory", "device_prefetch"]


@effect
def batched_fetch(tmp_path):
    trainer = quiet(batched_fetch=True)
    trainer.fit(Regression(), loader())
    assert trainer.run.techniques[0].acted  # that it changes no bit stands in test_same_weights


@effect
def activation_checkpointing(tmp_path):
    assert technique_of(activation_checkpointing="Block") == ("activation_checkpointing", "Block")


@effect
def activation_offload(tmp_path):
    assert technique_of(activation_offload=True) == ("activation_offload", True)
    with pytest.raises(hasten.HastenError, match="activation_checkpointing does not keep what it would move"):
        quiet(activation_offload=True, activation_checkpointing=True)


@effect
def chunked_loss(tmp_path):
    class Words(Regression):
        def training_step(self, batch, batch_idx):
            logits = self.net(batch[0]) @ torch.ones(1, 2**18)
            return torch.nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    plain = torch.nn.functional.cross_entropy
    trainer = quiet(chunked_loss=True, max_epochs=1, gradient_clip_val=1.0, accumulate_grad_batches=2)
    trainer.fit(Words(), loader())
    assert trainer.run.installed() == {"chunked_loss": "loss"}
    assert torch.nn.functional.cross_entropy is plain


@effect
def seed(tmp_path):
    quiet(seed=11)
    first = torch.rand(3)
    quiet(seed=11)
    assert torch.equal(torch.rand(3), first)


@effect
def checkpoint_format(tmp_path):
    for kind in ("hasten", "torch"):
        trainer = quiet(checkpoint_format=kind)
        trainer.fit(Regression(), loader())
        trainer.save_checkpoint(tmp_path / f"{kind}.ckpt")
    assert "state_dict" in torch.load(tmp_path / "torch.ckpt", weights_only=True)
    loaded = Regression.load_from_checkpoint(tmp_path / "hasten.ckpt")
    assert torch.equal(loaded.net[0].weight, trainer.model.net[0].weight)


@effect
def background_saves(tmp_path):
    from hasten.trainer.checkpoint.io import Files

    for on in (True, False):
        trainer = quiet(
            background_saves=on, enable_checkpointing=True, callbacks=[Exists(tmp_path, on)], default_root_dir=tmp_path
        )
        trainer.fit(Regression(), loader())
        assert isinstance(trainer.checkpointing.io, Files)


class Exists(Callback):
    """Whether a save that is asked for in training is there when the call returns."""

    def __init__(self, folder, background):
        self.path = folder / f"mid{background}.ckpt"
        self.background = background

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.path)
        assert self.background or self.path.is_file()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flag", FLAGS)
def test_flag(flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    EFFECTS[flag](tmp_path)
