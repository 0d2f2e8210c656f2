"""LearningRateMonitor, Timer, LambdaCallback, GradientAccumulationScheduler, StepMonitor."""

import csv
import time
from datetime import timedelta

import pytest
import torch

from hasten import HastenError
from hasten.evidence import Phase, read_evidence
from hasten.evidence.live import read_live
from hasten.trainer.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    StepMonitor,
    Timer,
)
from hasten.trainer.loggers import CSVLogger
from tests.trainer.callbacks.trainings import BATCHES, Regression, trained


def column(logger, name):
    with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row.get(name)]


class Scheduled(Regression):
    interval = "epoch"

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


def test_learning_rates_by_epoch(tmp_path):
    logger, monitor = CSVLogger(tmp_path), LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    trainer = trained(tmp_path, [monitor], Scheduled(), epochs=3, logger=logger)
    assert column(logger, "lr-SGD") == [(0, 0.1), (BATCHES, 0.05), (2 * BATCHES, 0.025)]
    assert monitor.lrs == {"lr-SGD": [0.1, 0.05, 0.025]}
    assert column(logger, "lr-SGD-momentum")[0] == (0, 0.9)
    assert column(logger, "lr-SGD-weight_decay")[0] == (0, 0.01)
    assert float(trainer.callback_metrics["lr-SGD"]) == pytest.approx(0.025)


def test_learning_rates_by_step(tmp_path):
    class ByStep(Scheduled):
        interval = "step"

    logger = CSVLogger(tmp_path)
    trained(tmp_path, [LearningRateMonitor()], ByStep(), logger=logger, log_every_n_steps=2)
    assert column(logger, "lr-SGD") == [(1, 0.05), (3, 0.0125)]


def test_names_of_groups(tmp_path):
    class Groups(Regression):
        def configure_optimizers(self):
            named = [{"params": self.layers[0].parameters(), "name": "body"}, {"params": self.layers[2].parameters()}]
            return torch.optim.Adam(named, lr=0.1)

    monitor = LearningRateMonitor("epoch")
    trained(tmp_path, [monitor], Groups(), logger=CSVLogger(tmp_path))
    assert monitor.lrs == {"lr-Adam/body": [0.1], "lr-Adam/pg2": [0.1]}


def test_names_of_several_optimizers_and_schedulers(tmp_path):
    class Two(Regression):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            pass

        def configure_optimizers(self):
            two = [torch.optim.SGD([p], lr=0.1) for p in (self.layers[0].weight, self.layers[2].weight)]
            adam = torch.optim.Adam([self.layers[0].bias], lr=0.2)
            scheduler = {"scheduler": torch.optim.lr_scheduler.StepLR(two[0], 1), "name": "mine"}
            return [*two, adam], [scheduler]

    monitor = LearningRateMonitor("epoch")
    trained(tmp_path, [monitor], Two(), logger=CSVLogger(tmp_path), validate=False)
    assert list(monitor.lrs) == ["mine", "lr-SGD", "lr-Adam"]


def test_learning_rates_need_a_logger(tmp_path):
    with pytest.raises(HastenError, match="logger"):
        trained(tmp_path, [LearningRateMonitor()])
    with pytest.raises(HastenError, match="logging_interval"):
        LearningRateMonitor("batch")


@pytest.mark.parametrize(("interval", "steps"), [("step", 1), ("epoch", BATCHES)])
def test_a_timer_ends_training(tmp_path, interval, steps):
    class Late(Timer):
        def on_train_start(self, trainer, module):
            super().on_train_start(trainer, module)
            self._start["train"] -= 3600  # an hour ago

    assert trained(tmp_path, [Late("00:01:00:00", interval)], epochs=5).global_step == steps


