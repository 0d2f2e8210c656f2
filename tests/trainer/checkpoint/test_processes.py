"""Killed writers, full disks, folders one may not write to, two runs in one folder: with real processes."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from hasten import HastenError
from hasten.trainer.checkpoint import check_writable, latest_good, lock_folder, read, remove_leftovers, write
from tests.fork_here import fork_here
from tests.own_mounts import need_mounts


def result(process):
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


def test_a_writer_killed_at_any_moment_leaves_a_good_file(tmp_path):
    path = tmp_path / "last.ckpt"
    forever = """
        import os, sys, torch
        from hasten.trainer.checkpoint import write, Saver
        state = {"t": torch.zeros(500_000), "i": 0}
        write(sys.argv[1], state)
        saver = Saver()
        while True:
            # A fork of its own for each victim.
            sys.stdin.readline()
            pid = os.fork()
            if not pid:
                while True:
                    state["i"] += 1
                    state["t"].fill_(state["i"])
                    saver.save(sys.argv[1], state) if state["i"] % 2 else write(sys.argv[1], state, "torch")
            print(pid, flush=True)
            os.waitpid(pid, 0)
    """
    process = fork_here(forever, path)
    choose = random.Random(1)
    seen = set()
    try:
        for round in range(300):
            if round >= 60 and len(seen) > 1 and list(tmp_path.glob(".hasten-*")):
                break
            process.stdin.write("go\n")
            process.stdin.flush()
            victim = int(process.stdout.readline())
            time.sleep(choose.uniform(0.0, 0.12))
            os.kill(victim, signal.SIGKILL)
            state = read(path)
            assert bool((state["t"] == state["i"]).all())
            seen.add(state["i"])
    finally:
        process.kill()
        process.communicate()
    assert len(seen) > 1
    left = list(tmp_path.glob(".hasten-*"))
    assert left  # killed in the middle of a write, at least once
    assert sorted(remove_leftovers(tmp_path)) == sorted(left)
    assert list(tmp_path.iterdir()) == [path]
    assert latest_good(tmp_path) == (path, [])


def test_a_file_that_is_replaced_while_it_is_read(tmp_path):
    """A reader has the one or the other, also where they are in two formats."""
    replace = """
        import os, sys
        folder = sys.argv[1]
        print("begun", flush=True)
        while True:
            for format in ("hasten", "torch"):
                os.link(f"{folder}/{format}", f"{folder}/next")
                os.replace(f"{folder}/next", f"{folder}/last.ckpt")
    """
    for format in ("hasten", "torch"):
        write(tmp_path / format, {"format": format, "t": torch.ones(1000)}, format)
    process = fork_here(replace, tmp_path)
    try:
        assert process.stdout.readline() == "begun\n"
        time.sleep(0.05)
        reads, seen = 0, set()
        while reads < 300 or len(seen) < 2:  # on a loaded machine nothing may be replaced for a while
            seen.add(read(tmp_path / "last.ckpt")["format"])
            reads += 1
            assert reads < 100_000
    finally:
        process.kill()
        process.communicate()
    assert seen == {"hasten", "torch"}


def test_a_file_that_is_being_written_is_not_swept(tmp_path):
    slow = """
        import sys
        from pathlib import Path
        from hasten.trainer.checkpoint.writing import whole_file
        def write(file):
            file.write(b"half")
            print("begun", flush=True)
            sys.stdin.readline()
        whole_file(Path(sys.argv[1]), write, lambda path: None, 4)
    """
    process = fork_here(slow, tmp_path / "a")
    assert process.stdout.readline() == "begun\n"
    assert remove_leftovers(tmp_path) == []
    process.communicate("go\n", timeout=60)
    assert (tmp_path / "a").read_bytes() == b"half"


@pytest.mark.parametrize("known", [True, False])
def test_a_full_disk_is_named_and_the_old_file_kept(tmp_path, known):
    need_mounts()
    code = """
        import shutil, sys, os, torch
        from pathlib import Path
        from hasten import HastenError
        from hasten.trainer.checkpoint import read, write, writing, check_writable
        folder, known = sys.argv[1:]
        usage = shutil.disk_usage
        if known == "False":  # a file system that does not tell how much is free: the write itself runs into it
            writing.shutil.disk_usage = lambda folder: usage(folder)._replace(total=0)
        def refused(what, *args):
            try:
                what(*args)
            except HastenError as error:
                print(error)
            else:
                raise SystemExit("not refused")
        path = Path(folder) / "a.ckpt"
        for format in ("hasten", "torch"):
            write(path, {"i": 1, "t": torch.ones(1000)}, format)
            refused(write, path, {"i": 2, "t": torch.ones(1_000_000)}, format)
            assert read(path)["i"] == 1
            assert os.listdir(folder) == ["a.ckpt"], os.listdir(folder)
        if known == "True":
            refused(check_writable, folder, 4_000_000)
    """
    out = result(fork_here(code, tmp_path, str(known), mounts=f"mount -t tmpfs -o size=1m none {tmp_path}"))
    assert out.count("the disk is full") == (3 if known else 2)
    assert "4,000," in out
    assert "are free" in out
    assert "Free space" in out
    assert "What was there is kept" in out


def test_a_read_only_folder_is_named(tmp_path):
    need_mounts()
    write(tmp_path / "a.ckpt", {"i": 1})
    code = """
        import sys
        from hasten import HastenError
        from hasten.trainer.checkpoint import read, write, check_writable, lock_folder
        folder = sys.argv[1]
        checks = (lambda: write(folder + "/a.ckpt", {}), lambda: check_writable(folder), lambda: lock_folder(folder))
        for failing in checks:
            try:
                failing()
            except HastenError as error:
                print(error)
        assert read(folder + "/a.ckpt") == {"i": 1}
    """
    read_only = f"mount --bind {tmp_path} {tmp_path}; mount -o remount,ro,bind {tmp_path}"
    out = result(fork_here(code, tmp_path, mounts=read_only))
    assert out.count("the file system is read-only") == 3
    assert str(tmp_path) in out


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_folder_of_somebody_else_is_named(tmp_path):
    code = """
        import os, sys, torch
        from hasten import HastenError
        from hasten.trainer.checkpoint import write, check_writable
        os.chdir(sys.argv[1])
        os.setuid(65534)
        for failing in (lambda: write("a.ckpt", {}), lambda: check_writable("."), lambda: check_writable("new/one")):
            try:
                failing()
            except HastenError as error:
                print(error)
    """
    tmp_path.chmod(0o755)
    assert result(fork_here(code, tmp_path)).count("this user may not write there") == 3
    assert list(tmp_path.iterdir()) == []


def test_other_refusals(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder.ckpt").mkdir()
    for path in (tmp_path / "file" / "a.ckpt", tmp_path / "folder.ckpt", tmp_path / ("n" * 300)):
        with pytest.raises(HastenError, match="Cannot write") as caught:
            write(path, {})
        assert caught.value.fix
    assert {p.name for p in tmp_path.iterdir()} == {"file", "folder.ckpt"}
    check_writable(tmp_path / "new" / "one")
    assert list((tmp_path / "new" / "one").iterdir()) == []


def test_memory_or_a_disk_that_changes_what_is_written_is_noticed(tmp_path, monkeypatch):
    write(tmp_path / "a.ckpt", {"i": 1})
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data).replace(b"\x00\x00\x80?", b"\x00\x00\x81?")))
    with pytest.raises(HastenError, match="does not read back as it was"):
        write(tmp_path / "a.ckpt", {"t": torch.ones(1)})
    monkeypatch.undo()
    assert read(tmp_path / "a.ckpt") == {"i": 1}
    assert len(list(tmp_path.iterdir())) == 1


CLAIMER = """
    import sys, time
    from hasten import HastenError
    from hasten.trainer.checkpoint import lock_folder
    try:
        held = lock_folder(sys.argv[1])
    except HastenError as error:
        print(error)
    else:
        print("mine", flush=True)
        sys.stdin.readline()
