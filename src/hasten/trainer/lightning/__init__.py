"""Lightning's modules, callbacks and loggers under hasten's Trainer: all that hasten knows of Lightning.

Nothing of this is used unless the script has imported Lightning itself, as `lightning.pytorch` or as
`pytorch_lightning`. Its modules and callbacks read a few names of their trainer that are no part of its public face;
`face.Face` answers to those.
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
    """Return a Python literal's value; a text that is none, as `bf16-mixed` and `01:30:00`, is itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # all that literal_eval may raise
        return text


class Lightning(Adapter):
    """Answers to hasten's Trainer about Lightning 2.5 and later."""

    name = "Lightning"
    log_name = "lightning.pytorch.trainer.trainer"  # one that its users have set up
    owners = ("LightningModule", "LightningDataModule")
    kinds_of_module = "`LightningModule` or a `hasten.Module`"

    def in_use(self) -> bool:
        """Return whether this process has imported it, under one of its names."""
        return bool(names.packages())

    @property
    def warning(self) -> type[Warning]:  # type: ignore[override]
        """Its category for warnings about what may be meant."""
        rooms = ("lightning.fabric.utilities.warnings", "lightning_fabric.utilities.warnings")
        return next((sys.modules[room].PossibleUserWarning for room in rooms if room in sys.modules), UserWarning)

    def bases(self, what: str) -> tuple[type, ...]:
        """Return its classes whose methods are defaults, of a "module", "callback" or "datamodule"."""
        found: list[type] = []
        for package in names.packages():
            core = sys.modules.get(f"{package.__name__}.core.hooks")
            data = [core.DataHooks, core.CheckpointHooks] if core else []
            if what == "module":
                found += [package.LightningModule, *([core.ModelHooks] if core else []), *data]
            elif what == "callback":
                found.append(package.Callback)
            else:
                found += [package.LightningDataModule, *data]
        return tuple(found)

    def error(self, message: str, fix: str = "") -> HastenError:
        """Return a HastenError that is its MisconfigurationException too."""
        return names.misconfigured(message, fix)

    def stopped(self, kind: type[SystemExit]) -> type[SystemExit]:
        """Return an exception that is its SIGTERMException too."""
        own = [sys.modules[f"{package.__name__}.utilities.exceptions"].SIGTERMException for package in names.packages()]
        return type("Stopped", (kind, *dict.fromkeys(own)), {})

    def environment_flags(self, kind: str, given: Collection[str]) -> dict[str, tuple[str, Any]]:
        """Return what `PL_TRAINER_MAX_EPOCHS=3` and the like say: numbers, True, None, lists; else the text itself.

        As there, the class of the Trainer is in the middle, and only flags of Lightning's Trainer are looked for.
        """
        flags = [name for name in inspect.signature(names.packages()[0].Trainer.__init__).parameters if name != "self"]
        variables = {name: f"PL_{kind.upper()}_{name.upper()}" for name in flags if name not in given}
        return {name: (there, _value(os.environ[there])) for name, there in variables.items() if os.environ.get(there)}

    def default_logger(self, root: str) -> Any:
        """Return TensorBoard where that is installed, else CSV files, as its own Trainer does."""
        loggers = importlib.import_module(f"{names.packages()[0].__name__}.loggers")
        try:
            return loggers.TensorBoardLogger(root)
        except ModuleNotFoundError:
            return loggers.CSVLogger(root)

    def silent_logger(self) -> Any:
        """Return its logger that logs nothing."""
        return importlib.import_module(f"{names.packages()[0].__name__}.loggers.logger").DummyLogger()

    def profilers(self) -> tuple[dict[str, Any], Any]:
        """Return its profilers by their names, and the one that does nothing."""
        room = importlib.import_module(f"{names.packages()[0].__name__}.profilers")
        named = {"simple": room.SimpleProfiler, "advanced": room.AdvancedProfiler, "pytorch": room.PyTorchProfiler}
        return named, room.PassThroughProfiler

    def default_progress(self) -> Any:
        """Return hasten's progress, with the attributes that people read of Lightning's."""
        return BarProgress()

    def default_summary(self, bars: list[Any]) -> Any:
        """Return its summary of a model; the one made with rich beside its progress bar made with rich."""
        packages = names.packages()
        rich = any(isinstance(bar, package.callbacks.RichProgressBar) for bar in bars for package in packages)
        return packages[0].callbacks.RichModelSummary() if rich else packages[0].callbacks.ModelSummary()

    def strategy(self, strategy: Any) -> tuple[str, dict[str, Any]] | None:
        """Return what one of its strategy objects comes to here."""
        return strategies.strategy(strategy)

    def guest(self, trainer: Trainer) -> Guest:
        """Return the face that modules, callbacks and datamodules of Lightning read; nothing where there are none."""
        if not any(map(names.is_lightning, (trainer.model, trainer.datamodule, *trainer.callbacks))):
            return Guest()
        return Face(trainer)

    def attribute(self, trainer: Trainer, name: str) -> Any:
        """Return what its classes read of their trainer beside its public face."""
        guest = trainer.engine.guest
        face = guest if isinstance(guest, Face) else trainer.__dict__.setdefault("_face", Face(trainer))
        if not hasattr(type(face), name) and name not in face.__dict__:
            return super().attribute(trainer, name)
        return getattr(face, name)

    def wrote(self, state: dict[str, Any]) -> bool:
        """Return whether its Trainer wrote a checkpoint."""
        return "pytorch-lightning_version" in state

    def epochs_done(self, state: dict[str, Any], progress: Progress) -> int:
        """Return the epochs that are done; the x-axis of the loggers goes on too."""
        fit = (state.get("loops") or {}).get("fit_loop", {})
        progress.logged_steps = fit.get("epoch_loop.state_dict", {}).get("_batches_that_stepped", 0)
        progress.total_batches = fit.get("epoch_loop.batch_progress", {}).get("total", {}).get("ready", 0)
        current = fit.get("epoch_progress", {}).get("current", {})
        return int(current.get("processed", state.get("epoch", 0)))
