"""The Lightning adapter: run Lightning's modules, callbacks and loggers under hasten's Trainer.

It is used only if the script has imported Lightning itself, as `lightning.pytorch` or as `pytorch_lightning`.
Lightning's modules and callbacks read a few attributes of their trainer that are not part of its public API;
`face.Face` provides those, with `loops` and `parts` for the objects that they lead to.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from hasten.errors import HastenError
from hasten.trainer.adapter import Adapter, Guest
from hasten.trainer.lightning import names, strategies
from hasten.trainer.lightning.bar import BarProgress
from hasten.trainer.lightning.face import Face
from hasten.trainer.lightning.loading import teach_loading as teach_loading

if TYPE_CHECKING:
    from hasten.trainer.progress import Progress
    from hasten.trainer.trainer import Trainer


def _value(text: str) -> Any:
    """Return the value of a Python literal; a text that is none (`bf16-mixed`, `01:30:00`) as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # all exceptions of literal_eval
        return text


class Lightning(Adapter):
    """Answers hasten's Trainer's questions about Lightning 2.5 and later."""

    name = "Lightning"
    log_name = "lightning.pytorch.trainer.trainer"  # Lightning's own logger, which its users have configured
    owners = ("LightningModule", "LightningDataModule")
    kinds_of_module = "`LightningModule` or a `hasten.Module`"

    def in_use(self) -> bool:
        """Return whether this process has imported Lightning, under either name."""
        return bool(names.packages())

    @property
    def warning(self) -> type[Warning]:  # type: ignore[override]
        """Lightning's category for warnings about what the user may have meant."""
        modules = ("lightning.fabric.utilities.warnings", "lightning_fabric.utilities.warnings")
        return next(
            (sys.modules[module].PossibleUserWarning for module in modules if module in sys.modules), UserWarning
        )

    def bases(self, kind: str) -> tuple[type, ...]:
        """Return Lightning's base classes of a "module", "callback" or "datamodule", whose methods are defaults."""
        classes: list[type] = []
        for package in names.packages():
            hooks = sys.modules.get(f"{package.__name__}.core.hooks")
            data = [hooks.DataHooks, hooks.CheckpointHooks] if hooks else []
            if kind == "module":
                classes += [package.LightningModule, *([hooks.ModelHooks] if hooks else []), *data]
            elif kind == "callback":
                classes.append(package.Callback)
            else:
                classes += [package.LightningDataModule, *data]
        return tuple(classes)

    def error(self, message: str, fix: str = "") -> HastenError:
        """Return a HastenError that is also Lightning's MisconfigurationException."""
        return names.misconfigured(message, fix)

    def stopped(self, kind: type[SystemExit]) -> type[SystemExit]:
        """Return an exception class that is also Lightning's SIGTERMException."""
        own = [sys.modules[f"{package.__name__}.utilities.exceptions"].SIGTERMException for package in names.packages()]
        return type("Stopped", (kind, *dict.fromkeys(own)), {})

    def environment_flags(self, kind: str, given_flags: Collection[str]) -> dict[str, tuple[str, Any]]:
        """Return the flags set by environment variables such as `PL_TRAINER_MAX_EPOCHS=3`.

        Numbers, True, None and lists are parsed; other text is returned as it is. As in Lightning, the middle of the
        variable's name is the class of the Trainer, and only flags of Lightning's Trainer are looked up.
        """
        flags = [name for name in inspect.signature(names.packages()[0].Trainer.__init__).parameters if name != "self"]
        variables = {name: f"PL_{kind.upper()}_{name.upper()}" for name in flags if name not in given_flags}
        return {
            name: (variable, _value(os.environ[variable]))
            for name, variable in variables.items()
            if os.environ.get(variable)
        }

    def default_logger(self, root: str) -> Any:
        """Return Lightning's TensorBoard logger, or its CSV logger if TensorBoard is missing, as its Trainer does."""
        loggers = importlib.import_module(f"{names.packages()[0].__name__}.loggers")
        try:
            return loggers.TensorBoardLogger(root)
        except ModuleNotFoundError:
            return loggers.CSVLogger(root)

    def silent_logger(self) -> Any:
        """Return Lightning's logger that logs nothing."""
        return importlib.import_module(f"{names.packages()[0].__name__}.loggers.logger").DummyLogger()

    def profilers(self) -> tuple[dict[str, Any], Any]:
        """Return Lightning's profilers by name, and the one that does nothing."""
        profilers = importlib.import_module(f"{names.packages()[0].__name__}.profilers")
        by_name = {
            "simple": profilers.SimpleProfiler,
            "advanced": profilers.AdvancedProfiler,
            "pytorch": profilers.PyTorchProfiler,
        }
        return by_name, profilers.PassThroughProfiler

    def default_progress(self) -> Any:
        """Return hasten's progress display, with the attributes that users read from Lightning's."""
        return BarProgress()

    def default_summary(self, bars: list[Any]) -> Any:
        """Return Lightning's model summary; the rich one if one of the progress bars is Lightning's rich one."""
        packages = names.packages()
        rich = any(isinstance(bar, package.callbacks.RichProgressBar) for bar in bars for package in packages)
        return packages[0].callbacks.RichModelSummary() if rich else packages[0].callbacks.ModelSummary()

    def strategy(self, strategy: Any) -> tuple[str, dict[str, Any]] | None:
        """Return the kind and options for one of Lightning's strategy objects."""
        return strategies.strategy(strategy)

    def guest(self, trainer: Trainer) -> Guest:
        """Return the face for Lightning's modules, callbacks and datamodules; an empty Guest if there are none."""
        if not any(map(names.is_lightning, (trainer.model, trainer.datamodule, *trainer.callbacks))):
            return Guest()
        return Face(trainer)

    def attribute(self, trainer: Trainer, name: str) -> Any:
        """Return an attribute that Lightning's classes read from their trainer besides its public ones."""
        guest = trainer.engine.guest
        face = guest if isinstance(guest, Face) else trainer.__dict__.setdefault("_face", Face(trainer))
        if not hasattr(type(face), name) and name not in face.__dict__:
            return super().attribute(trainer, name)
        return getattr(face, name)

    def wrote(self, state: dict[str, Any]) -> bool:
        """Return whether Lightning's Trainer wrote this checkpoint."""
        return "pytorch-lightning_version" in state

    def epochs_done(self, state: dict[str, Any], progress: Progress) -> int:
        """Return the epochs done in a checkpoint of Lightning's; restore the counters that loggers use as x-axis."""
        fit = (state.get("loops") or {}).get("fit_loop", {})
        progress.logged_steps = fit.get("epoch_loop.state_dict", {}).get("_batches_that_stepped", 0)
        progress.total_batches = fit.get("epoch_loop.batch_progress", {}).get("total", {}).get("ready", 0)
        current = fit.get("epoch_progress", {}).get("current", {})
        return int(current.get("processed", state.get("epoch", 0)))