"""


def test_two_runs_do_not_get_one_folder(tmp_path):
    first = fork_here(CLAIMER, tmp_path)
    assert first.stdout.readline() == "mine\n"
    second = result(fork_here(CLAIMER, tmp_path))
    assert f"process {first.pid} on {os.uname().nodename}" in second
    assert "started 20" in second
    assert str(tmp_path) in second
    assert "default_root_dir" in second
    (tmp_path / ".hasten-1-0123456789abcdef.tmp").write_text("left")
    first.kill()  # the kernel gives the folder back
    first.communicate()
    with lock_folder(tmp_path) as held:
        assert [path.name for path in held.swept] == [".hasten-1-0123456789abcdef.tmp"]
        with pytest.raises(HastenError, match=f"process {os.getpid()} "):
            lock_folder(tmp_path)
    held.close()
    with lock_folder(tmp_path):
        pass


def test_a_forked_worker_does_not_hold_the_folder_of_a_killed_run(tmp_path):
    code = """
        import os, signal, sys, time
        from hasten.trainer.checkpoint import lock_folder
        held = lock_folder(sys.argv[1])
        pid = os.fork()
        if not pid:
            held.close()  # must not give away what is the parent's
            print(os.getpid(), flush=True)
            os.close(0), os.close(1), os.close(2)
            time.sleep(30)
            os._exit(0)
        sys.stdin.readline()
    """
    run = fork_here(code, tmp_path)
    worker = int(run.stdout.readline())
    try:
        with pytest.raises(HastenError, match=f"process {run.pid} "):
            lock_folder(tmp_path)
        run.kill()
        run.communicate()
        assert Path(f"/proc/{worker}").exists()
        lock_folder(tmp_path).close()
    finally:
        os.kill(worker, signal.SIGKILL)
