"""What a trial writes goes to its scratch folder: the script finds it there, the person's folder stays as it was."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hasten.taps.config import RunConfig, TrialOptions
from hasten.taps.config import environment as trial_environment
from tests.taps.scripts import PYTHON, Done, environment, execute, write
from tests.taps.trial_folder import in_a_trial, same_as_outside, state

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
    value = CACHES_THAT_ARE_NONE[name].format(work=home, parent=home.parent)
    here = value if "link" in value else "."  # a link is one only for what is written by way of it
    text = "import os, shutil, sys; here = sys.argv[1]\n"
    text += "open(f'{here}/notes.txt', 'w').write('x'); os.remove(f'{here}/helper.py'); shutil.rmtree(f'{here}/runs')"
    write(home, "train.py", text)
    before = state(home)
    done = in_a_trial(home, home.parent / "scratch", "train.py", here, **{name: value})
    assert done.code == 0, done.err
    assert state(home) == before


def test_nor_does_one_to_other_programs(home: Path) -> None:
    """The kernel's guard has the same folders free as the one in Python."""
    (home.parent / "link").symlink_to(home)
    write(
        home,
        "train.py",
        """
        import subprocess
        from hasten.taps import sandbox
        print(sandbox.unguarded)
        tried = "echo > notes.txt", "rm helper.py", "rm -r runs", "mv data d", "touch notes.txt", "chmod 600 helper.py"
        for command in tried:
            print(subprocess.run(["sh", "-c", command], stderr=subprocess.DEVNULL).returncode != 0)
        """,
    )
    before = state(home)
    variables = {name: value.format(work=home, parent=home.parent) for name, value in CACHES_THAT_ARE_NONE.items()}
    done = in_a_trial(home, home.parent / "scratch", "train.py", **variables)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    if lines[0]:
        pytest.skip(lines[0])
    assert state(home) == before
    assert lines[1:6] == ["True"] * 5  # a change of modes is passed over


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


@pytest.mark.parametrize("folder", ["scratch", "scratch/files"])
def test_a_script_that_empties_its_scratch_folder_empties_no_cache(tmp_path: Path, folder: str) -> None:
    """Seen from within, the folder with what was written is the whole file system, with caches that may be changed."""
    work = tmp_path / "work"
    text = "import os, shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)\n"
    text += "open('made', 'w').write('x'); print(os.listdir())"
    write(work, "train.py", text)
    kept = write(tmp_path, "home/.cache/kept", "a model that took an hour to download")
    done = in_a_trial(work, tmp_path / "scratch", "train.py", str(tmp_path / folder), XDG_CACHE_HOME=str(kept.parent))
    assert (done.code, kept.exists()) == (0, True), done.err
    assert "made" in done.out
    assert not (work / "made").exists()
