"""The Python that the documentation shows runs as it stands: each page's blocks, one after the other.

That of the Trainer's pages does so in `tests/trainer/test_docs.py`, that of docs/nn.md in `tests/nn/test_docs.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.taps.forks import launched
from tests.taps.scripts import PYTHON

ROOT = Path(__file__).parents[1]

TWO_MODELS = """
from torch import nn
maker, judge = nn.Linear(8, 8), nn.Linear(8, 1)
maker_optimizer, judge_optimizer = torch.optim.SGD(maker.parameters()), torch.optim.SGD(judge.parameters())
"""


def script(page: str, before: dict[int, str]) -> str:
    """The blocks of a page as one script; `before` holds what the reader has at hand before a block, by its number."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert blocks
    # What a page guards by __main__ starts processes, and each would run the page's other blocks again.
    blocks = [block for block in blocks if "__main__" not in block]
    return "\n".join(before.get(number, "") + block for number, block in enumerate(blocks))


@pytest.mark.parametrize(
    ("page", "before"),
    [
        pytest.param("docs/batch.md", {}, id="batch"),
        pytest.param("docs/embeddings.md", {}, id="embeddings"),
        # slow: they compile models, or tune while they train
        pytest.param("docs/setup.md", {1: TWO_MODELS}, id="setup", marks=pytest.mark.slow),
        pytest.param("README.md", {}, id="readme", marks=pytest.mark.slow),
    ],
)
def test_the_code_of_a_page_runs(page: str, before: dict[int, str], tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(script(page, before))
    done = launched(tmp_path, PYTHON, "page.py", TMPDIR=str(tmp_path))
    assert done.code == 0, done.err[-3000:]
    assert "Traceback" not in done.err
