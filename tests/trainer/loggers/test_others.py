"""TensorBoard as it reads what was written; loggers whose library is missing; imports."""

import importlib.util
import subprocess
import sys

import pytest

from hasten import HastenError
from hasten.trainer.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger, remote


def test_tensorboard_reads_what_was_logged(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({"lr": 0.1, "model": {"width": 8}})
    for step in range(5):
        logger.log_metrics({"loss": 1 / (step + 1)}, step)
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert logger.log_dir == str(tmp_path / "hasten_logs" / "version_0")
    assert [(event.step, round(event.value, 4)) for event in events.Scalars("loss")][:2] == [(0, 1.0), (1, 0.5)]
    assert events.Scalars("hp_metric")[0].value == -1


@pytest.mark.parametrize(
    ("logger", "package"),
    [(TensorBoardLogger, "tensorboard"), (WandbLogger, "wandb"), (MLFlowLogger, "mlflow")],
)
def test_a_missing_library_is_named_with_what_to_install(tmp_path, monkeypatch, logger, package):
    def without(name, *more, found=importlib.util.find_spec):
        return None if name == package else found(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    monkeypatch.setattr(remote, "find_spec", without)
    with pytest.raises(HastenError, match=f"pip install {package}"):
        logger(*[tmp_path] if logger is TensorBoardLogger else [])


def test_importing_loggers_and_callbacks_imports_none_of_their_libraries():
    code = "import sys, hasten.trainer.loggers, hasten.trainer.callbacks\n"
    code += "print([m for m in ('rich', 'tensorboard', 'wandb', 'mlflow', 'yaml', 'lightning') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
