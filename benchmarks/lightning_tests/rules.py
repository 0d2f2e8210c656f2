"""What counts as Lightning's public face: lists of names, and small questions about them. README.md says why."""

from __future__ import annotations

import re

OUT_OF_SCOPE = (
    "accelerators/",  # chips other than the CPU
    "strategies/",
    "plugins/",
    "graveyard/",
    "deprecated_api/",
    "serve/",
    "helpers/",
    "checkpointing/test_legacy_checkpoints.py",  # checkpoint files from another place
    "utilities/migration/",  # converts checkpoint files of Lightning 1.x
    "utilities/testing/",
    "test_cli.py",  # LightningCLI builds Lightning's own Trainer
    "models/test_tpu.py",
    "models/test_gpu.py",
    "models/test_fabric_integration.py",
    "models/test_torch_tensorrt.py",
)
"""Folders and files under `tests_pytorch` that are not looked at."""

PUBLIC_MODULES = (
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "lightning.pytorch.profilers",
    "lightning.pytorch.demos",
    "lightning.pytorch.core",
    "lightning.pytorch.tuner",
    "lightning.pytorch.trainer.states",  # the values of `trainer.state`
    "lightning.pytorch.utilities.exceptions",
    "lightning.pytorch.utilities.combined_loader",
    "lightning.pytorch.utilities.rank_zero",
    "lightning.pytorch.utilities.seed",
    "lightning.pytorch.utilities.types",
    "lightning.pytorch.utilities.warnings",
    "lightning.pytorch.utilities.model_summary",
    "lightning.pytorch.utilities.model_helpers",
    "lightning.pytorch.utilities.grads",
    "lightning.pytorch.utilities.memory",
    "lightning.pytorch.utilities.compile",
    "lightning.fabric.utilities.seed",
    "lightning.fabric.utilities.rank_zero",
    "lightning.fabric.utilities.warnings",
    "lightning.fabric.utilities.exceptions",
    "lightning.fabric.utilities.types",
)
"""Modules whose names (without a leading underscore) a test may use and stay public."""

PUBLIC_NAMES = (
    "lightning.pytorch.utilities.CombinedLoader",
    "lightning.pytorch.utilities.grad_norm",
    "lightning.pytorch.utilities.parsing.AttributeDict",
    "lightning.pytorch.utilities.rank_zero_only",
    "lightning.pytorch.utilities.rank_zero_info",
    "lightning.pytorch.utilities.rank_zero_warn",
    "lightning.pytorch.utilities.rank_zero_deprecation",
    "lightning.pytorch.utilities.move_data_to_device",
    "lightning.pytorch.utilities.GradClipAlgorithmType",
    "lightning.fabric.seed_everything",
    "lightning.fabric.utilities.cloud_io._load",  # torch.load with a path or an address
    "lightning.fabric.utilities.cloud_io.get_filesystem",
    "lightning.fabric.utilities.apply_func.move_data_to_device",
)

FLAG_MODULES = ("lightning.pytorch.utilities.imports", "lightning.fabric.utilities.imports")
"""They only say what is installed here, so even their private names are allowed."""

INTERNAL_ATTRIBUTES = frozenset(
    "fit_loop validate_loop test_loop predict_loop epoch_loop epoch_progress batch_progress optim_progress "
    "optimizer_loop automatic_optimization_loop manual_optimization_loop precision_plugin checkpoint_io "
    "checkpoint_connector callback_connector data_connector accelerator_connector".split()
)
"""Attributes that are Lightning's own machinery, whatever they hang on."""

INTERNAL_ON_TRAINER = frozenset({"strategy", "accelerator", "lightning_optimizers", "distributed_sampler_kwargs"})
"""Attributes that are Lightning's own machinery when they hang on a trainer."""

NEAR = frozenset(
    {
        "strategy.root_device",
        "strategy.barrier",
        "strategy.broadcast",
        "fit_loop.max_epochs",
        "precision_plugin.__class__",
    }
)
"""Looks inside that people's own code takes too. A test with no other look inside is `near`, and counted apart."""

