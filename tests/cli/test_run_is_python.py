"""Under `hasten run` a script sees, prints and ends as if Python ran it. No torch here: that is in tests/taps."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.taps.forks import command
from tests.taps.scripts import HASTEN, PYTHON, Done, ctrl_c_works, environment, execute, hastened, plain, write

LOOK = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "package": __package__, "cwd": os.getcwd(),
    "path": sys.path, "executable": sys.executable, "flags": list(sys.flags), "prefix": sys.prefix,
    "spec": getattr(__spec__, "name", None), "main": sys.modules["__main__"].__file__,
    "stdin": sys.stdin.read(), "tty": [sys.stdin.isatty(), sys.stdout.isatty()],
    "encoding": [sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering],
    "environment": {k: v for k, v in os.environ.items() if k not in ("HASTEN_RUN", "PYTHONPATH")},
    "torch": "torch" in sys.modules, "numpy": "numpy" in sys.modules,
}))
print("to stderr", file=sys.stderr)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder as people have it: scripts, a package, a folder that can be run."""
    write(tmp_path, "train.py", LOOK)
    write(tmp_path, "deep/er/train.py", LOOK)
    write(tmp_path, "train", LOOK)  # no suffix, not executable: Python would run it
    write(tmp_path, "pkg/__init__.py", "print('pkg is imported')")
    write(tmp_path, "pkg/train.py", LOOK)
    write(tmp_path, "pkg/__main__.py", LOOK)
    write(tmp_path, "app/__main__.py", LOOK)
    write(tmp_path, "with space.py", LOOK)
    write(tmp_path, "options.py", "def parse(plan, no_plan, evidence): ...")  # the training's own, so nothing is said
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py"],
        ["train.py", "--epochs", "90", "--plan", "x.toml", "--no-plan", "-m", "a b", "", "--help", "--"],
        ["./train.py", "--evidence=e.json"],
        ["deep/er/train.py", "x"],
        ["train", "x"],
        ["with space.py", "it's"],
        ["app", "--lr", "1e-3"],
        ["-m", "pkg.train", "--lr", "1e-3", "-m", "x"],
        ["-m", "pkg"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_a_script_sees_what_it_would_see_under_python(project: Path, arguments: list[str]) -> None:
    expected = plain(project, *arguments, stdin="typed\n")
    assert expected.code == 0
    assert json.loads(expected.out.splitlines()[-1])["stdin"] == "typed\n"
    assert command(project, "run", "--no-plan", *arguments, stdin="typed\n", **environment()) == expected


def test_two_dashes_end_hastens_own_options(project: Path) -> None:
    expected = plain(project, "train.py", "--", "-x")
    assert execute(HASTEN, "run", "--no-plan", "--", "train.py", "--", "-x", cwd=project) == expected


ENDS = {
    "an exit code": "import sys; sys.exit(3)",
    "a message": "import sys; sys.exit('out of coffee')",
    "an exception": "def f():\n    raise ValueError('no luck')\nf()",
    "a chain": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('two') from e",
    "a group": "raise ExceptionGroup('many', [ValueError(1), KeyError('k')])",
    "at once": "import os; print('said', flush=True); os._exit(7)",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "an abort": "import os; os.abort()",
    "Ctrl-C raised": "raise KeyboardInterrupt",
    "a missing import": "import torch_is_not_this",
    "a syntax error": "def f(:\n    pass",
    "an error in a thread": "import threading as t\nt = t.Thread(target=lambda: 1 / 0, name='T')\nt.start()\nt.join()",
    "an error at exit": "import atexit\n@atexit.register\ndef f():\n    raise OSError('late')",
    "its own excepthook": "import sys\nsys.excepthook = lambda *a: print('mine', a[1])\nraise ValueError('x')",
}


@pytest.mark.parametrize("text", ENDS.values(), ids=ENDS.keys())
def test_a_script_ends_as_it_would_under_python(tmp_path: Path, text: str) -> None:
    write(tmp_path, "train.py", text)
    ends = command(tmp_path, "run", "--no-plan", "train.py"), plain(tmp_path, "train.py")
    assert _without_addresses(ends[0]) == _without_addresses(ends[1])


def _without_addresses(done: Done) -> Done:
    return Done(done.code, done.out, re.sub(r"0x[0-9a-f]+", "0x", done.err))


WAITS = """
import signal, sys, time
{setup}
try:
    print("ready", flush=True)
    while True:
        time.sleep(0.05)
{caught}
"""
SIGNALS = {
    "Ctrl-C": (signal.SIGINT, "", "finally:\n    print('cleaned up', flush=True)", -signal.SIGINT),
    "Ctrl-C caught": (signal.SIGINT, "", "except KeyboardInterrupt:\n    print('saved'); sys.exit(4)", 4),
    "SIGTERM": (signal.SIGTERM, "", "finally:\n    print('cleaned up', flush=True)", -signal.SIGTERM),
    "SIGTERM handled": (
        signal.SIGTERM,
        "signal.signal(signal.SIGTERM, lambda *a: (print('saved', flush=True), sys.exit(5)))",
        "finally:\n    print('cleaned up', flush=True)",
        5,
    ),
    "SIGUSR1 handled": (
        signal.SIGUSR1,
        "signal.signal(signal.SIGUSR1, lambda *a: sys.exit(6))",
        "finally:\n    pass",
        6,
    ),
}


@pytest.mark.parametrize("how", SIGNALS.values(), ids=SIGNALS.keys())
def test_signals_reach_the_script(tmp_path: Path, how: tuple[signal.Signals, str, str, int]) -> None:
    number, setup, caught, code = how
    (tmp_path / "train.py").write_text(WAITS.format(setup=setup, caught=caught))

    def ended(*command: str) -> tuple[int, str, str]:
        with subprocess.Popen(
            [*command, "train.py"],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=ctrl_c_works,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            out, err = process.communicate(timeout=30)
            # Which line of the loop was interrupted is chance.
            return process.returncode, out, "\n".join(err.splitlines()[-1:])

    expected = ended(PYTHON)
    assert expected[0] == code
    assert ended(HASTEN, "run", "--no-plan") == expected


def test_the_process_is_the_scripts_own(tmp_path: Path) -> None:
    """`hasten run` becomes the script's process: a scheduler's kill and a person's debugger find it."""
    write(tmp_path, "train.py", "import os; print(os.getpid())")
    with subprocess.Popen(
        [HASTEN, "run", "--no-plan", "train.py"], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.communicate(timeout=30)[0] == f"{process.pid}\n"


def test_the_users_own_sitecustomize_and_python_path_stay(tmp_path: Path) -> None:
    write(tmp_path, "mine/sitecustomize.py", "import builtins; builtins.CUSTOM = __file__")
    write(tmp_path, "mine/helper.py", "VALUE = 11")
    write(
        tmp_path,
        "train.py",
        """
        import helper, os, sys, sitecustomize, subprocess
        print(CUSTOM, helper.VALUE, sys.path, sitecustomize.__file__, flush=True)
        child = "import helper, sys; print('child', CUSTOM, helper.VALUE, sys.path)"
        subprocess.run([sys.executable, "-c", child], check=True)
        """,
    )
    env = environment(PYTHONPATH=str(tmp_path / "mine"))
    expected = plain(tmp_path, "train.py", env=env)
    assert expected.code == 0
    assert hastened(tmp_path, "train.py", env=env) == expected


def test_a_users_sitecustomize_that_fails_is_said_and_no_more(tmp_path: Path) -> None:
    write(tmp_path, "mine/sitecustomize.py", "import nowhere_to_be_found")
    write(tmp_path, "train.py", "print('went on')")
    env = environment(PYTHONPATH=str(tmp_path / "mine"))
    done = hastened(tmp_path, "train.py", env=env)
    assert (done.code, done.out) == (0, "went on\n")
    assert "nowhere_to_be_found" in done.err
    assert "nowhere_to_be_found" in plain(tmp_path, "train.py", env=env).err


CHILDREN = {
    "other programs": """
        import subprocess
        subprocess.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
        print(subprocess.run(["sh", "-c", "exit 3"]).returncode, subprocess.check_output(["echo", "x"]))
    """,
    "Python": """
        import subprocess, sys
        for flags in ([], ["-E"], ["-I"], ["-B"]):
            code = "import sys; print(sys.path, sys.argv, sys.flags)"
            print(subprocess.run([sys.executable, *flags, "-c", code, "x"], capture_output=True, text=True))
    """,
    "spawn": """
        import multiprocessing, os, sys
        def work(n):
            return n * n, __name__, sys.argv
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                print(pool.map(work, range(4)))
    """,
    "fork": """
        import os, sys
        pid = os.fork()
        if not pid:
            print("child", flush=True)
            sys.exit(9)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """,
    "fork by multiprocessing, a child that fails": """
        import multiprocessing
        def work():
            raise ValueError("in the child")
        child = multiprocessing.get_context("fork").Process(target=work, name="child")
        child.start(); child.join()
        print(child.exitcode)
    """,
}


@pytest.mark.parametrize("text", CHILDREN.values(), ids=CHILDREN.keys())
def test_children_of_a_script_are_left_alone(tmp_path: Path, text: str) -> None:
    write(tmp_path, "train.py", text)
    expected = plain(tmp_path, "train.py")
    assert expected.code == 0
    assert command(tmp_path, "run", "--no-plan", "train.py") == expected


def test_output_comes_as_it_is_written(tmp_path: Path) -> None:
    """Nothing is held back: the script waits for an answer to what it has printed."""
    write(tmp_path, "train.py", "name = input('who? ')\nprint('hello', name)\nprint(input())")
    with subprocess.Popen(
        [HASTEN, "run", "--no-plan", "train.py"],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.read(5) == "who? "
        process.stdin.write("you\n")
        process.stdin.flush()
        out, _ = process.communicate("bye\n", timeout=30)
        assert out == "hello you\nbye\n"
        assert process.returncode == 0


@pytest.mark.parametrize("stream", ["<&-", ">&-", "2>&-"])
def test_a_stream_that_is_closed_stays_closed(tmp_path: Path, stream: str) -> None:
    """What hasten has to say of the plan must not come out of another stream."""
    write(tmp_path, "train.py", "import sys\nprint([sys.stdin is None, sys.stdout is None, sys.stderr is None])")
    (tmp_path / "hasten.toml").write_text("[techniques]\ncpu_threads = 4096\n")
    expected = execute("bash", "-c", f"{PYTHON} train.py {stream}", cwd=tmp_path)
    found = execute("bash", "-c", f"{HASTEN} run train.py {stream}", cwd=tmp_path)
    assert (found.code, found.out) == (0, expected.out), found.err
    assert ("cpu_threads is of no use" in found.err) == (stream != "2>&-")


def test_a_script_may_come_through_a_pipe(tmp_path: Path) -> None:
    line = "run --no-plan <(echo 'import sys; print(sys.argv[1:])') x"
    found = execute("bash", "-c", f"{HASTEN} {line}", cwd=tmp_path)
    assert (found.code, found.out, found.err) == (0, "['x']\n", "")


def test_without_torch_evidence_says_that_nothing_was_trained(tmp_path: Path) -> None:
    """Nothing was listened to: there is no evidence, and the script is as it was."""
    write(tmp_path, "train.py", "print('no torch')")
    done = hastened(tmp_path, "--evidence", "e.json", "train.py")
    assert done == plain(tmp_path, "train.py")
    assert not (tmp_path / "e.json").exists()
