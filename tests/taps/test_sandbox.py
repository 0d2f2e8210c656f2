"""What a trial writes goes to its scratch folder: the script finds it there, the person's folder stays as it was."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hasten.taps.config import RunConfig, TrialOptions
from hasten.taps.config import environment as trial_environment
from tests.taps.forks import forked
from tests.taps.scripts import PYTHON, Done, environment, execute, plain, write

State = dict[str, tuple[str, int, int]]


def state(folder: Path) -> State:
    """Every path under a folder with what it holds, its mode and when it was changed."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        info = path.lstat()
        held = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        found[str(path.relative_to(folder))] = (held, info.st_mode, info.st_mtime_ns)
    return found


def in_a_trial(folder: Path, scratch: Path, *arguments: str, **variables: str) -> Done:
    """Run a script as a trial runs it."""
    scratch.mkdir(exist_ok=True)
    config = RunConfig({}, str(scratch / "evidence.json"), tuple(arguments), TrialOptions(str(scratch)), quiet=True)
    env = trial_environment(config, environment(HOME=str(scratch.parent / "home"), **variables))
    return execute(PYTHON, *arguments, cwd=folder, env=env)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A person's folder with things in it."""
    folder = tmp_path / "work"
    write(folder, "notes.txt", "mine\n")
    write(folder, "runs/old/log.txt", "old\n")
    write(folder, "runs/old/model.pt", "weights\n")
    write(folder, "data/a.txt", "a\n")
    write(folder, "helper.py", "VALUE = 3\n")
    return folder


def same_as_outside(home: Path, text: str) -> Done:
    """Run a script in a trial and, in a copy of the folder, for real; it must say the same."""
    (home / "train.py").write_text(text)
    twin = home.parent / "twin" / home.name
    shutil.copytree(home, twin)
    before = state(home)
    done = in_a_trial(home, home.parent / "scratch", "train.py")
    assert state(home) == before
    expected = forked(twin, "train.py")
    assert expected.code == 0, expected.err
    outside = Done(done.code, done.out, done.err.replace(str(home.parent), str(twin.parent)))
    assert outside == expected
    return expected


