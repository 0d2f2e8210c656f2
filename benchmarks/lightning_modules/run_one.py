"""Trains one repository's module under one Trainer and writes what happened. `compare.py` starts it in a process.

python run_one.py NAME lightning|hasten ROOT OUT.json
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SEED = 1234


def name_torchvision_ops() -> None:
    """Names torchvision's two compiled operators that its import asks for.

    The wheel of torchvision on PyPI is built for CUDA; beside torch for CPU its compiled part does not load, and
    `import torchvision` (so also `import lightning`) fails for want of these names. Its Python part is all we need.
    """
    import torch

    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for op in ("nms", "qnms"):
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        name_torchvision_ops.library = library  # type: ignore[attr-defined]  # kept alive: its end undoes it


def trainer_class(which: str, package: Any) -> Any:
    """The Trainer: Lightning's own from the package the module uses, or hasten's."""
    if which == "hasten":
        from hasten import Trainer

        return Trainer
    return package.Trainer


def train(entry: dict[str, Any], which: str, root: Path, work: Path) -> dict[str, Any]:
    """Builds the module with its driver, fits it, and gives back the record."""
    import torch
    from recorder import digest, exact, metrics, random_states, recorder

    torch.set_num_threads(1)
    source = root / entry["name"]
    sys.path[:0] = [str(source / part) for part in entry["python_path"]]
    package = importlib.import_module(entry["package"])
    driver = importlib.import_module(f"drivers.{entry['name']}")
    package.seed_everything(SEED, workers=True)
    pieces = driver.build(package, work)
    keep = recorder(package.Callback)
    given = {
        "accelerator": "cpu",
        "devices": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(work),
        **pieces.trainer,
    }
    given["callbacks"] = [*given.get("callbacks", []), keep]
    trainer = trainer_class(which, package)(**given)
    start = time.perf_counter()
    trainer.fit(pieces.module, **pieces.fit)
    seconds = time.perf_counter() - start
    record: dict[str, Any] = {
        "steps": keep.steps,
        "validations": keep.validations,
        "final_metrics": metrics(trainer.callback_metrics),
        "final_logged": metrics(trainer.logged_metrics),
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "weights": digest(pieces.module.state_dict()),
        "optimizers": digest([optimizer.state_dict() for optimizer in trainer.optimizers]),
        "random_states": random_states(),
    }
    for call, given in pieces.after.items():
        result = getattr(trainer, call)(pieces.module, **given)
        record[call] = (
            digest(result) if call == "predict" else [{k: exact(v) for k, v in row.items()} for row in result]
        )
    return {**record, "hooks": keep.hooks, "seconds": seconds}


def main() -> None:
    """Reads the arguments, trains, writes the JSON file."""
    name, which, root, out = sys.argv[1], sys.argv[2], Path(sys.argv[3]).resolve(), Path(sys.argv[4]).resolve()
    entries = tomllib.loads((HERE / "modules.toml").read_text())["module"]
    entry = next(entry for entry in entries if entry["name"] == name)
    sys.path.insert(0, str(HERE))
    sys.path.append(str(root / ".packages"))
    name_torchvision_ops()
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as work:
        os.chdir(work)
        out.write_text(json.dumps(train(entry, which, root, Path(work)), indent=1))


if __name__ == "__main__":
    main()
