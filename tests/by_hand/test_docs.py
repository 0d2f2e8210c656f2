"""docs/setup.md says what is true: its loop runs, and what it saves is plain torch's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from hasten.techniques import CATALOGUE

PAGE = Path(__file__).parents[2] / "docs" / "setup.md"


def test_the_loop_of_the_page_runs(tmp_path: Path) -> None:
    loop = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    subprocess.run([sys.executable, "-c", loop], cwd=tmp_path, check=True, timeout=100)
    assert (tmp_path / "last.pt").stat().st_size


def test_the_techniques_that_the_page_names_exist() -> None:
    named = {"fused_optimizer", "loader_workers", "channels_last", "activation_checkpointing", "allocator"}
    assert named <= set(CATALOGUE)
    assert all(f"`{name}" in PAGE.read_text() for name in named)