PLAIN_FILES = """
import bz2, csv, glob, gzip, io, json, logging, lzma, os, pathlib, shutil, tarfile, tempfile, zipfile
import helper

def tree(top="."):
    return sorted(os.path.join(d, f) for d, _, files in os.walk(top) for f in files if "__pycache__" not in d)

def failing(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        print(call.__name__, type(error).__name__)
    else:
        print(call.__name__, "did not fail")

with open("w.txt", "w") as f: f.write("one")
with open("w.txt", "a") as f: f.write(" two")
with open("w.txt", "r+") as f: f.write("ONE")
with open("x.txt", "x") as f: f.write("new")
failing(open, "x.txt", "x"); failing(open, "notes.txt", "x"); failing(open, "nowhere/x.txt", "w")
failing(open, "data", "w"); failing(open, "gone.txt")
with open("notes.txt", "a") as f: f.write("and more")
print(open("w.txt").read(), open("x.txt").read(), open("notes.txt").read())
handle = os.open("fd.bin", os.O_CREAT | os.O_RDWR); os.write(handle, b"12345"); os.close(handle)
print(os.path.getsize("fd.bin"), os.path.exists("fd.bin"), os.path.isdir("data"), os.access("fd.bin", os.R_OK))
path = pathlib.Path("made") / "deep" / "er"
path.mkdir(parents=True)
failing(os.mkdir, "made"); failing(os.mkdir, "data"); os.makedirs("data", exist_ok=True)
(path / "a.txt").write_text("a"); (path / "b.bin").write_bytes(b"b"); (path / "t").touch()
print(sorted(p.name for p in path.iterdir()), sorted(map(str, pathlib.Path(".").glob("**/*.txt"))))
print(sorted(glob.glob("*")), sorted(glob.glob("made/**", recursive=True)), tree())
shutil.copy("notes.txt", "copy.txt"); shutil.copy2("copy.txt", "made"); shutil.copytree("runs", "runs2")
shutil.move("copy.txt", "moved.txt"); shutil.move("data/a.txt", "made/a.txt"); os.replace("w.txt", "notes.txt")
os.rename("x.txt", "runs/x.txt"); os.rename("runs/old", "runs/new")
print(tree(), open("notes.txt").read(), open("runs/new/log.txt").read(), os.path.exists("runs/old"))
os.remove("helper.py"); failing(os.remove, "helper.py"); print(os.path.exists("helper.py"), "helper.py" in os.listdir())
failing(open, "helper.py"); failing(os.stat, "helper.py"); failing(os.rmdir, "runs"); failing(os.remove, "runs")
shutil.rmtree("runs"); print(os.path.exists("runs"), os.path.exists("runs/new/log.txt"))
os.makedirs("runs/again"); print(os.listdir("runs"), tree("runs"))
shutil.rmtree("nowhere", ignore_errors=True); failing(shutil.rmtree, "nowhere")
os.mkdir("empty"); os.rmdir("empty"); print(os.path.exists("empty"))
os.symlink("notes.txt", "link"); print(os.path.islink("link"), open("link").read()); os.unlink("link")
with tempfile.TemporaryDirectory() as folder: open(folder + "/x", "w").write("x"); print(os.listdir(folder))
with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as f: f.write("whole")
os.replace(f.name, "atomic.txt"); print(open("atomic.txt").read())
logging.basicConfig(filename="train.log", format="%(message)s", level=20); logging.info("logged"); logging.shutdown()
with open("t.csv", "w", newline="") as f: csv.writer(f).writerows([[1, 2], [3, 4]])
json.dump({"a": 1}, open("c.json", "w"))
for kind, name in ((gzip, "g.gz"), (bz2, "b.bz2"), (lzma, "l.xz")):
    with kind.open(name, "wt") as f: f.write("packed")
    print(kind.open(name, "rt").read())
with zipfile.ZipFile("z.zip", "w") as z: z.write("notes.txt")
with tarfile.open("t.tar", "w") as t: t.add("notes.txt")
print(zipfile.ZipFile("z.zip").namelist(), tarfile.open("t.tar").getnames())
print(open("train.log").read(), open("t.csv").read(), json.load(open("c.json")), sorted(os.listdir()))
with open("t.csv", "rb+") as f: f.truncate(2)
os.truncate("c.json", 1); os.chmod("c.json", 0o600); os.utime("c.json", (1, 1))
print(os.path.getsize("t.csv"), os.path.getsize("c.json"), oct(os.stat("c.json").st_mode), os.path.getmtime("c.json"))
home = os.getcwd()
os.makedirs("inside/out"); os.chdir("inside")
print(os.path.relpath(os.getcwd(), home), os.path.exists("out"), open("../notes.txt").read())
print(open("../data2.txt", "w").write("x"))
open("here.txt", "w").write("h"); os.chdir(".."); print(os.getcwd() == home, tree("inside"), open("data2.txt").read())
print(sorted(e.name for e in os.scandir("made")), sorted(e.path for e in os.scandir("made")), shutil.which("sh"))
"""


def test_files_of_every_kind(home: Path) -> None:
    expected = same_as_outside(home, PLAIN_FILES)
    assert len(expected.out.splitlines()) > 30


CACHES_THAT_ARE_NONE = {
    "HF_HOME": "{work}/",
    "TORCH_HOME": ".",
    "NUMBA_CACHE_DIR": "./",
    "XDG_CACHE_HOME": "{parent}/link",
    "MPLCONFIGDIR": "{work}/data/..",
    "TORCHINDUCTOR_CACHE_DIR": "//{parent}",
}


@pytest.mark.parametrize("name", CACHES_THAT_ARE_NONE)
def test_a_cache_variable_that_covers_the_working_folder_gives_nothing_of_it_away(home: Path, name: str) -> None:
    (home.parent / "link").symlink_to(home)
    text = "import os, shutil; open('notes.txt', 'w').write('x'); os.remove('helper.py'); shutil.rmtree('runs')"
    write(home, "train.py", text)
    before = state(home)
    value = CACHES_THAT_ARE_NONE[name].format(work=home, parent=home.parent)
    done = in_a_trial(home, home.parent / "scratch", "train.py", **{name: value})
    assert done.code == 0, done.err
    assert state(home) == before


