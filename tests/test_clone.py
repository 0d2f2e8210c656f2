"""The tests in a clone that is named `hasten`, as `git clone` makes it, started where SIGINT is ignored.

`make test &` and `nohup` ignore it for all that they start.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# They tell our code from a script's by where it lies, or wait for a Ctrl-C.
TESTS = (
    "tests/taps/test_tracebacks.py",
    "tests/taps/test_wrapping.py",
    "tests/doctor/observe/test_stages.py",
    "tests/techniques/test_activation_checkpointing.py::test_copies_are_checkpointed_and_pickles_are_plain",
    "tests/techniques/test_channels_last.py::test_what_is_scripted_traced_and_pickled_is_as_without",
    "tests/trainer/test_hook_order.py",
    "tests/cli/test_run_is_python.py::test_signals_reach_the_script",
    "tests/cli/test_check.py::test_ctrl_c_ends_all_that_was_started",
    "tests/cli/test_doctor_stopped.py::test_ctrl_c_stops_the_script_and_says_what_was_seen",
    "tests/trainer/resume/test_signals.py::test_without_checkpoints_it_says_that_nothing_was_saved",
)


@pytest.mark.slow  # dozens of tests
@pytest.mark.timeout(900)
def test_tests_pass_in_a_clone_named_hasten_with_sigint_ignored(tmp_path: Path) -> None:
    clone = tmp_path / "hasten"
    _copy(clone)
    _environment(clone / ".venv", clone / "src")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "HASTEN_"))}
    done = subprocess.run(
        [clone / ".venv/bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
        cwd=clone,
        env={**kept, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert done.returncode == 0, done.stdout[-5000:]


def _copy(clone: Path) -> None:
    """Copy what git knows, as it is here."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout of git")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)


def _environment(folder: Path, source: Path) -> None:
    """Make a virtual environment with this one's packages and a hasten of that source."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    theirs = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "clone.pth").write_text("\n".join([str(source), *theirs, ""]))
    command = folder / "bin" / "hasten"
    command.write_text(f"#!{folder}/bin/python\nimport sys\nfrom hasten.cli import main\nsys.exit(main())\n")
    command.chmod(0o755)
