"""docs/setup.md says what is true: its loop runs, and what it saves is plain torch's."""

from __future__ import annotations

import re
from pathlib import Path

from hasten.techniques import CATALOGUE
from tests.taps.forks import forked
from tests.taps.scripts import write

PAGE = Path(__file__).parents[2] / "docs" / "setup.md"


def test_the_loop_of_the_page_runs(tmp_path: Path) -> None:
    loop = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    write(tmp_path, "train.py", loop)
    ended = forked(tmp_path, "train.py")
    assert ended.code == 0, ended.err
    assert (tmp_path / "last.pt").stat().st_size


def test_the_techniques_that_the_page_names_exist() -> None:
    named = {"fused_optimizer", "loader_workers", "channels_last", "activation_checkpointing", "allocator"}
    assert named <= set(CATALOGUE)
    assert all(f"`{name}" in PAGE.read_text() for name in named)