def test_torch_numpy_and_sqlite(home: Path) -> None:
    same_as_outside(
        home,
        """
import os, pathlib, sqlite3
import numpy as np
import torch
model = torch.nn.Linear(2, 2)
torch.save(model.state_dict(), "model.pt")
torch.save({"epoch": 1}, pathlib.Path("runs/old/model.pt"))
with open("by_handle.pt", "wb") as f: torch.save([1], f)
print(torch.load("model.pt").keys(), torch.load(pathlib.Path("runs/old/model.pt")), torch.load("by_handle.pt"))
print(torch.load("model.pt", mmap=True).keys())
torch.jit.script(model).save("a.ts"); torch.jit.save(torch.jit.script(model), "b.ts")
print(type(torch.jit.load("a.ts")).__name__, type(torch.jit.load("b.ts")).__name__)
np.save("a.npy", np.arange(3)); np.savez("b.npz", x=np.ones(2)); np.savetxt("c.txt", np.ones(2))
np.arange(3).tofile("d.bin")
print(np.load("a.npy"), np.load("b.npz")["x"], np.loadtxt("c.txt"), np.fromfile("d.bin", dtype=int))
memory = np.memmap("m.bin", dtype="uint8", mode="w+", shape=(4,)); memory[:] = 7; memory.flush()
print(np.memmap("m.bin", dtype="uint8", mode="r"))
with sqlite3.connect("log.db") as base:
    base.execute("create table t (x)"); base.execute("insert into t values (5)")
print(sqlite3.connect("log.db").execute("select x from t").fetchall(), sorted(os.listdir()))
print(sqlite3.connect(":memory:").execute("select 1").fetchall())
""",
    )


def test_files_that_torch_maps_packs_and_writes_by_native_code(home: Path) -> None:
    """`torch.from_file(shared=True)` opens for writing, which the kernel refused as it does for strangers' files."""
    same_as_outside(
        home,
        """
import os
import torch
from torch.package import PackageExporter, PackageImporter
open("d.bin", "wb").write(bytes(range(16)))
print(torch.from_file("d.bin", False, 16, dtype=torch.uint8).sum())
shared = torch.from_file("d.bin", shared=True, size=16, dtype=torch.uint8); shared += 1
print(torch.from_file("notes.txt", shared=True, size=5, dtype=torch.uint8).fill_(65), open("notes.txt").read())
print(open("d.bin", "rb").read(), list(torch.UntypedStorage.from_file("d.bin", True, 16)))
torch.from_file("new.bin", True, 4, dtype=torch.uint8).fill_(66); print(open("new.bin", "rb").read())
torch.jit.trace(lambda x: x + 1, torch.ones(1)).save("f.ts"); print(torch.jit.load("f.ts")(torch.ones(1)))
with PackageExporter("p.pkg") as packed: packed.save_text("texts", "a.txt", "hello")
print(PackageImporter("p.pkg").load_text("texts", "a.txt"), sorted(os.listdir()))
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the profiler writes the time there
with torch.autograd.profiler.profile() as profile: torch.ones(1) + 1
profile.export_chrome_trace("trace.json"); print(os.path.getsize("trace.json") > 0)
""",
    )


