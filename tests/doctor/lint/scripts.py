"""Scripts to check: a head that all share, and training loops around given lines."""

from __future__ import annotations

import textwrap
from pathlib import Path

from hasten.doctor.lint.check import SourceFinding, check_text
from hasten.doctor.lint.fix import FixResult, apply_fixes
from hasten.doctor.source.read import read_text

HEAD = """\
import gc
import math
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.nn.parallel import DistributedDataParallel as DDP

device = torch.device("cuda")
model = nn.Linear(4, 2).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
"""


def script(code: str) -> str:
    """The head and this code."""
    return f"{HEAD}{textwrap.dedent(code)}\n"


def training(lines: str, before: str = "", after: str = "", loader: str = "loader") -> str:
    """A training at module level: `lines` at the end of each step, `before` and `after` the loop over steps."""
    return script(
        "\n".join(
            [
                "for epoch in range(3):",
                *(f"    {line}" for line in textwrap.dedent(before).splitlines()),
                f"    for i, (x, y) in enumerate({loader}):",
                "        x, y = x.to(device), y.to(device)",
                "        optimizer.zero_grad()",
                "        out = model(x)",
                "        loss = F.cross_entropy(out, y)",
                "        loss.backward()",
                "        optimizer.step()",
                *(f"        {line}" for line in textwrap.dedent(lines).splitlines()),
                *(f"    {line}" for line in textwrap.dedent(after).splitlines()),
                "",
            ]
        )
    )


def write(folder: Path, code: str) -> Path:
    """As a file."""
    path = folder / "train.py"
    path.write_text(code, encoding="utf-8")
    return path


def found(folder: Path, code: str, name: str = "") -> list[SourceFinding]:
    """What is found in this code, by this rule."""
    return [one for one in check_text(read_text(write(folder, code))) if name in ("", one.finding.name)]


def fixed(folder: Path, code: str, *select: str) -> FixResult:
    """Fix this code in memory."""
    return apply_fixes(read_text(write(folder, code)), select)
