"""The tests in `lightning/`, in a process of their own; see its conftest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.mark.slow  # Lightning's own run of each module beside ours
@pytest.mark.timeout(400)
def test_beside_lightning():
    pytest.importorskip("lightning_utilities")  # comes with Lightning; importing that itself would spoil this process
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "lightning")]
    env = {**{key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        command, cwd=HERE.parents[1], env=env, capture_output=True, text=True, timeout=380, check=False
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