LOOP_STATE = frozenset({"fit_loop", "validate_loop", "test_loop", "predict_loop"})
"""Keys of `checkpoint["loops"]`: Lightning's own bookkeeping inside a checkpoint file."""

NOT_LIGHTNINGS = frozenset({"_modules", "_parameters", "_buffers", "_forward_hooks", "_replace", "_asdict"})
"""Private names that belong to torch or Python."""

HARMLESS_FIXTURES = frozenset({"cuda_count_0", "mps_count_0"})
"""They say that there is no GPU, which is so here."""

HARDWARE = frozenset({"min_cuda_gpus", "bf16_cuda", "mps", "tpu", "deepspeed", "bitsandbytes", "tensorrt"})
"""Arguments of their `RunIf` that ask for a machine or package which is out of scope."""

TRAINERS = (
    "lightning.pytorch.Trainer",
    "lightning.pytorch.trainer.Trainer",
    "lightning.pytorch.trainer.trainer.Trainer",
)

MACHINERY = frozenset("fabric loops strategies plugins accelerators overrides utilities trainer cli".split())
"""Parts of `lightning.pytorch` (and `lightning.fabric`) that are internal unless listed above."""

FLAG = re.compile(r"_[A-Z0-9_]*(AVAILABLE|GREATER_EQUAL|IS_WINDOWS)[A-Z0-9_]*")
"""Names such as `_OMEGACONF_AVAILABLE`: they only say what is installed here."""

ELSEWHERE = re.compile(r"^(fsdp|deepspeed|model_parallel|xla|single_xla|tpu|gpu|cuda|mps|hpu|transformer-engine)")
"""Values of `strategy=`, `accelerator=`, `precision=` that are out of scope."""


def inside(name: str, roots: tuple[str, ...]) -> bool:
    """Whether ``name`` is one of ``roots`` or lies in one."""
    return any(name == root or name.startswith(root + ".") for root in roots)


def is_lightning(name: str) -> bool:
    """Whether a dotted name belongs to Lightning."""
    return inside(name, ("lightning", "lightning_fabric", "pytorch_lightning"))


def is_private(word: str) -> bool:
    """A leading underscore, but not `__dunder__`, and not the throw-away `_`."""
    return word.startswith("_") and word.strip("_") != "" and not (word.startswith("__") and word.endswith("__"))


def private_part(name: str) -> bool:
    """Whether any component of a dotted name is private."""
    return any(is_private(word) for word in name.split("."))


def is_public(name: str) -> bool:
    """Whether the use of this dotted Lightning name leaves a test public.

    A name directly in `lightning.pytorch` (Trainer, LightningModule, seed_everything, ...) is public, and so is
    what `PUBLIC_MODULES` and `PUBLIC_NAMES` list. A module alone (`import lightning.pytorch as pl`) says nothing.
    """
    last = name.rpartition(".")[2]
    if inside(name, PUBLIC_NAMES) or inside(name, FLAG_MODULES) or FLAG.fullmatch(last):
        return True
    if private_part(name):
        return False
    if inside(name, PUBLIC_MODULES):
        return True
    after = re.sub(r"^(lightning\.pytorch|pytorch_lightning|lightning)\.?", "", name)
    first, _, rest = after.partition(".")
    if first in MACHINERY and not rest.startswith("trainer.Trainer") and not rest.startswith("Trainer"):
        return not rest  # the bare module, as in `import lightning.fabric`
    return True


def may_patch(name: str) -> bool:
    """Whether a test that replaces this dotted Lightning name stays public.

    A public method of a public class may be replaced (`TensorBoardLogger.log_metrics`, `Trainer.save_checkpoint`),
    and a flag that says a logger's package is installed. Everything else is a name inside a module: internal.
    """
    *path, last = name.split(".")
    if re.fullmatch(r"_[A-Z0-9_]*AVAILABLE", last):
        return inside(name, ("lightning.pytorch.loggers", "lightning.pytorch.callbacks"))
    return is_public(name) and bool(path) and path[-1][:1].isupper()