def test_a_timer_measures_and_goes_on_after_a_resume(tmp_path):
    timer, kept = Timer(), ModelCheckpoint(tmp_path / "kept", "last")
    trained(tmp_path, [timer, kept])
    assert timer.time_elapsed("train") == timer.end_time() - timer.start_time() > 0
    assert timer.time_elapsed("validate") > 0
    assert timer.time_remaining() is None
    timer._before = 3600.0
    again = Timer(timedelta(minutes=30))
    again.load_state_dict(timer.state_dict())
    trainer = trained(tmp_path, [again], epochs=5)
    assert trainer.global_step == 0


@pytest.mark.parametrize("duration", ["1:00", "abc", {"houres": 1}])
def test_durations_that_cannot_be_read(duration):
    with pytest.raises(HastenError, match="not a duration"):
        Timer(duration)


def test_functions_as_hooks(tmp_path):
    calls = []
    callback = LambdaCallback(
        on_train_start=lambda trainer, module: calls.append("start"),
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: calls.append(batch_idx),
    )
    trained(tmp_path, [callback, LambdaCallback(on_fit_end=lambda trainer, module: calls.append("end"))])
    assert calls == ["start", *range(BATCHES), "end"]
    with pytest.raises(HastenError, match="did you mean 'on_train_start'"):
        LambdaCallback(on_training_start=print)


def test_accumulation_by_epoch(tmp_path):
    steps = LambdaCallback(on_train_epoch_end=lambda trainer, module: seen.append(trainer.global_step))
    seen = []
    trained(tmp_path, [GradientAccumulationScheduler({1: 2, 2: 4}), steps], epochs=3)
    assert seen == [BATCHES, BATCHES + BATCHES // 2, BATCHES + BATCHES // 2 + BATCHES // 4]


@pytest.mark.parametrize("scheduling", [{}, {-1: 2}, {0: 0}, {0.5: 2}])
def test_schedules_that_make_no_sense(scheduling):
    with pytest.raises(HastenError, match="not a schedule"):
        GradientAccumulationScheduler(scheduling)


def test_the_evidence_of_a_training(tmp_path):
    trained(tmp_path, [StepMonitor()], epochs=3)
    evidence = read_evidence(tmp_path / "evidence.json")
    assert (evidence.steps, evidence.ended, evidence.step_of) == (3 * BATCHES, "finished", "batch")
    assert len(evidence.losses) == 3 * BATCHES
    assert evidence.losses[0] > evidence.losses[-1] > 0
    for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        assert all(step[phase] > 0 for step in evidence.step_phases), phase
    validated = [step[Phase.VALIDATION] > 0 for step in evidence.step_phases]
    assert validated == ([False] * (BATCHES - 1) + [True]) * 3
    assert [one.batches for one in evidence.passes] == [BATCHES] * 3
    assert [(one.role, one.batches) for one in evidence.loaders] == [("train", BATCHES), ("validation", BATCHES)]
    assert evidence.models[0].parameters == 49
    assert (evidence.optimizers[0].name, evidence.optimizers[0].steps) == ("SGD", 3 * BATCHES)


def test_while_it_trains_a_live_file_lies_beside_the_evidence(tmp_path):
    seen = []

    class Wait(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            for _ in range(1000 * (batch_idx == 3 and not seen)):
                if (tmp_path / "evidence.live.json").exists():
                    seen.append(read_live(tmp_path / "evidence.live.json"))
                    break
                time.sleep(0.02)

    trained(tmp_path, [StepMonitor(), Wait()], epochs=1)
    assert seen[0].so_far.steps <= 3
    assert seen[0].evidence == str(tmp_path / "evidence.json")
    assert read_evidence(tmp_path / "evidence.json").listened == "trainer"
    assert not (tmp_path / "evidence.live.json").exists()


def test_the_evidence_of_a_training_that_fails(tmp_path):
    class Crash(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError):
        trained(tmp_path, [StepMonitor(tmp_path / "e.json"), Crash()])
    evidence = read_evidence(tmp_path / "e.json")
    assert (evidence.ended, evidence.error) == ("failed", "RuntimeError: out of luck")
    assert evidence.steps == 2