def test_other_programs_cannot_write_either(home: Path) -> None:
    """What is not Python is refused by the kernel; Python children find what their parent wrote."""
    write(
        home,
        "train.py",
        """
        import os, subprocess, sys
        from hasten.taps import sandbox
        open("parent.txt", "w").write("from the parent")
        code = "print(open('parent.txt').read()); open('child.txt', 'w').write('from the child')"
        subprocess.run([sys.executable, "-c", code], check=True)
        print(open("child.txt").read())
        if sandbox.unguarded:
            print(sandbox.unguarded)
        else:
            writing = "echo > sh.txt", "echo >> notes.txt", "rm notes.txt", "mkdir sub", "mv notes.txt n", "rm -r runs"
            for command in writing:
                print(subprocess.run(["sh", "-c", command], stderr=subprocess.DEVNULL).returncode != 0)
            print(subprocess.run(["sh", "-c", "echo > $TMPDIR/x && cat notes.txt"], capture_output=True).stdout)
        """,
    )
    before = state(home)
    done = in_a_trial(home, home.parent / "scratch", "train.py")
    assert done.code == 0, done.err
    assert state(home) == before
    lines = done.out.splitlines()
    assert lines[:2] == ["from the parent", "from the child"]
    if len(lines) == 3:
        pytest.skip(lines[2])
    assert lines[2:] == ["True"] * 6 + ["b'mine\\n'"]


METADATA = """
import io, os, shutil, stat, pathlib
def said(path, **how):
    held = os.stat(path, **how)
    return oct(held.st_mode), held.st_mtime, held.st_uid, held.st_nlink, sorted(os.listxattr(path))
file, folder = os.open("notes.txt", os.O_RDONLY), os.open(".", os.O_RDONLY)
def both():
    print(said("notes.txt"), said(f"{os.getcwd()}/data/../notes.txt"), said("notes.txt", dir_fd=folder))
os.utime("notes.txt", (1, 1)); both()
os.lchown("notes.txt", -1, -1); os.chown("notes.txt", -1, os.getgid()); both()
os.fchmod(os.open("notes.txt", os.O_RDONLY), 0o640); both()
os.utime("notes.txt", ns=(5, 7), follow_symlinks=False); os.utime("notes.txt", (2.5, 2.5), dir_fd=folder); both()
os.chmod("notes.txt", 0o644, dir_fd=folder); os.chmod("data/../notes.txt", 0o600); both()
os.chmod(f"/proc/self/cwd/notes.txt", 0o604); os.chmod(os.path.abspath("soft"), 0o640); both()
os.setxattr("notes.txt", "user.b", b"1"); os.removexattr("notes.txt", "user.a"); both()
pathlib.Path("notes.txt").chmod(0o611); pathlib.Path("notes.txt").touch(); print(said("notes.txt")[0])
shutil.copymode("train.py", "notes.txt"); shutil.copystat("data/a.txt", "notes.txt"); both()
os.chmod("data", 0o750); os.utime("data", (3, 3)); print(said("data"), sorted(os.listdir("data")))
os.link("helper.py", "hard.py"); open("hard.py", "a").write("# more"); os.chmod("hard.py", 0o600)
print(open("helper.py").read(), said("helper.py")[0], said("hard.py")[0])
os.symlink(os.path.abspath("data"), "way"); open("way/new.txt", "w").write("n"); open("way/a.txt", "a").write("b")
print(sorted(os.listdir("data")), open("data/a.txt").read(), os.readlink("way") == os.path.abspath("data"))
print(os.path.realpath("way/a.txt") == os.path.abspath("data/a.txt"))
open("soft", "a").write("through"); print(open("notes.txt").read(), os.path.islink("soft"))
os.close(os.open("data/a.txt", os.O_WRONLY | os.O_TRUNC, dir_fd=folder)); print(os.path.getsize("data/a.txt"))
os.mkdir("made", dir_fd=folder); os.rename("data/a.txt", "made/b.txt", src_dir_fd=folder, dst_dir_fd=folder)
os.unlink("hard.py", dir_fd=folder); print(sorted(os.listdir()), os.listdir("made"), os.listdir(folder) == os.listdir())
for root, folders, files, fd in os.fwalk("runs"):
    for name in files: os.utime(name, (3, 3), dir_fd=fd); print(root, name, os.stat(name, dir_fd=fd).st_mtime)
open("runs/new.txt", "w").write("n"); print(sorted(os.listdir("runs")), sorted(e.path for e in os.scandir("runs")))
shutil.rmtree("runs"); print(os.path.exists("runs"))
for path in ("soft", "gone"):
    try: os.symlink("x", path)
    except OSError as error: print(type(error).__name__)
for path in ("loop", "nowhere/x"):
    try: os.chmod(path, 0o600)
    except OSError as error: print(type(error).__name__)
open(os.path.join("data", "..", "way", "..", "up.txt"), "w").write("u"); print(os.path.exists("up.txt"))
"""


