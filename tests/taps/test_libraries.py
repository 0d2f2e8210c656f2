"""Places are the script's own, wherever the libraries lie that it calls."""

from __future__ import annotations

import os
from pathlib import Path

from tests.taps.scripts import environment, listened, write


def test_what_a_library_builds_is_the_scripts_wherever_libraries_lie(tmp_path: Path) -> None:
    """As below `pip install --user`, `--system-site-packages`, Debian's dist-packages, or a cluster's modules."""
    helper = "import torch\ndef made(p): return torch.optim.SGD(p, lr=0.1)\ndef spoil(x): return x @ torch.ones(3)\n"
    for folder in ("one/site-packages", "two/dist-packages"):
        write(tmp_path, f"{folder}/{folder[:3]}/__init__.py", helper)
    script = """
        import torch
        import one, two
        model = torch.nn.Linear(4, 1)
        first = one.made([model.weight])
        other = two.made([model.bias])
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()
            first.step()
            other.step()
        one.spoil(torch.ones(2))
    """
    write(tmp_path, "train.py", script)
    folders = [str(tmp_path / name) for name in ("one/site-packages", "two/dist-packages")]
    done, evidence = listened(tmp_path, "train.py", env=environment(PYTHONPATH=os.pathsep.join(folders)))
    assert "RuntimeError" in done.err
    assert [Path(one.where).name for one in evidence.optimizers] == ["train.py:5", "train.py:6"]
    assert evidence.error.endswith(f"({tmp_path}/train.py:11)"), evidence.error
