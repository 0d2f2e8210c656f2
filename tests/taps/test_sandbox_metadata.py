"""Modes, times, owners, attributes, links and descriptors in a trial: as outside; nothing of the person's changes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.taps.forks import forked
from tests.taps.scripts import Done, write
from tests.taps.trial_folder import in_a_trial, state

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