def test_metadata_links_and_descriptors(home: Path) -> None:
    (home / "soft").symlink_to("notes.txt")
    (home / "loop").symlink_to("loop")
    os.setxattr(home / "notes.txt", "user.a", b"1")
    before = owners(home)
    if same_as_outside_with(home, METADATA).count("\n") < 20:
        raise AssertionError("it ended early")
    assert owners(home) == before


def owners(folder: Path) -> dict[str, tuple[object, ...]]:
    """What `state` leaves out: owner, links, attributes."""
    infos = {path: path.lstat() for path in sorted(folder.rglob("*")) if path.name != "train.py"}
    return {str(path): (i.st_uid, i.st_gid, i.st_nlink, os.listxattr(path, follow_symlinks=False))
            for path, i in infos.items()}  # fmt: skip


def same_as_outside_with(home: Path, text: str) -> str:
    """As `same_as_outside`, links and attributes kept in the copy."""
    (home / "train.py").write_text(text)
    twin = home.parent / "twin" / home.name
    shutil.copytree(home, twin, symlinks=True)
    before = state(home)
    done = in_a_trial(home, home.parent / "scratch", "train.py")
    assert state(home) == before
    expected = forked(twin, "train.py")
    assert expected.code == 0, expected.err
    assert done.out.splitlines() == expected.out.splitlines()
    assert done == expected
    return expected.out


def test_a_file_can_be_read_and_written_through_a_link_to_its_folder(home: Path) -> None:
    """The working folder itself is often reached by a link: `~/project -> /data/me/project`."""
    (home.parent / "link").symlink_to(home)
    write(home, "train.py", "import os, sys; open(sys.argv[1], 'w').write('x'); print(open('notes.txt').read())")
    before = state(home)
    done = in_a_trial(home.parent / "link", home.parent / "scratch", "train.py", str(home.parent / "link/notes.txt"))
    assert done == Done(0, "x\n", "")
    assert state(home) == before


def test_metadata_is_safe_from_other_programs_and_native_code(home: Path) -> None:
    write(
        home,
        "train.py",
        """
        import ctypes, os, subprocess
        from hasten.taps import sandbox
        print(sandbox.unguarded)
        libc = ctypes.CDLL(None)
        libc.chmod(b"notes.txt", 0o600)
        libc.utimes(b"notes.txt", None)
        libc.fchmod(os.open("notes.txt", os.O_RDONLY), 0o600)
        tried = "touch notes.txt", "touch new.txt", "chmod 600 notes.txt", "chmod -R 700 .", "touch -t 0001010000 data"
        for command in tried:
            print(command, subprocess.run(["sh", "-c", command], stderr=subprocess.DEVNULL).returncode)
        # What other programs do in the scratch folder goes on.
        command = "cd $TMPDIR && mkdir d && touch d/f && cp -p d/f g && tar cf t.tar d g && tar xf t.tar && ls"
        print(subprocess.run(["sh", "-c", command], capture_output=True, text=True))
        """,
    )
    before = state(home)
    done = in_a_trial(home, home.parent / "scratch", "train.py")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    if lines[0]:
        pytest.skip(lines[0])
    assert state(home) == before
    assert lines[1:3] == ["touch notes.txt 1", "touch new.txt 1"]
    assert "returncode=0, stdout='d\\ng\\nt.tar\\n'" in lines[-1]


