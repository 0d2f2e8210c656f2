"""Lets the torchvision from PyPI load beside a CPU-only torch; put on PYTHONPATH for the public scripts only.

The wheel on PyPI is built for CUDA. Beside a CPU torch its compiled operators do not load, and `import
torchvision` then stops with "operator torchvision::nms does not exist". None of these scripts uses such an
operator, so this package declares the two missing names, without a kernel (a call of them still raises),
hands over to the installed torchvision, and steps aside: all classes and functions are torchvision's own.

CIFAR-10 is checked by torchvision against the checksums of the original archive. Ours is rebuilt from Parquet
by `prepare.py`, so the checksums are dropped; nothing else of the dataset changes.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent.parent

spec = PathFinder.find_spec("torchvision", [p for p in sys.path if p and Path(p).resolve() != HERE])
if spec is None or spec.loader is None:
    raise ModuleNotFoundError("torchvision itself is not installed beside this stand-in", name="torchvision")

if torch.version.cuda is None:
    for operator in ("nms", "qnms"):
        signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{operator}", signature)

module = module_from_spec(spec)
sys.modules["torchvision"] = module
spec.loader.exec_module(module)

cifar10 = module.datasets.CIFAR10
cifar10.train_list = [[name, None] for name, _ in cifar10.train_list]
cifar10.test_list = [[name, None] for name, _ in cifar10.test_list]
cifar10.meta = {**cifar10.meta, "md5": None}
