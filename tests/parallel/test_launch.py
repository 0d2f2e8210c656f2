"""Scripts that become several processes, and what happens when one of them ends: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.taps.forks import launched
from tests.taps.scripts import ctrl_c_works

SCRIPT = """
import os, signal, sys, time
import torch
from hasten.parallel import guard, open_world

def main(how, size):
    # Only who is stopped is never heard of again; on a loaded machine the others may take long to end.
    world = open_world("cpu", int(size), timeout=5 if how == "stop" else 60)
    last = world.rank == world.size - 1
    with open(f"rank{world.rank}", "w") as file:
        file.write(f"{os.getpid()} {torch.get_num_threads()} {sys.flags.utf8_mode} {world.launcher} {sys.argv[1:]}")
    with guard(world):
        for step in range(3 if how == "end" else 1_000_000):
            if step == 3 and last:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if how == "raise":
                    raise ValueError("the loss is gone")
                if how == "leave":
                    os._exit(0)
            if step == 3 and how == "busy":
                if last:
                    sys.exit(7)
                time.sleep(600)
            total = world.sum(torch.ones(1))
            time.sleep(0.01)
    os.write(1, f"rank {world.rank} of {world.size} sums {total.item():g}\\n".encode())  # in one piece

if __name__ == "__main__":
    main(*sys.argv[1:3])
"""


def _printed(output: str) -> list[str]:
    """Return a script's own lines: torch 2.9's gloo says on stdout who is connected."""
    return sorted(line for line in output.splitlines() if not line.startswith("[Gloo]"))


ENV = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "my trainings"
    place.mkdir()
    (place / "train.py").write_text(SCRIPT)
    return place


def run(folder: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=env or ENV, capture_output=True, text=True, timeout=100
    )


def nobody_left(folder: Path) -> bool:
    """Whether every rank that began has ended."""
    pids = [int(file.read_text().split()[0]) for file in folder.glob("rank?")]
    end = time.monotonic() + 60
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


# slow: ranks are started once more; a module is the longer way
@pytest.mark.parametrize("way", [pytest.param(("train.py",), marks=pytest.mark.slow), ("-m", "train")])
def test_own_command_runs_again_as_other_rank(folder: Path, way: tuple[str, ...]) -> None:
    done = run(folder, "-X", "utf8", *way, "end", "2", "two words", "--name='x'")
    assert done.returncode == 0, done.stderr
    assert _printed(done.stdout) == ["rank 0 of 2 sums 2", "rank 1 of 2 sums 2"]
    assert done.stderr == ""
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    said = [(folder / f"rank{rank}").read_text().split(" ", 1)[1] for rank in range(2)]
    assert said == [f"{threads} 1 hasten ['end', '2', 'two words', \"--name='x'\"]"] * 2


def test_start_folder_and_threads_a_person_has_set_are_kept(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT.replace("import os,", "import os; os.chdir('..')\nimport os,"))
    done = run(folder, "train.py", "end", "2", env={**ENV, "OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr  # started in the same folder, though the script went elsewhere
    assert [(folder.parent / f"rank{rank}").read_text().split()[1] for rank in range(2)] == ["2", "2"]


@pytest.mark.parametrize(
    ("how", "size", "said"),
    [
        ("kill", 3, "Rank 2 of 3 was ended by signal 9 (SIGKILL)"),
        ("raise", 2, "ValueError: the loss is gone"),
        ("stop", 2, "Rank 1 of 2 is stopped"),
        # slow: ranks are started once more for each way to end
        pytest.param("leave", 2, "Rank 1 of 2 ended (exit code 0) while the others", marks=pytest.mark.slow),
        pytest.param("busy", 2, "Rank 1 of 2 ended with exit code 7", marks=pytest.mark.slow),
    ],
)
def test_rank_that_ends_is_named_and_all_end(folder: Path, how: str, size: int, said: str) -> None:
    done = launched(folder, sys.executable, "train.py", how, str(size))
    assert done.code == 1, done.err
    error = done.err[done.err.rindex("HastenError:") :]
    assert said in error
    assert f"Rank {size - 1} of {size}" in error
    assert nobody_left(folder)


def test_rank_that_fails_before_it_joins_is_named(folder: Path) -> None:
    (folder / "train.py").write_text(
        "import os\nif 'RANK' in os.environ: raise ImportError('no such thing')\n" + SCRIPT
    )
    done = launched(folder, sys.executable, "train.py", "end", "2")
    assert done.code == 1
    assert "Rank 1 of 2 ended with exit code 1" in done.err
    assert "ImportError: no such thing" in done.err[done.err.rindex("HastenError:") :]


def test_other_ranks_die_with_the_main_process(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "train.py", "run", "2"], cwd=folder, env=ENV) as main:
        wait_for_ranks(folder, 2)
        main.kill()
    assert nobody_left(folder)


# slow: ranks are started once more; both signals take the same way
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_signal_reaches_each_rank_once(folder: Path, number: signal.Signals) -> None:
    (folder / "train.py").write_text(
        "import signal, sys, time\n"
        "from hasten.parallel import ending, guard, open_world\n"
        "got = []\n"
        "for number in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(number, lambda number, frame: got.append(number))\n"
        "world = open_world('cpu', 2)\n"
        "import os\n"
        "with open(f'rank{world.rank}', 'w') as file: file.write(f'{os.getpid()} ')\n"
        "while not got: time.sleep(0.01)\n"
        "world.barrier()\n"
        "time.sleep(0.5)\n"
        "os.write(1, f'{world.rank} {[int(one) for one in got]}\\n'.encode())\n"
        "with guard(world):\n"
        "    ending()\n"
        "    sys.exit(75)\n"
    )
    command = [sys.executable, "train.py"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        cwd=folder,
        env=ENV,
        stdout=pipe,
        stderr=pipe,
        text=True,
        process_group=0,
        preexec_fn=ctrl_c_works,
    ) as main:
        wait_for_ranks(folder, 2)
        os.killpg(main.pid, number)  # as a terminal does
        out, err = main.communicate(timeout=60)
    assert main.returncode == 75
    assert err == ""
    assert _printed(out) == [f"0 [{int(number)}]", f"1 [{int(number)}]"]


def wait_for_ranks(folder: Path, size: int) -> None:
    end = time.monotonic() + 90
    while not all((file := folder / f"rank{rank}").exists() and file.read_text() for rank in range(size)):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_torchrun_is_recognised(folder: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    done = launched(folder, *torchrun, "train.py", "end", "2")
    assert done.code == 0, done.err
    assert _printed(done.out) == ["rank 0 of 2 sums 2", "rank 1 of 2 sums 2"]
    assert "torchrun" in (folder / "rank1").read_text()


def test_session_without_a_command_names_what_works_there(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-"],
        input="from hasten.parallel import open_world; open_world('cpu', 2)",
        env=ENV,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "ddp_notebook" in done.stderr
    assert "ddp_fork" in done.stderr


def test_one_process_touches_no_torch_distributed() -> None:
    program = (
        "import sys, torch\n"
        "from hasten.parallel import open_world\n"
        "sys.modules['torch.distributed'] = None\n"  # importing it raises from here on
        "world, x = open_world('cpu', 1), torch.ones(2)\n"
        "assert world.size == 1 and world.is_zero\n"
        "assert world.broadcast([1]) == [1] and world.any(True) and not world.all(False)\n"
        "assert world.mean(x) is x and world.sum(x) is x and world.reduce(x, 'max') is x\n"
        "assert world.gather(x).shape == (1, 2)\n"
        "world.barrier('here')\n"
        "world.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=ENV, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
