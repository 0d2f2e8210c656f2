"""Flags of the Trainer that say where it computes, in which numbers, and how strictly."""

import pytest
import torch

import hasten
from tests.trainer.flags.trained import Counting, fitted
from tests.trainer.trainings import Regression, loader, quiet

pytestmark = pytest.mark.filterwarnings("ignore")


def test_accelerator(tmp_path):
    assert quiet(accelerator="cpu").device == torch.device("cpu")
    assert quiet(accelerator="auto").device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_strategy(tmp_path):
    # `devices` and `sync_batchnorm` below start processes by it.
    assert quiet(strategy="ddp").engine.strategy.collective == "ddp"


def test_devices(tmp_path):
    sizes = tmp_path / "sizes"

    class Sized(Regression):
        def on_train_start(self):
            with sizes.open("a") as file:
                file.write(f"{self.trainer.world_size}{self.trainer.global_rank} ")

    before = quiet(devices=2, accelerator="cpu", strategy="ddp_fork")  # scripts divide their batch by it
    assert (before.world_size, before.num_devices, before.node_rank) == (2, 2, 0)
    fitted(Sized(), devices=2, strategy="ddp_fork")
    assert sorted(sizes.read_text().split()) == ["20", "21"]


def test_num_nodes(tmp_path):
    with pytest.raises(hasten.HastenError, match="num_nodes=2"):
        fitted(num_nodes=2)


def test_use_distributed_sampler(tmp_path):
    for on, sizes in ((True, ["2", "2"]), (False, ["4", "4"])):
        seen = tmp_path / f"batches{on}"

        class Sized(Regression):
            def on_train_start(self):
                with seen.open("a") as file:  # noqa: B023
                    file.write(f"{self.trainer.num_training_batches} ")

        fitted(Sized(), devices=2, strategy="ddp_fork", use_distributed_sampler=on)
        assert seen.read_text().split() == sizes


def test_sync_batchnorm(tmp_path):
    said = "runs on GPUs only" if not torch.cuda.is_available() else "Rank"
    with pytest.raises(hasten.HastenError, match=said):
        fitted(devices=2, strategy="ddp_fork", sync_batchnorm=True)


def test_precision(tmp_path):
    assert fitted(precision="bf16-mixed").autocast
    assert not fitted().autocast
    assert fitted(precision="64-true").net[0].weight.dtype == torch.float64


def test_deterministic(tmp_path):
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


def test_benchmark(tmp_path):
    before = torch.backends.cudnn.benchmark
    try:
        assert fitted(Switches(), benchmark=True).benchmark
        assert torch.backends.cudnn.benchmark is before
        assert not fitted(Switches(), benchmark=False).benchmark
    finally:
        torch.backends.cudnn.benchmark = before


def test_matmul_precision(tmp_path):
    assert fitted(Switches(), matmul_precision="medium").products == "medium"
    assert torch.get_float32_matmul_precision() == "highest"


def test_inference_mode(tmp_path):
    for on in (True, False):
        module = Counting()
        quiet(inference_mode=on).validate(module, loader(), verbose=False)
        assert (module.inference, module.gradients) == (on, False)
    module = fitted(validation=loader())  # within fit weights must stay ordinary tensors
    assert (module.inference, module.gradients) == (False, False)


def test_detect_anomaly(tmp_path):
    assert fitted(detect_anomaly=True).anomaly
    assert not fitted().anomaly
    assert not torch.is_anomaly_enabled()

    class Bad(Regression):
        def training_step(self, batch, batch_idx):
            return (super().training_step(batch, batch_idx) * 0).sqrt().mul(0)

    with pytest.raises(RuntimeError, match="returned nan values"):
        fitted(Bad(), detect_anomaly=True)
