"""docs/nn.md says what is true: its code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "nn.md"


def test_the_code_of_the_page_runs() -> None:
    names: dict[str, Any] = {}
    in_less_memory, in_parallel = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(in_less_memory, names)
    assert names["loss"].isfinite()
    assert names["guesses"].shape == (4,)
    exec(in_parallel, names)
    assert names["loss"].isfinite()
    assert names["accuracy_needs"].shape == (7, 1000)