def test_compiled_files_are_not_left_beside_the_persons_own(home: Path) -> None:
    write(home, "train.py", "import helper; print(helper.VALUE)")
    before = state(home)
    scratch = home.parent / "scratch"
    scratch.mkdir()
    config = RunConfig({}, "", ("train.py",), TrialOptions(str(scratch)), quiet=True)
    env = trial_environment(config, environment())
    del env["PYTHONDONTWRITEBYTECODE"]
    assert execute(PYTHON, "train.py", cwd=home, env=env) == Done(0, "3\n", "")
    if "__pycache__" in os.listdir(home):  # Python itself writes these, past the overlay
        shutil.rmtree(home / "__pycache__")
        os.utime(home, ns=(0, before["."][2]))
    assert state(home) == before


# Random sequences of what scripts do to files, each on a real folder and on one inside the sandbox.

PLAYER = """
import json, os, pathlib, shutil, sys

def tree():
    found = []
    for folder, folders, files in os.walk("."):
        folders.sort()
        found += [[os.path.join(folder, name) + "/"] for name in folders]
        found += [[os.path.join(folder, name), open(os.path.join(folder, name)).read()] for name in files]
    return sorted(found)

def play(kind, a, b):
    if kind in ("w", "a", "r+", "x", "w+", "a+"):
        with open(a, kind) as f:
            f.write(b[:2])
            return f.tell()
    if kind == "read": return open(a).read()
    if kind == "touch": return pathlib.Path(a).touch()
    if kind == "makedirs": return os.makedirs(a, exist_ok=True)
    if kind == "listdir": return sorted(os.listdir(a))
    if kind == "scandir": return sorted((e.name, e.is_dir()) for e in os.scandir(a))
    if kind == "glob": return sorted(map(str, pathlib.Path(a).glob("*")))
    if kind == "size": return os.stat(a).st_size if os.path.isfile(a) else os.path.isdir(a)
    if kind == "truncate": return os.truncate(a, 1)
    if kind in ("mkdir", "remove", "rmdir"): return getattr(os, kind)(a)
    if kind in ("rename", "replace"): return getattr(os, kind)(a, b)
    if kind == "copytree" and (b + "/").startswith(a + "/"): return None  # endless, with or without a sandbox
    return str(getattr(shutil, kind)(*((a,) if kind == "rmtree" else (a, b))))

said = []
for number, steps in enumerate(json.load(open(sys.argv[1]))):
    os.chdir(os.path.join(sys.argv[2], str(number)))
    for kind, a, b in steps:
        try:
            result = play(kind, a, b)
        except (OSError, shutil.Error) as error:
            result = type(error).__name__
        said.append([number, kind, a, b, result])
    said.append([number, tree()])
print(json.dumps(said))
"""
KINDS = ["w", "a", "r+", "x", "w+", "a+", "read", "touch", "makedirs", "mkdir", "remove", "rmdir", "rmtree", "rename",
         "replace", "copy", "copytree", "move", "listdir", "scandir", "glob", "size", "truncate"]  # fmt: skip
PATHS = ["f", "g", "d", "d/f", "d/g", "d/e", "d/e/f", "n", "n/f", "n/e", "n/e/g"]


# An example is two processes, so none is spent on making a failing one smaller.
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(KINDS), st.sampled_from(PATHS), st.sampled_from(PATHS)), min_size=12, max_size=25
        ),
        min_size=60,
        max_size=60,
    )
)
def test_any_sequence_of_operations_looks_as_on_a_real_folder(tmp_path_factory, plays: list) -> None:
    root = tmp_path_factory.mktemp("sandbox")
    (root / "plays.json").write_text(json.dumps(plays))
    write(root, "player.py", PLAYER)
    for place in ("real", "guarded"):
        for number in range(len(plays)):
            write(root / place / str(number), "f", "old f")
            write(root / place / str(number), "d/f", "old d/f")
            write(root / place / str(number), "d/e/f", "old d/e/f")
    before = state(root / "guarded")
    expected = plain(root, "player.py", "plays.json", str(root / "real"))
    assert expected.code == 0, expected.err
    done = in_a_trial(root, root / "scratch", "player.py", "plays.json", str(root / "guarded"))
    assert done.code == 0, done.err
    assert state(root / "guarded") == before
    other = [(a, b) for a, b in zip(json.loads(expected.out), json.loads(done.out)) if a != b]
    assert other == []
